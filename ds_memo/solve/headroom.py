"""Headroom: device memory that the solver leaves free unless nothing fits without it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from ds_memo.solve.refusals import NothingFits
from ds_memo.solve.run_costs import RunCosts
from ds_memo.solve.solver import Solution, solve

HEADROOM = 0.08
"""Least share of the free memory to leave: for kernels' workspaces, and for torch's fragmentation until addresses are planned."""
_SHORTER = 1e-3
"""Least relative gain for which layers run in tiles, or in other tiles."""


@dataclass(frozen=True)
class Candidate:
    """One way to run the layers: whole, or in tiles of one size."""

    run: RunCosts
    """With a device budget that leaves at least HEADROOM."""
    most: RunCosts
    """The same run without headroom, and without non-layer memory that is only estimated."""


def shortest(
    candidates: Sequence[Candidate],
    alpha: float | None = None,
    resident_layers: int | None = None,
    may_skip_recompute: bool = True,
    unplanned_overhead: float = 1.0,
) -> tuple[RunCosts, Solution]:
    """Return the candidate with the shortest step within the device budget, and its solution. If none fits, take only as much
    headroom as the smallest solution needs.

    Args:
        candidates: the first, and of like ones the earlier, is taken unless another is shorter. The layers of the first may go
            without recompute; layers in tiles may not.
        alpha, resident_layers, may_skip_recompute, unplanned_overhead: see `solve`.

    Returns:
        The run with the device budget that was solved for, and the solution.

    Raises:
        NothingFits: none fits without headroom either. It is the error of the candidate that needs least.
    """
    best: tuple[RunCosts, Solution] | None = None
    refused: list[tuple[Candidate, NothingFits]] = []
    for candidate in candidates:
        skips = may_skip_recompute and candidate.run.tiles is None
        try:
            solution = solve(candidate.run, alpha, resident_layers, skips, unplanned_overhead=unplanned_overhead)
        except NothingFits as error:
            refused.append((candidate, error))
            continue
        if best is None or solution.step_s < best[1].step_s * (1 - _SHORTER):
            best = candidate.run, solution
        if solution.no_recompute:
            break
    if best is not None:
        return best
    candidate, refusal = min(refused, key=lambda pair: (pair[1].device_needed is None, pair[1].device_needed or pair[1].needed))
    if refusal.device_needed is None:
        raise refusal
    solve(candidate.most, alpha, resident_layers, may_skip_recompute=False)
    run = replace(candidate.run, device_budget=refusal.device_needed)  # no more than it needs
    return run, solve(run, alpha, resident_layers, may_skip_recompute=False)
