"""The solver against a simulator that is the engine itself: its step times, and its alpha beside the best of a sweep."""

from __future__ import annotations

import random
import re
from dataclasses import replace

import pytest

from ds_memo.estimate.simulate import simulate
from ds_memo.placement import HOMES, Places
from ds_memo.solve.costs import RunCosts
from ds_memo.solve.refusals import NothingFits
from ds_memo.solve.schedule import Schedule
from ds_memo.solve.solver import solve
from tests.solve.runs import random_run
from tests.solve.sweep import BAR, KI, SETTINGS, Setting, off_the_best


@pytest.mark.parametrize("seed", range(40))
def test_the_schedule_is_the_engines(seed: int) -> None:
    costs = random_run(seed)
    homes = random.Random(seed).choices(HOMES, (8, 2, 2, 2, 2, 2), k=len(costs.layers))  # swapped ones first
    kinds = ("resident", "lean", "dropped", "plain")  # in the order of Places
    places = Places(*(frozenset(i for i, home in enumerate(homes) if getattr(home, kind)) for kind in kinds))
    schedule = Schedule(costs, places)
    for alpha in (0.0, 0.25, 0.7, 1.0):
        ours, engine = schedule.at(alpha), simulate(costs, alpha, places)
        assert ours.seconds == pytest.approx(engine.seconds, rel=1e-9)
        assert ours.d2h_stall_s == pytest.approx(engine.d2h_stall_s, abs=1e-9 * engine.seconds)
        assert ours.h2d_stall_s == pytest.approx(engine.h2d_stall_s, abs=1e-9 * engine.seconds)


# ---- the sweep


def regime(costs: RunCosts) -> str:
    return re.match(r"[\w ]+", solve(costs).binding)[0]


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_alpha_is_the_best_of_a_sweep(setting: Setting) -> None:
    costs = setting.costs()
    homes = solve(costs, may_be_plain=False)
    assert not homes.places.dropped
    assert off_the_best(costs, homes) <= BAR, homes


def test_the_settings_cover_the_regimes() -> None:
    seen = {regime(setting.costs()) for setting in SETTINGS}
    assert {"link", "host memory", "all rows fit the host and their copies hide"} <= seen
    assert len(SETTINGS) >= 30


def test_the_other_regimes() -> None:
    all_resident = replace(SETTINGS[0], device=24).costs()
    homes = solve(all_resident, may_be_plain=False)
    assert len(homes.places.residents) == 24
    assert simulate(all_resident, 1.0, homes.places).seconds == pytest.approx(homes.step_s, rel=1e-9)
    for host, device in ((0.01, 0.5), (2.0, 0.05)):
        with pytest.raises(NothingFits):
            solve(replace(SETTINGS[0], host=host, device=device).costs())
    both = replace(SETTINGS[0], host=0.01).costs()
    homes = solve(both)
    assert homes.places.lean
    assert homes.step_s == pytest.approx(simulate(both, 0.0, homes.places).seconds, rel=1e-9)


def test_a_wrong_bandwidth_shows() -> None:
    """The comparison can fail: an alpha for half the bandwidth is not the best of the sweep."""
    costs = Setting(16 * KI, 40e9, 2.0, 4.0).costs()
    wrong = solve(replace(costs, d2h_bytes_per_s=20e9, h2d_bytes_per_s=20e9))
    assert off_the_best(costs, wrong) > 2.5 * BAR
