"""Headroom: the device memory that is left alone, and the runs that may have it all the same."""

from __future__ import annotations

from dataclasses import replace

from ds_memo.solve.costs import RunCosts
from ds_memo.solve.refusals import NothingFits
from ds_memo.solve.solver import Solution, solve

HEADROOM = 0.08
"""Share of the free memory that is left alone at least: for kernels' workspaces, and for what torch's allocator loses between
blocks until addresses are planned."""


def solve_within(
    run: RunCosts,
    most: RunCosts,
    alpha: float | None = None,
    resident_layers: int | None = None,
    may_skip_recompute: bool = True,
    unplanned_overhead: float = 1.0,
) -> tuple[RunCosts, Solution]:
    """Solve within the device budget or, where nothing fits it, take of the headroom what the smallest solution needs.

    Args:
        run: its device budget leaves HEADROOM alone, or more.
        most: the same with nothing left alone, and without non-layer memory that is only guessed.
        alpha, resident_layers, may_skip_recompute, unplanned_overhead: see `solve`.

    Returns:
        The run with the device budget that was solved for, and the solution.

    Raises:
        NothingFits: not in `most` either.
    """
    try:
        return run, solve(run, alpha, resident_layers, may_skip_recompute, unplanned_overhead=unplanned_overhead)
    except NothingFits as error:
        if error.device_needed is None:
            raise
        needed = error.device_needed
    solve(most, alpha, resident_layers, may_skip_recompute=False)
    run = replace(run, device_budget=needed)  # so that nothing is taken beyond what it needs
    return run, solve(run, alpha, resident_layers, may_skip_recompute=False)
