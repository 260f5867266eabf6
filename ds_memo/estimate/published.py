"""The methods that ds_memo is compared with: stock training, full recomputation, full swapping, and MEMO as published."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from ds_memo.estimate.costs import Costs
from ds_memo.estimate.parts import (
    FUSED_LOGIT_BYTES,
    LOGIT_BYTES,
    by_part,
    device_use,
    gathered_bytes,
    pinned_bytes,
    state_bytes,
    timed,
    without_budgets,
)
from ds_memo.estimate.question import OK, OOHM, OOM, Estimate, Question
from ds_memo.placement import ON_DEVICE, Placement, PlacementKind
from ds_memo.solve.costs import LayerCosts
from ds_memo.solve.paper import paper_alpha
from ds_memo.units import GIB


def published(question: Question, costs: Costs) -> Estimate:
    """Estimate one of the paper's methods. MEMO falls back to stock, unplanned training if that fits and no alpha is given."""
    model, method = question.model, question.method
    if method == "paper" and question.alpha is None:
        stock = published(replace(question, method="none", plan=False), costs)
        if stock.status == OK:
            return replace(stock, question=question, alpha=1.0, binding=f"everything fits without swapping: {stock.binding}")
    states, layers = state_bytes(costs), costs.layers(Costs.paper_layer)
    skeletal = costs.skeletal_bytes
    activations: dict[str, dict[str, float]] = {
        "none": {"activations of all layers": sum(layer.no_recompute_bytes for layer in layers)},
        "full_recompute": {"inputs of all layers": model.layers * costs.hidden_bytes, "one layer's activations": skeletal},
    }
    working = activations.get(method, {"rounding buffers": 2 * skeletal}) | {
        "gathered parameters": gathered_bytes(costs),
        "transients": costs.transient_bytes,
        "logits": costs.tokens * model.vocab * (FUSED_LOGIT_BYTES if costs.megatron else LOGIT_BYTES),
    }
    parts = by_part(question, states, working)
    answer = Estimate(question, costs.layout, OOM, device_use(question, parts), parts, 0.0)
    if sum(parts.values()) > question.hardware.device_memory:
        return answer
    if method in ("none", "full_recompute"):
        return timed(_without_copies(answer, costs, layers), costs)
    answer = _swapping(answer, costs, layers)
    return answer if answer.status == OOHM else timed(answer, costs)


def _without_copies(answer: Estimate, costs: Costs, layers: tuple[LayerCosts, ...]) -> Estimate:
    """Return the answer without swapping. Under full recomputation each backward begins with the layer's forward, which torch's
    checkpointing stops once it has all it needs."""
    recomputes = answer.question.method == "full_recompute"

    def again(layer: LayerCosts) -> float:
        return layer.forward_s if costs.megatron else max(layer.gemm_s + layer.attention_s, costs.gather_s)

    run = without_budgets(costs, layers).each(
        lambda layer: replace(layer, outputs=(), replay_s=again(layer) if recomputes else 0.0, gemm_s=0.0)
    )
    placements = (ON_DEVICE,) * len(layers)
    return replace(answer, status=OK, run=run, placements=placements, resident_layers=0 if recomputes else len(layers))


def _swapping(answer: Estimate, costs: Costs, layers: tuple[LayerCosts, ...]) -> Estimate:
    """Return the answer where all layers but the last two go to the host."""
    question, layer, n = answer.question, costs.paper_layer(), len(layers)
    swapped = max(0, n - 2)
    alpha = 1.0 if question.method == "full_swap" else question.alpha
    binding, host_bound, hides = answer.binding, False, False
    if alpha is None:
        alpha, host_bound, hides = _papers_alpha(question, layer, swapped)
    host = _pinned(layer, alpha) * swapped * question.ranks_on_node
    use = f"host memory: {host / GIB:.0f} of {question.host_bytes / GIB:.0f} GiB of the node at alpha {alpha:g}"
    if host > question.host_bytes:
        return replace(answer, status=OOHM, binding=f"{use}, pinned blocks rounded up to powers of two", host_bytes=host)
    if host_bound:
        binding = use
    elif hides:
        binding = f"link: at alpha {alpha:g} a layer's copy takes as long as its forward"
    run, residents = without_budgets(costs, layers), (ON_DEVICE,) * (n - swapped)
    placements = (Placement(PlacementKind.SWAPPED, alpha),) * swapped + residents
    more: dict[str, Any] = {"alpha": alpha, "resident_layers": len(residents), "run": run, "placements": placements}
    return replace(answer, status=OK, binding=binding, host_bytes=host, **more)


def _papers_alpha(question: Question, layer: LayerCosts, swapped: int) -> tuple[float, bool, bool]:
    """Return the alpha of the paper's program with its pinned blocks, and True if the host, then if the link, bounds it."""
    link = paper_alpha(
        input_bytes=layer.nbytes("input"),
        attention_bytes=layer.attention_bytes,
        other_bytes=layer.split_bytes,
        bandwidth=min(question.hardware.d2h, question.hardware.h2d) * question.hardware.quiet_link,
        layer_forward_s=layer.forward_s,
        layers=swapped + 2,
        host_bytes=math.inf,
    )
    link = link or 0.0
    block = int(question.host_bytes / max(1, swapped * question.ranks_on_node))
    largest = 1 << max(0, block.bit_length() - 1)  # a power of two
    host = max(0.0, (largest - layer.whole_bytes) / layer.split_bytes)
    return min(link, host), host < link, link <= host and link < 1


def _pinned(layer: LayerCosts, alpha: float) -> int:
    """Return the host bytes of a layer's block."""
    return pinned_bytes(layer.whole_bytes + alpha * layer.split_bytes)
