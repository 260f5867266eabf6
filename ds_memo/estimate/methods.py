"""Memory and time of a step on one layout, part by part, with placements by the solver of real runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from ds_memo.estimate.costs import Costs
from ds_memo.estimate.layout import LEAST_ZERO
from ds_memo.estimate.question import DAY_S, OK, OOHM, OOM, Estimate, Question
from ds_memo.logits.head_bytes import head_bytes, tile_rows
from ds_memo.placement import PlacementKind, Tiles
from ds_memo.planned_alloc import UNPLANNED_OVERHEAD
from ds_memo.solve.headroom import HEADROOM, shortest, without_recomputed_attention
from ds_memo.solve.memory import device_bytes
from ds_memo.solve.placement_kinds import Kinds
from ds_memo.solve.refusals import NothingFits
from ds_memo.solve.run_costs import NvmeCosts, PeakBytes, RunCosts
from ds_memo.solve.solver import Solution
from ds_memo.swap.stream_protocol import COMPUTE
from ds_memo.units import GIB

TILED_TOKENS = 4096
"""Tokens of a tile where none are asked for, as in a run."""
LOGIT_BYTES = 12
"""Per logit: bf16 and fp32 logits and their gradients."""
CACHE_GROWTH = 12
"""Without a plan, the allocator's cache grows to this many times a step's transient bytes. In the paper's ablation flushes begin
between 64 Ki and 128 Ki tokens, which is between 9 and 19 times."""


def memo(question: Question, costs: Costs) -> Estimate:
    """Solve the placements that a run would have, and estimate their step."""
    loose = 1.0 if question.planned else question.hardware.fragmentation
    free = question.hardware.usable_device_bytes - sum(state_bytes(costs).values())
    budget, careful = int(free / loose), min(int(free / loose), int(free * (1 - HEADROOM)))
    overhead = UNPLANNED_OVERHEAD if question.planned else 1.0  # stock training has no planned addresses
    runs: list[RunCosts] = []

    def best(tilings: Sequence[Tiles | None]) -> tuple[RunCosts, Solution]:
        found = [_run(question, costs, careful, tiles) for tiles in tilings]
        runs.extend(found)
        return shortest(found, lambda run: replace(run, device_budget=budget), question.alpha, unplanned_overhead=overhead)

    try:
        run, solution = _whole_or_in_tiles(question.tile_tokens if budget > 0 else 0, costs, best)
    except NothingFits as nothing:
        return _refused(question, costs, runs, nothing)
    kept = _frames(run, solution.kinds, solution.alpha)
    on_device = all(kind.on_device for kind in solution.kinds)
    name = "layers on the device" if on_device else "resident layers and reload buffers"
    of_layers = {"transients": solution.device_bytes - run.working_bytes - kept, name: kept}
    answer = Estimate(
        question,
        costs.layout,
        OK,
        solution.binding,
        by_part(question, costs, {"gathered parameters": gathered_bytes(costs)} | of_layers),
        solution.host_bytes * question.ranks_on_node,
        alpha=solution.alpha,
        resident_layers=len(solution.calls(PlacementKind.ON_DEVICE)),
        run=run,
        placements=solution.placements,
        nvme_bytes=solution.nvme_bytes * question.ranks_on_node,
    )
    return timed(answer, costs)


def _whole_or_in_tiles(
    tokens: int | None, costs: Costs, best: Callable[[Sequence[Tiles | None]], tuple[RunCosts, Solution]]
) -> tuple[RunCosts, Solution]:
    """Return the shorter step of whole layers and layers in tiles.

    Tiles make all GEMM outputs again, and more. So they are not tried where whole layers take no longer than that.

    Args:
        tokens: of a tile, as asked for; 0: layers run whole.

    Raises:
        NothingFits: neither way, and why whole layers do not, if they were tried.
    """
    found: list[tuple[RunCosts, Solution]] = []
    refused: NothingFits | None = None
    if not tokens or tokens >= costs.tokens:
        try:
            run, solution = best([None])
            at_0 = run.head_s + sum(layer.forward_s + layer.backward_s + layer.replay_s + layer.gemm_s for layer in run.layers)
            if tokens is not None or solution.step_s <= at_0:
                return run, solution
            found.append((run, solution))
        except NothingFits as nothing:
            if tokens is not None:
                raise
            refused = nothing
    tilings = costs.tilings(tokens or TILED_TOKENS)
    if not tilings and refused is None and not found:
        return best([None])

    def in_tiles(ways: Sequence[Tiles]) -> tuple[RunCosts, Solution]:
        best(ways)  # in most groups of heads: if that does not fit, fewer do not
        in_groups = [tiles._replace(head_groups=1 << i) for tiles in ways for i in range(tiles.head_groups.bit_length())]
        return best(in_groups)

    try:
        if tilings:
            found.append(in_tiles(tilings))
    except NothingFits as nothing:
        refused = refused or nothing
    of_tiles = min(found, key=lambda one: one[1].step_s, default=None)
    if (grouped := without_recomputed_attention(of_tiles, tilings, in_tiles)) is not None:
        found.append(grouped)
    if not found:
        assert refused is not None
        raise refused
    return min(found, key=lambda one: one[1].step_s)


def _run(question: Question, costs: Costs, device_budget: int, tiles: Tiles | None) -> RunCosts:
    """Return the solver's input.

    Args:
        device_budget: bytes without the model's states.
        tiles: how layers run; None: whole.
    """
    machine, ranks, nvme = question.hardware, question.ranks_on_node, None
    if machine.nvme_memory:
        rates = machine.nvme_write / ranks, machine.nvme_read / ranks, machine.nvme_daily / DAY_S / ranks
        nvme = NvmeCosts(int(machine.nvme_memory / ranks), *rates)
    return RunCosts(
        layers=costs.layers(tiles),
        d2h_bytes_per_s=machine.d2h,
        h2d_bytes_per_s=costs.h2d,
        host_budget=int(question.host_bytes / ranks),
        device_budget=device_budget,
        working_bytes=int(gathered_bytes(costs)),
        head_bytes=_head_bytes(question, costs),
        head_s=costs.head_s,
        tiles=tiles,
        nvme=nvme,
    )


def _refused(question: Question, costs: Costs, runs: Sequence[RunCosts], nothing: NothingFits) -> Estimate:
    """Return the answer where nothing fits, with the least memory of any solution."""
    status = OOHM if nothing.where == "host" else OOM
    why = str(nothing) if runs[0].device_budget > 0 else _too_large(question, costs)
    least = min(map(_least, runs), key=lambda parts: sum(parts.values()))
    host = nothing.needed * question.ranks_on_node if status == OOHM else 0.0
    return Estimate(
        question,
        costs.layout,
        status,
        why,
        by_part(question, costs, {"gathered parameters": gathered_bytes(costs)} | least),
        host,
    )


def _least(run: RunCosts) -> dict[str, float]:
    """Return the device bytes of layers at alpha 0, all swapped: in tiles, or else with attention recomputed."""
    kinds = [
        PlacementKind.SWAPPED_ATTENTION_RECOMPUTED if layer.in_tiles is None else PlacementKind.SWAPPED for layer in run.layers
    ]
    buffers = _frames(run, kinds, 0.0)
    return {"transients": device_bytes(run.layers_alone(), kinds, 0.0) - buffers, "reload buffers": buffers}


def _too_large(question: Question, costs: Costs) -> str:
    """Return the message where no placement of activations helps."""
    layout, total, usable = costs.layout, sum(state_bytes(costs).values()) / GIB, question.hardware.usable_device_bytes / GIB
    helps = "more GPUs" if layout.zero == 3 else "a higher ZeRO stage, more GPUs"
    if costs.model.adapters and not costs.model.adapters.quantized:
        helps = f"--qlora, {helps}"
    further = {"none": "--offload optimizer", "optimizer": "--offload all"}.get(layout.offload)
    if further and not costs.model.adapters and layout.zero >= LEAST_ZERO[further.split()[1]]:
        helps = f"{further}, {helps}"
    return f"device memory: the model's states alone take {total:.4g} of {usable:.4g} GiB. What helps: {helps}, a smaller model."


def _frames(run: RunCosts, kinds: Kinds, alpha: float) -> int:
    """Return the peak device bytes of kept and reloaded outputs, without the transients inside a layer."""
    nothing: dict[str, Any] = dict.fromkeys(("working", "working_at_0", "working_without_attention"), PeakBytes())
    frames = replace(run.each(lambda layer: replace(layer, **nothing)), working_bytes=0)
    return device_bytes(frames, kinds, alpha)


# ---- bytes and seconds, part by part


def state_bytes(costs: Costs) -> dict[str, float]:
    """Return the device bytes of parameters, of bf16 gradients, and of fp32 weights with two moments."""
    layout, mine, weights = costs.layout, costs.model.trained / costs.layout.tp, costs.model.weight_bytes / costs.layout.tp
    shards, zero, offloaded = layout.sharded, layout.zero, layout.offload != "none"
    return {
        "parameters": 0.0 if layout.offload == "all" else weights / (shards if zero >= 3 else 1),
        "gradients": 0.0 if offloaded and zero >= 2 else 2 * mine / (shards if zero >= 2 else 1),
        "optimizer states": 0.0 if offloaded else 12 * mine / (shards if zero >= 1 else 1),
    }


def gathered_bytes(costs: Costs) -> float:
    """Return the bytes that ZeRO-3 gathers: a layer's parameters, and the next one's. Gradients are in a layer's own peak."""
    return 2 * 2 * costs.model.layer_parameters / costs.layout.tp if costs.layout.zero == 3 else 0.0


def _head_bytes(question: Question, costs: Costs) -> int:
    """Return the bytes of head and loss under memo, whose logits are lazy."""
    model = costs.model
    rows = tile_rows(model.vocab, question.hardware.device_memory)
    if costs.tokens <= rows:
        return int(costs.tokens * model.vocab * LOGIT_BYTES)
    lazy = head_bytes(rows, model.vocab, model.hidden, model.head_trained, itemsize=2)
    return int(lazy.fixed + lazy.per_token * costs.tokens)


def by_part(question: Question, costs: Costs, working: dict[str, float]) -> dict[str, float]:
    """Return the bytes of a GPU by part.

    Args:
        working: what comes and goes in a step, so that the allocator can lose some between its blocks.
    """
    fragmentation = 0.0 if question.planned else (question.hardware.fragmentation - 1) * sum(working.values())
    ends = {"fragmentation": fragmentation, "context and communication": question.hardware.device_reserve}
    parts = state_bytes(costs) | working | ends
    return {name: nbytes for name, nbytes in parts.items() if nbytes > 0}


def timed(answer: Estimate, costs: Costs) -> Estimate:
    """Add the seconds of a step: a replica's share of the sequences, one after another, and one optimizer step."""
    question, rounds = answer.question, answer.sequences // answer.layout.dp
    kinds: dict[str, float] = {}
    for span in answer.timeline():
        if span.stream == COMPUTE:
            kinds[span.kind] = kinds.get(span.kind, 0.0) + rounds * (span.end - span.begin)
    seconds = sum(kinds.values())
    if not question.planned and _flushes(answer):
        kinds["allocator"] = question.hardware.stall * seconds
    kinds["optimizer"] = costs.optimizer_s(rounds)
    return replace(answer, step_s=sum(kinds.values()), seconds=kinds)


def _flushes(answer: Estimate) -> bool:
    """Return True if the caching allocator must flush its cache in every step."""
    parts = answer.device_bytes
    transient = sum(parts.get(name, 0.0) for name in ("transients", "logits"))
    lasting = answer.device_total - transient - parts.get("fragmentation", 0.0)
    return lasting + CACHE_GROWTH * transient > answer.question.hardware.device_memory
