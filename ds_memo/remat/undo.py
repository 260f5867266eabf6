"""Put back what is changed for a while, though Ctrl-C comes at any bytecode.

KeyboardInterrupt may come inside an ``__exit__`` or a ``finally``, before that has put anything back. So blocks nest, and a block
also ends those inside it that were not ended. One interrupt hits the end of one block at most: if it is the outermost, all others
have ended. What is left of a block that was never ended does nothing when the garbage collector comes to it.
Generators of others do something then (PyTorch's ``_pop_mode_temporarily`` pushes its mode), so those in a traceback are closed.
"""

from __future__ import annotations

import functools
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import _GeneratorContextManager, contextmanager
from types import TracebackType
from typing import Any

import torch
from torch._C import (
    _pop_torch_dispatch_stack,
    _pop_torch_function_stack,
    _push_on_torch_dispatch_stack,
    _push_on_torch_function_stack,
)
from torch.overrides import _get_current_function_mode_stack
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack


class _Thread(threading.local):
    def __init__(self) -> None:
        self.open: list[Undoing] = []


_thread = _Thread()


class Undoing:
    """Call `undo` at the end of the block. Make the changes inside of it.

    Args:
        undo: may be called before all changes are made, and again when all are undone. It must not raise.
    """

    __slots__ = ("_undo",)

    def __init__(self, undo: Callable[[], Any]) -> None:
        self._undo = undo

    def __enter__(self) -> Any:
        _thread.open.append(self)

    def __exit__(self, kind: Any, exception: Any, raised_in: TracebackType | None) -> None:
        try:
            if raised_in is not None:
                _close_generators(raised_in)
        finally:
            blocks = _thread.open
            while self in blocks:
                blocks[-1]._undo()
                blocks.pop()


_ENDS = {_GeneratorContextManager.__enter__.__code__, _GeneratorContextManager.__exit__.__code__}


def _close_generators(raised_in: TracebackType) -> None:
    """Close the generators of contexts that were interrupted while they were entered or left."""
    for frame, _ in traceback.walk_tb(raised_in):
        if frame.f_code in _ENDS:
            frame.f_locals["self"].gen.close()


@contextmanager
def changed(owner: Any, name: str, value: Any) -> Iterator[None]:
    with Undoing(functools.partial(setattr, owner, name, getattr(owner, name))):
        setattr(owner, name, value)
        yield


def stacks_restored() -> Undoing:
    """Put this thread's stacks of dispatch modes, function modes and saved-tensor hooks back at the end of the block.

    It goes around everything that runs a layer. In a backward PyTorch does the same.
    """
    stacks = _get_current_dispatch_mode_stack(), _get_current_function_mode_stack()
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(False)
    return Undoing(functools.partial(_restore, *stacks, hooks, torch.is_grad_enabled()))


def _restore(modes: list[Any], functions: list[Any], hooks: Any, with_gradients: bool) -> None:
    torch._C._set_grad_enabled(with_gradients)
    if (now := _get_current_dispatch_mode_stack()) or modes:
        _refill(modes, now, lambda: _pop_torch_dispatch_stack(None), _push_on_torch_dispatch_stack)
    if (now := _get_current_function_mode_stack()) or functions:
        _refill(functions, now, _pop_torch_function_stack, _push_on_torch_function_stack)
    while (top := torch._C._autograd._top_saved_tensors_default_hooks(False)) is not None and top != hooks:
        torch._C._autograd._pop_saved_tensors_default_hooks()


def _refill(before: list[Any], now: list[Any], pop: Callable[[], Any], push: Callable[[Any], Any]) -> None:
    alike = next((i for i, (a, b) in enumerate(zip(before, now, strict=False)) if a is not b), min(len(before), len(now)))
    for _ in now[alike:]:
        pop()
    for mode in before[alike:]:
        push(mode)
