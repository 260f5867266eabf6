"""Run a layer call so that it can be replayed: a checkpoint with our two modes as its contexts."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from ds_memo.remat import checkpoint, follower
from ds_memo.remat.analyse import Analyse
from ds_memo.remat.call import Call
from ds_memo.remat.inputs import DeviceInput, Lifted, analysing_pack, lift_keywords, recording_pack
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
    if call.preserve_rng_state:
        replay = from_current_states(replay)
    args, bound = lifted.args, lifted.bound
    lifted = Lifted(fn, replay, args, bound)
    nested = [value for value in args if not isinstance(value, torch.Tensor)]
    record.device_inputs = [DeviceInput(layer.name, tensor) for tensor in tensor_leaves((nested, bound))]
    givens = functools.partial(_givens, layer, (args, bound))
    observed = Observed() if recipe is None else None
    library, mode = None, None
    if observed is not None:
        host.work.analysed += key is not None and layer.follows_recipes
        mode, pack = Analyse(record, observed, givens()), analysing_pack(record, observed)
    else:
        layer.latest = recipe
        library = follower.library() if checkpoint.may_use_cpp(args, engine.device) else None
        mode, pack = Record(record, givens, layer.left_recipe, hooked=library is not None), recording_pack(record)
    try:
        if recipe is not None:
            engine.adopt(frame, recipe.layout)
        begin_replay = functools.partial(Replay, record)
        if library is None:
            out = checkpoint.run_by_torch(lifted, call.preserve_rng_state, pack, mode, begin_replay)
        else:
            out = checkpoint.run_by_cpp(library, lifted, call.preserve_rng_state, engine.device, pack, mode, begin_replay)
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


def _givens(layer: Layer, arguments: Any) -> list[torch.Tensor]:
    """Return the tensors that exist before a layer call: what the layer holds, and the arguments."""
    module = layer.module()
    return [*(tensors_of(module) if module is not None else ()), *tensor_leaves(arguments)]
