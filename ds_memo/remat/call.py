"""One layer call, and what the modes ask of an op in it."""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set
from typing import Any

import torch

from ds_memo.remat import op_policy
from ds_memo.remat.layer import Layer
from ds_memo.remat.layer_host import LayerHost
from ds_memo.remat.layer_state import Before
from ds_memo.remat.op_policy import OpKind
from ds_memo.remat.random_states import generator_of
from ds_memo.remat.recipe import Observed, ObservedSavedOp, Recipe, SavedOp
from ds_memo.remat.replay_check import ReplayCheck
from ds_memo.remat.tensors import cloned, detached, storage_of
from ds_memo.swap.frame import Frame, Kept
from ds_memo.swap.stream_protocol import D2H


class Call:
    """One layer call, or a part of one in tiles: its frame, its recipe, and the state of this call alone.

    Args:
        frame: None while a tile's recipe is made.
        recipe: None while the call is analysed.
        layer: None: a part of a call.
    """

    def __init__(self, host: LayerHost, frame: Any, recipe: Any = None, layer: Layer | None = None) -> None:
        self.engine = host.engine
        self.work = host.work
        self.frame: Frame = frame
        self.recipe: Recipe = recipe
        self._host = host
        self._layer = layer
        self.loose: dict[int, tuple[Any, ...]] = {}
        """By index of a saved op: the outputs that the frame does not keep (ints, None, tiny tensors)."""
        self.rng_after: dict[int, torch.Tensor] = {}
        """By index of an op that drew random numbers: the generator's state after it, for the replay."""
        self.device_inputs: list[Any] = []
        """Tensors passed by keyword or inside a container. Autograd does not notice if they are changed."""
        self.altered: set[int] = set()
        """Indices of saved ops whose loose outputs the layer, and each replay, changes in place."""
        self.before: Before | None = None
        """The layer's state before the call; None: it is a function, or a tile, whose call has it."""
        self.check: ReplayCheck | None = None
        """Values that its replay is compared by, if the call is analysed."""
        self.weights: dict[int, int | None] = {}
        """By index of a GEMM: the number of the layer's parameter that is its right operand; None: it is another tensor."""

    def weight_of(self, func: Any, args: tuple) -> int | None:
        """Return the number of the parameter that is a GEMM's right operand."""
        right = op_policy.right_operand(func, args)
        base = right._base
        return self.before.state.number_of.get(id(right if base is None else base))

    def about_to_write(self, tensor: torch.Tensor) -> None:
        """Note that the layer is about to write to `tensor` in place, which may be its own."""
        if self.before is not None:
            self.before.about_to_write(tensor)
        self.about_to_change(tensor)

    def about_to_change(self, tensor: torch.Tensor) -> None:
        """Preserve the present value of what is kept of `tensor`, which is about to be changed in place."""
        storage = storage_of(tensor)
        if not storage:  # nothing is kept of a sparse tensor
            return
        self.engine.about_to_change(self.frame, tensor)
        for index, values in self.loose.items():
            for value in values:
                if isinstance(value, torch.Tensor) and storage_of(value) == storage:
                    self.altered.add(index)
                    self.loose[index] = tuple(map(cloned, values))
                    break

    def keep_outputs(self, index: int, op: SavedOp, outputs: tuple[Any, ...]) -> None:
        """Keep the outputs of the saved op at `index`: in the frame, or in `loose`."""
        for kept, value in zip(op.kept, outputs, strict=True):
            if kept is not None:
                self.engine.keep(self.frame, kept, value)
        self.loose[index] = tuple(
            None if kept is not None else detached(value) for kept, value in zip(op.kept, outputs, strict=True)
        )

    def keep_observed(self, observed: Observed, tensors: Sequence[tuple[Kept, torch.Tensor]]) -> None:
        """Keep what an analysed call observed, by the recipe that was made of it.

        Args:
            tensors: from `make_recipe`.
        """
        frame = self.frame
        self.engine.adopt(frame, self.recipe.layout)
        clones = {id(tensor) for tensor in observed.clones}
        for kept, tensor in tensors:
            self.engine.keep(frame, kept, tensor)
            if frame.side_streams and not frame.resident:  # it may have been allocated on one of them
                self.engine.streams.record(tensor, D2H)
            if frame.resident and id(tensor) in clones:
                frame.changed.add(kept.index)
        for index, (op, was) in enumerate(zip(self.recipe.ops, observed.ops, strict=True)):
            if isinstance(was, ObservedSavedOp) and isinstance(op, SavedOp) and op.kept is not None:
                self.loose[index] = tuple(
                    None if kept is not None else value for kept, value in zip(op.kept, was.outputs, strict=True)
                )
                if any(id(value) in clones for value in self.loose[index]):
                    self.altered.add(index)

    def begin_replay(self) -> None:
        """Make the frame ready, and notify the observers of a whole call's replay."""
        if self._layer is None:
            self.engine.bring_back(self.frame)
        else:
            self._host.replay_begins(self._layer, self.frame)

    def input_tensor(self, position: int) -> torch.Tensor:
        if self.frame.state != "ready":
            self.begin_replay()
        return self.frame.tensor(self.recipe.inputs[position])


def needs_right_operands(kind: OpKind, func: Any, args: tuple, kwargs: dict[str, Any], older: Callable[[], Set[int]]) -> bool:
    """Return True if a replay needs the op's operands to be right, even if nothing computed from them is saved.

    The op reads their values, or writes to memory older than the call (running statistics), where a replay's write lasts.

    Args:
        older: returns the storages of that older memory.
    """
    if op_policy.reads_values(func, args, kwargs):
        return True
    return kind is OpKind.MUTATES and any(
        storage_of(tensor) in older() for tensor in op_policy.written_tensors(func, args, kwargs)
    )


def noticing_draws(device: torch.device, func: Any, args: tuple, kwargs: dict) -> tuple[Any, torch.Tensor | None]:
    """Run an op. Return its output, and the generator's state after it if the op drew random numbers, else None."""
    generator = generator_of(device)
    before = generator.get_state()
    out = func(*args, **kwargs)
    after = generator.get_state()
    return out, None if torch.equal(before, after) else after
