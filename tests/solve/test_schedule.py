"""The solver's schedule against the engine in virtual time."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import pytest

from ds_memo.placement import PlacementKind, Tiles
from ds_memo.solve.run_costs import RunCosts
from ds_memo.solve.schedule import Schedule
from ds_memo.swap.engine import SwapEngine
from ds_memo.swap.frame import Frame
from tests.placements import placed
from tests.solve import virtual_engine
from tests.solve.runs import random_run, run
from tests.solve.test_tiles import tiled
from tests.solve.virtual_engine import simulate


def drawn(seed: int) -> tuple[RunCosts, list[PlacementKind]]:
    costs = random_run(seed)
    return costs, random.Random(seed).choices(list(PlacementKind), (8, 2, 2, 2, 2, 2), k=len(costs.layers))  # swapped ones first


def test_layers_that_run_whole_take_the_engines_time() -> None:
    for seed, alpha in itertools.product(range(40), (0.0, 0.25, 0.7, 1.0)):
        costs, kinds = drawn(seed)
        solved, engine = Schedule(costs, kinds).at(alpha), simulate(costs, placed(kinds, alpha))
        assert solved.seconds == pytest.approx(engine.seconds, rel=1e-9), seed
        assert solved.d2h_stall_s == pytest.approx(engine.d2h_stall_s, abs=1e-9 * engine.seconds), seed
        assert solved.h2d_stall_s == pytest.approx(engine.h2d_stall_s, abs=1e-9 * engine.seconds), seed


def test_a_wrong_bandwidth_shows() -> None:
    """The comparison, to 1e-9, can fail."""
    costs, kinds = drawn(7)
    engine = simulate(costs, placed(kinds, 0.7))
    for rate in ("d2h_bytes_per_s", "h2d_bytes_per_s"):
        wrong = replace(costs, **{rate: 0.7 * getattr(costs, rate)})
        assert abs(Schedule(wrong, kinds).at(0.7).seconds / engine.seconds - 1) > 1e-6, rate


class NoPrefetch(SwapEngine):
    """A schedule that is right, and slower."""

    def _next_below(self, frame: Frame) -> Frame | None:
        return None


class Impatient(SwapEngine):
    """An engine that frees a frame one layer too early."""

    def end(self, frame: Frame) -> None:
        super().end(frame)
        while self._leaving:
            self._let_go(self._leaving.popleft()())


@pytest.mark.parametrize("other", [NoPrefetch, Impatient])
def test_another_schedule_is_told_apart(other: type[SwapEngine], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(virtual_engine, "SwapEngine", other)
    off = []
    for costs, kinds in map(drawn, range(10)):
        off.append(Schedule(costs, kinds).at(0.7).seconds / simulate(costs, placed(kinds, 0.7)).seconds - 1)
    assert max(map(abs, off)) > 1e-3


@pytest.mark.parametrize("differs, off", [(False, 0.015), (True, 0.05)])
def test_layers_in_tiles_take_it_nearly(differs: bool, off: float) -> None:
    """All tiles of a pass count as alike there, also those next to a stored one, or next to attention's frame."""
    for seed in range(30):
        draw, count = random.Random(seed), 256
        layer = tiled(count)
        layer = replace(layer, in_tiles=replace(layer.in_tiles, result_differs=differs))
        costs = replace(run(layer, 2, link=draw.uniform(2e9, 200e9)), tiles=Tiles(128))
        alpha, kinds = draw.randint(0, count) / count, [PlacementKind.SWAPPED] * 2
        engine = simulate(costs, placed(kinds, alpha))
        assert Schedule(costs, kinds).at(alpha).seconds == pytest.approx(engine.seconds, rel=off), seed
