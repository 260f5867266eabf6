"""Changes that several owners need at once: made for the first, put back when the last has no more need of it."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import Any

Undo = Callable[[], Any]
_LOCK = threading.RLock()


class _Needs:
    def __init__(self) -> None:
        self.owners = 0
        self.undo: list[Undo] = []


_needs: weakref.WeakKeyDictionary[Any, _Needs] = weakref.WeakKeyDictionary()


def for_good(undo: Undo) -> None:
    """Keep a change: as `undo_with`."""


def need(what: Any, change: Callable[[], Undo | None], undo_with: Callable[[Undo], Any]) -> None:
    """Have a module, a class or a Python file changed until the owner undoes it.

    Args:
        what: it is not kept alive.
        change: makes the change and returns how it is undone; None: it is there already. It is called for each owner, as
            a check of a layer may have put hooks back.
        undo_with: is given the function that the owner calls once it has no more need.
    """
    with _LOCK:
        needs = _needs.setdefault(what, _Needs())
        needs.owners += 1
        undo = change()
        if undo is not None:
            needs.undo.append(undo)
    where = weakref.ref(what)

    def release() -> None:
        with _LOCK:
            target = where()
            if target is None:
                return
            needs.owners -= 1
            if not needs.owners:
                del _needs[target]
                while needs.undo:
                    needs.undo.pop()()

    undo_with(release)
