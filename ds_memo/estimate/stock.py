"""Memory and time of a step of training without ds_memo, by method."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from ds_memo.estimate.costs import Costs
from ds_memo.estimate.methods import LOGIT_BYTES, by_part, gathered_bytes, timed
from ds_memo.estimate.question import OK, OOHM, OOM, Estimate, Question
from ds_memo.placement import ON_DEVICE
from ds_memo.solve.run_costs import LayerCosts, RunCosts
from ds_memo.units import GIB

TILED_UNITS = 12.1
"""Most that a layer's backward takes with DeepSpeed's TiledMLP, in hidden states: Llama-3-8B's width, by the emulator
(docs/benchmarks.md). A layer that takes less whole is taken for no more."""


@dataclass(frozen=True)
class Checkpointing:
    """A way to checkpoint every layer. Which way a published run took is in benchmarks/paper/published_runs.json."""

    inputs: int | None = None
    """Layer inputs on the device at once, where they go to the host; None: all of them, and none goes."""
    waits: bool = False
    """Compute waits for their copies: ALST's, and those of Transformers' `offload`, which run on its stream."""
    tiled_mlp: bool = False
    """DeepSpeed's TiledMLP, which runs the MLP once more."""
    whole_logits: bool = True
    """False: the loss is computed in chunks of tokens."""

    def layer(self, layer: LayerCosts, costs: Costs) -> LayerCosts:
        """Return what a checkpointed layer takes."""
        again_s, backward_s = layer.replay_s + layer.gemm_s + layer.attention_s, layer.backward_s
        waits = costs.hidden_bytes if self.waits else 0
        if self.tiled_mlp:  # the MLP is all that follows attention's projection; its weights' gradients are summed in bf16
            gemms = (output.born for output in layer.outputs if output.role == "gemm")
            projected = next((born for born in gemms if born > layer.outputs[-1].born / 3), 1.0)  # 1: no product follows
            sums = math.ceil(costs.tokens / costs.model.hidden) * 6 * costs.model.layer_trained
            rate = costs.hardware.device_bandwidth * costs.hardware.device_bandwidth_efficiency
            backward_s += (1 - projected) * layer.forward_s + sums / rate
        return replace(
            layer,
            outputs=(),
            forward_s=layer.forward_s + waits / costs.hardware.d2h,
            backward_s=backward_s,
            replay_s=max(again_s, costs.gather_s) + waits / costs.h2d,
            gemm_s=0.0,
        )

    def device_bytes(self, costs: Costs) -> dict[str, float]:
        """Return the bytes of a GPU by part, without the model's states."""
        layers, hidden = costs.layers(), costs.hidden_bytes
        whole = max(max(layer.working.forward, layer.working_without_attention.backward) for layer in layers)
        return {
            "inputs of layers": hidden * (len(layers) if self.inputs is None else self.inputs),
            "gathered parameters": gathered_bytes(costs),
            "transients": max(0, min(whole, TILED_UNITS * hidden) if self.tiled_mlp else whole),
            "logits": costs.tokens * costs.model.vocab * LOGIT_BYTES if self.whole_logits else 0.0,
        }


CHECKPOINTING = {
    "full_recompute": Checkpointing(),
    "checkpoint": Checkpointing(whole_logits=False),
    "alst": Checkpointing(inputs=1, waits=True, tiled_mlp=True, whole_logits=False),
    "trl": Checkpointing(inputs=4, waits=True, whole_logits=False),
}


def stock(question: Question, costs: Costs) -> Estimate:
    """Estimate a step of training without ds_memo."""
    layers, way, host_bytes = costs.layers(), CHECKPOINTING.get(question.method), 0.0
    if way is not None:
        working = way.device_bytes(costs)
        if way.inputs is not None:
            host_bytes = costs.hidden_bytes * len(layers) * question.ranks_on_node
        layers = tuple(way.layer(layer, costs) for layer in layers)
    else:
        transients = max(layer.working.backward + layer.frame_bytes - layer.no_recompute_bytes for layer in layers)
        working = {
            "activations of all layers": float(sum(layer.no_recompute_bytes for layer in layers)),
            "gathered parameters": gathered_bytes(costs),
            "transients": max(0, transients),
            "logits": costs.tokens * costs.model.vocab * LOGIT_BYTES,
        }
        layers = tuple(replace(layer, outputs=(), replay_s=0.0, gemm_s=0.0) for layer in layers)
    parts, device = by_part(question, costs, working), question.hardware.device_memory
    binding = f"device memory: {sum(parts.values()) / GIB:.1f} of {device / GIB:.1f} GiB"
    answer = Estimate(question, costs.layout, OOM, binding, parts, host_bytes)
    if answer.device_total > device:
        return answer
    if host_bytes > question.host_bytes:
        why = f"host memory: inputs of layers take {host_bytes / GIB:.4g} of {question.host_bytes / GIB:.4g} GiB of the node"
        return replace(answer, status=OOHM, binding=f"{why}. What helps: more GPUs on as many more nodes.")
    run = RunCosts(layers, question.hardware.d2h, costs.h2d, host_budget=0, device_budget=0, head_s=costs.head_s)
    placements, resident = (ON_DEVICE,) * len(layers), 0 if way is not None else len(layers)
    return timed(replace(answer, status=OK, run=run, placements=placements, resident_layers=resident), costs)
