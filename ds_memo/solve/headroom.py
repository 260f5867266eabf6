"""Headroom: device memory that the solver leaves free unless nothing fits without it."""

from __future__ import annotations

from dataclasses import replace

from ds_memo.solve.costs import RunCosts
from ds_memo.solve.refusals import NothingFits
from ds_memo.solve.solver import Solution, solve

HEADROOM = 0.08
"""Least share of the free memory to leave: for kernels' workspaces, and for torch's fragmentation until addresses are planned."""


def solve_within(
    run: RunCosts,
    most: RunCosts,
    alpha: float | None = None,
    resident_layers: int | None = None,
    may_skip_recompute: bool = True,
    unplanned_overhead: float = 1.0,
) -> tuple[RunCosts, Solution]:
    """Solve within the device budget. If nothing fits, take only as much headroom as the smallest solution needs.

    Args:
        run: costs with a device budget that leaves at least HEADROOM.
        most: the same run without headroom, and without non-layer memory that is only estimated.
        alpha, resident_layers, may_skip_recompute, unplanned_overhead: see `solve`.

    Returns:
        The run with the device budget that was solved for, and the solution.

    Raises:
        NothingFits: nothing fits `most` either.
    """
    try:
        return run, solve(run, alpha, resident_layers, may_skip_recompute, unplanned_overhead=unplanned_overhead)
    except NothingFits as error:
        if error.device_needed is None:
            raise
        needed = error.device_needed
    solve(most, alpha, resident_layers, may_skip_recompute=False)
    run = replace(run, device_budget=needed)  # no more than it needs
    return run, solve(run, alpha, resident_layers, may_skip_recompute=False)
