"""A layer in tiles, and the recipes of its tiles and its attention."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ds_memo.distributed.agree import world_size
from ds_memo.distributed.topology import is_in_pieces, ranks_per_sequence
from ds_memo.remat.layer import Layer
from ds_memo.remat.recipe import Recipe
from ds_memo.tiles.probe_result import Shapes
from ds_memo.tiles.weight_gradients import see_products_of_zero3

SizeRecipes = dict[tuple[bool, bool], Recipe]
"""Recipes of tiles of one size, by two questions: do they keep attention's result, and are they stored? Every tile keeps its
hidden states, unless its layer computes them again, and what routers chose, a stored one all GEMM outputs, too."""


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
        agree_on_input: returns why no rank computes the input of its calls, for this rank's reason.
        exchanges: True if ranks exchange tensors inside the layer.
    """

    def __init__(
        self,
        layer: Layer,
        module: nn.Module,
        shapes: Shapes,
        agree: Callable[[str, bool], None],
        agree_on_input: Callable[[str], str],
        exchanges: bool,
    ) -> None:
        self.layer = layer
        self.shapes = shapes
        self._agree = agree
        self.agree_on_input = agree_on_input
        self.exchanges = exchanges
        self.in_pieces = is_in_pieces(module)
        self.gathers_with_others = self.in_pieces and world_size() > 1
        self._ran = False
        self.striped = False
        """True if ranks that share a sequence have put its tokens in the order of tiles."""
        self.recipes: dict[Any, Any] = {}
        self.attention_recipes: dict[Any, AttentionRecipe] = {}
        self.alphas: dict[Any, float] = {}
        """By key of the call: alpha where the policy leaves it open until sizes are known."""
        self.result_differs = shapes.attention is not None and ranks_per_sequence(module) > 1
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
