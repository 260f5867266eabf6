"""Headroom: free device memory that only a run that fits no other way takes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ds_memo.solve.headroom import shortest
from ds_memo.solve.refusals import NothingFits
from ds_memo.solve.run_costs import RunCosts
from ds_memo.solve.solver import solve
from tests.solve.runs import layer, run

LAYERS = run(layer(1 << 14), 8)


def with_device(nbytes: int) -> RunCosts:
    return replace(LAYERS, device_budget=nbytes)


def least() -> int:
    """Return the least device bytes with which a solution fits."""
    with pytest.raises(NothingFits) as nothing:
        solve(with_device(1))
    return nothing.value.device_needed


def test_a_run_that_fits_takes_no_headroom() -> None:
    again, solution = shortest([LAYERS], lambda run: with_device(2 * run.device_budget))
    assert again is LAYERS and solution == solve(LAYERS)


def test_the_smallest_solution_takes_only_the_headroom_that_it_needs() -> None:
    most = with_device(3 * least())
    solved_for, solution = shortest([with_device(least() - 1)], lambda run: most)
    assert solved_for.device_budget == least() >= solution.device_bytes
    assert solution.device_bytes < solve(most).device_bytes


def test_no_run_takes_more_than_the_headroom() -> None:
    with pytest.raises(NothingFits) as nothing:
        shortest([with_device(least() // 2)], lambda run: with_device(least() - 1))
    assert nothing.value.budget == least() - 1


def test_estimated_non_layer_memory_refuses_no_run() -> None:
    careful = replace(LAYERS, head_bytes=2 * LAYERS.device_budget)
    solved_for, solution = shortest([careful], RunCosts.layers_alone)
    assert solved_for.device_budget >= solution.device_bytes > LAYERS.device_budget
