"""Training without ds_memo, to compare with: nothing recomputed, or all of a layer (torch's checkpointing)."""

from __future__ import annotations

from dataclasses import replace

from ds_memo.estimate.costs import Costs
from ds_memo.estimate.parts import LOGIT_BYTES, by_part, device_use, gathered_bytes, state_bytes, timed, without_budgets
from ds_memo.estimate.question import OK, OOM, Estimate, Question
from ds_memo.placement import ON_DEVICE


def stock(question: Question, costs: Costs) -> Estimate:
    """Estimate a step."""
    layers, recomputes = costs.layers(), question.method == "full_recompute"
    if recomputes:
        kept = {"inputs of all layers": costs.hidden_bytes * len(layers)}
        transients = max(max(layer.working.forward, layer.working_without_attention.backward) for layer in layers)
    else:
        kept = {"activations of all layers": float(sum(layer.no_recompute_bytes for layer in layers))}
        transients = max(layer.working.backward + layer.frame_bytes - layer.no_recompute_bytes for layer in layers)
    working = kept | {
        "gathered parameters": gathered_bytes(costs),
        "transients": max(0, transients),
        "logits": costs.tokens * costs.model.vocab * LOGIT_BYTES,
    }
    parts = by_part(question, state_bytes(costs), working)
    answer = Estimate(question, costs.layout, OOM, device_use(question, parts), parts, 0.0)
    if sum(parts.values()) > question.hardware.device_memory:
        return answer
    run = without_budgets(costs, layers).each(
        lambda layer: replace(
            layer,
            outputs=(),
            replay_s=max(layer.replay_s + layer.gemm_s + layer.attention_s, costs.gather_s) if recomputes else 0.0,
            gemm_s=0.0,
        )
    )
    placements = (ON_DEVICE,) * len(layers)
    resident = 0 if recomputes else len(layers)
    return timed(replace(answer, status=OK, run=run, placements=placements, resident_layers=resident), costs)
