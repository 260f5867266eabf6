"""Headroom: device memory that the solver leaves free unless nothing fits without it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

from ds_memo.placement import Tiles
from ds_memo.solve.groups import ALL
from ds_memo.solve.refusals import NothingFits
from ds_memo.solve.run_costs import RunCosts
from ds_memo.solve.solver import Solution, solve

HEADROOM = 0.08
"""Least share of the free memory to leave: for kernels' workspaces, and for torch's fragmentation until addresses are planned."""
_SHORTER = 1e-3
"""Least relative gain for which layers run in tiles, or in other tiles, or compute their inputs."""
INPUT_EVERY = (2, 3, 4, 8, ALL)
"""Sizes of groups that are tried."""


def without_recomputed_attention(
    found: tuple[RunCosts, Solution] | None,
    tilings: Sequence[Tiles],
    best: Callable[[Sequence[Tiles]], tuple[RunCosts, Solution]],
) -> tuple[RunCosts, Solution] | None:
    """Return the solution whose layers compute inputs, if it is shorter than one whose layers recompute attention, with as few of
    these inputs as are no longer; else `found`.

    Args:
        found: the solution of layers that store their inputs; None: nothing fits.
        tilings: ways to run the layers in tiles.
        best: returns the shortest step of some ways, or raises NothingFits.
    """
    if not tilings or (found is not None and not any(kind.recomputes_attention for kind in found[1].kinds)):
        return found
    grouped: list[tuple[RunCosts, Solution]] = []
    for every in reversed(INPUT_EVERY):
        if grouped and grouped[0][0].tiles is not None:
            tilings = [grouped[0][0].tiles]
        try:
            grouped.append(best([tiles._replace(input_every=every) for tiles in tilings]))
        except NothingFits:
            break
    least_s = min((solution.step_s for _, solution in grouped), default=math.inf)
    if not grouped or (found is not None and least_s > found[1].step_s * (1 - _SHORTER)):
        return found
    return next(one for one in reversed(grouped) if one[1].step_s <= least_s * (1 + _SHORTER))


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
