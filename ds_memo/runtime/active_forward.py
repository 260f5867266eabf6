"""Track the running model per thread: one may be evaluated in a thread while another trains."""

from __future__ import annotations

import threading
import weakref
from typing import Any


class _Running(threading.local):
    """Sessions of models whose forward runs, the innermost last.

    PyTorch's hooks do not tell of a forward that Ctrl-C ended. It stays until its model's next forward, or one around it, ends.
    """

    def __init__(self) -> None:
        self.sessions: list[weakref.ref[Any]] = []


_running = _Running()


def begins(session: Any) -> None:
    ends(session)
    _running.sessions.append(weakref.ref(session))


def ends(session: Any) -> None:
    """Note that it is over, with those inside it."""
    known = [ref() for ref in _running.sessions]
    if session in known:
        del _running.sessions[known.index(session) :]


def in_forward() -> Any:
    """Return the session of the innermost model whose forward runs in this thread; None: none does."""
    return next((session for ref in reversed(_running.sessions) if (session := ref()) is not None), None)
