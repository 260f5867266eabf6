"""Headroom: device memory that the solver leaves free unless nothing fits without it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from ds_memo.solve.refusals import NothingFits
from ds_memo.solve.run_costs import RunCosts
from ds_memo.solve.solver import Solution, solve

HEADROOM = 0.08
"""Least share of the free memory to leave: for kernels' workspaces, and for torch's fragmentation until addresses are planned."""
_SHORTER = 1e-3
"""Least relative gain for which layers run in tiles, or in other tiles."""


def shortest(
    candidates: Sequence[RunCosts],
    without_headroom: Callable[[RunCosts], RunCosts],
    alpha: float | None = None,
    resident_layers: int | None = None,
    may_skip_recompute: bool = True,
    unplanned_overhead: float = 1.0,
) -> tuple[RunCosts, Solution]:
    """Return the candidate with the shortest step within the device budget, and its solution. If none fits, take only as much
    headroom as the smallest solution needs.

    Args:
        candidates: ways to run the layers, whole or in tiles of one size, with a device budget that leaves at least HEADROOM.
            The first, and of like ones the earlier, is taken unless another is shorter. Layers in tiles may not go without
            recompute.
        without_headroom: returns a candidate without headroom, and without non-layer memory that is only estimated.
        alpha, resident_layers, may_skip_recompute, unplanned_overhead: see `solve`.

    Returns:
        The run with the device budget that was solved for, and the solution.

    Raises:
        NothingFits: none fits without headroom either. It is the error of the candidate that needs least.
    """
    best: tuple[RunCosts, Solution] | None = None
    refused: list[tuple[RunCosts, NothingFits]] = []
    for candidate in candidates:
        skips = may_skip_recompute and candidate.tiles is None
        try:
            solution = solve(candidate, alpha, resident_layers, skips, unplanned_overhead=unplanned_overhead)
        except NothingFits as error:
            refused.append((candidate, error))
            continue
        if best is None or solution.step_s < best[1].step_s * (1 - _SHORTER):
            best = candidate, solution
        if solution.no_recompute:
            break
    if best is not None:
        return best
    candidate, refusal = min(refused, key=lambda pair: (pair[1].device_needed is None, pair[1].device_needed or pair[1].needed))
    if refusal.device_needed is None:
        raise refusal
    solve(without_headroom(candidate), alpha, resident_layers, may_skip_recompute=False)
    run = replace(candidate, device_budget=refusal.device_needed)  # no more than it needs
    return run, solve(run, alpha, resident_layers, may_skip_recompute=False)
