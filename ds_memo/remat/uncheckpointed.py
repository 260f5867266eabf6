"""Run a layer call without recompute: autograd saves its own tensors."""

from __future__ import annotations

from functools import partial
from typing import Any

from ds_memo.remat.inputs import lift_keywords
from ds_memo.remat.layer_call import LayerCall
from ds_memo.remat.layer_host import LayerHost


class Uncheckpointed:
    """Runs calls whose placement recomputes nothing, and calls without gradients."""

    def refusal(self, call: LayerCall, host: LayerHost) -> str | None:
        return "" if call.recomputes else None

    def run(self, call: LayerCall, host: LayerHost) -> Any:
        if not call.grads:
            return call.forward(*call.args, **call.kwargs)
        lifted = lift_keywords(call.forward, call.args, call.kwargs)
        forward = partial(host.with_kernel, call.layer, lifted.fn, *lifted.args)
        if not call.placement.empty_frame:
            return forward()
        return host.observed(call.layer, lambda: self._with_empty_frame(call, host, forward))

    @staticmethod
    def _with_empty_frame(call: LayerCall, host: LayerHost, forward: partial[Any]) -> Any:
        """With its empty frame, swapped frames below a call move as below a resident layer."""
        frame = host.engine.begin(call.layer.name, call.placement)
        try:
            out = forward()
        except BaseException:
            host.engine.abort(frame)
            raise
        host.engine.end(frame)
        host.follow_backward(out, frame, partial(host.replay_begins, call.layer, frame))
        return out
