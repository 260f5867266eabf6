"""A layer that runs in tiles of tokens, forward and backward, as one autograd function.

    forward   head of each tile: q, k, v ─► attention over all tokens ─► tail of each tile: the output
    backward  whole run of each tile, last first: q, k, v again, and the tail's backward: d(attention's output), a part of d(x)
              attention's backward, a group of heads at a time; its gradients overwrite q, k, v
              head of each tile, last first: its backward, the rest of d(x)

Frames: one for attention (its log-sum-exp), one for each tile (its hidden states, its part of attention's output, what routers
chose, and if the tile is stored all GEMM outputs). The backward asks for the tiles', attention's, and the tiles' once more.

Parameters are arguments of the function, and tiles see aliases of them: hooks of a parameter see one gradient per backward.
"""

from __future__ import annotations

import copy
import functools
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from ds_memo.placement import GEMMS_RECOMPUTED, UNDECIDED, Placement
from ds_memo.remat.analyse import Analyse
from ds_memo.remat.call import Call, storage_of, tensor_leaves
from ds_memo.remat.checkpoint import CannotTile, Layer, Remat
from ds_memo.remat.inputs import DeviceInput
from ds_memo.remat.random_states import forked
from ds_memo.remat.recipe import Observed, ObservedSavedOp, Recipe, SavedOp, make_recipe
from ds_memo.remat.record import Record
from ds_memo.remat.replay import Replay
from ds_memo.spans import Span
from ds_memo.swap.frame import Kept, Layout
from ds_memo.tiles.around import (
    aliased,
    autocast_again,
    autocast_now,
    dropping,
    from_generators,
    generators,
    own_linear,
    refuse_create_graph,
    without_autocast,
)
from ds_memo.tiles.attention_call import AttentionCall, Gathered, run_to_attention, run_with_attention
from ds_memo.tiles.gradient_owner import is_owned
from ds_memo.tiles.heads import Heads
from ds_memo.tiles.modes import RecordHead, RecordTail, SupplyHeads, may_split_heads
from ds_memo.tiles.probe import Shapes
from ds_memo.tiles.recipes import TileRecipe, analyse
from ds_memo.tiles.slices import Arguments, fill, hidden_states, new_whole, part
from ds_memo.tiles.weight_gradients import GradientSums

_REMEMBERED = 64
"""Recipes that a layer remembers; beyond that, the oldest is dropped."""


@dataclass
class Tile:
    """One tile of a call."""

    span: Span
    call: Call
    recipe: TileRecipe
    seed: int | None
    """Seed of the tile's random numbers; None: it draws none."""
    followed: bool = False
    """True if the head did what the recipe says."""

    def hidden(self) -> torch.Tensor:
        """Return its hidden states from its frame, as a leaf."""
        return self.call.frame.tensor(self.call.recipe.inputs[0]).detach().requires_grad_()

    def supplies_up_to_attention(self) -> bool:
        """Return True if the backward of the part up to attention reads more of the frame than the hidden states."""
        return any(op.kept is not None and (isinstance(op, SavedOp) or op.wanted) for op in self.up_to_attention.recipe.ops)

    @functools.cached_property
    def up_to_attention(self) -> Call:
        """A call like the tile's that ends at attention. Its forward must be over."""
        call = copy.copy(self.call)
        call.recipe = self.recipe.up_to_attention(call.recipe) if self.followed else replace(call.recipe, ops=[])
        return call


@dataclass(frozen=True)
class AttentionRecipe:
    """What attention's frame keeps."""

    recipe: Recipe
    output: Output | None
    """The output of an op that is attention's result, which the tiles' frames keep; None: the frame keeps all outputs."""
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
    """

    def __init__(self, layer: Layer, module: nn.Module, shapes: Shapes) -> None:
        self.layer = layer
        self.shapes = shapes
        self.recipes: dict[Any, TileRecipe] = {}
        self.attention_recipes: dict[Any, AttentionRecipe] = {}
        self.alphas: dict[Any, float] = {}
        """By key of the call: alpha where the policy leaves it open until sizes are known."""
        self._module = weakref.ref(module)

    @property
    def module(self) -> nn.Module:
        module = self._module()
        assert module is not None  # it is running
        return module


class TiledCall:
    """One call of a tiled layer. It lives as long as its graph, and so do its frames.

    Args:
        forward: the layer's own.
        args, kwargs: of the call.
        spans: its tiles.
        placement: has tiles; its alpha is the share of them that are stored.
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
    ) -> None:
        self._tiled = tiled
        self._shapes = tiled.shapes
        self._spans = spans
        self._placement = placement
        self._remat = remat
        self._engine = remat.engine
        self._forward = forward
        self._arguments = Arguments(args, kwargs)
        self._inputs = self._arguments.detach()
        self._hidden: torch.Tensor | None = hidden_states(args, kwargs)
        self._parameters = [parameter for parameter in tiled.module.parameters() if parameter.requires_grad]
        self._tiles: list[Tile] = []
        self._attention: Call | None = None
        self._output: Output | None = None
        self._result: torch.Tensor | None = None
        """Attention's result where it stays on the device: the tiles' frames hold parts of it."""
        self._generators: Any = None
        """States before attention ran, if it draws random numbers."""
        self._device_inputs = [DeviceInput(tiled.layer.name, tensor) for tensor in self._arguments.tensors]
        self._autocast = autocast_now()
        self._seed = int(torch.randint(1 << 62, ())) if tiled.shapes.draws else None

    def run(self) -> Any:
        """Run the layer; return what it returns."""
        hidden, self._hidden = self._hidden, None
        inputs, self._inputs = self._inputs, []
        with torch.autograd.graph.saved_tensors_hooks(lambda _: self, _hand_over):
            output = _Tiled.apply(self, hidden, *inputs, *self._parameters)
        return self._shapes.output.of(output)

    # ---- forward

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the layer's output (b, s, h)."""
        with own_linear():
            recipes = self._recipes(hidden)
        self._place(hidden, recipes)
        try:
            with own_linear(), torch.enable_grad(), dropping(), aliased(self._tiled.module, self._parameters):
                # The first frame: the backward of the layer above goes on with the last tile's, the youngest.
                frame = self._engine.begin(f"{self._tiled.layer.name}, attention", self._placement)
                self._attention = Call(self._tiled.layer.index, (), self._engine, frame, None, self._remat.work)
                gathered = self._heads(hidden, recipes)
                result = self._attend(gathered)
                self._engine.end(frame)
                del gathered
                output = self._tails(hidden, result)
            if self._placement.kind.on_device and self._output is not None:
                self._result = result
            self._describe(hidden)
        except BaseException:  # Ctrl-C, too: the host blocks of frames that no graph will hold
            for call in (*(tile.call for tile in self._tiles), self._attention):
                if call is not None and call.frame.state == "recording":
                    self._engine.abort(call.frame)
            raise
        return output

    def _recipes(self, hidden: torch.Tensor) -> dict[tuple[int, int], TileRecipe]:
        """Return the recipes by the tiles' sizes, after analysing sizes that are new."""
        module, found = self._tiled.module, {}
        trained = tuple(parameter.requires_grad for parameter in module.parameters())
        for span in self._spans:
            if span.size in found:
                continue
            key = span.size, hidden.dtype, trained, module.training, self._autocast
            recipe = self._tiled.recipes.get(key)
            if recipe is None:
                x = part(hidden.detach(), span, 1).clone().requires_grad_()
                args, kwargs, _ = self._arguments.tile(x, span)
                call = Call(self._tiled.layer.index, (), self._engine, None, None, self._remat.work)
                recipe = analyse(call, module, self._forward, (args, kwargs), span, self._shapes)
                _remember(self._tiled.recipes, key, recipe)
            found[span.size] = recipe
        return found

    def _place(self, hidden: torch.Tensor, recipes: dict[tuple[int, int], TileRecipe]) -> None:
        """Settle the share of tiles that are stored, and stay on the device if the host has no room."""
        of_tiles = [recipes[span.size] for span in self._spans]
        whole = sum(recipe.recomputed.layout.host_bytes for recipe in of_tiles) + self._attention_bytes(hidden)
        if self._placement.alpha is UNDECIDED:
            key = hidden.shape, self._placement
            if key not in self._tiled.alphas:
                split = sum(recipe.stored.layout.host_bytes - recipe.recomputed.layout.host_bytes for recipe in of_tiles)
                _remember(self._tiled.alphas, key, self._remat.policy.alpha(self._tiled.layer, whole, split))
            self._placement = replace(self._placement, alpha=self._tiled.alphas[key])
        stored = stored_tiles(len(of_tiles), self._placement.decided_alpha)
        needs = whole + sum(of_tiles[i].stored.layout.host_bytes - of_tiles[i].recomputed.layout.host_bytes for i in stored)
        if not (self._placement.kind.on_device or self._remat.policy.has_room(needs)):
            self._placement = replace(GEMMS_RECOMPUTED, tiles=self._placement.tiles)

    def _attention_bytes(self, hidden: torch.Tensor) -> int:
        """Return about how many bytes attention's frame keeps: a log-sum-exp in float32 for each head."""
        result = self._shapes.result
        return hidden.shape[0] * hidden.shape[1] * 4 * result.elements_per_token // result.shape[-1]

    def _describe(self, hidden: torch.Tensor) -> None:
        """Show the layer's report what this call keeps: the bytes of all its frames, and the shape of its input."""
        frames = [*(tile.call.frame for tile in self._tiles), self._attention.frame]
        layouts = [frame.layout for frame in frames]
        layout = Layout(
            [kept for layout in layouts for kept in layout.kept],
            sum(layout.host_bytes for layout in layouts),
            sum(layout.buffer_bytes for layout in layouts),
        )
        recipe = self._attention.recipe
        self._tiled.layer.latest = replace(recipe, layout=layout, inputs=[Layout().add(hidden)])

    def _heads(self, hidden: torch.Tensor, recipes: dict[tuple[int, int], TileRecipe]) -> Gathered:
        self._remat.part_begins("heads")
        gathered = Gathered(self._shapes.arguments, self._arguments.batch, self._arguments.length)
        all_stored = stored_tiles(len(self._spans), self._placement.decided_alpha)
        for number, span in enumerate(self._spans):
            of_size = recipes[span.size]
            recipe = of_size.stored if number in all_stored else of_size.recomputed
            frame = self._engine.begin(f"{self._tiled.layer.name}, tile {number}", self._placement)
            call = Call(self._tiled.layer.index, (), self._engine, frame, recipe, self._remat.work)
            tile = Tile(span, call, of_size, None if self._seed is None else self._seed + number)
            self._tiles.append(tile)
            self._engine.adopt(frame, recipe.layout)
            x = part(hidden, span, 1).detach()
            self._engine.keep(frame, recipe.inputs[0], x)
            args, kwargs, wholes = self._arguments.tile(x.requires_grad_(), span)
            with self._seeded(tile.seed), RecordHead(call, len(of_size.head)) as mode:
                reached = run_to_attention(self._forward, args, kwargs, self._shapes.sdpa)
            tile.followed = mode.followed
            gathered.add(span, reached, wholes)
            self._remat.work.gemm_flops += recipe.gemm_flops
        return gathered

    def _attend(self, gathered: Gathered) -> torch.Tensor:
        """Run attention for all tokens, keep what its backward needs, and return its output."""
        self._remat.part_begins("attention")
        tiled, leaves = self._tiled, list(gathered.leaves)
        for index in self._shapes.differentiable:
            leaves[index] = leaves[index].detach().requires_grad_()
        key = tuple((leaf.shape, leaf.dtype) for leaf in leaves if isinstance(leaf, torch.Tensor)), tiled.module.training
        known = tiled.attention_recipes.get(key)
        self._engine.let_go_but(0)
        call, frame = self._attention, self._attention.frame
        call.recipe = known.recipe if known else None
        observed = Observed()
        mode: Analyse | Record
        if known:
            self._engine.adopt(frame, known.recipe.layout)
            mode = Record(call, functools.partial(tensor_leaves, leaves), tiled.attention_recipes.clear)
        else:
            mode = Analyse(call, observed, None, tensor_leaves(leaves))
        if known is None or known.draws:
            self._generators = generators(self._engine.device)
        with mode:
            result = self._shapes.result.only_tensor(self._run_attention(gathered, leaves)).detach()
        if known is None:
            draws = self._generators != generators(self._engine.device)
            known = self._settle_attention(observed, result, draws)
            _remember(tiled.attention_recipes, key, known)
        if not known.draws:
            self._generators = None
        self._output = known.output
        if known.output is not None:
            self._set_output(None)
        return result

    def _settle_attention(self, observed: Observed, result: torch.Tensor, draws: bool) -> AttentionRecipe:
        """Make the recipe of an attention call that was analysed, and keep this call's tensors by it."""
        call = self._attention
        if observed.softmax and not observed.ops:
            raise CannotTile("its attention makes a matrix of tokens × tokens")
        observed.note_hidden_writes()
        observed.close_over_inputs(all_rows_kept=True)
        output = None
        for index, op in enumerate(observed.ops):
            if isinstance(op, ObservedSavedOp) and not op.recomputed:
                for position, value in enumerate(op.outputs):
                    if torch.is_tensor(value) and self._is(value, result):
                        output = Output(index, position, tuple(value.shape), value.stride())
                        op.outputs = (*op.outputs[:position], None, *op.outputs[position + 1 :])
        recipe, tensors = make_recipe(observed, 1.0)
        call.recipe = recipe
        call.keep_observed(observed, tensors)
        observed.forget()
        return AttentionRecipe(recipe, output, draws)

    def _is(self, value: torch.Tensor, result: torch.Tensor) -> bool:
        """Return True if an op's output is attention's result, in the memory order that the backward rebuilds."""
        if storage_of(value) != storage_of(result) or value.numel() != result.numel():
            return False
        again = self._shapes.result.new(self._arguments.batch, self._arguments.length, result.dtype, "meta")
        return value.storage_offset() == result.storage_offset() and _lie_alike(result.shape, again.stride(), result.stride())

    def _set_output(self, result: torch.Tensor | None) -> None:
        """Have attention's replay supply its op's output from `result`, or hold it no longer."""
        call, where = self._attention, self._output
        if where is not None:
            outputs = list(call.loose[where.op])
            outputs[where.position] = None if result is None else where.within(result)
            call.loose[where.op] = tuple(outputs)

    def _tails(self, hidden: torch.Tensor, result: torch.Tensor) -> torch.Tensor:
        self._remat.part_begins("tails")
        output: torch.Tensor | None = None
        for tile in self._tiles:
            of_tile = self._tail(tile, hidden, result)
            if output is None:
                output = new_whole(of_tile, self._arguments.batch, self._arguments.length, 1)
            part(output, tile.span, 1).copy_(of_tile)
            self._engine.end(tile.call.frame)
            if tile.call.recipe is not tile.recipe.recomputed:
                self._engine.let_go_but(2)
        assert output is not None
        return output

    def _tail(self, tile: Tile, hidden: torch.Tensor, result: torch.Tensor) -> torch.Tensor:
        """Return a tile of the layer's output."""
        args, kwargs, _ = self._arguments.tile(part(hidden, tile.span, 1).detach().requires_grad_(), tile.span)
        own, kept = part(result, tile.span, self._shapes.result.dim).detach(), tile.call.recipe.inputs[1]
        self._engine.keep(tile.call.frame, kept, _in_order_of(kept, own))
        given = self._shapes.result.of(own.requires_grad_())
        with self._seeded(tile.seed), RecordTail(tile.call, tile.recipe.head, tile.followed):
            returned = run_with_attention(self._forward, args, kwargs, lambda reached: given, self._shapes.sdpa)
        return self._shapes.output.tensor(returned).detach()

    # ---- backward

    def backward(self, gradient: torch.Tensor, may_overwrite: bool) -> list[torch.Tensor | None]:
        """Return the gradients of the hidden states, of other inputs and of the parameters."""
        for given in self._device_inputs:
            given.check()
        for observer in self._remat.observers:
            observer.layer_replays(self._tiled.layer.index)
        try:
            return self._backward(gradient, may_overwrite)
        finally:
            for call in (*(tile.call for tile in self._tiles), self._attention):
                call.frame.first_only = False
                if call.frame.state == "ready":  # it raised; the graph may be run again
                    self._engine.replayed(call.frame)

    def _backward(self, gradient: torch.Tensor, may_overwrite: bool) -> list[torch.Tensor | None]:
        with own_linear(), autocast_again(self._autocast), aliased(self._tiled.module, self._parameters) as aliases:
            sums, d_inputs = GradientSums(aliases), self._arguments.new_gradients()
            self._remat.part_begins("tails_backward")
            dtype = self._tiles[0].call.recipe.inputs[1].dtype
            new_result = functools.partial(
                self._shapes.result.new, self._arguments.batch, self._arguments.length, dtype, gradient.device
            )
            result = new_result() if self._result is None else self._result
            d_hidden = gradient if may_overwrite else torch.empty_like(gradient, memory_format=torch.contiguous_format)
            d_result = new_result()
            gathered = self._tails_backward(sums, gradient, d_hidden, d_inputs, result, d_result)
            sums.settle()
            self._engine.bring_back(self._attention.frame, then=self._tiles[-1].call.frame)
            self._set_output(result)
            del result
            self._remat.part_begins("attention_backward")
            self._attention_backward(sums, aliases, gathered, d_result)
            self._set_output(None)
            del d_result
            self._remat.part_begins("heads_backward")
            self._heads_backward(sums, gathered, d_hidden, d_inputs)
            return [d_hidden, *d_inputs, *sums.take()]

    def _tails_backward(
        self,
        sums: GradientSums,
        gradient: torch.Tensor,
        d_hidden: torch.Tensor,
        d_inputs: list[torch.Tensor],
        result: torch.Tensor,
        d_result: torch.Tensor,
    ) -> Gathered:
        """Run every tile again, and the backward of what follows attention: fill `result`, `d_result`, a part of the others.

        Returns:
            Attention's arguments.
        """
        gathered = Gathered(self._shapes.arguments, self._arguments.batch, self._arguments.length)
        dim = self._shapes.result.dim
        below = [self._attention.frame, *(tile.call.frame for tile in self._tiles)]
        for number, tile in reversed(list(enumerate(self._tiles))):
            self._engine.bring_back(tile.call.frame, then=below[number], again=True)
            own = tile.call.frame.tensor(tile.call.recipe.inputs[1]).detach()
            if storage_of(own) != storage_of(result):
                part(result, tile.span, dim).copy_(own)
            d_x, d_own, *d_others = self._tail_backward(sums, tile, gathered, own.requires_grad_(), part(gradient, tile.span, 1))
            tile.call.frame.first_only = not tile.supplies_up_to_attention()
            fill(part(d_result, tile.span, dim), d_own)
            fill(part(d_hidden, tile.span, 1), d_x)
            self._arguments.add(d_inputs, tile.span, d_others)
        return gathered

    def _tail_backward(
        self, sums: GradientSums, tile: Tile, gathered: Gathered, own: torch.Tensor, d_output: torch.Tensor
    ) -> tuple[torch.Tensor | None, ...]:
        """Return the gradients of a tile's hidden states, of attention's output `own`, and of other inputs, by what follows
        attention."""
        x = tile.hidden()
        args, kwargs, wholes = self._arguments.tile(x, tile.span)

        def supply(reached: AttentionCall) -> Any:
            gathered.add(tile.span, reached, wholes)
            return self._shapes.result.of(own)

        with torch.enable_grad(), self._seeded(tile.seed), Replay(tile.call):
            output = self._shapes.output.tensor(run_with_attention(self._forward, args, kwargs, supply, self._shapes.sdpa))
        return sums.backward([output], [d_output], [x, own, *self._arguments.inputs(args, kwargs)])

    def _attention_backward(
        self, sums: GradientSums, aliases: list[torch.Tensor], gathered: Gathered, d_result: torch.Tensor
    ) -> None:
        """Run attention's backward, a group of heads at a time. Gradients of its arguments overwrite them."""
        shapes, call = self._shapes, self._attention
        for heads in self._groups(gathered, d_result):
            leaves = list(gathered.leaves)
            for index in shapes.differentiable:
                leaves[index] = heads.of(leaves[index], shapes.arguments[index]).detach().requires_grad_()
            inputs = [leaves[index] for index in shapes.differentiable]
            with torch.enable_grad(), from_generators(self._generators, self._engine.device), SupplyHeads(call, heads):
                result = shapes.result.only_tensor(self._run_attention(gathered, leaves))
            with without_autocast():
                found = torch.autograd.grad(result, inputs, heads.of(d_result, shapes.result.dim))
            del result, leaves, inputs
            for index, gradient in zip(shapes.differentiable, found, strict=True):
                whole, dim = gathered.leaves[index], shapes.arguments[index]
                if dim is None:
                    sums.add(next(i for i, alias in enumerate(aliases) if alias is whole), gradient)
                else:
                    heads.of(whole, dim).copy_(gradient)
        self._engine.replayed(call.frame)

    def _groups(self, gathered: Gathered, d_result: torch.Tensor) -> list[Heads]:
        """Return the groups of heads that attention's backward runs for, one after another."""
        assert self._placement.tiles is not None
        shapes, groups = self._shapes, self._placement.tiles.head_groups
        tensors = [(gathered.leaves[index], shapes.arguments[index]) for index in shapes.differentiable]
        tensors.append((d_result, shapes.result.dim))
        heads = [tensor.shape[3 - dim] if dim in (1, 2) and tensor.dim() == 4 else 0 for tensor, dim in tensors]
        if groups == 1:
            return [Heads(0, 1)]
        others = [
            leaf for i, leaf in enumerate(gathered.leaves) if isinstance(leaf, torch.Tensor) and i not in shapes.differentiable
        ]
        why = None
        if self._output is None:
            why = "heads are traded among ranks (Ulysses), or its kernel's output is not its result"
        elif not all(heads) or not may_split_heads(self._attention):
            why = "its kernel runs for all heads at once"
        elif min(heads) % groups:
            why = f"they do not divide its {min(heads)} key-value heads"
        elif any(leaf.dim() == 4 and leaf.shape[1] > 1 for leaf in others):
            why = "its mask differs among heads"
        if why:
            name = type(self._tiled.module).__name__
            self._remat.warn(f"memo.head_groups: {groups} groups are not used in the backward of {name}'s attention: {why}")
            return [Heads(0, 1)]
        return [Heads(number, groups) for number in range(groups)]

    def _heads_backward(
        self, sums: GradientSums, gathered: Gathered, d_hidden: torch.Tensor, d_inputs: list[torch.Tensor]
    ) -> None:
        """Run the backward of what comes before attention: add to `d_hidden` and `d_inputs`."""
        for tile in reversed(self._tiles):
            self._engine.bring_back(tile.call.frame)
            tile.call.frame.first_only = False
            d_x, *d_others = self._head_backward(sums, tile, gathered)
            if d_x is not None:
                part(d_hidden, tile.span, 1).add_(d_x)
            self._arguments.add(d_inputs, tile.span, d_others)

    def _head_backward(self, sums: GradientSums, tile: Tile, gathered: Gathered) -> tuple[torch.Tensor | None, ...]:
        """Return the gradients of a tile's hidden states and of other inputs, by what comes before attention."""
        x, shapes = tile.hidden(), self._shapes
        args, kwargs, _ = self._arguments.tile(x, tile.span)
        with torch.enable_grad(), self._seeded(tile.seed), Replay(tile.up_to_attention):
            reached = run_to_attention(self._forward, args, kwargs, self._shapes.sdpa)
        indices = [index for index in shapes.differentiable if shapes.arguments[index] is not None]
        gradients = [part(gathered.leaves[index], tile.span, shapes.arguments[index]) for index in indices]
        outputs = [reached.leaves[index] for index in indices]
        return sums.backward(outputs, gradients, [x, *self._arguments.inputs(args, kwargs)])

    # ---- around tiles

    def _run_attention(self, gathered: Gathered, leaves: list[Any]) -> Any:
        return self._remat.with_kernel(self._tiled.layer, gathered.call.run, leaves)

    @contextmanager
    def _seeded(self, seed: int | None) -> Iterator[None]:
        """Draw random numbers from a seed inside the block, if the layer draws any."""
        if seed is None:
            yield
            return
        with forked(self._engine.device):
            torch.manual_seed(seed % (1 << 63))
            yield


def _remember(table: dict[Any, Any], key: Any, value: Any) -> None:
    """Keep a value for later calls. The number is limited, because lengths may never repeat."""
    if len(table) >= _REMEMBERED:
        del table[next(iter(table))]
    table[key] = value


def _lie_alike(shape: Sequence[int], one: Sequence[int], other: Sequence[int]) -> bool:
    """Return True if two strides are the same for a shape."""
    return all(a == b for size, a, b in zip(shape, one, other, strict=True) if size > 1)


def _in_order_of(kept: Kept, tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor that lies in memory as `kept` says: itself, or a copy."""
    if _lie_alike(tensor.shape, tensor.stride(), kept.stride):
        return tensor
    return torch.empty_strided(kept.shape, kept.stride, dtype=kept.dtype, device=tensor.device).copy_(tensor)


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
