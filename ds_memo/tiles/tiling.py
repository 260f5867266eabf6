"""Which layers of a model run in tiles, and why the others do not."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from ds_memo.placement import FULL_RECOMPUTE, Placement, Tiles
from ds_memo.remat.checkpoint import CannotTile, Layer, Remat
from ds_memo.remat.modes import running_tiles
from ds_memo.remat.undo import Undoing
from ds_memo.spans import number_of_spans, spans
from ds_memo.tiles.around import generators, set_generators
from ds_memo.tiles.layer import TiledCall, TiledLayer
from ds_memo.tiles.probe import LEAST_TOKENS, probe, refuse_call
from ds_memo.tiles.slices import Arguments, hidden_states


class Tiling:
    """Runs the layers of one attached model in tiles, where their placements say so and it can be.

    Args:
        tiles: of calls without gradients, until one with gradients has run in tiles. None: they run whole.
    """

    def __init__(self, tiles: Tiles | None = None) -> None:
        self.without_gradients = tiles
        """Tiles of calls without gradients: those of the latest call with gradients that was placed in tiles."""
        self._latest: Tiles | None = None
        """None: no placement has asked for tiles."""
        self._layers: weakref.WeakKeyDictionary[nn.Module, dict[Any, TiledLayer | None]] = weakref.WeakKeyDictionary()
        """By layer and kind of call; None: such a call is no chain of token-wise parts and one attention call."""
        self._refusals: dict[str, str] = {}
        """Why a layer's latest call that could not be tiled could not, by the layer's name."""

    def report(self) -> dict[str, Any] | None:
        """Return what ``report()["tiles"]`` shows; None: no layer was asked to run in tiles."""
        if self._latest is None:
            return None
        tiled = {found.layer.index for kinds in self._layers.values() for found in kinds.values() if found is not None}
        refusals = dict(self._refusals)
        return {**self._latest._asdict(), "layers": sorted(tiled), "not_tiled": refusals}

    @property
    def result_differs(self) -> bool:
        """True if the result of any layer's attention is not its kernel's output."""
        return any(found.result_differs for kinds in self._layers.values() for found in kinds.values() if found is not None)

    def prepare(
        self, remat: Remat, layer: Layer, fn: Callable[..., Any], args: tuple, kwargs: dict[str, Any], placement: Placement | None
    ) -> Callable[[], Any] | None:
        """Return a function that runs a layer call in tiles; None: it is one tile, or cannot. See `remat.checkpoint.Tiler`."""
        tiles = self.without_gradients if placement is None else placement.tiles
        if tiles is None:
            return None
        self._latest = self.without_gradients = tiles
        call = LayerCall(fn, layer.module(), args, kwargs)
        hidden = hidden_states(call.args, call.kwargs)
        if call.module is None or _is_one_tile(hidden, tiles.tokens):
            return None
        try:
            refuse_call(call.module, call.args, call.kwargs)
        except CannotTile as reason:
            self._refuse(remat, layer, call.module, reason)
            return None
        arguments, kinds = Arguments(call.args, call.kwargs), self._layers.setdefault(call.module, {})
        kind = arguments.kind(), call.module.training
        if placement is None:
            trained = kind[0], True
            kind = trained if trained in kinds else kind
        if kind not in kinds:
            kinds[kind] = None
            try:
                if placement is None and (others := arguments.others):
                    raise CannotTile(f"it gets a {others[0]}, which a check would change. For an evaluation pass use_cache=False")
                with remat.aside(), torch.inference_mode(False), running_tiles():
                    shapes = probe(call.module, call.forward, call.args, call.kwargs)
                kinds[kind] = TiledLayer(layer, call.module, shapes)
            except CannotTile as reason:
                self._refuse(remat, layer, call.module, reason)
        tiled = kinds[kind]
        if tiled is None or (placement is None and tiled.shapes.draws and any(part.training for part in call.module.modules())):
            return None  # whole layers draw random numbers as the model does without memo
        placed = placement or replace(FULL_RECOMPUTE, tiles=tiles)

        def in_tiles(*args: Any, **kwargs: Any) -> Any:
            hidden = hidden_states(args, kwargs)
            cut = spans(hidden.shape[0], hidden.shape[1], tiles.tokens)
            return TiledCall(tiled, call.forward, args, kwargs, cut, placed, remat).run()

        device = remat.engine.device
        states = None if placement is None or tiled.attention_recipes else generators(device)

        def run() -> Any:
            try:
                out = call.run(in_tiles)
                self._refusals.pop(layer.name, None)
                return out
            except CannotTile as reason:
                set_generators(states, device)
                kinds[kind] = None
                self._refuse(remat, layer, call.module, reason)
                raise

        return run

    def _refuse(self, remat: Remat, layer: Layer, module: nn.Module, reason: CannotTile) -> None:
        self._refusals[layer.name] = str(reason)
        remat.warn(f"{type(module).__name__} runs whole, not in tiles of memo.tile_tokens: {reason}")


def _is_one_tile(hidden: Any, tile_tokens: int) -> bool:
    """Return True for hidden states that are no longer than a tile, or too short to be cut."""
    if not isinstance(hidden, torch.Tensor) or hidden.dim() != 3:
        return False  # it will be refused
    return (
        hidden.shape[1] < LEAST_TOKENS
        or not hidden.numel()
        or number_of_spans(hidden.shape[0], hidden.shape[1], tile_tokens) == 1
    )


class LayerCall:
    """A call that came to memo: of a layer's forward, or of the layer with its hooks.

    Args:
        fn: a method of `module`, bound to it or with it as its first argument, and keywords bound or not.
        module: the layer.
    """

    def __init__(self, fn: Callable[..., Any], module: nn.Module | None, args: tuple, kwargs: dict[str, Any]) -> None:
        self._fn, self._args, self._kwargs = fn, args, kwargs
        called = functools.partial(fn, *args, **kwargs)  # partials of partials are one
        function: Any = called.func
        self.args, self.kwargs = called.args, called.keywords
        self.module: nn.Module | None = module
        """None: it is no method of the layer."""
        self.forward: Callable[..., Any] = function
        """The layer's own."""
        self._with_hooks = False
        if called.args and called.args[0] is module:
            self.args = called.args[1:]
            self.forward = functools.partial(function, module)
        elif function is module or getattr(function, "__self__", None) is module:
            self._with_hooks = module is not None and getattr(function, "__name__", "") != "forward"
            if self._with_hooks:
                forward: Any = module.forward  # type: ignore[union-attr]
                self.forward = getattr(forward, "plain", forward)  # what memo has put in its place would come back here
        else:
            self.module = None

    def run(self, forward: Callable[..., Any]) -> Any:
        """Run the call with another forward."""
        if not self._with_hooks:
            return forward(*self.args, **self.kwargs)
        module: Any = self.module
        own = vars(module).get("forward")

        def put_back() -> None:
            vars(module).pop("forward", None)
            if own is not None:
                module.forward = own

        with Undoing(put_back):
            module.forward = forward
            return self._fn(*self._args, **self._kwargs)
