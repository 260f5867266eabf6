"""Recipes of tiles: what a tile of one length keeps, and what its two replays compute."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import nn

from ds_memo.remat.analyse import Analyse
from ds_memo.remat.call import Call, tensor_leaves
from ds_memo.remat.random_states import forked
from ds_memo.remat.recipe import Gemm, Observed, Recipe, make_recipe
from ds_memo.spans import Span
from ds_memo.tiles.around import dropping
from ds_memo.tiles.attention_call import AttentionCall, run_to_attention, run_with_attention
from ds_memo.tiles.modes import AnalyseTile
from ds_memo.tiles.probe import Shapes
from ds_memo.tiles.slices import hidden_states


class Keeps(NamedTuple):
    """Recipes of a whole run."""

    recomputed: Recipe
    """Only the hidden states, attention's result and what routers chose are kept."""
    stored: Recipe
    """All GEMM outputs are kept, too."""


@dataclass(frozen=True)
class TileRecipe:
    """Recipes of all tiles of one length."""

    with_result: Keeps
    without_result: Keeps
    """Attention's result is not kept."""
    to_attention: list[bool]
    """For each GEMM up to attention, whether a backward from attention needs its output."""
    head: list[bool]
    """For each op up to attention, whether what follows attention needs it."""

    def kept(self, result: bool) -> Keeps:
        """Return the recipes by whether attention's result is kept."""
        return self.with_result if result else self.without_result

    def behind_attention(self, recipe: Recipe) -> Recipe:
        """Return the recipe of a run whose attention is supplied: of the head's products, those that the tail needs."""
        head = [
            replace(op, wanted=op.wanted and needed) if isinstance(op, Gemm) else op
            for op, needed in zip(recipe.ops, self.head, strict=False)
        ]
        return replace(recipe, ops=[*head, *recipe.ops[len(head) :]])

    def up_to_attention(self, recipe: Recipe) -> Recipe:
        """Return the recipe of a run that ends at attention, for the backward of that part."""
        wanted = iter(self.to_attention)
        ops = [replace(op, wanted=next(wanted)) if isinstance(op, Gemm) else op for op in recipe.ops[: len(self.head)]]
        return replace(recipe, ops=ops)


def analyse(
    call: Call,
    module: nn.Module,
    forward: Callable[..., Any],
    arguments: tuple[tuple, dict[str, Any]],
    span: Span,
    shapes: Shapes,
) -> TileRecipe:
    """Run a tile twice to make its recipes. Nothing is kept, generators are put back.

    Args:
        call: what the modes need of a call; its frame is not touched.
        arguments: of the tile; its hidden states are a leaf.
    """
    args, kwargs = arguments
    givens = [*module.parameters(), *module.buffers(), *tensor_leaves(arguments)]
    with forked(call.engine.device), torch.enable_grad(), dropping():
        dtype = shapes.result.tensor(run_to_attention(forward, args, kwargs).stand_in()).dtype
        result = shapes.result.new(*span.size, dtype, call.engine.device).normal_().requires_grad_()
        whole, part = Observed(), Observed()
        with AnalyseTile(call, whole, module, givens) as mode:

            def supply(reached: AttentionCall) -> Any:
                mode.attention_reached(tensor_leaves(reached.leaves), [result])
                return shapes.result.of(result)

            output = shapes.output.tensor(run_with_attention(forward, args, kwargs, supply))
            head = mode.tail_needs(output)
        with Analyse(call, part, module, givens):
            run_to_attention(forward, args, kwargs)
        part.close_over_inputs(all_rows_kept=False)
        whole.note_hidden_writes()
        whole.softmax = None  # a router's: attention is not in it
        x = hidden_states(args, kwargs)
        recipe = TileRecipe(
            _keeps(whole, [x, result]), _keeps(whole, [x]), [part.is_wanted(i) for i in range(len(part.gemms()))], head
        )
        whole.forget()
        part.forget()
    return recipe


def _keeps(observed: Observed, inputs: list[torch.Tensor]) -> Keeps:
    observed.inputs = inputs
    wanted = observed.wanted
    recipes = []
    for all_stored in (False, True):
        observed.close_over_inputs(all_rows_kept=all_stored)
        recipes.append(make_recipe(observed, float(all_stored))[0])
        observed.wanted = wanted
    return Keeps(*recipes)
