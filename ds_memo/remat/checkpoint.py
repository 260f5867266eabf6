"""Run a layer so that its backward can run it again: a checkpoint that is not reentrant, torch's own or with its hooks in C++.

C++'s (ops/csrc/checkpoint.h) follows torch's rules and takes calls that follow a recipe. torch's own takes the others, and those
in surroundings that it alone knows: modes of torch functions (a default device), its debugging switches, arguments on several
devices.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from contextlib import ExitStack, nullcontext
from types import ModuleType
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.utils import checkpoint as torchs
from torch.utils.checkpoint import _checkpoint_without_reentrant_generator, _StopRecomputationError

from ds_memo.remat.autocast import Autocast, autocast_now
from ds_memo.remat.inputs import Lifted, unpack
from ds_memo.remat.record import Record
from ds_memo.remat.replay import Replay


def may_use_cpp(args: Sequence[Any], device: torch.device) -> bool:
    """Return True if C++'s checkpoint can take a call with these arguments."""
    return (
        not torch._C._len_torch_function_stack()
        and torchs._checkpoint_debug_enabled is None
        and torchs._enable_checkpoint_early_stop is None
        and all(value.device == device or value.is_cpu for value in args if isinstance(value, torch.Tensor))
    )


def run_by_cpp(
    library: ModuleType,
    lifted: Lifted,
    preserve_rng_state: bool,
    device: torch.device,
    pack: Callable[[torch.Tensor], Any],
    mode: Record,
    replay: Callable[[], Replay],
) -> Any:
    """Run a call that follows its recipe.

    Args:
        pack: of the saved-tensor hooks for the layer's inputs. Inside the layer torch's checkpoint has hooks of its own.
        mode: notes what autograd saves by the hook here.
    """
    inputs = library.save_inputs(lifted.args, pack, unpack)
    states = library.RandomStates(device) if preserve_rng_state else None
    again = functools.partial(_again, library, inputs, lifted.replay, states, autocast_now(), replay)
    checkpoint = library.checkpoint(again, mode.at)
    raised = True
    try:
        out = library.under(mode, library.pack(checkpoint), library.unpack, lifted.fn, lifted.args, None)
        raised = False
    finally:
        mode.ends(raised)
        library.recorded(checkpoint)
    return out


def _again(
    library: ModuleType,
    inputs: Sequence[Any],
    run: Callable[..., Any],
    states: Any,
    autocast: Autocast,
    replay: Callable[[], Replay],
    pack: Callable[[torch.Tensor], Any],
) -> None:
    """Run the layer again. `pack` ends it by torch's _StopRecomputationError."""
    args = [value.unpack() if isinstance(value, library.SavedInput) else value for value in inputs]
    with torch.enable_grad(), nullcontext() if autocast_now() == autocast else _as_in(autocast):
        mode = replay()
        mode.begins()
        try:
            library.under(mode, pack, library.same, run, tuple(args), states)
        finally:
            mode.ends()


def _as_in(autocast: Autocast) -> ExitStack:
    with ExitStack() as stack:
        for kind, enabled, dtype in autocast:
            if torch.amp.is_autocast_available(kind):
                stack.enter_context(torch.amp.autocast(kind, dtype, enabled))
        return stack.pop_all()


def run_by_torch(
    lifted: Lifted, preserve_rng_state: bool, pack: Callable[[torch.Tensor], Any], mode: Any, replay: Callable[[], Replay]
) -> Any:
    """Do what torch.utils.checkpoint.checkpoint(use_reentrant=False) does, through the generator beneath it.

    torch.distributed._composable does the same. Up to torch 2.11 the public function does not leave the forward's contexts when
    `fn` raises, until the traceback is dropped.
    """
    run = functools.partial(_until_stopped, lifted.replay)
    context_fn = lambda: (mode, replay())  # noqa: E731
    with saved_tensors_hooks(pack, unpack):  # these see the layer's inputs only: inside, torch's checkpoint has its own on top
        generator = _checkpoint_without_reentrant_generator(
            run, preserve_rng_state, context_fn, "default", False, True, *lifted.args
        )
        try:
            next(generator)
            out = lifted.fn(*lifted.args)
            next(generator, None)  # leaves the contexts
        finally:
            generator.close()
    return out


def _until_stopped(replay: Callable[..., Any], *args: Any) -> Any:
    """Call ``replay(*args)``, and turn TorchScript's RuntimeError back into torch's _StopRecomputationError.

    torch raises that when the last saved tensor is recomputed. TorchScript replaces it inside a scripted function, such as
    Megatron's bias_dropout_add at the end of its layers.
    """
    pack, unpack = torch._C._autograd._top_saved_tensors_default_hooks(False)
    stopped = False

    def watched_pack(tensor: torch.Tensor) -> Any:
        nonlocal stopped
        try:
            return pack(tensor)
        except _StopRecomputationError:
            stopped = True
            raise

    with saved_tensors_hooks(watched_pack, unpack):
        try:
            return replay(*args)
        except RuntimeError:
            if stopped:
                raise _StopRecomputationError from None
            raise
