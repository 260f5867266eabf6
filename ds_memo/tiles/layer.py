"""A layer that runs in tiles of tokens, forward and backward, as one autograd function.

    forward   pre of each tile: q, k, v ─► attention over all tokens ─► post of each tile: the output
    backward  whole run of each tile, last first: q, k, v again, and the post's backward: d(attention's output), a part of d(x)
              attention's backward, a group of heads at a time; its gradients overwrite q, k, v
              pre of each tile, last first: its backward, the rest of d(x)

Frames: one for attention (its log-sum-exp), one for each tile (its hidden states, its part of attention's output, what routers
chose, and if the tile is stored all GEMM outputs). The backward asks for the tiles', attention's, and the tiles' once more.

Parameters are arguments of the function, and tiles see aliases of them: hooks of a parameter see one gradient per backward.
"""

from __future__ import annotations

import copy
import functools
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch

from ds_memo.placement import FULL_RECOMPUTE, GEMMS_RECOMPUTED, Placement
from ds_memo.remat.call import Call
from ds_memo.remat.checkpoint import Remat
from ds_memo.remat.inputs import DeviceInput
from ds_memo.remat.layer_state import Before
from ds_memo.remat.modes import running_tiles
from ds_memo.remat.random_states import seeded
from ds_memo.remat.recipe import Recipe, SavedOp, remember
from ds_memo.remat.replay import Replay
from ds_memo.remat.tensors import storage_of
from ds_memo.remat.undo import Undoing, stacks_restored
from ds_memo.spans import Span
from ds_memo.swap.frame import Frame, Layout
from ds_memo.swap.pinned_segments import PAGE
from ds_memo.tiles.around import aliased, autocast_as, autocast_now, dropping, refuse_create_graph
from ds_memo.tiles.attention import TiledAttention
from ds_memo.tiles.attention_call import AttentionCall, Gathered, run_to_attention, run_with_attention
from ds_memo.tiles.gradient_owner import is_owned
from ds_memo.tiles.modes import LeftRecipe, RecordPost, RecordPre, ReplayPost
from ds_memo.tiles.probe import by_arrival
from ds_memo.tiles.recipes import SizeRecipes, TiledLayer, TileRecipe, analyse
from ds_memo.tiles.slices import Arguments, fill, hidden_states, new_whole, part
from ds_memo.tiles.weight_gradients import GradientSums
from ds_memo.units import round_up


@dataclass
class Tile:
    """One tile of a call."""

    span: Span
    call: Call
    recipe: TileRecipe
    stored: bool
    seed: int | None
    """Seed of the tile's random numbers; None: it draws none."""
    followed: bool = False
    """True if the pre did what the recipe says, as far as is known. The run behind attention compares it once more."""

    def hidden(self) -> torch.Tensor:
        """Return its hidden states from its frame, as a leaf."""
        return self.call.frame.tensor(self.call.recipe.inputs[0]).detach().requires_grad_()

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


def reads_hidden_only(call: Call) -> bool:
    """Return True if a replay reads no more of its frame than the hidden states."""
    return not any(op.kept is not None and (isinstance(op, SavedOp) or op.wanted) for op in call.recipe.ops)


class TiledCall:
    """One call of a tiled layer. It lives as long as its graph, and so do its frames.

    Args:
        forward: the layer's own.
        args, kwargs: of the call.
        spans: its tiles.
        placement: has tiles; its alpha is the share of them that are stored.
        before: the layer's state before the call.
    """

    def __init__(
        self,
        tiled: TiledLayer,
        forward: Callable[..., Any],
        args: tuple,
        kwargs: dict[str, Any],
        spans: Sequence[Span],
        placement: Placement,
        remat: Remat,
        before: Before,
    ) -> None:
        self._before = before
        self._tiled = tiled
        self._shapes = tiled.shapes
        self._spans = spans
        self._remat = remat
        self._engine = remat.engine
        self._forward = forward
        self._arguments = Arguments(args, kwargs)
        self._inputs = self._arguments.detach()
        self._hidden = hidden_states(args, kwargs)
        self._parameters = by_arrival(tiled.module, tiled.shapes.arrivals)
        self._trains = torch.is_grad_enabled() and bool(self._inputs or self._parameters or self._hidden.requires_grad)
        """False: no backward will come, and nothing is kept."""
        if not self._trains:
            placement, self._parameters = replace(FULL_RECOMPUTE, tiles=placement.tiles), []
        self._placement = placement
        self._tiles: list[Tile] = []
        self._recomputes = self._placement.kind.recomputes_attention
        self._keeps_result = not (self._recomputes or tiled.result_differs)
        """True if the tiles' frames keep attention's result; else the backward makes it before it comes to the tiles."""
        size = self._arguments.batch, self._arguments.length
        groups = placement.tiles.head_groups
        self._attention = TiledAttention(tiled, remat, size, groups, self._keeps_result, self._recomputes)
        self._result: torch.Tensor | None = None
        """Attention's result where it stays on the device: the tiles' frames hold parts of it."""
        self._result_dtype: torch.dtype | None = None
        self._device_inputs = [DeviceInput(tiled.layer.name, tensor) for tensor in self._arguments.tensors]
        self._autocast = autocast_now()
        self._seed = int(torch.randint(1 << 62, ())) if tiled.shapes.draws and torch.is_grad_enabled() else None

    def run(self) -> Any:
        hidden, self._hidden = self._hidden, None
        inputs, self._inputs = self._inputs, []
        if not self._trains:
            if torch.is_grad_enabled():  # a frozen layer: frames below it move as below any other
                self._engine.abort(self._engine.begin(self._tiled.layer.name, self._placement))
            return self._shapes.output.of(self.forward(hidden))
        # Autograd goes on with the youngest of these views: ZeRO's buckets get gradients in the order of a whole layer, which
        # another rank may run.
        views = [parameter.view_as(parameter) for parameter in self._parameters]
        with torch.autograd.graph.saved_tensors_hooks(lambda _: self, _hand_over):
            output = _Tiled.apply(self, hidden, *inputs, *views)
        return self._shapes.output.of(output)

    # ---- forward

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the layer's output (b, s, h)."""
        recipes = self._recipes(hidden)
        self._place(hidden, recipes)
        try:
            with running_tiles(), self._grads(), dropping(), aliased(self._tiled.module, self._parameters):
                if not self._recomputes:  # the first frame: the backward of the layer above goes on with the last tile's
                    self._attention.begin(self._placement)
                gathered = self._pre(hidden, recipes)
                self._remat.part_begins("attention")
                attend = self._attention.run_and_forget if self._recomputes else self._attention.run
                result = attend(gathered)
                del gathered
                output = self._post(hidden, result)
            self._result_dtype = result.dtype
            if not self._recomputes:
                self._tiled.result_differs = self._attention.result_differs
            if self._placement.kind.on_device and self._attention.output is not None:
                self._result = result
            if self._trains or torch.is_grad_enabled():
                self._describe(hidden)
        except BaseException:  # Ctrl-C, too: the host blocks of frames that no graph will hold
            for frame in self._frames():
                if frame.state == "recording":
                    self._engine.abort(frame)
            raise
        return output

    def _grads(self) -> AbstractContextManager[None]:
        """Have tiles build graphs, whose backwards are not run, if a backward of the layer will come."""
        return torch.set_grad_enabled(self._trains)

    def _recipes(self, hidden: torch.Tensor) -> dict[tuple[int, int], SizeRecipes]:
        """Return the recipes by the tiles' sizes, after analysing sizes that are new."""
        module, found = self._tiled.module, {}
        trained = tuple(parameter.requires_grad for parameter in module.parameters())
        for span in self._spans:
            if span.size in found:
                continue
            how = self._trains, torch.is_inference_mode_enabled(), module.training, self._autocast
            key = span.size, hidden.dtype, trained, how
            recipe = self._tiled.recipes.get(key)
            if recipe is None:
                recipe = self._analysed(hidden, span)
                remember(self._tiled.recipes, key, recipe)
            found[span.size] = recipe
        return found

    def _analysed(self, hidden: torch.Tensor, span: Span) -> SizeRecipes:
        with self._remat.aside(), self._grads():
            args, kwargs, _ = self._arguments.tile(self._hidden_of(hidden, span), span)
            call = Call(self._tiled.layer.index, (), self._engine, None, None, self._remat.work)
            with running_tiles():
                return analyse(call, self._tiled.module, self._forward, (args, kwargs), span, self._shapes)

    def _place(self, hidden: torch.Tensor, recipes: dict[tuple[int, int], SizeRecipes]) -> None:
        """Settle the share of tiles that are stored, and stay on the device if the host has no room."""
        by_size = {size: [found[self._keeps_result, stored] for stored in (False, True)] for size, found in recipes.items()}
        of_tiles = [by_size[span.size] for span in self._spans]
        whole = sum(recomputed.host_bytes for recomputed, _ in of_tiles) + self._attention_bytes(hidden)
        if not self._placement.kind.on_device:
            key = hidden.shape, self._placement
            if key not in self._tiled.alphas:
                split = sum(stored.host_bytes - recomputed.host_bytes for recomputed, stored in of_tiles)
                settled = self._remat.policy.settle(self._tiled.layer, self._placement, whole, split)
                remember(self._tiled.alphas, key, settled.alpha)
            self._placement = replace(self._placement, alpha=self._tiled.alphas[key])
        stored = stored_tiles(len(of_tiles), self._placement.decided_alpha)
        needs = [recipe[number in stored].host_bytes for number, recipe in enumerate(of_tiles)] + [self._attention_bytes(hidden)]
        if not (self._placement.kind.on_device or self._remat.policy.has_room(sum(round_up(nbytes, PAGE) for nbytes in needs))):
            on_device = FULL_RECOMPUTE if self._recomputes else GEMMS_RECOMPUTED
            self._placement = replace(on_device, tiles=self._placement.tiles)

    def _attention_bytes(self, hidden: torch.Tensor) -> int:
        """Return about how many bytes attention's frame keeps: a log-sum-exp in float32 for each head, and maybe the output."""
        if self._recomputes:
            return 0
        result = self._shapes.result
        elements = hidden.shape[0] * hidden.shape[1] * result.elements_per_token
        return 4 * elements // result.shape[-1] + (0 if self._keeps_result else elements * hidden.element_size())

    def _describe(self, hidden: torch.Tensor) -> None:
        """Show the layer's report what this call keeps: the bytes of all its frames, and the shape of its input."""
        layouts = [frame.layout for frame in self._frames()]
        layout = Layout(
            [kept for layout in layouts for kept in layout.kept],
            sum(layout.host_bytes for layout in layouts),
            sum(layout.buffer_bytes for layout in layouts),
        )
        of_tile = self._tiles[0].call.recipe
        whole = [replace(kept, shape=tuple(hidden.shape)) for kept in of_tile.inputs[:1] if kept is not None]
        self._tiled.layer.latest = replace(of_tile, layout=layout, inputs=whole)

    def _frames(self) -> list[Frame]:
        of_attention = self._attention.frame
        found = [*(tile.call.frame for tile in self._tiles), of_attention]
        return [frame for frame in found if frame is not None]

    def _pre(self, hidden: torch.Tensor, recipes: dict[tuple[int, int], SizeRecipes]) -> Gathered:
        self._remat.part_begins("heads")
        gathered = Gathered(self._shapes.arguments, self._arguments.batch, self._arguments.length)
        all_stored = stored_tiles(len(self._spans), self._placement.decided_alpha)
        for number, span in enumerate(self._spans):
            stored = number in all_stored
            of_tile = recipes[span.size][self._keeps_result, stored]
            recipe = of_tile.whole
            frame = self._engine.begin(f"{self._tiled.layer.name}, tile {number}", self._placement) if self._trains else None
            call = Call(self._tiled.layer.index, (), self._engine, frame, recipe, self._remat.work)
            tile = Tile(span, call, of_tile, stored, None if self._seed is None else self._seed + number)
            self._tiles.append(tile)
            x = self._hidden_of(hidden, span)
            if frame is not None:
                frame.ahead = True
                self._engine.adopt(frame, recipe.layout)
                self._engine.keep(frame, recipe.inputs[0], x)
            mode = RecordPre(call, len(of_tile.pre)) if of_tile.records_pre else None
            reached, _, wholes = self._to_attention(tile, x, mode or nullcontext())
            tile.followed = mode is None or mode.followed
            gathered.add(span, reached, wholes)
            self._remat.work.gemm_flops += recipe.gemm_flops if self._trains else 0
        return gathered

    def _hidden_of(self, hidden: torch.Tensor, span: Span) -> torch.Tensor:
        """Return a tile's hidden states as a leaf, in row-major order: its ops are then the same for any layout of the whole."""
        return part(hidden.detach(), span, 1).contiguous().requires_grad_(self._trains)

    def _post(self, hidden: torch.Tensor, result: torch.Tensor) -> torch.Tensor:
        self._remat.part_begins("tails")
        output: torch.Tensor | None = None
        for tile in self._tiles:
            of_tile = self._tile_post(tile, hidden, result)
            if output is None:
                output = new_whole(of_tile, self._arguments.batch, self._arguments.length, 1)
            part(output, tile.span, 1).copy_(of_tile)
            if self._trains:
                self._engine.end(tile.call.frame)
            if tile.stored:
                self._engine.let_go_but(2)
        assert output is not None
        return output

    def _tile_post(self, tile: Tile, hidden: torch.Tensor, result: torch.Tensor) -> torch.Tensor:
        x = self._hidden_of(hidden, tile.span)
        own = part(result, tile.span, self._shapes.result.dim).detach()
        if self._keeps_result:
            self._engine.keep(tile.call.frame, tile.call.recipe.inputs[1], own)
        own.requires_grad_(self._trains)
        if tile.followed:
            mode = RecordPost(tile.call, tile.recipe.needed_behind, tile.recipe.records_post)

            def supply(reached: AttentionCall, wholes: Any) -> torch.Tensor:
                mode.attention_reached()
                return own

            try:
                return self._with_attention(tile, x, mode, supply)[0].detach()
            except LeftRecipe:
                tile.followed = False
        return self._with_attention(tile, x, nullcontext(), lambda reached, wholes: own)[0].detach()

    # ---- backward

    def backward(self, gradient: torch.Tensor, may_overwrite: bool) -> list[torch.Tensor | None]:
        """Return the gradients of the hidden states, of other inputs and of the parameters."""
        for given in self._device_inputs:
            given.check()
        for observer in self._remat.observers:
            observer.layer_replays(self._tiled.layer.index)
        with stacks_restored(), Undoing(self._close_frames), Undoing(torch.clear_autocast_cache):
            return self._backward(gradient, may_overwrite)

    def _close_frames(self) -> None:
        for tile in self._tiles:
            tile.call.frame.first_only = False
            self._engine.give_up(tile.call.frame)
        self._attention.release()

    def _backward(self, gradient: torch.Tensor, may_overwrite: bool) -> list[torch.Tensor | None]:
        aliases_of = aliased(self._tiled.module, self._parameters)
        with running_tiles(), autocast_as(self._autocast), self._before.put_in(), aliases_of as aliases:
            sums, d_inputs = GradientSums(aliases), self._arguments.new_gradients()
            self._remat.part_begins("tails_backward")
            gathered = Gathered(self._shapes.arguments, self._arguments.batch, self._arguments.length)
            if self._keeps_result:
                result = self._new_result(gradient.device) if self._result is None else self._result
            else:
                self._pre_again(gathered)
                result = self._attention.result(gathered, then=self._last_frame)
            d_hidden = gradient if may_overwrite else torch.empty_like(gradient, memory_format=torch.contiguous_format)
            d_result = self._new_result(gradient.device)
            self._post_backward(sums, gathered, gradient, d_hidden, d_inputs, result, d_result)
            sums.settle()
            self._remat.part_begins("attention_backward")
            self._attention.supply(result)
            del result
            self._attention.backward(sums, aliases, gathered, d_result, then=self._last_frame)
            del d_result
            self._remat.part_begins("heads_backward")
            self._pre_backward(sums, gathered, d_hidden, d_inputs)
            return [d_hidden, *d_inputs, *sums.take()]

    @property
    def _last_frame(self) -> Frame:
        return self._tiles[-1].call.frame

    def _new_result(self, device: torch.device) -> torch.Tensor:
        return self._shapes.result.new(self._arguments.batch, self._arguments.length, self._result_dtype, device)

    def _pre_again(self, gathered: Gathered) -> None:
        """Run every tile up to attention once more: fill `gathered`."""
        for tile in self._tiles:
            tile.call.frame.first_only = reads_hidden_only(tile.again_to_attention)
        below = [self._attention.frame or self._last_frame, *(tile.call.frame for tile in self._tiles)]
        for number, tile in reversed(list(enumerate(self._tiles))):
            self._engine.bring_back(tile.call.frame, then=below[number], again=True)
            tile.call.frame.first_only = False
            with torch.enable_grad(), dropping():
                reached, _, wholes = self._to_attention(tile, tile.hidden(), Replay(tile.again_to_attention))
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
        for number, tile in reversed(list(enumerate(self._tiles))):
            self._engine.bring_back(tile.call.frame, then=below[number], again=True)
            own = part(result, tile.span, dim)
            if self._keeps_result:
                kept = tile.call.frame.tensor(tile.call.recipe.inputs[1]).detach()
                if storage_of(kept) != storage_of(result):
                    own.copy_(kept)
                own = kept
                del kept
            own = own.detach().requires_grad_()
            d_x, d_own, *d_others = self._tile_post_backward(sums, tile, gathered, own, part(gradient, tile.span, 1))
            tile.call.frame.first_only = reads_hidden_only(tile.up_to_attention)
            fill(part(d_result, tile.span, dim), d_own)
            fill(part(d_hidden, tile.span, 1), d_x)
            self._arguments.add(d_inputs, tile.span, d_others)
            del own, d_own, d_x, d_others  # before the next tile is reloaded and runs again

    def _tile_post_backward(
        self, sums: GradientSums, tile: Tile, gathered: Gathered, own: torch.Tensor, d_output: torch.Tensor
    ) -> tuple[torch.Tensor | None, ...]:
        """Return the gradients of a tile's hidden states, of attention's output `own`, and of other inputs, by what follows
        attention."""
        x, recipe = tile.hidden(), tile.recipe
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
            output, inputs = self._with_attention(tile, x, mode, supply)
        return sums.backward([output], [d_output], [x, own, *inputs])

    def _pre_backward(self, sums: GradientSums, gathered: Gathered, d_hidden: torch.Tensor, d_inputs: list[torch.Tensor]) -> None:
        """Run the backward of what comes before attention: add to `d_hidden` and `d_inputs`."""
        for tile in reversed(self._tiles):
            self._engine.bring_back(tile.call.frame)
            tile.call.frame.first_only = False
            d_x, *d_others = self._tile_pre_backward(sums, tile, gathered)
            if d_x is not None:
                part(d_hidden, tile.span, 1).add_(d_x)
            self._arguments.add(d_inputs, tile.span, d_others)
            del d_x, d_others

    def _tile_pre_backward(self, sums: GradientSums, tile: Tile, gathered: Gathered) -> tuple[torch.Tensor | None, ...]:
        """Return the gradients of a tile's hidden states and of other inputs, by what comes before attention."""
        x, shapes = tile.hidden(), self._shapes
        with torch.enable_grad():
            reached, inputs, _ = self._to_attention(tile, x, Replay(tile.up_to_attention))
        indices = [index for index in shapes.differentiable if shapes.arguments[index] is not None]
        gradients = [part(gathered.leaves[index], tile.span, shapes.arguments[index]) for index in indices]
        outputs = [reached.leaves[index] for index in indices]
        return sums.backward(outputs, gradients, [x, *inputs])

    # ---- runs of a tile

    def _to_attention(self, tile: Tile, x: torch.Tensor, mode: Any) -> tuple[AttentionCall, list[torch.Tensor], Any]:
        """Run a tile up to attention. Return the call, the tile's inputs besides `x`, and what arguments were cut from."""
        args, kwargs, wholes = self._arguments.tile(x, tile.span)
        with self._seeded(tile.seed), mode:
            reached = run_to_attention(self._forward, args, kwargs, self._shapes.sdpa)
        return reached, self._arguments.inputs(args, kwargs), wholes

    def _with_attention(
        self, tile: Tile, x: torch.Tensor, mode: Any, supply: Callable[[AttentionCall, Any], torch.Tensor]
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Run a whole tile with ``supply(call, wholes)`` as attention's result. Return its output, and its inputs besides `x`."""
        args, kwargs, wholes = self._arguments.tile(x, tile.span)
        shapes = self._shapes

        def attend(reached: AttentionCall) -> Any:
            return shapes.result.of(supply(reached, wholes))

        with self._seeded(tile.seed), mode:
            returned = run_with_attention(self._forward, args, kwargs, attend, shapes.sdpa)
        return shapes.output.tensor(returned), self._arguments.inputs(args, kwargs)

    def _seeded(self, seed: int | None) -> AbstractContextManager[None]:
        return nullcontext() if seed is None else seeded(seed % (1 << 63), self._engine.device)


def stored_tiles(tiles: int, alpha: float) -> set[int]:
    """Return the numbers of the tiles that are stored, a share alpha of all, evenly among the others.

    The first tile is the first of them: so the copies of the last one have some tiles' time until the next layer begins.
    """
    stored = int(tiles * alpha + 1e-9)
    return {number * tiles // stored for number in range(stored)}


class _Tiled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: TiledCall, hidden: torch.Tensor, *parameters: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(hidden.new_empty(0))  # in its place the hooks save the call: it is freed with the graph's tensors
        return call.forward(hidden)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        may_overwrite = is_owned(gradient)
        refuse_create_graph()
        ctx.saved_tensors  # noqa: B018  # hands the call over, or raises: the graph was freed
        call, _handed_over.call = _handed_over.call, None
        d_hidden, *others = call.backward(gradient, may_overwrite)
        return None, d_hidden if ctx.needs_input_grad[1] else None, *others


class _HandedOver(threading.local):
    call: Any = None


_handed_over = _HandedOver()


def _hand_over(call: TiledCall) -> torch.Tensor:
    """Give the call to the backward that asks for its saved tensor."""
    _handed_over.call = call
    return torch.empty(0, device=call._engine.device)
