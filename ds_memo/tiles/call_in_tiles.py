"""A layer's call in tiles of tokens, forward and backward, as one autograd function: what its two ways have in common.

Parameters are arguments of the function, and tiles see aliases of them: hooks of a parameter see one gradient per backward.

Where ranks share a sequence and the layer mixes tokens by more than attention, hidden states and whatever else it gets of its
tokens move, so that tiles of one number are one stretch of the sequence (ds_memo.sequence.striped). The output moves back.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch

from ds_memo.errors import MemoError
from ds_memo.placement import FULL_RECOMPUTE, Placement
from ds_memo.remat.call import Call
from ds_memo.remat.inputs import DeviceInput
from ds_memo.remat.layer_call import CannotTile
from ds_memo.remat.layer_host import LayerHost, Way
from ds_memo.remat.layer_state import Before
from ds_memo.remat.modes import running_tiles
from ds_memo.remat.random_states import seeded
from ds_memo.remat.recipe import Recipe, remember
from ds_memo.remat.undo import Undoing, stacks_restored
from ds_memo.sequence.mixers import fitting
from ds_memo.sequence.parts import SequenceParts, parts_of
from ds_memo.sequence.striped import Striped, striped
from ds_memo.spans import Span
from ds_memo.swap.frame import Frame, Layout
from ds_memo.swap.pinned_segments import PAGE
from ds_memo.tiles.around import aliased, autocast_as, autocast_now, dropping, refuse_create_graph
from ds_memo.tiles.compare import refuse_other_gradients
from ds_memo.tiles.findings import by_arrival
from ds_memo.tiles.gradient_owner import is_owned
from ds_memo.tiles.recipes import TiledLayer
from ds_memo.tiles.slices import Arguments, hidden_states, part
from ds_memo.tiles.weight_gradients import GradientSums
from ds_memo.units import round_up


@dataclass
class Tile:
    """One tile of a call."""

    span: Span
    call: Call
    stored: bool
    seed: int | None
    """Seed of the tile's random numbers; None: it draws none."""

    def hidden(self) -> torch.Tensor:
        """Return its hidden states from its frame, as a leaf."""
        return self.call.frame.tensor(self.call.recipe.inputs[0]).detach().requires_grad_()


class CallInTiles(ABC):
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
        host: LayerHost,
        before: Before,
    ) -> None:
        self._before = before
        self._tiled = tiled
        self._shapes = tiled.shapes
        self._spans = spans
        self._host = host
        self._engine = host.engine
        self._forward = forward
        self._arguments = Arguments(args, kwargs)
        self._hidden = hidden_states(args, kwargs)
        parts = parts_of(tiled.module) if tiled.shapes.mixes else None
        self._striped: Striped | None = None
        """The tokens of the ranks' tiles; None: this rank has whole sequences, or the layer does not mix tokens."""
        if parts is not None:
            parts = fitting(parts, self._arguments.length, type(tiled.module).__name__)
            self._striped, tiled.striped = striped(parts, spans[0].size[1]), True
            self._hidden = self._striped.enter(self._hidden)
            self._arguments.move(self._striped.argument)
        self._inputs = self._arguments.detach()
        self._parameters = by_arrival(tiled.module, tiled.shapes.arrivals)
        self._trains = torch.is_grad_enabled() and bool(self._inputs or self._parameters or self._hidden.requires_grad)
        """False: no backward will come, and nothing is kept."""
        if not self._trains:
            placement, self._parameters = replace(FULL_RECOMPUTE, tiles=placement.tiles), []
        self._placement = placement
        self._tiles: list[Any] = []
        self._recomputes = self._placement.kind.recomputes_attention
        self._device_inputs = [DeviceInput(tiled.layer.name, tensor) for tensor in self._arguments.tensors]
        self._autocast = autocast_now()
        self._aliases: Sequence[torch.Tensor] = ()
        """The parameters' aliases, while the forward runs."""
        self._seed = int(torch.randint(1 << 62, ())) if tiled.shapes.draws and torch.is_grad_enabled() else None

    # ---- what the two ways differ in

    @abstractmethod
    def _run_tiles(self, hidden: torch.Tensor, recipes: dict[Any, Any]) -> torch.Tensor:
        """Return the layer's output."""

    @abstractmethod
    def _backward_tiles(
        self, sums: GradientSums, gradient: torch.Tensor, may_overwrite: bool, d_inputs: list[torch.Tensor]
    ) -> torch.Tensor:
        """Return the gradient of the hidden states, and add to the other gradients."""

    @abstractmethod
    def _analyse(self, call: Call, hidden: torch.Tensor, span: Span) -> Any:
        """Return the recipes of a tile."""

    @abstractmethod
    def _host_bytes(self, recipes: Any) -> tuple[int, int]:
        """Return the bytes that a tile keeps on the host, recomputed and stored."""

    def _bytes_beside(self, hidden: torch.Tensor) -> int:
        """Return about how many bytes frames besides the tiles' keep."""
        return 0

    def _kind(self, span: Span) -> Any:
        """Return a key for what a tile's recipes depend on. The first tile of a sequence has no carry."""
        return (span.size, span.tokens.start == 0) if self._shapes.mixes else span.size

    # ---- ranks that share a sequence

    def _is_packed(self, span: Span) -> bool:
        """Return True if a tile's ops depend on where documents begin. A recipe would serve it once: all of it is recomputed."""
        return self._striped is not None and self._striped.is_packed(span)

    def _stretch(self, span: Span, packed: bool = True) -> SequenceParts | None:
        return None if self._striped is None else self._striped.stretch(span, packed)

    # ---- forward

    def run(self) -> Any:
        output = self._run()
        return self._shapes.output.of(output if self._striped is None else self._striped.leave(output))

    def _run(self) -> torch.Tensor:
        hidden, self._hidden = self._hidden, None
        inputs, self._inputs = self._inputs, []
        if not self._trains:
            if torch.is_grad_enabled():  # a frozen layer: frames below it move as below any other
                self._engine.abort(self._engine.begin(self._tiled.layer.name, self._placement))
            return self.forward(hidden)
        # Autograd goes on with the youngest of these views: ZeRO's buckets get gradients in the order of a whole layer, which
        # another rank may run.
        views = [parameter.view_as(parameter) for parameter in self._parameters]
        with torch.autograd.graph.saved_tensors_hooks(lambda _: self, _hand_over):
            return _Tiled.apply(self, hidden, *inputs, *views)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the layer's output (b, s, h)."""
        recipes = self._recipes(hidden)
        self._place(hidden, recipes)
        try:
            with running_tiles(), self._grads(), dropping(), aliased(self._tiled.module, self._parameters) as self._aliases:
                output = self._run_tiles(hidden, recipes)
            self._aliases = ()
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

    def _refuse_other_gradients(self, results: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]) -> None:
        """Refuse the layer if a tile's results depend on another tensor that needs a gradient, wherever it is held.

        A layer may hold one from some call on, which no check of an earlier call has seen.
        """
        if torch.is_grad_enabled():
            refuse_other_gradients(results, [*inputs, *self._aliases])

    def _recipes(self, hidden: torch.Tensor) -> dict[Any, Any]:
        """Return the recipes by the tiles' kinds, after analysing kinds that are new."""
        module, found = self._tiled.module, {}
        trained = tuple(parameter.requires_grad for parameter in module.parameters())
        for span in self._spans:
            kind = self._kind(span)
            if kind in found:
                continue
            how = self._trains, torch.is_inference_mode_enabled(), module.training, self._autocast
            key = kind, hidden.dtype, trained, how
            recipes = self._tiled.recipes.get(key)
            if recipes is None:
                with self._host.isolated(), self._grads():
                    self._host.work.analysed += 1
                    call = Call(self._tiled.layer.index, (), self._engine, None, None, self._host.work)
                    recipes = self._analyse(call, hidden, span)
                remember(self._tiled.recipes, key, recipes)
            found[kind] = recipes
        return found

    def _place(self, hidden: torch.Tensor, recipes: dict[Any, Any]) -> None:
        """Decide the share of tiles that are stored, and stay on the device if the host has no room."""
        by_kind = {kind: self._host_bytes(found) for kind, found in recipes.items()}
        of_tiles, beside = [by_kind[self._kind(span)] for span in self._spans], self._bytes_beside(hidden)

        def host_bytes(placement: Placement) -> int:
            stored = stored_tiles(len(of_tiles), placement.decided_alpha)
            needs = [nbytes[number in stored] for number, nbytes in enumerate(of_tiles)] + [beside]
            return sum(round_up(nbytes, PAGE) for nbytes in needs)

        asked, key, sizes = self._placement, (hidden.shape, self._placement), None
        if asked.kind.on_device:
            return
        if key in self._tiled.alphas:
            asked = replace(asked, alpha=self._tiled.alphas[key])
        else:
            whole = sum(recomputed for recomputed, _ in of_tiles) + beside
            sizes = whole, sum(stored - recomputed for recomputed, stored in of_tiles)
        self._placement = self._host.admit(self._tiled.layer, asked, Way.TILED, host_bytes, sizes)
        if self._placement.kind is asked.kind:
            remember(self._tiled.alphas, key, self._placement.decided_alpha)

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
        return [tile.call.frame for tile in self._tiles if tile.call.frame is not None]

    def _begin_tile(self, number: int, recipe: Recipe) -> Call:
        """Open a tile's frame, if a backward will come."""
        frame = self._engine.begin(f"{self._tiled.layer.name}, tile {number}", self._placement) if self._trains else None
        return Call(self._tiled.layer.index, (), self._engine, frame, recipe, self._host.work)

    def _keep_inputs(self, call: Call, inputs: Sequence[torch.Tensor]) -> None:
        """Keep the first of a tile's inputs."""
        if call.frame is not None:
            call.frame.ahead = True
            self._engine.adopt(call.frame, call.recipe.layout)
            for kept, tensor in zip(call.recipe.inputs, inputs, strict=False):
                self._engine.keep(call.frame, kept, tensor)
            self._host.work.gemm_flops += call.recipe.gemm_flops

    def _hidden_of(self, hidden: torch.Tensor, span: Span) -> torch.Tensor:
        """Return a tile's hidden states as a leaf, in row-major order: its ops are then the same for any layout of the whole."""
        return part(hidden.detach(), span, 1).contiguous().requires_grad_(self._trains)

    def _leaves(self, carry: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        return [tensor.detach().requires_grad_(self._trains) for tensor in carry]

    def _seed_of(self, number: int) -> int | None:
        return None if self._seed is None else self._seed + number

    def _seeded(self, seed: int | None) -> AbstractContextManager[None]:
        return nullcontext() if seed is None else seeded(seed % (1 << 63), self._engine.device)

    # ---- backward

    def backward(self, gradient: torch.Tensor, may_overwrite: bool) -> list[torch.Tensor | None]:
        """Return the gradients of the hidden states, of other inputs and of the parameters."""
        for given in self._device_inputs:
            given.check()
        self._host.replay_begins(self._tiled.layer)
        with stacks_restored(), Undoing(self._close_frames), Undoing(torch.clear_autocast_cache):
            try:
                return self._backward(gradient, may_overwrite)
            except CannotTile as reason:
                raise MemoError(
                    f"layer {self._tiled.layer.name} ran in tiles, and its backward cannot: {reason}. Set memo.tile_tokens to 0"
                ) from reason

    def _backward(self, gradient: torch.Tensor, may_overwrite: bool) -> list[torch.Tensor | None]:
        aliases_of = aliased(self._tiled.module, self._parameters)
        with running_tiles(), autocast_as(self._autocast), self._before.put_in(), aliases_of as aliases:
            sums, d_inputs = GradientSums(aliases), self._arguments.new_gradients()
            d_hidden = self._backward_tiles(sums, gradient, may_overwrite, d_inputs)
            return [d_hidden, *d_inputs, *sums.take()]

    def _close_frames(self) -> None:
        for tile in self._tiles:
            tile.call.frame.first_only = False
            self._engine.give_up(tile.call.frame)


def with_left(
    results: Sequence[torch.Tensor],
    gradients: Sequence[torch.Tensor],
    left: Sequence[torch.Tensor],
    d_left: Sequence[torch.Tensor | None],
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Add what a tile left for the next to what its backward begins at, and the gradients of that.

    Args:
        d_left: empty behind the last tile of a sequence. None: nothing came of it.
    """
    more = [(end, d_end) for end, d_end in zip(left, d_left, strict=False) if d_end is not None]
    return [*results, *(end for end, _ in more)], [*gradients, *(d_end for _, d_end in more)]


def stored_tiles(tiles: int, alpha: float) -> set[int]:
    """Return the numbers of the tiles that are stored, a share alpha of all, evenly among the others.

    The first tile is the first of them: so the copies of the last one have some tiles' time until the next layer begins.
    """
    stored = int(tiles * alpha + 1e-9)
    return {number * tiles // stored for number in range(stored)}


def memory_for(gradient: torch.Tensor, may_overwrite: bool) -> torch.Tensor:
    """Return memory for the gradient of a layer's input: that of its output's, where no one else has it."""
    return gradient if may_overwrite else torch.empty_like(gradient, memory_format=torch.contiguous_format)


class _Tiled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: CallInTiles, hidden: torch.Tensor, *parameters: torch.Tensor) -> torch.Tensor:
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


def _hand_over(call: CallInTiles) -> torch.Tensor:
    """Give the call to the backward that asks for its saved tensor."""
    _handed_over.call = call
    return torch.empty(0, device=call._engine.device)
