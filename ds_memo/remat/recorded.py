"""Run a layer call so that it can be replayed: torch's non-reentrant checkpoint, with our two modes as its contexts."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.checkpoint import _checkpoint_without_reentrant_generator, _StopRecomputationError

from ds_memo.remat.analyse import Analyse
from ds_memo.remat.call import Call
from ds_memo.remat.inputs import DeviceInput, Lifted, analysing_pack, lift_keywords, recording_pack, unpack
from ds_memo.remat.layer import Layer
from ds_memo.remat.layer_call import LayerCall
from ds_memo.remat.layer_host import LayerHost, Way
from ds_memo.remat.layer_state import TOO_LARGE, tensors_of
from ds_memo.remat.random_states import from_current_states
from ds_memo.remat.recipe import Observed, make_recipe
from ds_memo.remat.record import Record
from ds_memo.remat.replay import Replay
from ds_memo.remat.replay_check import ReplayCheck
from ds_memo.remat.tensors import tensor_leaves


class Recorded:
    """Runs calls by their layer's recipes, and analyses those of a new signature."""

    def refusal(self, call: LayerCall, host: LayerHost) -> str | None:
        return None

    def run(self, call: LayerCall, host: LayerHost) -> Any:
        return host.observed(call.layer, functools.partial(_run, call, host))


def _run(call: LayerCall, host: LayerHost) -> Any:
    layer, placement, engine = call.layer, call.placement, host.engine
    lifted = lift_keywords(call.forward, call.args, call.kwargs)
    key = layer.signature(lifted.args, placement) if layer.module() is not None else None
    recipe = layer.recipes.get(key) if layer.follows_recipes else None
    if recipe is not None:
        host_bytes = recipe.layout.host_bytes
        placement = host.admit(layer, placement, Way.RECORDED, lambda _: host_bytes)
        if placement is not call.placement:
            key = layer.signature(lifted.args, placement)
            recipe = layer.recipes.get(key)
    frame = engine.begin(layer.name, placement)
    record = Call(host, frame, recipe, layer)
    fn: Callable[..., Any] = functools.partial(host.with_kernel, layer, lifted.fn)
    replay: Callable[..., Any] = functools.partial(host.with_kernel, layer, lifted.replay)
    if layer.state is not None:
        learns = recipe is None and layer.follows_recipes
        record.before = layer.state.before(learns)
        if learns:
            record.check = ReplayCheck(functools.partial(host.warn_of, layer))
            replay = record.check.around(replay)
        replay = record.before.around(replay)
    lifted = lifted._replace(fn=fn, replay=replay)
    nested = [value for value in lifted.args if not isinstance(value, torch.Tensor)]
    record.device_inputs = [DeviceInput(layer.name, tensor) for tensor in tensor_leaves((nested, lifted.bound))]
    givens = functools.partial(_givens, layer, (lifted.args, lifted.bound))
    observed = Observed() if recipe is None else None
    mode: Analyse | Record
    if observed is not None:
        host.work.analysed += key is not None and layer.follows_recipes
        mode, pack = Analyse(record, observed, givens()), analysing_pack(record, observed)
    else:
        layer.latest = recipe
        mode, pack = Record(record, givens, layer.left_recipe), recording_pack(record)
    try:
        if recipe is not None:
            engine.adopt(frame, recipe.layout)
        # These hooks see the layer's inputs only: inside, torch's checkpoint puts its own on top.
        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            out = _checkpoint(lifted, call.preserve_rng_state, lambda: (mode, Replay(record)))
        if observed is not None:
            if record.before is not None:
                for name in record.before.learn():
                    host.warn_of(layer, TOO_LARGE.format(name))
            _make_recipe(layer, key, record, observed, host)
        if mode.packs:
            host.work.gemm_flops += record.recipe.gemm_flops
            engine.end(frame)
    finally:
        if observed is not None:
            observed.forget()  # the graph's hooks refer to the mode, which would keep every output
        if frame.state == "recording":  # the layer raised, or no backward will ask for it
            engine.abort(frame)
    if record.recipe is recipe:
        layer.times_left = 0
    if frame.device or record.loose:
        for tensor in tensor_leaves(out):  # the caller may change it in place
            record.about_to_change(tensor)
    return out


def _make_recipe(layer: Layer, key: Any, record: Call, observed: Observed, host: LayerHost) -> None:
    """Make the recipe of a call that was analysed, and keep its tensors by it."""
    frame = record.frame
    placement = frame.placement
    observed.note_hidden_writes()
    if placement.kind.recomputes_attention:
        observed.recompute_attention()
    observed.close_over_inputs(all_rows_kept=placement.alpha == 1.0)
    made: Callable[[float], Any] = functools.cache(functools.partial(make_recipe, observed))
    if observed.packs:
        frame.placement = host.admit(
            layer, placement, Way.RECORDED, lambda placed: made(placed.decided_alpha)[0].layout.host_bytes, observed.sizes()
        )
    if frame.placement.kind is not placement.kind:  # in this call alone: the next one is analysed
        key = None
        observed.recompute_attention()
        observed.close_over_inputs(all_rows_kept=False)
        made = functools.partial(make_recipe, observed)
    recipe, tensors = made(frame.placement.decided_alpha if observed.packs else 0.0)
    record.recipe = layer.latest = recipe
    if key is not None:
        layer.remember(key, recipe)
    host.diagnose(layer, recipe)
    if recipe.packs:
        record.keep_observed(observed, tensors)


def _checkpoint(lifted: Lifted, preserve_rng_state: bool, context_fn: Callable[[], tuple]) -> Any:
    """Do what torch.utils.checkpoint.checkpoint(use_reentrant=False) does, through the generator beneath it.

    torch.distributed._composable does the same. Up to torch 2.11 the public function does not leave the forward's contexts when
    `fn` raises, until the traceback is dropped.
    """
    replay = functools.partial(_until_stopped, from_current_states(lifted.replay) if preserve_rng_state else lifted.replay)
    generator = _checkpoint_without_reentrant_generator(
        replay, preserve_rng_state, context_fn, "default", False, True, *lifted.args
    )
    try:
        next(generator)
        out = lifted.fn(*lifted.args)
        next(generator, None)  # leaves the contexts
    finally:
        generator.close()
    return out


def _until_stopped(replay: Callable[..., Any], *args: Any) -> Any:
    """Call ``replay(*args)``, and turn TorchScript's RuntimeError back into torch's _StopRecomputationError.

    torch raises that when the last saved tensor is recomputed. TorchScript replaces it inside a scripted function, such as
    Megatron's bias_dropout_add at the end of its layers.
    """
    pack, unpack = torch._C._autograd._top_saved_tensors_default_hooks(False)
    stopped = False

    def watched_pack(tensor: torch.Tensor) -> Any:
        nonlocal stopped
        try:
            return pack(tensor)
        except _StopRecomputationError:
            stopped = True
            raise

    with torch.autograd.graph.saved_tensors_hooks(watched_pack, unpack):
        try:
            return replay(*args)
        except RuntimeError:
            if stopped:
                raise _StopRecomputationError from None
            raise


def _givens(layer: Layer, arguments: Any) -> list[torch.Tensor]:
    """Return the tensors that exist before a layer call: what the layer holds, and the arguments."""
    module = layer.module()
    return [*(tensors_of(module) if module is not None else ()), *tensor_leaves(arguments)]
