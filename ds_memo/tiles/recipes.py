"""Recipes of tiles: what a tile of one length keeps, and what its two replays compute."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

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


@dataclass(frozen=True)
class TileRecipe:
    """Recipes of all tiles of one length."""

    recomputed: Recipe
    """Recipe of a whole run; only its hidden states, attention's output and what routers chose are kept."""
    stored: Recipe
    """Recipe of a whole run; all GEMM outputs are kept, too."""
    to_attention: list[bool]
    """For each GEMM up to attention, whether a backward from attention needs its output."""
    head: list[bool]
    """For each op up to attention, whether what follows attention needs it."""

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
        whole.inputs = [hidden_states(args, kwargs), result]
        wanted = whole.wanted
        whole.close_over_inputs(all_rows_kept=True)
        whole.softmax = None  # a router's: attention is not in it
        stored, _ = make_recipe(whole, 1.0)
        whole.wanted = wanted
        whole.close_over_inputs(all_rows_kept=False)
        recomputed, _ = make_recipe(whole, 0.0)
        recipe = TileRecipe(recomputed, stored, [part.is_wanted(i) for i in range(len(part.gemms()))], head)
        whole.forget()
        part.forget()
    return recipe
