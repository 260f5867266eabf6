"""Remat: send each layer call to the first runner that can run it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import torch
from torch.nn.utils import parametrize

from ds_memo.errors import MemoError
from ds_memo.remat.layer import Layer
from ds_memo.remat.layer_call import CannotRun, LayerCall, LayerRunner, OwnForward, Tiler
from ds_memo.remat.layer_host import LayerHost
from ds_memo.remat.modes import inside_a_checkpoint, inside_a_layer, inside_a_transform, keep_dynamo_out
from ds_memo.remat.recorded import Recorded
from ds_memo.remat.uncheckpointed import Uncheckpointed
from ds_memo.remat.undo import changed, stacks_restored

UNCOMPILED = "it {}, so it runs uncompiled, with the same memory and results"

LayerRun = Callable[[Layer, Callable[..., Any], tuple, dict[str, Any]], Any]
"""Runs ``fn(*args, **kwargs)`` as a layer."""


class Remat:
    """Runs the layers of one attached model.

    Args:
        host: what its runners may use.
        tiler: runs calls in tiles; None: layers run whole.
    """

    def __init__(self, host: LayerHost, tiler: Tiler | None = None) -> None:
        keep_dynamo_out()
        self.host, self.engine, self.work = host, host.engine, host.work
        runners: tuple[LayerRunner, ...] = (Uncheckpointed(), Recorded())
        self._tiler = tiler
        self._runners = runners if tiler is None else (tiler, *runners)
        self._instead: LayerRun | None = None

    def run(self, layer: Layer, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Call ``fn(*args, **kwargs)`` and keep what its backward needs, as the policy says.

        Without gradients nothing is kept. Inside another layer's run, just call it.
        """
        return self.run_with(layer, fn, args, kwargs)

    def run_with(
        self, layer: Layer, fn: Callable[..., Any], args: tuple, kwargs: dict[str, Any], preserve_rng_state: bool = True
    ) -> Any:
        """Do the same as :meth:`run`.

        Args:
            preserve_rng_state: True if the replay must draw the same random numbers as the forward.
        """
        if self._instead is not None:
            return self._instead(layer, fn, args, kwargs)
        if inside_a_layer():
            return fn(*args, **kwargs)
        if not torch.is_grad_enabled():
            with stacks_restored():
                return self._run(LayerCall(layer, fn, args, kwargs, grads=False))
        if inside_a_checkpoint():  # it runs the layer twice whatever is kept, and both runs must be the same
            self.host.warn(
                "the model calls torch.utils.checkpoint, or its own, around its layers, so they are recomputed and ds_memo has "
                "no part in it. Leave that checkpoint out, or call ds_memo.checkpoint or deepspeed.checkpointing.checkpoint"
            )
            return fn(*args, **kwargs)
        if inside_a_transform():
            self.host.warn(
                "the model runs inside torch.func (vmap, jvp, grad), a trace or FakeTensorMode, whose tensors no copy can reach. "
                "It goes on there as without ds_memo: autograd keeps what its layers save"
            )
            return fn(*args, **kwargs)
        if parametrize._cache_enabled:
            _refuse_cached_parameters(layer)
        with stacks_restored():
            placement = self.host.policy.placement(layer)
            return self._run(LayerCall(layer, fn, args, kwargs, placement, preserve_rng_state=preserve_rng_state))

    def instead(self, run: LayerRun) -> AbstractContextManager[None]:
        """Send every layer call inside the block to `run`."""
        return changed(self, "_instead", run)

    def _run(self, call: LayerCall) -> Any:
        own = call.forward if isinstance(call.forward, OwnForward) and call.recomputes else None
        for runner in self._runners if own is None else (own, *self._runners):
            why = runner.refusal(call, self.host)
            if why is None:
                try:
                    out = runner.run(call, self.host)
                except CannotRun as reason:
                    why = str(reason)  # no traceback, which holds the arguments
                else:
                    tiles = call.placement.tiles
                    if tiles is not None and tiles.input_every > 1 and self._tiler not in (None, runner):
                        self._tiler.ran_whole(call, out, self.host)
                    return out
            if runner is own:
                out = self._run(replace(call, forward=own.plain))
                own.refuse(call.layer, why)  # not earlier: the layer's own errors are raised
                self.host.warn_of(call.layer, UNCOMPILED.format(why))
                return out
        raise AssertionError("Recorded refuses no call")


def _refuse_cached_parameters(layer: Layer) -> None:
    """Raise MemoError for a layer with parametrized weights: whether a replay finds one cached decides what autograd saves, and a
    tile leaves one without a graph in the cache."""
    module = layer.module()
    named = () if module is None else module.named_modules()
    if (name := next((name for name, part in named if parametrize.is_parametrized(part)), None)) is not None:
        raise MemoError(
            f"layer {layer.name}: weights of {name or 'it'} are parametrized, and it was called under "
            "torch.nn.utils.parametrize.cached(). A backward runs the layer again and computes them anew: leave cached() out of "
            "training"
        )
