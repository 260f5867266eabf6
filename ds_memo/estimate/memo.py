"""ds_memo's own method: placements by the solver of real runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from ds_memo.estimate.costs import Costs
from ds_memo.estimate.layout import Layout
from ds_memo.estimate.offload import LEAST_ZERO
from ds_memo.estimate.parts import LOGIT_BYTES, TILE_TOKENS, by_part, gathered_bytes, state_bytes, timed
from ds_memo.estimate.question import DAY_S, OK, OOHM, OOM, Estimate, Question
from ds_memo.placement import PlacementKind, Tiles
from ds_memo.planned_alloc import UNPLANNED_OVERHEAD
from ds_memo.solve.headroom import HEADROOM, Candidate, shortest
from ds_memo.solve.memory import device_bytes
from ds_memo.solve.placement_kinds import Kinds
from ds_memo.solve.refusals import NothingFits
from ds_memo.solve.run_costs import NvmeCosts, RunCosts, Working
from ds_memo.solve.solver import Solution
from ds_memo.units import GIB

TILED_TOKENS = 4096
"""Tokens of a tile where none are asked for, as in a run."""


def memo(question: Question, costs: Costs) -> Estimate:
    """Solve the placements that a run would have, and estimate their step."""
    model, states = question.model, state_bytes(costs)
    working = {
        "gathered parameters": gathered_bytes(costs),
        "logits of a tile": min(costs.tokens, TILE_TOKENS) * model.vocab * LOGIT_BYTES,
    }
    loose = 1.0 if question.planned else question.hardware.fragmentation
    free = question.hardware.usable_device_bytes - sum(states.values())
    budget, careful = int(free / loose), min(int(free / loose), int(free * (1 - HEADROOM)))
    overhead = UNPLANNED_OVERHEAD if question.planned else 1.0  # stock training has no planned addresses
    runs: list[RunCosts] = []

    def best(tilings: Sequence[Tiles | None]) -> tuple[RunCosts, Solution]:
        found = [_run(question, costs, budget, sum(working.values()), tiles) for tiles in tilings]
        runs.extend(found)
        candidates = [Candidate(replace(run, device_budget=careful), run) for run in found]
        return shortest(candidates, question.alpha, unplanned_overhead=overhead)

    try:
        run, solution = _whole_or_in_tiles(question.tile_tokens if budget > 0 else 0, costs, best)
    except NothingFits as nothing:
        return _refused(question, costs.layout, runs, states, working, nothing)
    kept = _frames(run, solution.kinds, solution.alpha)
    on_device = all(kind.on_device for kind in solution.kinds)
    name = "layers on the device" if on_device else "resident layers and reload buffers"
    parts = by_part(question, states, working | {"transients": solution.device_bytes - run.working_bytes - kept, name: kept})
    answer = Estimate(
        question,
        costs.layout,
        OK,
        solution.binding,
        parts,
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
    try:
        for tiles in tilings:
            best([tiles])  # in most groups: if that does not fit, fewer do not
            found.append(best([tiles._replace(head_groups=1 << i) for i in range(tiles.head_groups.bit_length())]))
    except NothingFits as nothing:
        refused = refused or nothing
    if not found:
        assert refused is not None
        raise refused
    return min(found, key=lambda one: one[1].step_s)


def _run(question: Question, costs: Costs, device_budget: int, working: float, tiles: Tiles | None) -> RunCosts:
    """Return the solver's input.

    Args:
        device_budget: bytes without the model's states.
        working: bytes of the budget that are non-layer memory.
        tiles: how layers run; None: whole.
    """
    return RunCosts(
        layers=costs.layers(tiles),
        d2h_bytes_per_s=question.hardware.d2h,
        h2d_bytes_per_s=costs.h2d,
        host_budget=int(question.host_bytes / question.ranks_on_node),
        device_budget=device_budget,
        working_bytes=int(working),
        head_s=costs.head_s,
        tiles=tiles,
        nvme=_nvme(question),
    )


def _nvme(question: Question) -> NvmeCosts | None:
    """Return a rank's share of the node's drives."""
    machine, ranks = question.hardware, question.ranks_on_node
    if not machine.nvme_memory:
        return None
    per_s = machine.nvme_write / ranks, machine.nvme_read / ranks
    return NvmeCosts(int(machine.nvme_memory / ranks), *per_s, most_written_per_s=machine.nvme_daily / DAY_S / ranks)


def _refused(
    question: Question,
    layout: Layout,
    runs: Sequence[RunCosts],
    states: dict[str, float],
    working: dict[str, float],
    nothing: NothingFits,
) -> Estimate:
    """Return the answer where nothing fits, with the least memory of any solution."""
    status = OOHM if nothing.where == "host" else OOM
    why = str(nothing) if runs[0].device_budget > 0 else _too_large(question, layout, states)
    least = min(map(_least, runs), key=lambda parts: sum(parts.values()))
    host = nothing.needed * question.ranks_on_node if status == OOHM else 0.0
    return Estimate(question, layout, status, why, by_part(question, states, working | least), host)


def _least(run: RunCosts) -> dict[str, float]:
    """Return the device bytes of layers at alpha 0, all swapped: in tiles, or else with attention recomputed."""
    kinds = [
        PlacementKind.SWAPPED_ATTENTION_RECOMPUTED if layer.in_tiles is None else PlacementKind.SWAPPED for layer in run.layers
    ]
    buffers = _frames(run, kinds, 0.0)
    return {"transients": device_bytes(run.layers_alone(), kinds, 0.0) - buffers, "reload buffers": buffers}


def _too_large(question: Question, layout: Layout, states: dict[str, float]) -> str:
    """Return the message where no placement of activations helps."""
    total, usable = sum(states.values()) / GIB, question.hardware.usable_device_bytes / GIB
    helps = "more GPUs" if layout.zero == 3 else "a higher ZeRO stage, more GPUs"
    further = {"none": "--offload optimizer", "optimizer": "--offload all"}.get(layout.offload)
    if further and layout.zero >= LEAST_ZERO[further.split()[1]]:
        helps = f"{further}, {helps}"
    return f"device memory: the model's states alone take {total:.4g} of {usable:.4g} GiB. What helps: {helps}, a smaller model."


def _frames(run: RunCosts, kinds: Kinds, alpha: float) -> int:
    """Return the peak device bytes of kept and reloaded outputs, without the transients inside a layer."""
    nothing: dict[str, Any] = dict.fromkeys(("working", "working_at_0", "working_without_attention"), Working())
    frames = replace(run.each(lambda layer: replace(layer, **nothing)), working_bytes=0)
    return device_bytes(frames, kinds, alpha)
