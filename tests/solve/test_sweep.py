"""The solver against a simulator that is the engine itself: its step times, and its alpha beside the best of a sweep."""

from __future__ import annotations

import itertools
import re
from dataclasses import dataclass, replace

import pytest
from runs import GPT, LLAMA, layer, random_run, run

from ds_memo.estimate.simulate import simulate
from ds_memo.solve.costs import RunCosts
from ds_memo.solve.homes import NothingFits, host_cap, place_residents, solve
from ds_memo.solve.schedule import Schedule

KI = 1024


@pytest.mark.parametrize("seed", range(40))
def test_the_schedule_is_the_engines(seed: int) -> None:
    costs = random_run(seed)
    n = len(costs.layers)
    residents = place_residents(n, seed % 5)
    dropped = [i for i in range(n) if i not in residents and seed % 3 == 0 and i % 2]
    schedule = Schedule(costs, residents, dropped)
    for alpha in (0.0, 0.25, 0.7, 1.0):
        ours, engine = schedule.at(alpha), simulate(costs, alpha, residents, dropped)
        assert ours.seconds == pytest.approx(engine.seconds, rel=1e-9)
        assert ours.d2h_stall_s == pytest.approx(engine.d2h_stall_s, abs=1e-9 * engine.seconds)
        assert ours.h2d_stall_s == pytest.approx(engine.h2d_stall_s, abs=1e-9 * engine.seconds)


# ---- the sweep


@dataclass
class Setting:
    """A simulated machine and a length."""

    tokens: int
    """Of this rank."""
    link: float
    """Bytes a second, each way."""
    host: float
    """Of what all rows of all layers would take."""
    device: float
    """In layers: frames that it holds beside what a step needs."""
    shape: tuple = GPT
    layers: int = 24

    def costs(self) -> RunCosts:
        one = layer(self.tokens, shape=self.shape)
        whole = self.layers * one.host_bytes(1.0)
        return run(one, self.layers, self.link, int(self.host * whole), int(self.device * one.frame_bytes), head_s=one.forward_s)


SETTINGS = [
    Setting(tokens * KI, link * 1e9, host, device, shape)
    for (tokens, link), (host, device), shape in itertools.product(
        [(4, 12.0), (8, 25.0), (16, 12.0), (16, 50.0), (64, 25.0), (128, 12.0), (256, 50.0)],
        [(2.0, 4.0), (0.5, 4.0), (2.0, 12.5), (0.3, 2.0)],
        [GPT, LLAMA],
    )
]


def best_of_a_sweep(costs: RunCosts, residents: frozenset[int]) -> list[float]:
    """The alphas of the shortest simulated step: 0, 0.05 … 1 as far as the host holds them, then finer around the best."""
    swapped = [one for i, one in enumerate(costs.layers) if i not in residents]
    cap = host_cap(swapped, costs.host_budget)
    tried: dict[float, float] = {}

    def best_near(alphas: list[float]) -> float:
        for alpha in alphas:
            if 0 <= alpha <= cap and alpha not in tried:
                tried[alpha] = simulate(costs, alpha, residents).seconds
        return min(tried, key=tried.__getitem__)

    best = best_near([i / 20 for i in range(21)] + [cap])
    best = best_near([best + i / 100 for i in range(-5, 6)])
    least = tried[best]
    return [alpha for alpha, seconds in tried.items() if seconds <= least * (1 + 1e-5)]


def regime(costs: RunCosts) -> str:
    return re.match(r"[\w ]+", solve(costs).binding)[0]


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_alpha_is_the_best_of_a_sweep(setting: Setting) -> None:
    costs = setting.costs()
    homes = solve(costs, may_be_plain=False)
    assert not homes.dropped
    best = best_of_a_sweep(costs, homes.residents)
    assert min(abs(homes.alpha - alpha) for alpha in best) <= 0.02, (homes, best)


def test_the_settings_cover_the_regimes() -> None:
    seen = {regime(setting.costs()) for setting in SETTINGS}
    assert {"link", "host memory", "all rows fit the host and their copies hide"} <= seen
    assert len(SETTINGS) >= 30


def test_the_other_regimes() -> None:
    all_resident = replace(SETTINGS[0], device=24).costs()
    homes = solve(all_resident)
    assert len(homes.residents) == 24
    assert simulate(all_resident, 1.0, homes.residents).seconds == pytest.approx(homes.step_s, rel=1e-9)
    for little in (replace(SETTINGS[0], host=0.01), replace(SETTINGS[0], device=0.05)):
        with pytest.raises(NothingFits):
            solve(little.costs())


def test_a_wrong_bandwidth_shows() -> None:
    """The comparison can fail: an alpha for half the bandwidth is not the best of the sweep."""
    costs = Setting(16 * KI, 40e9, 2.0, 4.0).costs()
    wrong = solve(replace(costs, d2h_bytes_per_s=20e9, h2d_bytes_per_s=20e9))
    assert min(abs(wrong.alpha - alpha) for alpha in best_of_a_sweep(costs, wrong.residents)) > 0.05
