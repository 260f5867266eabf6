"""Memory and time of a step, part by part."""

from __future__ import annotations

from dataclasses import replace

from ds_memo.estimate.costs import Costs
from ds_memo.estimate.question import Estimate, Question
from ds_memo.solve.run_costs import LayerCosts, RunCosts
from ds_memo.units import GIB

TILE_TOKENS = 1024
"""Tokens of a tile of ds_memo's tiled loss (launch/loss.py)."""
LOGIT_BYTES = 12
"""Per logit: bf16 and fp32 logits and their gradients."""
CACHE_GROWTH = 12
"""Without a plan, the allocator's cache grows to this many times a step's transient bytes. In the paper's ablation flushes begin
between 64 Ki and 128 Ki tokens, which is between 9 and 19 times."""


def state_bytes(costs: Costs) -> dict[str, float]:
    """Return the device bytes of bf16 parameters, of gradients, and of fp32 weights with two moments."""
    layout, mine = costs.layout, costs.model.parameters / costs.layout.tp
    shards, zero, offloaded = layout.sharded, layout.zero, layout.offload != "none"
    return {
        "parameters": 0.0 if layout.offload == "all" else 2 * mine / (shards if zero >= 3 else 1),
        "gradients": 0.0 if offloaded and zero >= 2 else 2 * mine / (shards if zero >= 2 else 1),
        "optimizer states": 0.0 if offloaded else 12 * mine / (shards if zero >= 1 else 1),
    }


def gathered_bytes(costs: Costs) -> float:
    """Return the bytes that ZeRO-3 gathers: a layer's parameters, and the next one's. Gradients are in a layer's own peak."""
    return 2 * 2 * costs.model.layer_parameters / costs.layout.tp if costs.layout.zero == 3 else 0.0


def by_part(question: Question, states: dict[str, float], working: dict[str, float]) -> dict[str, float]:
    fragmentation = 0.0 if question.planned else (question.hardware.fragmentation - 1) * sum(working.values())
    context = {"context and communication": question.hardware.device_reserve}
    parts = states | working | ({"fragmentation": fragmentation} if fragmentation else {}) | context
    return {name: nbytes for name, nbytes in parts.items() if nbytes > 0}


def device_use(question: Question, parts: dict[str, float]) -> str:
    return f"device memory: {sum(parts.values()) / GIB:.1f} of {question.hardware.device_memory / GIB:.1f} GiB"


def without_budgets(costs: Costs, layers: tuple[LayerCosts, ...]) -> RunCosts:
    """Return the simulator's input where nothing is solved for."""
    return RunCosts(layers, costs.hardware.d2h, costs.h2d, host_budget=0, device_budget=0, head_s=costs.head_s)


def timed(answer: Estimate, costs: Costs) -> Estimate:
    """Simulate one sequence. A step has a replica's share of the sequences, and one optimizer step."""
    question, simulated = answer.question, answer.simulated()
    rounds = answer.sequences // answer.layout.dp
    kinds: dict[str, float] = {}
    for span in simulated.spans:
        if span.stream == "compute":
            kinds[span.kind] = kinds.get(span.kind, 0.0) + rounds * (span.end - span.begin)
    seconds = rounds * simulated.seconds
    if not question.planned and _flushes(answer):
        kinds["allocator"] = question.hardware.stall * seconds
        seconds += kinds["allocator"]
    kinds["optimizer"] = costs.optimizer_s(rounds)
    return replace(answer, step_s=seconds + kinds["optimizer"], seconds=kinds)


def _flushes(answer: Estimate) -> bool:
    """Return True if the caching allocator must flush its cache in every step."""
    parts = answer.device_bytes
    transient = sum(parts.get(name, 0.0) for name in ("one layer's activations", "transients", "logits", "logits of a tile"))
    lasting = answer.device_total - transient - parts.get("fragmentation", 0.0)
    return lasting + CACHE_GROWTH * transient > answer.question.hardware.device_memory
