"""Recipes of a layer in tiles: what its tiles and its attention keep, and what their replays compute."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import nn

from ds_memo.distributed.topology import ranks_per_sequence
from ds_memo.remat.layer import Layer
from ds_memo.remat.recipe import Gemm, Recipe, SavedOp
from ds_memo.tiles.modes import Sections
from ds_memo.tiles.probe_result import Shapes
from ds_memo.tiles.weight_gradients import see_products_of_zero3


@dataclass(frozen=True)
class TileRecipe:
    """Recipe of tiles of one size. Its views are the recipes of a tile's runs in the backward.

    The ops of a tile without attention are all of its post.
    """

    whole: Recipe
    """Recipe of a whole run."""
    sections: Sections

    @cached_property
    def pre(self) -> list[Gemm | SavedOp]:
        return self.whole.ops[: len(self.sections.post_needs)]

    @cached_property
    def post(self) -> list[Gemm | SavedOp]:
        return self.whole.ops[len(self.pre) :]

    @cached_property
    def records_pre(self) -> bool:
        """True if the forward keeps an output of the pre, or what the pre overwrites."""
        return self._records(self.pre, self.sections.pre_writes)

    @cached_property
    def records_post(self) -> bool:
        """True if the forward keeps an output of the post, or what the post overwrites."""
        return self._records(self.post, self.sections.post_writes)

    def _records(self, ops: list[Gemm | SavedOp], writes: bool) -> bool:
        return bool(self.whole.packs) and (writes or any(op.kept is not None for op in ops))

    @cached_property
    def pre_flops(self) -> int | None:
        """FLOPs of the pre's products, if a whole replay computes all ops of the pre; else None."""
        computed = [op.flops for op in self.pre if isinstance(op, Gemm) and op.wanted and op.kept is None]
        return sum(computed) if len(computed) == len(self.pre) else None

    @cached_property
    def pre_backward(self) -> Recipe:
        """Recipe of a run that ends at attention, for the backward of the pre."""
        needs = zip(self.pre, self.sections.pre_backward_needs, strict=True)
        return replace(self.whole, ops=[replace(op, wanted=needed) if isinstance(op, Gemm) else op for op, needed in needs])

    @cached_property
    def pre_again(self) -> Recipe:
        """Recipe of a run that ends at attention, and computes what attention reads."""
        return replace(self.whole, ops=self.pre)

    @cached_property
    def post_backward(self) -> Recipe:
        """Recipe of a whole run whose attention is supplied: of the pre's products, it computes those that the post needs."""
        needs = zip(self.pre, self.sections.post_needs, strict=True)
        pre = [replace(op, wanted=op.wanted and needed) if isinstance(op, Gemm) else op for op, needed in needs]
        return replace(self.whole, ops=[*pre, *self.post])


SizeRecipes = dict[tuple[bool, bool], TileRecipe]
"""Recipes of tiles of one size, by two questions: do they keep attention's result, and are they stored? Every tile keeps its
hidden states and what routers chose, a stored one all GEMM outputs, too."""


@dataclass(frozen=True)
class AttentionRecipe:
    recipe: Recipe
    shared: SharedOutput | None
    """The output of an op that is attention's result, which the frame need not keep; None: there is none, or it keeps all."""
    result_differs: bool
    """True if no op's output is attention's result."""
    draws: bool
    """True if attention draws random numbers."""


@dataclass(frozen=True)
class SharedOutput:
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
        self.shapes = shapes
        self._agree = agree
        self._ran = False
        self.striped = False
        """True if ranks that share a sequence have put its tokens in the order of tiles."""
        self.recipes: dict[Any, Any] = {}
        self.attention_recipes: dict[Any, AttentionRecipe] = {}
        self.alphas: dict[Any, float] = {}
        """By key of the call: alpha where the policy leaves it open until sizes are known."""
        self.result_differs = shapes.attention is not None and ranks_per_sequence() > 1
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
    def module(self) -> nn.Module:
        module = self._module()
        assert module is not None  # it is running
        return module
