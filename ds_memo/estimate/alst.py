"""ALST's recipe (Arctic Long Sequence Training, arXiv 2506.13996): checkpointing with layer inputs on the host, DeepSpeed's
TiledMLP, norms of one kernel, a tiled loss. The benchmarks' rival `alst` is the same without the loss."""

from __future__ import annotations

from dataclasses import replace

from ds_memo.estimate.costs import Costs
from ds_memo.estimate.parts import (
    LOGIT_BYTES,
    TILE_TOKENS,
    by_part,
    device_use,
    gathered_bytes,
    pinned_bytes,
    state_bytes,
    timed,
    without_budgets,
)
from ds_memo.estimate.question import OK, OOHM, OOM, Estimate, Question
from ds_memo.placement import ON_DEVICE
from ds_memo.units import GIB


def alst(question: Question, costs: Costs) -> Estimate:
    """Estimate a step. `costs` are of a model with fused norms."""
    layers = costs.layers(Costs.alst_layer)
    working = {
        "gathered parameters": gathered_bytes(costs),
        "logits of a tile": min(costs.tokens, TILE_TOKENS) * costs.model.vocab * LOGIT_BYTES,
        "transients": max(max(layer.working.forward, layer.working.backward) for layer in layers),
    }
    parts = by_part(question, state_bytes(costs), working)
    host = float(pinned_bytes(costs.hidden_bytes) * len(layers) * question.ranks_on_node)
    answer = Estimate(question, costs.layout, OOM, device_use(question, parts), parts, host)
    if sum(parts.values()) > question.hardware.device_memory:
        return answer
    if host > question.host_bytes:
        use = f"host memory: inputs of all layers take {host / GIB:.0f} of {question.host_bytes / GIB:.0f} GiB of the node"
        return replace(answer, status=OOHM, binding=f"{use}, pinned blocks rounded up to powers of two")
    placed = replace(
        answer, status=OK, run=without_budgets(costs, layers), placements=(ON_DEVICE,) * len(layers), resident_layers=0
    )
    return timed(placed, costs)
