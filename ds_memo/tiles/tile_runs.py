"""One tile of a layer call: how it runs, and the recipes of such tiles."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes

from ds_memo.remat import follower
from ds_memo.remat.analyse import Analyse
from ds_memo.remat.call import Call
from ds_memo.remat.layer_call import CannotTile
from ds_memo.remat.layer_state import tensors_of, unchanged
from ds_memo.remat.modes import running_tiles
from ds_memo.remat.random_states import forked, seeded
from ds_memo.remat.recipe import Observed, Recipe, SavedOp, make_recipe
from ds_memo.remat.tensors import tensor_leaves
from ds_memo.sequence.catch_mixers import Carrying
from ds_memo.sequence.striped import Striped
from ds_memo.spans import Span
from ds_memo.tiles.aliases import dropping
from ds_memo.tiles.attention_call import AttentionCall, run_to_attention, run_with_attention
from ds_memo.tiles.probe_result import Shapes
from ds_memo.tiles.recipes import SizeRecipes
from ds_memo.tiles.slices import Arguments, part
from ds_memo.tiles.weight_gradients import GradientSums

Gradients = Sequence[torch.Tensor | None]


@dataclass
class Tile:
    """One tile of a call."""

    number: int
    span: Span
    call: Call
    stored: bool
    seed: int | None
    """Seed of the tile's random numbers; None: it draws none."""
    carried: int
    """Tensors of the tile before that its pre goes on from."""
    followed: bool
    """True if the pre did what the recipe said, as far as is known. The post's run compares it once more."""

    def hidden(self) -> torch.Tensor:
        """Return its hidden states from its frame, as a leaf."""
        return self.call.frame.tensor(self.recipe.inputs[0]).detach().requires_grad_()

    @property
    def recipe(self) -> Recipe:
        return self.call.recipe

    def reads_hidden_only(self, recipe: Recipe) -> bool:
        """Return True if a replay by one of these recipes reads no more of the frame than the hidden states."""
        return not self.carried and not any(op.kept is not None and (isinstance(op, SavedOp) or op.wanted) for op in recipe.ops)


class TileRun(NamedTuple):
    """A tile's run."""

    end: Any
    """The tile's output, or its attention call where the run ended there."""
    inputs: list[torch.Tensor]
    """Leaves of its graph: hidden states, the carry, and other arguments that need a gradient."""
    left: list[torch.Tensor]
    """The carry that it leaves for the next tile."""

    def backward(
        self,
        sums: GradientSums,
        ends: Sequence[torch.Tensor],
        gradients: Sequence[torch.Tensor],
        d_left: Gradients,
        own: torch.Tensor | None = None,
    ) -> Gradients:
        """Run its backward. Return the gradients of `own` and of `inputs`.

        Args:
            ends: where the backward begins, besides `left`.
            d_left: the gradients of `left`; empty behind the last tile of a sequence. None: nothing came of it.
            own: its part of attention's result, where that was supplied.
        """
        more = [(end, d_end) for end, d_end in zip(self.left, d_left, strict=False) if d_end is not None]
        outputs, d_outputs = [*ends, *(end for end, _ in more)], [*gradients, *(d_end for _, d_end in more)]
        found = sums.backward(outputs, d_outputs, [*self.inputs, *([] if own is None else [own])])
        return [None if own is None else found[-1], *found[: len(self.inputs)]]


def _noted_once(library: ModuleType, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return library.noted_once(forward, args, kwargs)


class TileRuns:
    """Runs the tiles of one layer call.

    Args:
        forward: the layer's own.
        trains: True if a backward will come.
        striped: the tokens of the ranks' tiles; None: this rank has whole sequences, or the layer does not mix tokens.
    """

    def __init__(
        self,
        forward: Callable[..., Any],
        arguments: Arguments,
        shapes: Shapes,
        device: torch.device,
        trains: bool,
        striped: Striped | None,
    ) -> None:
        self._forward = forward
        self._arguments = arguments
        self._shapes = shapes
        self._device = device
        self._trains = trains
        self._striped = striped

    def leaf(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return a tile's hidden states as a leaf, in row-major order: its ops are then the same for any layout of the whole."""
        return hidden.detach().contiguous().requires_grad_(self._trains)

    def leaves(self, carry: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        return [tensor.detach().requires_grad_(self._trains) for tensor in carry]

    def run(
        self,
        span: Span,
        x: torch.Tensor,
        carry: list[torch.Tensor],
        mode: AbstractContextManager[Any],
        attend: Callable[[AttentionCall], torch.Tensor] | None = None,
        seed: int | None = None,
        packed: bool = True,
    ) -> TileRun:
        """Run a tile.

        Args:
            mode: is on while the layer's own forward runs.
            attend: returns its attention's result; None: the run ends at attention.
            packed: False: as if it had no documents.
        """
        args, kwargs, wholes = self._arguments.tile(x, span)
        attention = self._shapes.attention
        stretch = None if self._striped is None else self._striped.stretch(span, packed)
        drawing = nullcontext() if seed is None else seeded(seed % (1 << 63), self._device)

        def supply(reached: AttentionCall) -> Any:
            reached.cut_from = wholes
            return attention.result.of(attend(reached))

        library, forward = follower.library(), self._forward
        if library is not None and not isinstance(mode, nullcontext):
            forward = functools.partial(_noted_once, library, forward)
        with drawing, mode, Carrying(carry if span.tokens.start else None, stretch) as after:
            if attention is None:
                end = forward(*args, **kwargs)
            elif attend is None:
                end = run_to_attention(forward, args, kwargs, attention.sdpa)
                end.cut_from = wholes
            else:
                end = run_with_attention(forward, args, kwargs, supply, attention.sdpa)
        if not isinstance(end, AttentionCall):
            end = self._shapes.output.tensor(end)
        return TileRun(end, [x, *carry, *self._arguments.inputs(args, kwargs)], after.left)

    def analyse(
        self, module: nn.Module, call: Call, hidden: torch.Tensor, first: Span, span: Span, keeps_input: bool
    ) -> SizeRecipes:
        """Run a tile to make the recipes of its size. Nothing is kept, and the module and generators are put back.

        Args:
            call: what the mode needs of a call; its frame is not touched.
            keeps_input: True if tiles store their hidden states.
            first: the first tile of its sequence, which leaves what this one goes on from.

        Raises:
            CannotTile: a backward would need nothing of it.
        """
        attention, observed = self._shapes.attention, Observed()
        result: list[torch.Tensor] = []
        with running_tiles(), forked(self._device), unchanged(module), dropping():
            carry: list[torch.Tensor] = []
            if self._shapes.mixes and span.tokens.start:
                stand_in = lambda reached: attention.result.tensor(reached.stand_in())  # noqa: E731
                ran = self.run(first, self.leaf(part(hidden, first, 1)), [], nullcontext(), stand_in, packed=False)
                carry = self.leaves(ran.left)
            x = self.leaf(part(hidden, span, 1))
            givens = [*tensors_of(module), *tensor_leaves(self._arguments.tile(x, span)[:2]), *carry]
            with Analyse(call, observed, givens) as mode:

                def attend(reached: AttentionCall) -> torch.Tensor:
                    with _disable_current_modes():
                        own = attention.result.new(*span.size, reached.dtype, self._device).normal_().requires_grad_(self._trains)
                    mode.attention_reached(tensor_leaves(reached.leaves), [own])
                    result.append(own)
                    return own

                ran = self.run(span, x, carry, nullcontext(), attend, packed=False)
                mode.returned(ran.end)
            if self._trains and not observed.packs:
                raise CannotTile("its backward needs nothing of its forward")
            observed.note_hidden_writes()
            for gemm in observed.gemms():
                gemm.splits &= not gemm.without_tokens  # each tile computes it, and none stores it
            observed.notes.softmax = None  # a router's: attention is not in it
            wanted, recipes = observed.wanted, {}
            for keeps_result, stored in itertools.product((True, False) if result else (False,), (True, False)):
                observed.inputs, observed.wanted = [x, *carry, *(result if keeps_result else [])], wanted
                observed.close_over_inputs(all_rows_kept=stored)
                recipes[keeps_result, stored], _ = make_recipe(observed, float(stored), keeps_input)
            observed.forget()
        return recipes
