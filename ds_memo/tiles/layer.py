"""A layer that runs in tiles of tokens, forward and backward, as one autograd function.

    forward   pre of each tile: q, k, v ─► attention over all tokens ─► post of each tile: the output
    backward  whole run of each tile, last first: q, k, v again, and the post's backward: d(attention's output), a part of d(x)
              attention's backward, a group of heads at a time; its gradients overwrite q, k, v
              pre of each tile, last first: its backward, the rest of d(x)

Frames: one for attention (its log-sum-exp), one for each tile (its hidden states, its part of attention's output, what routers
chose, and if the tile is stored all GEMM outputs). The backward asks for the tiles', attention's, and the tiles' once more.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch

from ds_memo.errors import MemoError
from ds_memo.remat.call import Call
from ds_memo.remat.modes import running_tiles
from ds_memo.remat.recipe import Recipe, SavedOp
from ds_memo.remat.replay import Replay
from ds_memo.remat.tensors import storage_of, tensor_leaves
from ds_memo.sequence.carry import Carry
from ds_memo.sequence.catch_mixers import carrying
from ds_memo.spans import Span
from ds_memo.swap.frame import Frame
from ds_memo.tiles.around import dropping
from ds_memo.tiles.attention import TiledAttention
from ds_memo.tiles.attention_call import AttentionCall, Gathered, run_to_attention, run_with_attention
from ds_memo.tiles.call_in_tiles import CallInTiles, Tile, memory_for, stored_tiles, with_left
from ds_memo.tiles.findings import AttentionShapes
from ds_memo.tiles.modes import LeftRecipe, RecordPost, RecordPre, ReplayPost
from ds_memo.tiles.recipes import SizeRecipes, TileRecipe, analyse
from ds_memo.tiles.slices import fill, new_whole, part
from ds_memo.tiles.weight_gradients import GradientSums

Gradients = Sequence[torch.Tensor | None]


@dataclass
class AttentionTile(Tile):
    """A tile that is cut at attention."""

    recipe: TileRecipe
    carried: int
    """Tensors of the tile before that its pre goes on from."""
    followed: bool = False
    """True if the pre did what the recipe says, as far as is known. The run behind attention compares it once more."""

    @functools.cached_property
    def up_to_attention(self) -> Call:
        """A call like the tile's that ends at attention, for the backward from there. Its forward must be over."""
        return self._like(self.recipe.up_to_attention if self.followed else self._without_ops)

    @functools.cached_property
    def again_to_attention(self) -> Call:
        """The same, but it computes what attention reads."""
        return self._like(self.recipe.again_to_attention if self.followed else self._without_ops)

    @functools.cached_property
    def behind_attention(self) -> Call:
        """A call like the tile's that leaves out what only attention reads."""
        followed_to_the_end = self.call.recipe is self.recipe.whole
        return self._like(self.recipe.behind_attention) if followed_to_the_end else self.call

    @property
    def _without_ops(self) -> Recipe:
        return replace(self.call.recipe, ops=[])

    def _like(self, recipe: Recipe) -> Call:
        call = copy.copy(self.call)
        call.recipe = recipe
        return call


def reads_hidden_only(tile: AttentionTile, call: Call) -> bool:
    """Return True if a tile's replay reads no more of its frame than the hidden states."""
    return not tile.carried and not any(op.kept is not None and (isinstance(op, SavedOp) or op.wanted) for op in call.recipe.ops)


class TiledCall(CallInTiles):
    """One call of a tiled layer that calls attention. See :class:`CallInTiles` for the arguments."""

    _shapes: AttentionShapes
    _tiles: list[AttentionTile]

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        tiled, tiles = self._tiled, self._placement.tiles
        assert tiles is not None
        self._keeps_result = not (self._recomputes or tiled.result_differs)
        """True if the tiles' frames keep attention's result; else the backward makes it before it comes to the tiles."""
        size = self._arguments.batch, self._arguments.length
        how = tiles.head_groups, self._keeps_result, self._recomputes, self._striped
        self._attention = TiledAttention(tiled, self._host, size, *how)
        self._result: torch.Tensor | None = None
        """Attention's result where it stays on the device: the tiles' frames hold parts of it."""
        self._result_dtype: torch.dtype | None = None

    # ---- forward

    def _run_tiles(self, hidden: torch.Tensor, recipes: dict[Any, SizeRecipes]) -> torch.Tensor:
        if not self._recomputes:  # the first frame: the backward of the layer above goes on with the last tile's
            self._attention.begin(self._placement)
        gathered = self._pre(hidden, recipes)
        self._host.part_begins("attention")
        attend = self._attention.run_and_forget if self._recomputes else self._attention.run
        with torch.set_grad_enabled(self._trains):
            result = attend(gathered)
        del gathered
        output = self._post(hidden, result)
        self._result_dtype = result.dtype
        if not self._recomputes:
            self._tiled.result_differs = self._attention.result_differs
        if self._placement.kind.on_device and self._attention.output is not None:
            self._result = result
        return output

    def _analyse(self, call: Call, hidden: torch.Tensor, span: Span) -> SizeRecipes:
        first = self._spans[0]
        tile, before = (self._arguments.tile(self._hidden_of(hidden, of), of)[:2] for of in (span, first))
        goes_on = self._shapes.mixes and span.tokens.start
        stretches = self._stretch(span, packed=False), self._stretch(first, packed=False)
        how = span, self._shapes, stretches
        with running_tiles():
            return analyse(call, self._tiled.module, self._forward, tile, before if goes_on else None, *how)

    def _host_bytes(self, recipes: SizeRecipes) -> tuple[int, int]:
        return recipes[self._keeps_result, False].host_bytes, recipes[self._keeps_result, True].host_bytes

    def _bytes_beside(self, hidden: torch.Tensor) -> int:
        """Return about how many bytes attention's frame keeps: a log-sum-exp in float32 for each head, and maybe the output."""
        if self._recomputes:
            return 0
        result = self._shapes.result
        elements = hidden.shape[0] * hidden.shape[1] * result.elements_per_token
        return 4 * elements // result.shape[-1] + (0 if self._keeps_result else elements * hidden.element_size())

    def _frames(self) -> list[Frame]:
        of_attention = self._attention.frame
        return [*super()._frames(), *([] if of_attention is None else [of_attention])]

    def _pre(self, hidden: torch.Tensor, recipes: dict[tuple[int, int], SizeRecipes]) -> Gathered:
        self._host.part_begins("heads")
        gathered = Gathered(self._shapes.arguments, self._arguments.batch, self._arguments.length)
        all_stored = stored_tiles(len(self._spans), self._placement.decided_alpha)
        left: list[torch.Tensor] = []
        for number, span in enumerate(self._spans):
            packed = self._is_packed(span)
            stored = number in all_stored and not packed
            of_tile = recipes[self._kind(span)][self._keeps_result, stored]
            x, carry = self._hidden_of(hidden, span), self._leaves(left if span.tokens.start else [])
            call = self._begin_tile(number, of_tile.whole)
            tile = AttentionTile(span, call, stored, self._seed_of(number), of_tile, len(carry))
            self._tiles.append(tile)
            self._keep_inputs(call, [x, *carry])
            mode = RecordPre(call, len(of_tile.pre)) if of_tile.records_pre and not packed else None
            reached, inputs, wholes, left = self._to_attention(tile, x, carry, mode or nullcontext())
            self._refuse_other_gradients([*tensor_leaves(reached.leaves), *left], [x, *carry, *inputs])
            tile.followed = not packed if mode is None else mode.followed
            if packed:
                call.recipe = replace(call.recipe, ops=[])
            gathered.add(span, reached, wholes)
        return gathered

    def _post(self, hidden: torch.Tensor, result: torch.Tensor) -> torch.Tensor:
        self._host.part_begins("tails")
        output: torch.Tensor | None = None
        left: list[torch.Tensor] = []
        for tile in self._tiles:
            of_tile, left = self._tile_post(tile, hidden, result, self._leaves(left if tile.span.tokens.start else []))
            if output is None:
                output = new_whole(of_tile, self._arguments.batch, self._arguments.length, 1)
            part(output, tile.span, 1).copy_(of_tile)
            if self._trains:
                self._engine.end(tile.call.frame)
            if tile.stored:
                self._engine.let_go_but(2)
        assert output is not None
        return output

    def _tile_post(
        self, tile: AttentionTile, hidden: torch.Tensor, result: torch.Tensor, carry: list[torch.Tensor]
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Run a tile behind attention. Return its output, and what it leaves for the next.

        Args:
            carry: also for what lies before attention, as far as what follows needs that.
        """
        x = self._hidden_of(hidden, tile.span)
        own = part(result, tile.span, self._shapes.result.dim).detach()
        if self._keeps_result:
            self._engine.keep(tile.call.frame, tile.call.recipe.inputs[-1], own)
        if self._trains:
            for kept, tensor in list(zip(self._kept_carry(tile), carry, strict=True))[tile.carried :]:
                self._engine.keep(tile.call.frame, kept, tensor)
        own.requires_grad_(self._trains)
        if tile.followed:
            mode = RecordPost(tile.call, tile.recipe.needed_behind, tile.recipe.records_post)

            def supply(reached: AttentionCall, wholes: Any) -> torch.Tensor:
                mode.attention_reached()
                return own

            try:
                output, inputs, left = self._with_attention(tile, x, carry, mode, supply)
                self._refuse_other_gradients([output, *left], [x, own, *carry, *inputs])
                return output.detach(), left
            except LeftRecipe:
                if self._striped is not None:  # other ranks would have to join in another run
                    raise MemoError(
                        f"layer {self._tiled.layer.name} did other work in a tile than in the one that was analysed, and other "
                        "ranks would have to join in running it again. Set memo.tile_tokens to 0"
                    ) from None
                tile.followed = False
        output, inputs, left = self._with_attention(tile, x, carry, nullcontext(), lambda reached, wholes: own)
        self._refuse_other_gradients([output, *left], [x, own, *carry, *inputs])
        return output.detach(), left

    # ---- backward

    def _close_frames(self) -> None:
        super()._close_frames()
        self._attention.release()

    def _backward_tiles(
        self, sums: GradientSums, gradient: torch.Tensor, may_overwrite: bool, d_inputs: list[torch.Tensor]
    ) -> torch.Tensor:
        self._host.part_begins("tails_backward")
        gathered = Gathered(self._shapes.arguments, self._arguments.batch, self._arguments.length)
        if self._keeps_result:
            result = self._new_result(gradient.device) if self._result is None else self._result
        else:
            self._pre_again(gathered)
            result = self._attention.result(gathered, then=self._last_frame)
        d_hidden, d_result = memory_for(gradient, may_overwrite), self._new_result(gradient.device)
        self._post_backward(sums, gathered, gradient, d_hidden, d_inputs, result, d_result)
        sums.settle()
        self._host.part_begins("attention_backward")
        self._attention.supply(result)
        del result
        self._attention.backward(sums, sums.parameters, gathered, d_result, then=self._last_frame)
        del d_result
        self._host.part_begins("heads_backward")
        self._pre_backward(sums, gathered, d_hidden, d_inputs)
        return d_hidden

    @property
    def _last_frame(self) -> Frame:
        return self._tiles[-1].call.frame

    def _new_result(self, device: torch.device) -> torch.Tensor:
        return self._shapes.result.new(self._arguments.batch, self._arguments.length, self._result_dtype, device)

    def _pre_again(self, gathered: Gathered) -> None:
        """Run every tile up to attention once more: fill `gathered`."""
        for tile in self._tiles:
            tile.call.frame.first_only = reads_hidden_only(tile, tile.again_to_attention)
        below = [self._attention.frame or self._last_frame, *(tile.call.frame for tile in self._tiles)]
        for number, tile in reversed(list(enumerate(self._tiles))):
            self._engine.bring_back(tile.call.frame, then=below[number], again=True)
            tile.call.frame.first_only = False
            with torch.enable_grad(), dropping():
                replay = Replay(tile.again_to_attention)
                reached, _, wholes, _ = self._to_attention(tile, tile.hidden(), self._carry(tile, tile.carried), replay)
            gathered.add(tile.span, reached, wholes)

    def _post_backward(
        self,
        sums: GradientSums,
        gathered: Gathered,
        gradient: torch.Tensor,
        d_hidden: torch.Tensor,
        d_inputs: list[torch.Tensor],
        result: torch.Tensor,
        d_result: torch.Tensor,
    ) -> None:
        """Run every tile again, and the backward of what follows attention: fill `d_result` and a part of other gradients.

        If the tiles' frames keep attention's result, `gathered` and `result` are filled, too.
        """
        dim = self._shapes.result.dim
        below = [self._attention.frame or self._last_frame, *(tile.call.frame for tile in self._tiles)]
        d_left: Gradients = []
        for number, tile in reversed(list(enumerate(self._tiles))):
            self._engine.bring_back(tile.call.frame, then=below[number], again=True)
            own = part(result, tile.span, dim)
            if self._keeps_result:
                kept = tile.call.frame.tensor(tile.call.recipe.inputs[-1]).detach()
                if storage_of(kept) != storage_of(result):
                    own.copy_(kept)
                own = kept
                del kept
            own = own.detach().requires_grad_()
            d_output = part(gradient, tile.span, 1)
            d_x, d_own, d_left, d_others = self._tile_post_backward(sums, tile, gathered, own, d_output, d_left)
            tile.call.frame.first_only = reads_hidden_only(tile, tile.up_to_attention)
            fill(part(d_result, tile.span, dim), d_own)
            fill(part(d_hidden, tile.span, 1), d_x)
            self._arguments.add(d_inputs, tile.span, d_others)
            del own, d_own, d_x, d_others  # before the next tile is reloaded and runs again

    def _tile_post_backward(
        self,
        sums: GradientSums,
        tile: AttentionTile,
        gathered: Gathered,
        own: torch.Tensor,
        d_output: torch.Tensor,
        d_left: Gradients,
    ) -> tuple[torch.Tensor | None, torch.Tensor | None, Gradients, Gradients]:
        """Return the gradients of a tile's hidden states, of attention's output `own`, of its carry, and of other inputs, by
        what follows attention.

        Args:
            d_left: the gradients of what it left, by what follows attention in later tiles.
        """
        x, carry, recipe = tile.hidden(), self._carry(tile), tile.recipe
        mode = Replay(tile.call if self._keeps_result else tile.behind_attention)
        if tile.followed and self._keeps_result and recipe.pre_flops is not None:
            mode = ReplayPost(tile.call, len(recipe.pre), recipe.pre_flops)

        def supply(reached: AttentionCall, wholes: Any) -> torch.Tensor:
            if self._keeps_result:
                gathered.add(tile.span, reached, wholes)
            if isinstance(mode, ReplayPost):
                mode.attention_reached()
            return own

        with torch.enable_grad():
            output, inputs, left = self._with_attention(tile, x, carry, mode, supply)
        d_x, d_own, *rest = sums.backward(*with_left([output], [d_output], left, d_left), [x, own, *carry, *inputs])
        return d_x, d_own, rest[: len(carry)], rest[len(carry) :]

    def _pre_backward(self, sums: GradientSums, gathered: Gathered, d_hidden: torch.Tensor, d_inputs: list[torch.Tensor]) -> None:
        """Run the backward of what comes before attention: add to `d_hidden` and `d_inputs`."""
        d_left: Gradients = []
        for tile in reversed(self._tiles):
            self._engine.bring_back(tile.call.frame)
            tile.call.frame.first_only = False
            d_x, d_left, d_others = self._tile_pre_backward(sums, tile, gathered, d_left)
            if d_x is not None:
                part(d_hidden, tile.span, 1).add_(d_x)
            self._arguments.add(d_inputs, tile.span, d_others)
            del d_x, d_others

    def _tile_pre_backward(
        self, sums: GradientSums, tile: AttentionTile, gathered: Gathered, d_left: Gradients
    ) -> tuple[torch.Tensor | None, Gradients, Gradients]:
        """Return the gradients of a tile's hidden states, of its carry, and of other inputs, by attention's arguments.

        Args:
            d_left: the gradients of what it left, by attention's arguments of later tiles.
        """
        x, carry, shapes = tile.hidden(), self._carry(tile, tile.carried), self._shapes
        with torch.enable_grad():
            reached, inputs, _, left = self._to_attention(tile, x, carry, Replay(tile.up_to_attention))
        indices = [index for index in shapes.differentiable if shapes.arguments[index] is not None]
        gradients = [part(gathered.leaves[index], tile.span, shapes.arguments[index]) for index in indices]
        outputs = [reached.leaves[index] for index in indices]
        d_x, *rest = sums.backward(*with_left(outputs, gradients, left, d_left), [x, *carry, *inputs])
        return d_x, rest[: len(carry)], rest[len(carry) :]

    # ---- runs of a tile

    def _kept_carry(self, tile: AttentionTile) -> list[Any]:
        inputs = tile.call.recipe.inputs[1:]
        return inputs[:-1] if self._keeps_result else inputs

    def _carry(self, tile: AttentionTile, tensors: int | None = None) -> list[torch.Tensor]:
        """Return what the tile before left, or the first tensors of it, from this one's frame."""
        return self._leaves([tile.call.frame.tensor(kept) for kept in self._kept_carry(tile)[:tensors]])

    def _going_on(self, tile: AttentionTile, carry: list[torch.Tensor]) -> AbstractContextManager[Carry]:
        return carrying(carry if tile.span.tokens.start else None, self._stretch(tile.span))

    def _to_attention(
        self, tile: AttentionTile, x: torch.Tensor, carry: list[torch.Tensor], mode: Any
    ) -> tuple[AttentionCall, list[torch.Tensor], Any, list[torch.Tensor]]:
        """Run a tile up to attention. Return the call, the tile's inputs besides `x` and `carry`, what arguments were cut from,
        and what it leaves for the next tile."""
        args, kwargs, wholes = self._arguments.tile(x, tile.span)
        with self._seeded(tile.seed), mode, self._going_on(tile, carry) as after:
            reached = run_to_attention(self._forward, args, kwargs, self._shapes.sdpa)
        return reached, self._arguments.inputs(args, kwargs), wholes, after.left

    def _with_attention(
        self,
        tile: AttentionTile,
        x: torch.Tensor,
        carry: list[torch.Tensor],
        mode: Any,
        supply: Callable[[AttentionCall, Any], torch.Tensor],
    ) -> tuple[torch.Tensor, list[torch.Tensor], list[torch.Tensor]]:
        """Run a whole tile with ``supply(call, wholes)`` as attention's result. Return its output, its inputs besides `x` and
        `carry`, and what it leaves for the next tile."""
        args, kwargs, wholes = self._arguments.tile(x, tile.span)
        shapes = self._shapes

        def attend(reached: AttentionCall) -> Any:
            return shapes.result.of(supply(reached, wholes))

        with self._seeded(tile.seed), mode, self._going_on(tile, carry) as after:
            returned = run_with_attention(self._forward, args, kwargs, attend, shapes.sdpa)
        return shapes.output.tensor(returned), self._arguments.inputs(args, kwargs), after.left
