"""One layer call, and small things that the modes share."""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from ds_memo.layer_observer import LayerObserver
from ds_memo.remat import op_policy
from ds_memo.remat.op_policy import OpKind
from ds_memo.remat.recipe import Recipe, SavedOp
from ds_memo.swap.engine import SwapEngine
from ds_memo.swap.frame import Frame


@dataclass
class Work:
    """What forwards computed so far, and how much of it replays computed again."""

    gemm_flops: int = 0
    """Of all recorded forwards."""
    gemm_flops_recomputed: int = 0
    attention_ops_recomputed: int = 0
    """Attention calls that ran again: there was no kernel whose output could be kept, the call had left its recipe, or the layer
    has a checkpoint of its own."""


class Call:
    """One layer call: its frame, its recipe, and what belongs to this call alone.

    Args:
        layer: its number.
        observers: are told when its replay begins.
        recipe: None while the call is analysed.
    """

    def __init__(
        self, layer: int, observers: Sequence[LayerObserver], engine: SwapEngine, frame: Frame, recipe: Recipe | None, work: Work
    ) -> None:
        self.layer = layer
        self.observers = observers
        self.engine = engine
        self.frame = frame
        self.recipe = recipe
        self.work = work
        self.loose: dict[int, tuple[Any, ...]] = {}
        """By index of a saved op: those of its outputs that the frame does not keep (ints, None, tiny tensors), as they are."""
        self.rng_after: dict[int, torch.Tensor] = {}
        """By index of an op that drew random numbers: the generator's state after it. Supplying its output skips the draw."""
        self.device_inputs: list[Any] = []
        """Tensors that the layer was given by keyword or inside a container: autograd does not notice if they are changed."""
        self.altered: set[int] = set()
        """Indices of saved ops whose loose outputs the layer changes in place, and will again in each replay."""

    def about_to_change(self, tensor: torch.Tensor) -> None:
        """Preserve the present value of what is kept of `tensor`, which is about to be changed in place."""
        storage = storage_of(tensor)
        if not storage:  # nothing is kept of a sparse tensor
            return
        self.engine.about_to_change(self.frame, tensor)
        for index, values in self.loose.items():
            if any(isinstance(value, torch.Tensor) and storage_of(value) == storage for value in values):
                self.altered.add(index)
                self.loose[index] = tuple(map(cloned, values))

    def keep_outputs(self, index: int, op: SavedOp, outputs: tuple[Any, ...]) -> None:
        """Keep the outputs of the saved op at `index`: in the frame, or in `loose`."""
        for kept, value in zip(op.kept, outputs, strict=True):
            if kept is not None:
                self.engine.keep(self.frame, kept, value)
        self.loose[index] = tuple(
            None if kept is not None else detached(value) for kept, value in zip(op.kept, outputs, strict=True)
        )

    def begin_replay(self) -> None:
        """Tell the observers, and make the frame ready."""
        for observer in self.observers:
            observer.layer_replays(self.layer)
        self.engine.bring_back(self.frame)

    def input_tensor(self, position: int) -> torch.Tensor:
        if self.frame.state != "ready":
            self.begin_replay()
        return self.frame.tensor(self.recipe.inputs[position])


def needs_right_operands(kind: OpKind, func: Any, args: tuple, kwargs: dict[str, Any], older: Callable[[], Set[int]]) -> bool:
    """Whether a replay needs the op's operands to be right, whatever is saved of what it makes: it looks at their values, or
    writes to memory of before the call, as running statistics, where what a replay writes is not undone.

    Args:
        older: returns that memory's storages.
    """
    if op_policy.looks_at_values(func, args, kwargs):
        return True
    return kind is OpKind.MUTATES and any(
        storage_of(tensor) in older() for tensor in op_policy.written_tensors(func, args, kwargs)
    )


def noticing_draws(device: torch.device, func: Any, args: tuple, kwargs: dict) -> tuple[Any, torch.Tensor | None]:
    """Run an op. Returns its output, and the generator's state after it if the op drew random numbers, else None."""
    generator = generator_of(device)
    before = generator.get_state()
    out = func(*args, **kwargs)
    after = generator.get_state()
    return out, None if torch.equal(before, after) else after


def generator_of(device: torch.device) -> torch.Generator:
    if device.type == "cpu":
        return torch.default_generator
    return torch.cuda.default_generators[device.index]


def storage_of(tensor: torch.Tensor) -> int:
    """What tells the tensor's memory from all other that is alive, whichever views look at it; 0: it has no storage (sparse)."""
    return tensor.untyped_storage()._cdata if torch._C._has_storage(tensor) else 0


def tensor_leaves(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def as_tuple(out: Any) -> tuple[Any, ...]:
    return tuple(out) if isinstance(out, (tuple, list)) else (out,)


def cloned(value: Any) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) else value


def detached(value: Any) -> Any:
    """A view of `value` outside the graph: autograd goes on to tie `value` itself into it, and would keep the graph alive."""
    return value.detach() if isinstance(value, torch.Tensor) else value
