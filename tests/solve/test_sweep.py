"""The solver against the engine in virtual time: its step times, and its alpha against the best of a sweep."""

from __future__ import annotations

import itertools
import random
import re
from dataclasses import replace

import pytest

from ds_memo.placement import PlacementKind
from ds_memo.solve.refusals import NothingFits
from ds_memo.solve.run_costs import RunCosts
from ds_memo.solve.schedule import Schedule
from ds_memo.solve.solver import solve
from tests.placements import placed, sets
from tests.solve.runs import random_run
from tests.solve.sweep import BAR, CASES, KI, Case, off_the_best
from tests.solve.virtual_engine import simulate


def test_the_schedule_is_the_engines() -> None:
    for seed, alpha in itertools.product(range(40), (0.0, 0.25, 0.7, 1.0)):
        costs = random_run(seed)
        kinds = random.Random(seed).choices(list(PlacementKind), (8, 2, 2, 2, 2, 2), k=len(costs.layers))  # swapped ones first
        solved, engine = Schedule(costs, kinds).at(alpha), simulate(costs, placed(kinds, alpha))
        assert solved.seconds == pytest.approx(engine.seconds, rel=1e-9), seed
        assert solved.d2h_stall_s == pytest.approx(engine.d2h_stall_s, abs=1e-9 * engine.seconds), seed
        assert solved.h2d_stall_s == pytest.approx(engine.h2d_stall_s, abs=1e-9 * engine.seconds), seed


# ---- the sweep


def regime(costs: RunCosts) -> str:
    return re.match(r"[\w ]+", solve(costs).binding)[0]


def test_alpha_is_the_best_of_a_sweep() -> None:
    for case in CASES:
        costs = case.costs()
        solution = solve(costs, may_skip_recompute=False)
        assert not sets(solution).attention_recomputed
        assert off_the_best(costs, solution) <= BAR, (case, solution)


def test_the_cases_cover_the_regimes() -> None:
    seen = {regime(case.costs()) for case in CASES}
    assert {"link", "host memory", "nothing"} <= seen
    assert len(CASES) >= 30


def test_the_other_regimes() -> None:
    all_resident = replace(CASES[0], device=24).costs()
    solution = solve(all_resident, may_skip_recompute=False)
    assert len(sets(solution).on_device) == 24
    assert simulate(all_resident, solution.placements).seconds == pytest.approx(solution.step_s, rel=1e-9)
    for host, device in ((0.01, 0.5), (2.0, 0.05)):
        with pytest.raises(NothingFits):
            solve(replace(CASES[0], host=host, device=device).costs())
    both = replace(CASES[0], host=0.01).costs()
    solution = solve(both)
    assert sets(solution).without_gemms
    assert solution.step_s == pytest.approx(simulate(both, solution.placements).seconds, rel=1e-9)


def test_a_wrong_bandwidth_shows() -> None:
    """The comparison can fail: an alpha for half the bandwidth is not the best of the sweep."""
    costs = Case(16 * KI, 40e9, 2.0, 4.0).costs()
    wrong = solve(replace(costs, d2h_bytes_per_s=20e9, h2d_bytes_per_s=20e9))
    assert off_the_best(costs, wrong) > 2.5 * BAR
