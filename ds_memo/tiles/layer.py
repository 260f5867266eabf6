"""A layer call that runs in tiles of tokens, forward and backward, as one autograd function.

    forward   pre of each tile: q, k, v ─► attention over all tokens ─► post of each tile: the output
    backward  whole run of each tile, last first: q, k, v again, and the post's backward: d(attention's output), a part of d(x)
              attention's backward, a group of heads at a time; its gradients overwrite q, k, v
              pre of each tile, last first: its backward, the rest of d(x)

A layer without attention is all post: one run of each tile forward, one backward. Convolutions and scans go on from tile to tile:
each tile gets what the one before left (its carry), and the gradient of that goes back in the backward.

Attention has a frame with its log-sum-exp. Each tile has one with its hidden states, its carry, its part of attention's output,
and what routers chose; a stored tile's has all GEMM outputs, too. With attention, the backward asks for the tiles', attention's,
and the tiles' once more. Hidden states that the forward did not store are computed before (ds_memo.tiles.groups).

Parameters are arguments of the function, and tiles see aliases of them: hooks of a parameter see one gradient per backward.

Ranks that share a sequence take stretches of it in turn where the layer mixes tokens by more than attention: tiles of one number
are one stretch (ds_memo.sequence.striped). Hidden states and other arguments of tokens move there, and the output moves back.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch

from ds_memo.errors import MemoError
from ds_memo.placement import FULL_RECOMPUTE, Placement, PlacementKind
from ds_memo.remat.autocast import autocast_as, autocast_now
from ds_memo.remat.call import Call
from ds_memo.remat.inputs import DeviceInput
from ds_memo.remat.layer_call import CannotTile
from ds_memo.remat.layer_host import LayerHost, Way
from ds_memo.remat.layer_state import Before
from ds_memo.remat.modes import running_tiles
from ds_memo.remat.recipe import Recipe, remember
from ds_memo.remat.replay import Replay
from ds_memo.remat.tensors import storage_of
from ds_memo.remat.undo import Undoing, stacks_restored
from ds_memo.sequence.mixers import fitting
from ds_memo.sequence.parts import parts_of
from ds_memo.sequence.striped import Striped, striped
from ds_memo.spans import Span
from ds_memo.swap.frame import Frame, Layout
from ds_memo.swap.pinned_segments import PAGE
from ds_memo.tiles.aliases import aliased, dropping, places_of, refuse_create_graph
from ds_memo.tiles.attention import TiledAttention
from ds_memo.tiles.attention_call import AttentionCall, Gathered
from ds_memo.tiles.gradient_owner import is_owned
from ds_memo.tiles.graph import refuse_other_gradients
from ds_memo.tiles.groups import Grouping, Member, compute_inputs
from ds_memo.tiles.modes import LeftRecipe, RecordPost, RecordPre, ReplayPost
from ds_memo.tiles.probe_result import by_arrival
from ds_memo.tiles.recipes import SizeRecipes, TiledLayer
from ds_memo.tiles.slices import Arguments, fill, new_whole, parts
from ds_memo.tiles.tile_runs import Gradients, Tile, TileRuns
from ds_memo.tiles.weight_gradients import GradientSums
from ds_memo.units import round_up

CANNOT_GATHER = (
    "ZeRO-3 holds its parameters, and memo cannot gather them for the layer above. Let ds_memo.initialize make the engine, with "
    "a DeepSpeed whose PartitionedParameterCoordinator is like that of 0.19"
)


class TiledCall:
    """One call of a tiled layer. It lives as long as its graph, and so do its frames.

    Args:
        forward: the layer's own.
        arguments: of the call, which gives up the hidden states.
        spans: its tiles.
        placement: has tiles; its alpha is the share of them that are stored.
        before: the layer's state before the call.
        grouping: knows the call of the layer below.
    """

    def __init__(
        self,
        tiled: TiledLayer,
        forward: Callable[..., Any],
        arguments: Arguments,
        spans: Sequence[Span],
        placement: Placement,
        host: LayerHost,
        before: Before,
        grouping: Grouping,
    ) -> None:
        self._before = before
        self._grouping = grouping
        self._tiled = tiled
        self._shapes = tiled.shapes
        self._spans = spans
        self._host = host
        self._engine = host.engine
        self._arguments = arguments
        hidden = self._hidden = arguments.take_hidden()
        parts = parts_of(tiled.module) if tiled.shapes.mixes else None
        self._striped: Striped | None = None
        """The tokens of the ranks' tiles; None: this rank has whole sequences, or the layer does not mix tokens."""
        if parts is not None:
            parts = fitting(parts, arguments.length, type(tiled.module).__name__)
            self._striped, tiled.striped = striped(parts, spans[0].size[1]), True
            self._hidden = self._striped.enter(self._hidden)
            arguments.move(self._striped.argument)
        self._inputs = arguments.detach()
        self._places = places_of(tiled.module)
        """Where the forward finds the parameters."""
        self._all_parameters = [*{id(parameter): parameter for *_, parameter in self._places}.values()]
        self._parameters = by_arrival(self._all_parameters, tiled.shapes.arrivals)
        self._trains = torch.is_grad_enabled() and bool(self._inputs or self._parameters or self._hidden.requires_grad)
        """False: no backward will come, and nothing is kept."""
        if not self._trains:
            placement, self._parameters = replace(FULL_RECOMPUTE, tiles=placement.tiles), []
        self.member = Member(tiled.layer, weakref.ref(self))
        self.below: Any = None
        """The call whose posts the backward runs again; None: none."""
        self._computes_input = False
        """True if it computes the hidden states by them; else they are stored."""
        self.input_changed: torch.Tensor | None = None
        """True, on the device, if they are not what the call below has returned."""
        self._why_stored = ""
        """Why they are, though the placement has it otherwise."""
        if placement.kind is PlacementKind.SWAPPED_WITHOUT_INPUT:
            self._enter_group(hidden)
            if not self._computes_input:
                placement = replace(placement, kind=PlacementKind.SWAPPED)
            else:
                self.input_changed = grouping.changed(hidden)
        del hidden
        self._placement = placement
        self._recomputes = placement.kind.recomputes_attention
        self._device_inputs = [DeviceInput(tiled.layer.name, tensor) for tensor in arguments.tensors]
        self._autocast = autocast_now()
        self._aliases: Sequence[torch.Tensor] = ()
        """The parameters' aliases, while the forward runs."""
        self._seed = int(torch.randint(1 << 62, ())) if tiled.shapes.draws and torch.is_grad_enabled() else None
        self._runs = TileRuns(forward, arguments, tiled.shapes, self._engine.device, self._trains, self._striped)
        self._tiles: list[Tile] = []
        self._recipes: dict[Any, SizeRecipes] = {}
        """By the tiles' kinds."""
        self._stored: set[int] = set()
        """Numbers of the tiles that are stored."""
        self._keeps_result = tiled.shapes.attention is not None and not (self._recomputes or tiled.result_differs)
        """True if the tiles' frames keep attention's result; else the backward makes it before it comes to the tiles."""
        self._attention: Any = None
        if tiled.shapes.attention is not None:
            self._attention = TiledAttention(tiled, host, arguments.size, placement, self._keeps_result, self._striped)
        self._result: torch.Tensor | None = None
        """Attention's result where it stays on the device: the tiles' frames hold parts of it."""
        self._result_dtype: torch.dtype | None = None

    def _enter_group(self, hidden: torch.Tensor) -> None:
        """Find the call below, and whether the hidden states are computed by it. Ranks that wait for this one do the same.

        Raises:
            MemoError: other ranks run posts with this one, and it cannot.
        """
        tiled, below = self._tiled, self._grouping.latest
        if tiled.in_pieces and not self._host.can_gather(tiled.module):
            self._why_stored = CANNOT_GATHER
            return
        lower, why = self._grouping.below(hidden, self._spans, self._striped is not None)
        why_none = why
        if tiled.exchanges and below is not None and below.runs_again:
            why_none = tiled.agree_on_input(why)
            lower = below.call()
            if lower is None and not why_none:
                raise MemoError(
                    f"layer {tiled.layer.name}: other ranks compute its input by the layer below, in which they wait for this "
                    f"one, and here that layer's graph is gone ({why}). Call the layers alike on all ranks, or set "
                    "memo.input_every to 1"
                )
        self.below = None if why_none else lower
        self._why_stored = why or why_none
        self._computes_input = not self._why_stored
        follows = below is not None and below.layer.index == tiled.layer.index - 1
        if self.below is not None or (tiled.gathers_with_others and follows):
            self.member.below = below

    # ---- forward

    def run(self) -> Any:
        """Return what the layer returns."""
        hidden, self._hidden = self._hidden, None
        inputs, self._inputs = self._inputs, []
        if self._trains:
            # Autograd goes on with the youngest of these views: ZeRO's buckets get gradients in the order of a whole layer, which
            # another rank may run.
            views = [parameter.view_as(parameter) for parameter in self._parameters]
            with torch.autograd.graph.saved_tensors_hooks(lambda _: self, lambda call: None):
                output = _Tiled.apply(self, hidden, *inputs, *views)
        else:
            if torch.is_grad_enabled():  # a frozen layer: frames below it move as below any other
                self._engine.abort(self._engine.begin(self._tiled.layer.name, self._placement))
                self._grouping.ran(None)
            output = self.forward(hidden)
        del hidden  # before the output moves back
        output = output if self._striped is None else self._striped.leave(output)
        if torch.is_grad_enabled() and self._placement.tiles.input_every > 1:  # type: ignore[union-attr]
            self._grouping.returned(self, output, self._spans, self._striped is not None)
        return self._shapes.output.of(output)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the layer's output (b, s, h)."""
        self._recipes = self._find_recipes(hidden)
        self._place(hidden)
        self._stored = stored_tiles(len(self._spans), self._placement.decided_alpha)
        try:
            with running_tiles(), self._grads(), dropping(), aliased(self._places, self._parameters) as self._aliases:
                output = self._run_tiles(hidden)
            self._aliases, self._places, self._all_parameters = (), [], []
            if self._trains or torch.is_grad_enabled():
                self._describe(hidden)
        except BaseException:  # Ctrl-C, too: the host blocks of frames that no graph will hold
            for frame in self._frames():
                if frame.state == "recording":
                    self._engine.abort(frame)
            raise
        return output

    def _grads(self) -> AbstractContextManager[None]:
        """Have tiles build graphs, whose backwards are not run, if a backward of the model will come.

        Tiles of a frozen layer have none, unless it holds a tensor that needs a gradient.
        """
        return torch.set_grad_enabled(self._trains or torch.is_grad_enabled())

    def _find_recipes(self, hidden: torch.Tensor) -> dict[Any, SizeRecipes]:
        """Return the recipes by the tiles' kinds, after analysing kinds that are new."""
        module, found = self._tiled.module, {}
        trained = tuple(parameter.requires_grad for parameter in self._all_parameters)
        for span in self._spans:
            kind = self._kind(span)
            if kind in found:
                continue
            modes = self._trains, torch.is_inference_mode_enabled(), module.training, self._autocast
            key = kind, hidden.dtype, trained, modes, self._computes_input
            recipes = self._tiled.recipes.get(key)
            if recipes is None:
                with self._host.isolated(), self._grads():
                    self._host.work.analysed += 1
                    call = Call(self._host, None)
                    recipes = self._runs.analyse(module, call, hidden, self._spans[0], span, not self._computes_input)
                remember(self._tiled.recipes, key, recipes)
            found[kind] = recipes
        return found

    def _kind(self, span: Span) -> Any:
        """Return a key for what a tile's recipes depend on. The first tile of a sequence has no carry."""
        return (span.size, span.tokens.start == 0) if self._shapes.mixes else span.size

    def _recipe(self, span: Span, stored: bool) -> Recipe:
        return self._recipes[self._kind(span)][self._keeps_result, stored]

    def _place(self, hidden: torch.Tensor) -> None:
        """Decide the share of tiles that are stored, and stay on the device if the host has no room."""
        asked, key, sizes = self._placement, (hidden.shape, self._placement), None
        if asked.kind.on_device:
            return
        of_attention = self._bytes_of_attention(hidden)
        by_kind = {
            kind: [recipes[self._keeps_result, is_stored].layout.host_bytes for is_stored in (False, True)]
            for kind, recipes in self._recipes.items()
        }
        recomputed, stored = zip(*(by_kind[self._kind(span)] for span in self._spans), strict=True)

        def host_bytes(placement: Placement) -> int:
            all_stored = stored_tiles(len(stored), placement.decided_alpha)
            needs = [stored[number] if number in all_stored else nbytes for number, nbytes in enumerate(recomputed)]
            return sum(round_up(nbytes, PAGE) for nbytes in (*needs, of_attention))

        if key in self._tiled.alphas:
            asked = replace(asked, alpha=self._tiled.alphas[key])
        else:
            sizes = sum(recomputed) + of_attention, sum(stored) - sum(recomputed)
        if self._why_stored:
            self._host.must_store.add(self._tiled.layer.index)
        planned = not self._host.must_store  # else calls behind it may find less than what was solved for
        self._placement = self._host.admit(self._tiled.layer, asked, Way.TILED, host_bytes, sizes, planned)
        if self._placement.kind is asked.kind:
            remember(self._tiled.alphas, key, self._placement.decided_alpha)
        if self._why_stored:
            self._host.warn_of(self._tiled.layer, f"it stores its input, which was to be computed again: {self._why_stored}.")
        if self._placement.kind.on_device and self._computes_input:
            self._computes_input, self.input_changed = False, None
            if not self._tiled.exchanges:
                self.below = None
                self.member.below = self.member.below if self._tiled.gathers_with_others else None
            self._recipes = self._find_recipes(hidden)

    def _bytes_of_attention(self, hidden: torch.Tensor) -> int:
        """Return about how many bytes attention's frame keeps: a log-sum-exp in float32 for each head, and maybe the output."""
        if self._recomputes or self._attention is None:
            return 0
        result = self._shapes.attention.result
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
        frames = [tile.call.frame for tile in self._tiles]
        if self._attention is not None:
            frames.append(self._attention.frame)
        return [frame for frame in frames if frame is not None]

    def _run_tiles(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the layer's output."""
        attention, result = self._attention, None
        if attention is not None and not self._recomputes:  # first: the backward of the layer above goes on with the last tile's
            attention.begin(self._placement)
        hiddens = parts(hidden.detach(), self._spans, 1)
        self._host.part_begins("pre")
        if attention is not None:
            gathered = self._pre(hiddens)
        self._host.part_begins("attention")
        if attention is not None:
            with torch.set_grad_enabled(self._trains):
                result = attention.run(gathered)
            del gathered
        self._host.part_begins("post")
        output = self._post(hiddens, result)
        if attention is not None:
            self._result_dtype = result.dtype
            if not self._recomputes:
                self._tiled.result_differs = attention.result_differs
            if self._placement.kind.on_device and attention.shared is not None:
                self._result = result
        return output

    def _open(self, number: int, x: torch.Tensor, carry: Sequence[torch.Tensor]) -> Tile:
        """Begin a tile, and keep its hidden states and its carry if a backward will come.

        If its ops depend on where documents begin, a recipe would serve it once: all of it is recomputed.
        """
        span = self._spans[number]
        packed = self._striped is not None and self._striped.is_packed(span)
        stored = number in self._stored and not packed
        recipe = self._recipe(span, stored)
        frame = self._engine.begin(f"{self._tiled.layer.name}, tile {number}", self._placement) if self._trains else None
        call = Call(self._host, frame, recipe)
        if frame is not None:
            frame.ahead = True
            self._engine.adopt(frame, recipe.layout)
            for kept, tensor in list(zip(recipe.inputs, [x, *carry], strict=False))[self._computes_input :]:
                self._engine.keep(frame, kept, tensor)
            self._host.work.gemm_flops += recipe.gemm_flops
        if packed:
            call.recipe = recipe.without_shortcuts(0)
        seed = None if self._seed is None else self._seed + number
        tile = Tile(number, span, call, stored, seed, len(carry), followed=not packed)
        self._tiles.append(tile)
        return tile

    def _pre(self, hiddens: Sequence[torch.Tensor]) -> Gathered:
        gathered = self._new_gathered()
        left: list[torch.Tensor] = []
        for number, span in enumerate(self._spans):
            x, carry = self._runs.leaf(hiddens[number]), self._runs.leaves(left if span.tokens.start else [])
            tile = self._open(number, x, carry)
            records = tile.recipe.records_pre and tile.followed
            mode = RecordPre(tile.call) if records else None
            reached, inputs, left = self._runs.run(span, x, carry, mode or nullcontext(), seed=tile.seed)
            ends = [leaf for leaf in reached.leaves if isinstance(leaf, torch.Tensor)]
            self._refuse_other_gradients([*ends, *left], inputs)
            del ends  # they would be there while the next tile runs
            if mode is not None:
                tile.followed = mode.followed
            gathered.add(number, reached)
        return gathered

    def _post(self, hiddens: Sequence[torch.Tensor], result: torch.Tensor | None) -> torch.Tensor:
        """Run each tile behind attention; without attention, all of it."""
        output: torch.Tensor | None = None
        outputs: list[torch.Tensor] = []
        results = self._parts_of_result(result)
        left: list[torch.Tensor] = []
        for number, span in enumerate(self._spans):
            x, carry = self._runs.leaf(hiddens[number]), self._runs.leaves(left if span.tokens.start else [])
            tile = self._open(number, x, carry) if results is None else self._tiles[number]
            of_tile, left = self._tile_post(tile, x, carry, None if results is None else results[number])
            if output is None:
                output = new_whole(of_tile, *self._arguments.size, 1)
                outputs = parts(output, self._spans, 1)
            outputs[number].copy_(of_tile)
            del of_tile
            if self._trains:
                self._engine.end(tile.call.frame)
            if tile.stored:
                self._engine.let_go_but(2)
        assert output is not None
        return output

    def _parts_of_result(self, result: torch.Tensor | None) -> list[torch.Tensor] | None:
        return None if result is None else parts(result, self._spans, self._shapes.attention.result.dim)

    def _tile_post(
        self, tile: Tile, x: torch.Tensor, carry: list[torch.Tensor], result: torch.Tensor | None
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Run a tile behind attention. Return its output, and what it leaves for the next.

        Args:
            carry: also for what lies before attention, as far as what follows needs that.
            result: its part of attention's.
        """
        own = None if result is None else self._own_result(tile, carry, result)
        if tile.followed:
            mode = RecordPost(tile.call)

            def attend(reached: AttentionCall) -> Any:
                mode.attention_reached()
                return own

            try:
                output, inputs, left = self._runs.run(tile.span, x, carry, mode, attend, tile.seed)
            except LeftRecipe:
                if self._striped is not None:  # other ranks would have to join in another run
                    raise MemoError(
                        f"layer {self._tiled.layer.name} did other work in a tile than in the one that was analysed, and other "
                        "ranks would have to join in running it again. Set memo.tile_tokens to 0"
                    ) from None
                tile.followed = False
        if not tile.followed:
            output, inputs, left = self._runs.run(tile.span, x, carry, nullcontext(), lambda reached: own, tile.seed)
        self._refuse_other_gradients([output, *left], [*inputs, *([] if own is None else [own])])
        return output.detach(), left

    def _own_result(self, tile: Tile, carry: list[torch.Tensor], result: torch.Tensor) -> torch.Tensor:
        """Return a tile's part of attention's result as a leaf. Keep it, and the part of the carry that its pre does not read."""
        own = result.detach()
        if self._keeps_result:
            self._engine.keep(tile.call.frame, tile.recipe.inputs[-1], own)
        if self._trains:
            for kept, tensor in list(zip(self._kept_carry(tile), carry, strict=True))[tile.carried :]:
                self._engine.keep(tile.call.frame, kept, tensor)
        return own.requires_grad_(self._trains)

    def _refuse_other_gradients(self, results: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]) -> None:
        """Refuse the layer if a tile's results depend on another tensor that needs a gradient, wherever it is held.

        A layer may hold one from some call on, which no check of an earlier call has seen.
        """
        if torch.is_grad_enabled():
            refuse_other_gradients(results, [*inputs, *self._aliases])

    # ---- backward

    def backward(self, gradient: torch.Tensor, may_overwrite: bool) -> list[torch.Tensor | None]:
        """Return the gradients of the hidden states, of other inputs and of the parameters."""
        for given in self._device_inputs:
            given.check()
        self._host.replay_begins(self._tiled.layer)
        if self.member.below is not None and not self.member.done:
            self._host.part_begins("inputs")  # their seconds are those of other layers
            compute_inputs(self.member, self._host.gathering)
        with stacks_restored(), Undoing(self._drop_input), self._as_in_forward() as aliases:
            sums, d_inputs = GradientSums(aliases), self._arguments.new_gradients()
            try:
                d_hidden = self._backward_tiles(sums, gradient, may_overwrite, d_inputs)
            except CannotTile as reason:
                raise MemoError(
                    f"layer {self._tiled.layer.name} ran in tiles, and its backward cannot: {reason}. Set memo.tile_tokens to 0"
                ) from reason
            return [d_hidden, *d_inputs, *sums.take()]

    @contextmanager
    def _as_in_forward(self) -> Iterator[Sequence[torch.Tensor]]:
        """Run tiles inside the block in the state of the forward. Yield aliases of the parameters. Its end closes the frames."""
        with (
            stacks_restored(),
            Undoing(self._close_frames),
            Undoing(torch.clear_autocast_cache),
            running_tiles(),
            autocast_as(self._autocast),
            self._before.put_in(),
            aliased(places_of(self._tiled.module), self._parameters) as aliases,
        ):
            yield aliases

    def _close_frames(self) -> None:
        for tile in self._tiles:
            tile.call.frame.first_only = False
            self._engine.give_up(tile.call.frame)
        if self._attention is not None:
            self._attention.release()

    def _backward_tiles(
        self, sums: GradientSums, gradient: torch.Tensor, may_overwrite: bool, d_inputs: list[torch.Tensor]
    ) -> torch.Tensor:
        """Return the gradient of the hidden states, and add to the other gradients."""
        attention, gathered = self._attention, None
        result = d_result = None
        self._host.part_begins("post_backward")
        if attention is not None:
            gathered = self._new_gathered()
            if self._keeps_result:
                result = self._new_result(gradient.device) if self._result is None else self._result
            else:
                self._pre_again(gathered)
                result = attention.result(gathered, then=self._last_frame)
            d_result = self._new_result(gradient.device)
        d_hidden = gradient if may_overwrite else torch.empty_like(gradient, memory_format=torch.contiguous_format)
        d_hiddens = parts(d_hidden, self._spans, 1)
        self._post_backward(sums, gathered, gradient, d_hiddens, d_inputs, result, d_result)
        if attention is not None:
            sums.round_sums()  # in post's part: beside attention's gradients both dtypes hide how their bytes grow with tokens
        self._host.part_begins("attention_backward")
        if attention is not None:
            attention.supply(result)
            del result
            attention.backward(sums, gathered, d_result, then=self._last_frame)
            del d_result
        self._host.part_begins("pre_backward")
        if attention is not None:
            self._pre_backward(sums, gathered, d_hiddens, d_inputs)
        return d_hidden

    @property
    def _last_frame(self) -> Frame:
        return self._tiles[-1].call.frame

    def _tiles_back(self, again: bool = False) -> Iterator[Tile]:
        """Yield the tiles, last first, each with its frame on the device.

        Args:
            again: True if they will be asked for once more: attention's frame follows the first tile's, or then the last one's.
        """
        for number in reversed(range(len(self._tiles))):
            tile, then = self._tiles[number], None
            if again:
                then = self._tiles[number - 1].call.frame if number else self._attention.frame or self._last_frame
            self._engine.bring_back(tile.call.frame, then, again)
            tile.call.frame.first_only = False
            yield tile

    def _new_gathered(self) -> Gathered:
        return Gathered(self._shapes.attention.arguments, *self._arguments.size, self._spans)

    def _new_result(self, device: torch.device) -> torch.Tensor:
        return self._shapes.attention.result.new(*self._arguments.size, self._result_dtype, device)

    def _pre_again(self, gathered: Gathered) -> None:
        """Run every tile up to attention once more: fill `gathered`."""
        for tile in self._tiles:
            tile.call.frame.first_only = tile.reads_hidden_only(tile.recipe.pre_again)
        for tile in self._tiles_back(again=True):
            carry, mode = self._carry(tile, tile.carried), Replay(tile.call, tile.recipe.pre_again)
            with torch.enable_grad(), dropping():
                ran = self._runs.run(tile.span, tile.hidden(), carry, mode, seed=tile.seed)
            gathered.add(tile.number, ran.end)

    def _post_backward(
        self,
        sums: GradientSums,
        gathered: Gathered | None,
        gradient: torch.Tensor,
        d_hiddens: Sequence[torch.Tensor],
        d_inputs: list[torch.Tensor],
        result: torch.Tensor | None,
        d_result: torch.Tensor | None,
    ) -> None:
        """Run every tile again, and the backward of its post: fill `d_hiddens` and `d_result`, add to other gradients.

        If the tiles' frames keep attention's result, `gathered` and `result` are filled, too.
        """
        d_left: Gradients = []
        gradients, results = parts(gradient, self._spans, 1), self._parts_of_result(result)
        d_results = self._parts_of_result(d_result)
        for tile in self._tiles_back(again=results is not None):
            own = None if results is None else self._result_again(tile, results[tile.number])
            d_output = gradients[tile.number]
            d_x, d_own, d_left, d_others = self._tile_post_backward(sums, tile, gathered, own, d_output, d_left)
            if d_results is not None:
                tile.call.frame.first_only = tile.reads_hidden_only(tile.recipe.pre_backward)
                fill(d_results[tile.number], d_own)
            fill(d_hiddens[tile.number], d_x)
            self._arguments.add(d_inputs, tile.span, d_others)
            del own, d_own, d_x, d_others  # before the next tile is reloaded and runs again

    # ---- the layer above, if it has not stored its input

    @property
    def why_no_outputs_again(self) -> str:
        """Return why the backward must not compute what this call has returned; "": it may."""
        if not self._trains:
            return "the layer below keeps nothing"
        return "the layer below recomputes attention" if self._recomputes else ""

    def run_posts_again(self, into: TiledCall) -> None:
        """Compute what this call has returned once more, and store it as the hidden states of the call above, unless that has."""
        attention, result = self._attention, None
        for given in self._device_inputs:
            given.check()
        with self._host.gathering(self._tiled.module), self._as_in_forward():
            if attention is not None and not self._keeps_result:
                leaves = self._new_gathered()
                self._pre_again(leaves)
                result = attention.result(leaves, then=self._last_frame)
                del leaves
            results = self._parts_of_result(result)
            for tile in reversed(self._tiles):
                below = self._tiles[tile.number - 1 if tile.number else 0].call.frame
                self._engine.bring_back(tile.call.frame, then=below, again=True)
                own = None
                if attention is not None:
                    kept = tile.call.frame.tensor(tile.recipe.inputs[-1]) if results is None else results[tile.number]
                    own = kept.detach().requires_grad_()
                    del kept
                mode, x, carry = Replay(tile.call, tile.recipe.post_again), tile.hidden(), self._carry(tile)
                with torch.enable_grad(), dropping():
                    ran = self._runs.run(tile.span, x, carry, mode, lambda reached, own=own: own, tile.seed)  # type: ignore[misc]
                if into._computes_input:
                    into.take_hidden(tile.number, ran.end)
                del own, x, carry, ran  # before the next tile is reloaded
        self._engine.let_go_late_but(0)

    def take_hidden(self, number: int, hidden: torch.Tensor) -> None:
        """Store a tile's hidden states, which the backward has computed."""
        tile = self._tiles[number]
        self._engine.keep_late(tile.call.frame, tile.recipe.inputs[0], hidden)

    def _drop_input(self) -> None:
        self.member.done = False
        for tile in self._tiles:
            self._engine.drop_late(tile.call.frame)

    def _result_again(self, tile: Tile, own: torch.Tensor) -> torch.Tensor:
        """Return a tile's part of attention's result as a leaf. If the tile's frame keeps it, fill `own` with it."""
        if self._keeps_result:
            kept = tile.call.frame.tensor(tile.recipe.inputs[-1])
            if storage_of(kept) != storage_of(own):
                own.copy_(kept)
            own = kept
        return own.detach().requires_grad_()

    def _tile_post_backward(
        self,
        sums: GradientSums,
        tile: Tile,
        gathered: Gathered | None,
        own: torch.Tensor | None,
        d_output: torch.Tensor,
        d_left: Gradients,
    ) -> tuple[torch.Tensor | None, torch.Tensor | None, Gradients, Gradients]:
        """Return the gradients of a tile's hidden states, of attention's output `own`, of its carry, and of other inputs, by its
        post.

        Args:
            d_left: the gradients of what it left, by the post of later tiles; empty behind the last tile of a sequence.
        """
        x, carry, recipe = tile.hidden(), self._carry(tile), tile.recipe
        mode = Replay(tile.call, recipe if self._keeps_result else recipe.post_backward)
        if tile.followed and self._keeps_result and recipe.pre_flops is not None:
            mode = ReplayPost(tile.call)

        def attend(reached: AttentionCall) -> Any:
            if self._keeps_result:
                gathered.add(tile.number, reached)  # type: ignore[union-attr]
            if isinstance(mode, ReplayPost):
                mode.attention_reached()
            return own

        with torch.enable_grad():
            ran = self._runs.run(tile.span, x, carry, mode, attend, tile.seed)
        d_own, d_x, *rest = ran.backward(sums, [ran.end], [d_output], d_left, own)
        return d_x, d_own, rest[: len(carry)], rest[len(carry) :]

    def _pre_backward(
        self, sums: GradientSums, gathered: Gathered, d_hiddens: Sequence[torch.Tensor], d_inputs: list[torch.Tensor]
    ) -> None:
        """Run the backward of every tile's pre: add to `d_hiddens` and `d_inputs`."""
        d_left: Gradients = []
        for tile in self._tiles_back():
            d_x, d_left, d_others = self._tile_pre_backward(sums, tile, gathered, d_left)
            if d_x is not None:
                d_hiddens[tile.number].add_(d_x)
            self._arguments.add(d_inputs, tile.span, d_others)
            del d_x, d_others

    def _tile_pre_backward(
        self, sums: GradientSums, tile: Tile, gathered: Gathered, d_left: Gradients
    ) -> tuple[torch.Tensor | None, Gradients, Gradients]:
        """Return the gradients of a tile's hidden states, of its carry, and of other inputs, by attention's arguments.

        Args:
            d_left: the gradients of what it left, by attention's arguments of later tiles.
        """
        x, carry, attention = tile.hidden(), self._carry(tile, tile.carried), self._shapes.attention
        with torch.enable_grad():
            ran = self._runs.run(tile.span, x, carry, Replay(tile.call, tile.recipe.pre_backward), seed=tile.seed)
        indices = [index for index in attention.differentiable if attention.arguments[index] is not None]
        gradients = [gathered.parts[index][tile.number] for index in indices]
        _, d_x, *rest = ran.backward(sums, [ran.end.leaves[index] for index in indices], gradients, d_left)
        return d_x, rest[: len(carry)], rest[len(carry) :]

    def _kept_carry(self, tile: Tile) -> list[Any]:
        inputs = tile.recipe.inputs[1:]
        return inputs[:-1] if self._keeps_result else inputs

    def _carry(self, tile: Tile, tensors: int | None = None) -> list[torch.Tensor]:
        """Return what the tile before left, or the first tensors of it, from this one's frame."""
        return self._runs.leaves([tile.call.frame.tensor(kept) for kept in self._kept_carry(tile)[:tensors]])


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
        call = ctx._raw_saved_tensors[0].data  # raises if the graph was freed
        d_hidden, *others = call.backward(gradient, may_overwrite)
        return None, d_hidden if ctx.needs_input_grad[1] else None, *others
