"""The common base of the three dispatch modes.

analyse.py watches a layer's first forward of a signature, record.py its later forwards, replay.py runs before each backward. They
see every aten op of the layer, below autograd. The first two note what the replay needs; the replay must repeat their ops one by
one.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from ds_memo.remat.functions import ObservesFunctions, Ran, described, tensors_in, versions_of
from ds_memo.remat.undo import changed


class _Thread(threading.local):
    in_tiles = False


_thread = _Thread()


@contextmanager
def running_tiles() -> Iterator[None]:
    """Have :func:`inside_a_layer` return True inside the block, where modes are not on the stack all the time."""
    with changed(_thread, "in_tiles", True):
        yield


def inside_tiles() -> bool:
    return _thread.in_tiles


def inside_a_layer() -> bool:
    """Return True if this thread is running a layer under one of the modes. A checkpoint inside is then a direct call."""
    return _thread.in_tiles or any(isinstance(mode, Mode) for mode in _get_current_dispatch_mode_stack())


def under_a_checkpoint(up_to: Collection[str] = ("ds_memo.remat.remat", "ds_memo.remat.recorded")) -> bool:
    """Return True if the current op runs under a torch.utils.checkpoint inside the layer. It is recomputed, outside our modes.

    Args:
        up_to: the modules that run layers, where the search ends; none: search all callers.
    """
    frame = sys._getframe(1)
    while frame is not None and (name := frame.f_globals.get("__name__")) not in up_to:
        if name == "torch.utils.checkpoint":
            return True
        frame = frame.f_back
    return False


def inside_a_checkpoint() -> bool:
    """Return True if this code runs under a torch.utils.checkpoint, in its forward or its recomputation.

    A reentrant checkpoint (Megatron's own) is found only in its recomputation, which runs inside a backward.
    """
    return saves_for_a_checkpoint() or torch._C._current_graph_task_id() != -1


def saves_for_a_checkpoint() -> bool:
    """Return True if a torch.utils.checkpoint that is not reentrant takes what autograd saves now."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(False)
    return hooks is not None and getattr(hooks[0], "__module__", "") == "torch.utils.checkpoint"


def inside_a_transform() -> bool:
    """Return True where tensors, and the views that are taken there, have no memory of their own, or sizes are no numbers: inside
    a transform of torch.func, torch.jit.trace or FakeTensorMode. Or where ops are traced (make_fx): a trace has no copies."""
    return (
        torch._C._functorch.maybe_current_level() is not None
        or torch._C._get_tracing_state() is not None
        or torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None
        or torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.PROXY) is not None
    )


IN_LAYERS = ("analyse", "call", "modes", "op_policy", "random_states", "recipe", "record", "replay", "tensors", "undo")
"""Files of this folder whose code runs inside layers."""


@functools.cache
def keep_dynamo_out() -> None:
    """Have dynamo skip our modes. With some backends they receive a compiled region's ops, and dynamo would compile them."""
    from torch._dynamo import trace_rules

    trace_rules.add("ds_memo.swap")
    for part in IN_LAYERS:
        trace_rules.add(f"ds_memo.remat.{part}")


class Mode(ObservesFunctions):
    at: Any = None
    """How far a mode has followed its recipe: see ds_memo.remat.follower."""

    # True would wrap every op in a guard against dynamo; keep_dynamo_out() does that once.
    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


class NotingMode(Mode):
    """A mode that also notes each tensor autograd saves, before the hook below (torch's checkpoint) takes it.

    Args:
        hooked: True if the hook below notes them itself.
    """

    _note: Callable[[torch.Tensor], None]

    def __init__(self, hooked: bool = False) -> None:
        super().__init__()
        self._hooked = hooked

    def __enter__(self) -> Any:
        if self._hooked:
            return super().__enter__()
        pack, unpack = torch._C._autograd._top_saved_tensors_default_hooks(False)

        torch._C._autograd._push_saved_tensors_default_hooks(self._noting(pack), unpack)
        return super().__enter__()

    def _noting(self, pack: Callable[[torch.Tensor], Any]) -> Callable[[torch.Tensor], Any]:
        def noting_pack(tensor: torch.Tensor) -> Any:
            self._note(tensor)
            return pack(tensor)

        return noting_pack

    def _watched(self, fn: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> Ran:
        """Run a function given to `keep_whole`. What autograd saves meanwhile goes into its description, not to `_note`."""
        arguments = tensors_in(args, kwargs)
        saved: list[torch.Tensor] = []
        versions = versions_of(arguments)
        self._note_in(saved)
        try:
            out = fn(*args, **kwargs)
        finally:
            self._note_in(None)
        return described(fn, out, arguments, versions, saved)

    def _note_in(self, saved: list[torch.Tensor] | None) -> None:
        """Note what autograd saves in a list alone; None: as before."""
        if saved is None:
            del self._note
        else:
            self._note = saved.append

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)
        if not self._hooked:
            torch._C._autograd._pop_saved_tensors_default_hooks()
