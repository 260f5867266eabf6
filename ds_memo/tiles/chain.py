"""A layer without attention in tiles of tokens, in one pass: convolutions and scans go on from tile to tile.

    forward   each tile, first to last: the layer's own forward, with what the tile before left (its carry)
    backward  each tile, last to first: its forward again, then its backward, given d(output) and d(what it left); d(carry) goes
              to the tile before

For all tokens there are hidden states and their gradient, and nothing else. A frame for each tile: its hidden states, its carry,
what routers chose, and if the tile is stored all GEMM outputs. Where no function is caught, tokens are not mixed, and there is no
carry.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch

from ds_memo.remat.call import Call
from ds_memo.remat.layer_call import CannotTile
from ds_memo.remat.layer_state import tensors_of, unchanged
from ds_memo.remat.modes import running_tiles
from ds_memo.remat.random_states import forked
from ds_memo.remat.recipe import Observed, Recipe, make_recipe
from ds_memo.remat.record import Record
from ds_memo.remat.replay import Replay
from ds_memo.remat.tensors import tensor_leaves
from ds_memo.sequence.catch_mixers import carrying
from ds_memo.spans import Span
from ds_memo.tiles.around import dropping
from ds_memo.tiles.call_in_tiles import CallInTiles, Tile, memory_for, stored_tiles, with_left
from ds_memo.tiles.modes import AnalyseTile
from ds_memo.tiles.recipes import note_tile
from ds_memo.tiles.slices import fill, new_whole, part
from ds_memo.tiles.weight_gradients import GradientSums


@dataclass(frozen=True)
class LinkRecipes:
    """Recipes of tiles of one length. The first tile of a sequence has no carry, and recipes of its own."""

    recomputed: Recipe
    stored: Recipe
    writes: bool
    """True if ops write in place."""

    def records(self, recipe: Recipe) -> bool:
        """Return True if the forward keeps an op's output, or what the layer overwrites."""
        return self.writes or any(op.kept is not None for op in recipe.ops)


class ChainedCall(CallInTiles):
    """One call of a tiled layer that calls no attention. See :class:`CallInTiles` for the arguments."""

    _tiles: list[Tile]

    # ---- forward

    def _run_tiles(self, hidden: torch.Tensor, recipes: dict[Any, LinkRecipes]) -> torch.Tensor:
        for begins in ("heads", "attention", "tails"):  # the first two are empty
            self._host.part_begins(begins)
        all_stored = stored_tiles(len(self._spans), self._placement.decided_alpha)
        output: torch.Tensor | None = None
        left: list[torch.Tensor] = []
        for number, span in enumerate(self._spans):
            of_kind, packed = recipes[self._kind(span)], self._is_packed(span)
            stored = number in all_stored and not packed
            recipe = of_kind.stored if stored else of_kind.recomputed
            tile = Tile(span, self._begin_tile(number, recipe), stored, self._seed_of(number))
            self._tiles.append(tile)
            records = of_kind.writes if packed else of_kind.records(recipe)
            of_tile, left = self._tile_forward(tile, hidden, left if span.tokens.start else [], records, packed)
            if output is None:
                output = new_whole(of_tile, self._arguments.batch, self._arguments.length, 1)
            part(output, span, 1).copy_(of_tile)
            del of_tile
            if tile.call.frame is not None:
                self._engine.end(tile.call.frame)
            if stored:
                self._engine.let_go_but(2)
        assert output is not None
        return output

    def _tile_forward(
        self, tile: Tile, hidden: torch.Tensor, carry: list[torch.Tensor], records: bool, packed: bool
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Run a tile. Return its output, and what it leaves for the next."""
        x, carry = self._hidden_of(hidden, tile.span), self._leaves(carry)
        self._keep_inputs(tile.call, [x, *carry])
        if not self._trains:
            output, left, others = self._run_tile(tile, x, carry, nullcontext())
        elif records:
            # A new recipe takes a run of a tile, in which ranks that share its sequence would have to join.
            mode = Record(tile.call, left_recipe=self._tiled.recipes.clear) if self._striped is None else Record(tile.call)
            output, left, others = self._run_tile(tile, x, carry, mode)
        else:
            packs = itertools.count()
            counting = torch.autograd.graph.saved_tensors_hooks(lambda tensor: next(packs), lambda number: None)
            output, left, others = self._run_tile(tile, x, carry, counting)
            if packed or next(packs) != tile.call.recipe.packs:  # it left its recipe, where products were left out
                tile.call.recipe = replace(tile.call.recipe, ops=[])
        self._refuse_other_gradients([output, *left], [x, *carry, *others])
        return output.detach(), [tensor.detach() for tensor in left]

    def _run_tile(
        self, tile: Tile, x: torch.Tensor, carry: list[torch.Tensor], mode: AbstractContextManager[Any], packed: bool = True
    ) -> tuple[torch.Tensor, list[torch.Tensor], list[torch.Tensor]]:
        """Return a tile's output, what it leaves for the next, and its inputs besides `x` and `carry`.

        Args:
            packed: False: as if it had no documents.
        """
        args, kwargs, _ = self._arguments.tile(x, tile.span)
        given = carry if tile.span.tokens.start else None
        with self._seeded(tile.seed), mode, carrying(given, self._stretch(tile.span, packed)) as after:
            output = self._shapes.output.tensor(self._forward(*args, **kwargs))
        return output, after.left, self._arguments.inputs(args, kwargs)

    # ---- its recipes

    def _host_bytes(self, recipes: LinkRecipes) -> tuple[int, int]:
        return recipes.recomputed.layout.host_bytes, recipes.stored.layout.host_bytes

    def _analyse(self, call: Call, hidden: torch.Tensor, span: Span) -> LinkRecipes:
        """Run a tile, and for its carry the first of its sequence. Nothing is kept; the module and generators are put back."""
        module, observed = self._tiled.module, Observed()
        with running_tiles(), forked(self._engine.device), unchanged(module), dropping():
            carry: list[torch.Tensor] = []
            if span.tokens.start:
                first = Tile(self._spans[0], call, False, None)
                carry = self._leaves(self._run_tile(first, self._hidden_of(hidden, first.span), [], nullcontext(), False)[1])
            x = self._hidden_of(hidden, span)
            givens = [*tensors_of(module), *tensor_leaves(self._arguments.tile(x, span)[:2]), *carry]
            with AnalyseTile(call, observed, givens) as mode:
                self._run_tile(Tile(span, call, False, None), x, carry, nullcontext(), False)
            if self._trains and not observed.packs:
                raise CannotTile("its backward needs nothing of its forward")
            observed.note_hidden_writes()
            note_tile(observed)
            wanted, found = observed.wanted, {}
            for stored in (False, True):
                observed.inputs, observed.wanted = [x, *carry], wanted
                observed.close_over_inputs(all_rows_kept=stored)
                found[stored] = make_recipe(observed, float(stored))[0]
            observed.forget()
        return LinkRecipes(found[False], found[True], mode.pre_writes)

    # ---- backward

    def _backward_tiles(
        self, sums: GradientSums, gradient: torch.Tensor, may_overwrite: bool, d_inputs: list[torch.Tensor]
    ) -> torch.Tensor:
        self._host.part_begins("tails_backward")
        d_hidden = memory_for(gradient, may_overwrite)
        d_left: Sequence[torch.Tensor | None] = []
        for tile in reversed(self._tiles):
            self._engine.bring_back(tile.call.frame)
            d_x, d_left, d_others = self._tile_backward(sums, tile, part(gradient, tile.span, 1), d_left)
            fill(part(d_hidden, tile.span, 1), d_x)
            self._arguments.add(d_inputs, tile.span, d_others)
            del d_x, d_others  # before the next tile is reloaded and runs again
        for begins in ("attention_backward", "heads_backward"):
            self._host.part_begins(begins)
        return d_hidden

    def _tile_backward(
        self, sums: GradientSums, tile: Tile, d_output: torch.Tensor, d_left: Sequence[torch.Tensor | None]
    ) -> tuple[torch.Tensor | None, Sequence[torch.Tensor | None], Sequence[torch.Tensor | None]]:
        """Return the gradients of a tile's hidden states, of its carry, and of its other inputs.

        Args:
            d_left: the gradients of what it left; empty behind the last tile of a sequence.
        """
        x, frame = tile.hidden(), tile.call.frame
        carry = self._leaves([frame.tensor(kept) for kept in tile.call.recipe.inputs[1:]])
        with torch.enable_grad():
            output, left, others = self._run_tile(tile, x, carry, Replay(tile.call))
        d_x, *rest = sums.backward(*with_left([output], [d_output], left, d_left), [x, *carry, *others])
        return d_x, rest[: len(carry)], rest[len(carry) :]
