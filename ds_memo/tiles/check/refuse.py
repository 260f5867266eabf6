"""Refuse a layer that does what each tile would do again: writes, draws, hooks, tensors that outlive a call."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.modules import module as modules

from ds_memo.distributed.agree import world_size
from ds_memo.distributed.topology import gathers_by_module
from ds_memo.errors import MemoError
from ds_memo.remat.layer_state import LayerState, alike, copied
from ds_memo.remat.modes import under_a_checkpoint
from ds_memo.remat.op_policy import materialises_scores
from ds_memo.remat.random_states import KeepsGiven, forked, named_states
from ds_memo.remat.tensors import storage_of, tensor_leaves
from ds_memo.spans import Span
from ds_memo.tiles.aliases import dropping
from ds_memo.tiles.attention_call import UNDER_A_CHECKPOINT, CannotTile
from ds_memo.tiles.check.compare import MOST_FLIPPED, tolerance_of
from ds_memo.tiles.slices import Arguments, hidden_states, is_dense, part

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_NOTES_NAMES = "torch.utils.module_tracker"
"""FlopCounterMode's hooks. They do no harm without gradients; with them they fail in a tile's backward."""
_LET_GO_S = 1.0
"""Time for gloo's thread to let go of the tensors of a collective (AutoTP). The caller goes on a few ms before that."""
BY_MODULE = "ZeRO-3 gathers its parameters module by module. Let ds_memo.initialize make the engine"
"""Why a layer runs whole that was attached without its engine."""


def refuse_call(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
    """Refuse a call that cannot be tiled, whatever the layer is. This is cheap, and every call is looked at.

    Raises:
        CannotTile: with the reason.
    """
    hidden = hidden_states(args, kwargs)
    if not is_dense(hidden) or hidden.dim() != 3 or not hidden.is_floating_point():
        raise CannotTile("its first argument is no tensor of hidden states (batch, tokens, hidden)")
    if any(map(_sees_tiles, _hooks_of_all_modules())):
        raise CannotTile("a hook of all modules, as FlopCounterMode has, would run once for each tile")
    for name, part_of_it in module.named_modules():
        if name and any(_sees_tiles(hook) for table in _HOOKS for hook in getattr(part_of_it, table).values()):
            raise CannotTile(f"a hook of its {name} would run once for each tile")
    leaf = next((name for name, part_of_it in module.named_modules() if name and getattr(part_of_it, "_z3_leaf", False)), None)
    if leaf is not None and not getattr(module, "_z3_leaf", False):
        raise CannotTile(f"its {leaf} is a leaf module of ZeRO-3, whose gradients are reduced by a hook. Set memo.tile_tokens")
    if gathers_by_module(module):
        raise CannotTile(BY_MODULE)


def _hooks_of_all_modules() -> Iterator[Any]:
    for table in _HOOKS:
        for hook in getattr(modules, f"_global{table}").values():
            if torch.is_grad_enabled() or getattr(hook, "__module__", "") != _NOTES_NAMES:
                yield hook


def _sees_tiles(hook: Any) -> bool:
    return is_external(hook) and not _is_idle(hook)


def is_external(hook: Any) -> bool:
    """Return True for a hook that is neither DeepSpeed's nor ds_memo's."""
    return not getattr(hook, "__module__", "").startswith(("deepspeed.", "ds_memo."))


def _is_idle(hook: Any) -> bool:
    """Return True for a hook of Transformers that collects outputs, none of which this call asks for.

    Such hooks stay after a call that asks for any.
    """
    capturing = sys.modules.get("transformers.utils.output_capturing")
    if getattr(hook, "__module__", "") != getattr(capturing, "__name__", None) or not hasattr(capturing, "_active_collector"):
        return False
    collected = capturing._active_collector.get()
    held = dict(zip(hook.__code__.co_freevars, hook.__closure__ or (), strict=True))
    return not collected or ("key" in held and held["key"].cell_contents not in collected)


def saying_why(function: Callable[..., Any]) -> Callable[..., Any]:
    """Have a function of the model raise CannotTile if a tile makes it fail."""

    def run(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except (CannotTile, MemoError, torch.OutOfMemoryError):
            raise
        except Exception as error:
            why = (str(error) or type(error).__name__).splitlines()[0][:160]
            raise CannotTile(f"a tile of it raises {type(error).__name__}: {why}") from error

    return run


def refuse_writes(module: nn.Module, run: Callable[[], Any], arguments: Sequence[torch.Tensor]) -> None:
    """Run a layer, and refuse it if it writes to a tensor that it holds or is given, or draws from other generators.

    Such tensors are counts, running statistics, or states of a cache.

    Args:
        arguments: tensors that the run gets.
    """
    before, named = LayerState("", module).before(learns=True), named_states()
    given = [(tensor, tensor._version, copied(tensor, {})) for tensor in arguments]
    run()
    for tensor, version, copy in given:
        if tensor._version != version or not alike(tensor, copy):
            raise CannotTile(f"it writes to an argument of the shape {tuple(tensor.shape)}, which tiles would do each")
    if changed := before.changed():
        raise CannotTile(f"it writes to its {changed[0]}, which tiles would do each")
    drawn = [*before.drew_from(), *(["a tensor-parallel state"] if named_states() != named else [])]
    if drawn:
        raise CannotTile(f"it draws random numbers from {drawn[0]}, which tiles would draw anew")


def refuse_hidden_draws(run: Callable[[], Any], device: torch.device) -> None:
    """Refuse a layer whose runs from the same random states differ."""
    if device.type == "meta":
        return
    outputs = []
    for _ in range(2):
        with forked(device):
            outputs.append(next(leaf for leaf in tensor_leaves(run()) if leaf.is_floating_point()).detach().float())
    a, b = outputs
    if a.shape != b.shape or ((a - b).norm(dim=-1) > tolerance_of(a) * a.norm(dim=-1)).float().mean() > MOST_FLIPPED:
        raise CannotTile("two runs of it from the same random states differ: it draws random numbers that memo does not see")


def refuse_draws_of_sequences(run: Callable[..., Any], arguments: Arguments, x: torch.Tensor, spans: Sequence[Span]) -> None:
    """Refuse a layer that draws numbers which all tokens of a sequence share (stochastic depth): each tile would draw its own."""
    drawn = []
    for span in (spans[0], spans[-1]):
        with Watch() as watch:
            run(*arguments.tile(part(x, span, 1), span)[:2])
        drawn.append(watch.drawn)
    for shape, other in zip(*drawn, strict=False):
        if shape == other:
            raise CannotTile(
                f"it draws random numbers of the shape {shape} whatever its tokens are (stochastic depth), and each tile would "
                "draw others"
            )


def refuse_escapes(run: Callable[[], Any]) -> None:
    """Run a layer, and refuse it if tensors of the run are still alive when its output is gone."""
    with Watch() as watch, dropping():
        run()
    deadline = time.monotonic() + (_LET_GO_S if world_size() > 1 else 0)
    while not all(made.expired() for made in watch.made):
        if time.monotonic() >= deadline:
            raise CannotTile("tensors of a call outlive it: a hook, a list or an attribute holds them")
        time.sleep(1e-3)


class Watch(KeepsGiven):
    """Sees what a run draws, and which memory it makes."""

    def __init__(self) -> None:
        super().__init__()
        self.drawn: list[tuple[int, ...]] = []
        """Shapes of tensors of random numbers."""
        self.made: list[StorageWeakRef] = []
        self.attends: nn.Module | None = None
        """Module whose code takes a softmax over scores."""

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if under_a_checkpoint():
            raise CannotTile(UNDER_A_CHECKPOINT)
        out = super().__torch_dispatch__(func, types, args, kwargs)
        tensors, given = tensor_leaves(out), {storage_of(tensor) for tensor in tensor_leaves((args, kwargs))}
        if torch.Tag.nondeterministic_seeded in getattr(func, "tags", ()):
            self.drawn += [tuple(tensor.shape) for tensor in tensors]
        if self.attends is None and materialises_scores(func, args[0] if args else None):
            self.attends = _caller()
        self.made += [StorageWeakRef(tensor.untyped_storage()) for tensor in tensors if storage_of(tensor) not in {0, *given}]
        return out


def _caller() -> nn.Module | None:
    """Return the innermost module with parameters whose code is running."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        caller = frame.f_locals.get("self")
        if isinstance(caller, nn.Module) and any(True for _ in caller.parameters()):
            return caller
        frame = frame.f_back
    return None


def own_attention(attends: nn.Module) -> str:
    """Name the module of a layer that attends without a function which could be caught."""
    name, file = type(attends).__name__, sys.modules[type(attends).__module__]
    if hasattr(file, "ALL_ATTENTION_FUNCTIONS"):
        how = getattr(getattr(attends, "config", None), "_attn_implementation", None)
        return f'its {name} makes a matrix of tokens × tokens: attn_implementation is "{how}"'
    return f"its {name} multiplies queries by keys in code of its own"
