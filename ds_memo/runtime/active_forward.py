"""Whose forward runs: of attached models, in each thread. One model may be evaluated in a thread while another trains."""

from __future__ import annotations

import threading
import weakref
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ds_memo.runtime.session import Session


class _Running(threading.local):
    """The innermost last. One that Ctrl-C ended, of which PyTorch's hooks tell nothing, stays until its model's next forward, or
    one around it, is over."""

    def __init__(self) -> None:
        self.memos: list[weakref.ref[Session]] = []


_running = _Running()


def begins(memo: Session) -> None:
    """A forward of its model begins in this thread."""
    ends(memo)
    _running.memos.append(weakref.ref(memo))


def ends(memo: Session) -> None:
    """End this forward and those inside it."""
    known = [ref() for ref in _running.memos]
    if memo in known:
        del _running.memos[known.index(memo) :]


def in_forward() -> Session | None:
    """Whose model's forward runs in this thread: the innermost; None: none does."""
    return next((memo for ref in reversed(_running.memos) if (memo := ref()) is not None), None)
