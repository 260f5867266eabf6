"""What is left alone of the device, and who has it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ds_memo.solve.costs import RunCosts
from ds_memo.solve.headroom import solve_within
from ds_memo.solve.refusals import NothingFits
from ds_memo.solve.solver import solve
from tests.solve.runs import layer, run

LAYERS = run(layer(1 << 14), 8)


def with_device(nbytes: int) -> RunCosts:
    return replace(LAYERS, device_budget=nbytes)


def least() -> int:
    """Bytes of the device without which nothing fits."""
    with pytest.raises(NothingFits) as nothing:
        solve(with_device(1))
    return nothing.value.device_needed


def test_what_fits_is_solved_for_as_ever() -> None:
    again, solution = solve_within(LAYERS, with_device(2 * LAYERS.device_budget))
    assert again is LAYERS and solution == solve(LAYERS)


def test_the_leanest_have_what_was_left_alone() -> None:
    most = with_device(3 * least())
    solved_for, solution = solve_within(with_device(least() - 1), most)
    assert solved_for.device_budget == least() >= solution.device_bytes
    assert solution.device_bytes < solve(most).device_bytes


def test_nobody_has_more_than_there_is() -> None:
    with pytest.raises(NothingFits) as nothing:
        solve_within(with_device(least() // 2), with_device(least() - 1))
    assert nothing.value.budget == least() - 1


def test_what_is_only_guessed_refuses_no_run() -> None:
    careful = replace(LAYERS, head_bytes=2 * LAYERS.device_budget)
    solved_for, solution = solve_within(careful, careful.layers_alone())
    assert solved_for.device_budget >= solution.device_bytes > LAYERS.device_budget
