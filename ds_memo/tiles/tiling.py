"""Which layers of a model run in tiles, and why the others do not."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from ds_memo.placement import Placement
from ds_memo.remat.checkpoint import CannotTile, Layer, Remat
from ds_memo.tiles.layer import TiledCall, TiledLayer
from ds_memo.tiles.probe import probe
from ds_memo.tiles.spans import Span, hidden_states, spans


class Tiling:
    """Runs the layers of one attached model in tiles, where they can be.

    Args:
        tile_tokens: tokens of a tile, at most.
        head_groups: groups of key-value heads in attention's backward.
    """

    def __init__(self, tile_tokens: int, head_groups: int) -> None:
        self.tile_tokens = tile_tokens
        self.head_groups = head_groups
        self._layers: weakref.WeakKeyDictionary[nn.Module, TiledLayer | str] = weakref.WeakKeyDictionary()
        """Layers that are tiled, and of the others why not."""
        self._names: weakref.WeakKeyDictionary[nn.Module, str] = weakref.WeakKeyDictionary()

    def report(self) -> dict[str, Any]:
        """Return what ``report()["tiles"]`` shows."""
        reasons = {self._names[module]: found for module, found in self._layers.items() if isinstance(found, str)}
        tiled = sorted(found.layer.index for found in self._layers.values() if isinstance(found, TiledLayer))
        return {"tokens": self.tile_tokens, "head_groups": self.head_groups, "layers": tiled, "not_tiled": reasons}

    def prepare(
        self, remat: Remat, layer: Layer, fn: Callable[..., Any], args: tuple, kwargs: dict[str, Any], placement: Placement
    ) -> Callable[[], Any] | None:
        """Return a function that runs a layer call in tiles; None: it is one tile, or cannot. See `remat.checkpoint.Tiler`."""
        call = LayerCall(fn, layer.module(), args, kwargs)
        if call.module is None or placement.kind.recomputes_attention or len(self._spans(call.args, call.kwargs)) == 1:
            return None
        tiled = self._layers.get(call.module)
        if tiled is None:
            tiled = self._layers[call.module] = self._probed(remat, layer, call)
        if isinstance(tiled, str):
            return None

        def in_tiles(*args: Any, **kwargs: Any) -> Any:
            return TiledCall(tiled, call.forward, args, kwargs, self._spans(args, kwargs), placement, remat).run()

        def run() -> Any:
            try:
                return call.run(in_tiles)
            except CannotTile as reason:
                self._layers[call.module] = self._refused(remat, call.module, reason)
                raise

        return run

    def _probed(self, remat: Remat, layer: Layer, call: LayerCall) -> TiledLayer | str:
        self._names[call.module] = layer.name
        try:
            return TiledLayer(layer, call.module, probe(call.module, call.forward, call.args, call.kwargs), self.head_groups)
        except CannotTile as reason:
            return self._refused(remat, call.module, reason)

    def _refused(self, remat: Remat, module: nn.Module, reason: CannotTile) -> str:
        remat.warn(f"{type(module).__name__} runs whole, not in tiles of memo.tile_tokens: {reason}")
        return str(reason)

    def _spans(self, args: tuple, kwargs: dict[str, Any]) -> list[Span]:
        hidden = hidden_states(args, kwargs)
        if not isinstance(hidden, torch.Tensor) or hidden.dim() != 3 or not hidden.numel():
            return [Span(slice(0, 1), slice(0, 1))]
        return spans(hidden.shape[0], hidden.shape[1], self.tile_tokens)


class LayerCall:
    """A call that came to memo: of a layer's forward, or of the layer with its hooks.

    Args:
        fn: a method of `module`, bound to it or with it as its first argument, and keywords bound or not.
        module: the layer.
    """

    def __init__(self, fn: Callable[..., Any], module: nn.Module | None, args: tuple, kwargs: dict[str, Any]) -> None:
        self._fn, self._args, self._kwargs = fn, args, kwargs
        called = functools.partial(fn, *args, **kwargs)  # partials of partials are one
        self.args, self.kwargs = called.args, called.keywords
        self.forward: Callable[..., Any] = called.func
        """The layer's own."""
        if called.args and called.args[0] is module:
            self.args = called.args[1:]
            self.forward = functools.partial(called.func, module)
        elif getattr(called.func, "__self__", None) is not module:
            module = None
        self.module = module
        """None: it is no method of the layer."""
        self._with_hooks = module is not None and called.func.__name__ != "forward" and called.func.__name__.endswith("call_impl")
        if self._with_hooks:
            self.forward = module.forward

    def run(self, forward: Callable[..., Any]) -> Any:
        """Run the call with another forward."""
        if not self._with_hooks:
            return forward(*self.args, **self.kwargs)
        own = vars(self.module).get("forward")
        self.module.forward = forward
        try:
            return self._fn(*self._args, **self._kwargs)
        finally:
            if own is None:
                del self.module.forward
            else:
                self.module.forward = own
