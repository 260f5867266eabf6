"""What of a device's free memory is left alone, and who may have it all the same."""

from __future__ import annotations

from dataclasses import replace

from ds_memo.solve.costs import RunCosts
from ds_memo.solve.refusals import NothingFits
from ds_memo.solve.solver import Homes, solve

RESERVE = 0.08
"""Share of the free memory that is left alone at least: for kernels' workspaces, and for what torch's allocator loses between
blocks until addresses are planned."""


def solve_within(
    run: RunCosts,
    most: RunCosts,
    alpha: float | None = None,
    resident_layers: int | None = None,
    may_be_plain: bool = True,
    planned: bool = False,
) -> tuple[RunCosts, Homes]:
    """Homes within the device budget or, where nothing fits it, the leanest there are: what was left alone is there for these.

    Args:
        run: its device budget leaves RESERVE alone, or more.
        most: the same with nothing left alone, and with nothing beside the layers that is only guessed.
        alpha, resident_layers, may_be_plain, planned: see `solve`.

    Returns:
        The homes, and the run with the device budget that they were solved for.

    Raises:
        NothingFits: not in `most` either.
    """
    try:
        return run, solve(run, alpha, resident_layers, may_be_plain, planned=planned)
    except NothingFits as error:
        if error.device_needed is None:
            raise
        needed = error.device_needed
    solve(most, alpha, resident_layers, may_be_plain=False)
    run = replace(run, device_budget=needed)  # so that nothing is taken beyond what it needs
    return run, solve(run, alpha, resident_layers, may_be_plain=False)
