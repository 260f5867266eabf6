"""A layer that runs in tiles, and its recipes: what tiles and attention keep, and what their replays compute."""

from __future__ import annotations

import functools
import itertools
import weakref
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import nn

from ds_memo.distributed.topology import ranks_per_sequence
from ds_memo.remat.analyse import Analyse
from ds_memo.remat.call import Call
from ds_memo.remat.layer import Layer
from ds_memo.remat.layer_state import tensors_of, unchanged
from ds_memo.remat.random_states import forked
from ds_memo.remat.recipe import Gemm, Observed, Recipe, SavedOp, make_recipe
from ds_memo.remat.tensors import tensor_leaves
from ds_memo.sequence.catch_mixers import carrying
from ds_memo.sequence.parts import SequenceParts
from ds_memo.spans import Span
from ds_memo.tiles.around import dropping
from ds_memo.tiles.attention_call import AttentionCall, run_to_attention, run_with_attention
from ds_memo.tiles.findings import AttentionShapes, Shapes
from ds_memo.tiles.modes import AnalyseTile
from ds_memo.tiles.slices import hidden_states
from ds_memo.tiles.weight_gradients import see_products_of_zero3


@dataclass(frozen=True)
class TileRecipe:
    """What tiles of one length keep, and what follows for each of their passes."""

    whole: Recipe
    """The recipe of a whole run."""
    to_attention: list[bool]
    """For each GEMM up to attention, whether a backward from attention needs its output."""
    needed_behind: list[bool]
    """For each op up to attention, whether what follows attention needs it."""
    pre_writes: bool
    """True if ops up to attention write in place."""
    post_writes: bool
    """The same for ops that follow attention."""

    @property
    def host_bytes(self) -> int:
        return self.whole.layout.host_bytes

    @cached_property
    def pre(self) -> list[Gemm | SavedOp]:
        """Ops up to attention."""
        return self.whole.ops[: len(self.needed_behind)]

    @cached_property
    def records_pre(self) -> bool:
        """True if the forward keeps an output of the pre, or what the pre overwrites."""
        return bool(self.whole.packs) and (self.pre_writes or any(op.kept is not None for op in self.pre))

    @cached_property
    def records_post(self) -> bool:
        """True if the forward keeps an output of the post, or what the post overwrites."""
        post = self.whole.ops[len(self.pre) :]
        return bool(self.whole.packs) and (self.post_writes or any(op.kept is not None for op in post))

    @cached_property
    def pre_flops(self) -> int | None:
        """FLOPs of the pre's products, if a whole replay computes all ops of the pre; else None."""
        computed = [op.flops for op in self.pre if isinstance(op, Gemm) and op.wanted and op.kept is None]
        return sum(computed) if len(computed) == len(self.pre) else None

    @cached_property
    def up_to_attention(self) -> Recipe:
        """Recipe of a run that ends at attention, for the backward of that part."""
        wanted = iter(self.to_attention)
        return replace(self.whole, ops=[replace(op, wanted=next(wanted)) if isinstance(op, Gemm) else op for op in self.pre])

    @cached_property
    def again_to_attention(self) -> Recipe:
        """Recipe of a run that ends at attention, and computes what attention reads."""
        return replace(self.whole, ops=self.pre)

    @cached_property
    def behind_attention(self) -> Recipe:
        """Recipe of a whole run whose attention is supplied: of the pre's products, it computes those that the post needs."""
        pre = [
            replace(op, wanted=op.wanted and needed) if isinstance(op, Gemm) else op
            for op, needed in zip(self.pre, self.needed_behind, strict=True)
        ]
        return replace(self.whole, ops=[*pre, *self.whole.ops[len(pre) :]])


SizeRecipes = dict[tuple[bool, bool], TileRecipe]
"""Recipes of tiles of one length, by two questions: is attention's result kept, and is the tile stored? Every tile keeps its
hidden states and what routers chose, a stored one all GEMM outputs, too."""


@dataclass(frozen=True)
class AttentionRecipe:
    recipe: Recipe
    output: Output | None
    """The output of an op that is attention's result, which the frame need not keep; None: there is none, or it keeps all."""
    result_differs: bool
    """True if no op's output is attention's result."""
    draws: bool
    """True if attention draws random numbers."""


@dataclass(frozen=True)
class Output:
    """An op's output that shares its memory with attention's result."""

    op: int
    """Index in the recipe."""
    position: int
    """Among the op's outputs."""
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    def within(self, result: torch.Tensor) -> torch.Tensor:
        return result.as_strided(self.shape, self.stride)


class TiledLayer:
    """A layer that runs in tiles, and the recipes of its calls.

    Args:
        shapes: from its probe.
        agree: tells other ranks why attention cannot run so, "" if it can, and raises CannotTile if one of them has a reason. The
            second argument is True if all of them are sure to call it.
    """

    def __init__(self, layer: Layer, module: nn.Module, shapes: Shapes, agree: Callable[[str, bool], None]) -> None:
        self.layer = layer
        self.shapes: Any = shapes
        self._agree = agree
        self._ran = False
        self.striped = False
        """True if ranks that share a sequence have put its tokens in the order of tiles."""
        self.recipes: dict[Any, Any] = {}
        self.attention_recipes: dict[Any, AttentionRecipe] = {}
        self.alphas: dict[Any, float] = {}
        """By key of the call: alpha where the policy leaves it open until sizes are known."""
        self.result_differs = isinstance(shapes, AttentionShapes) and ranks_per_sequence() > 1
        """True if attention's result is not its kernel's output, as the latest call showed. Before the first: where ranks trade
        heads."""
        self._module = weakref.ref(module)
        see_products_of_zero3()

    def attention_ran(self, why: str) -> None:
        """Agree with other ranks on attention, after its first run. Later a rank speaks only to refuse."""
        first, self._ran = not self._ran, True
        if why or first:
            self._agree(why, first)

    @property
    def has_run(self) -> bool:
        return bool(self.attention_recipes if isinstance(self.shapes, AttentionShapes) else self.recipes)

    @property
    def module(self) -> nn.Module:
        module = self._module()
        assert module is not None  # it is running
        return module


def note_tile(observed: Observed) -> None:
    """Note what is the same in all tiles of a layer."""
    for gemm in observed.gemms():
        gemm.splits &= not gemm.without_tokens  # each computes it, and none stores it
    observed.notes.softmax = None  # a router's: attention is not in it


def analyse(
    call: Call,
    module: nn.Module,
    forward: Callable[..., Any],
    arguments: tuple[tuple, dict[str, Any]],
    before: tuple[tuple, dict[str, Any]] | None,
    span: Span,
    shapes: AttentionShapes,
    stretches: tuple[SequenceParts | None, SequenceParts | None],
) -> SizeRecipes:
    """Run a tile twice to make its recipes. Nothing is kept, and the module and generators are put back.

    Args:
        call: what the modes need of a call; its frame is not touched.
        arguments: of the tile; its hidden states are a leaf, which needs no gradient if no backward will come.
        before: those of a first tile, which leaves what this one goes on from; None: this one is its sequence's first.
        stretches: of this tile and of the first, where ranks share the sequence.
    """
    args, kwargs = arguments
    x = hidden_states(args, kwargs)
    with forked(call.engine.device), unchanged(module), dropping():
        carry: list[torch.Tensor] = []
        if before is not None:
            with carrying(None, stretches[1]) as first:
                run_with_attention(forward, *before, AttentionCall.stand_in)
            carry = [tensor.detach().requires_grad_(x.requires_grad) for tensor in first.left]
        going_on = functools.partial(carrying, None if before is None else carry, stretches[0])
        givens = [*tensors_of(module), *tensor_leaves(arguments), *carry]
        with going_on():
            dtype = shapes.result.tensor(run_to_attention(forward, args, kwargs).stand_in()).dtype
        result = shapes.result.new(*span.size, dtype, call.engine.device).normal_()
        result.requires_grad_(x.requires_grad)
        whole, part = Observed(), Observed()
        with AnalyseTile(call, whole, givens) as mode, going_on():

            def supply(reached: AttentionCall) -> Any:
                mode.attention_reached(tensor_leaves(reached.leaves), [result])
                return shapes.result.of(result)

            output = shapes.output.tensor(run_with_attention(forward, args, kwargs, supply))
            needed_behind = mode.post_needs(output)
        with Analyse(call, part, givens), going_on():
            run_to_attention(forward, args, kwargs)
        part.close_over_inputs(all_rows_kept=False)
        whole.note_hidden_writes()
        note_tile(whole)
        to_attention = [part.is_wanted(i) for i in range(len(part.gemms()))]

        wanted, found = whole.wanted, {}
        for with_result, stored in itertools.product((True, False), repeat=2):
            whole.inputs, whole.wanted = [x, *carry, *([result] if with_result else [])], wanted
            whole.close_over_inputs(all_rows_kept=stored)
            recipe = make_recipe(whole, float(stored))[0]
            found[with_result, stored] = TileRecipe(recipe, to_attention, needed_behind, mode.pre_writes, mode.post_writes)
        whole.forget()
        part.forget()
    return found
