"""The solver's schedule, without files and with them, against the engine in virtual time."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

import pytest

from ds_memo.errors import MemoError
from ds_memo.placement import Placement, PlacementKind, Tiles
from ds_memo.solve.placement_kinds import Kinds
from ds_memo.solve.run_costs import NvmeCosts, RunCosts
from ds_memo.solve.schedule import Schedule, Step
from ds_memo.swap.engine import SwapEngine
from ds_memo.swap.frame import Frame
from tests.placements import placed
from tests.solve import virtual_engine
from tests.solve.runs import random_run, run
from tests.solve.test_tiles import tiled
from tests.solve.virtual_engine import simulate

ALPHAS = (0.0, 0.25, 0.7, 1.0)


def with_files(kinds: Kinds, alpha: float, files: int) -> list[Placement]:
    placements = placed(kinds, alpha)
    return [replace(placement, nvme=number < files) for number, placement in enumerate(placements)]


def with_nvme(costs: RunCosts, kinds: Kinds, draw: random.Random) -> RunCosts:
    """Return the run with drives, some slower than the link, and a host that holds a part of what it stores."""
    whole = Schedule(replace(costs, nvme=NvmeCosts(0, 1, 1)), kinds)
    host = int(draw.uniform(0, 0.5) * sum(whole.blocks(0.0))) + max(whole.blocks(1.0))
    drives = (draw.uniform(0.05, 1) * rate for rate in (costs.d2h_bytes_per_s, costs.h2d_bytes_per_s))
    return replace(costs, host_budget=host, nvme=NvmeCosts(1 << 60, *drives))


def both(costs: RunCosts, kinds: Kinds, alpha: float) -> tuple[Step, Step]:
    schedule = Schedule(costs, kinds)
    files = schedule.files(alpha) if costs.nvme else 0
    return schedule.at(alpha, files), simulate(costs, with_files(kinds, alpha, files))


def drawn(seed: int) -> tuple[RunCosts, Kinds]:
    costs = random_run(seed)
    whole = [kind for kind in PlacementKind if kind is not PlacementKind.SWAPPED_WITHOUT_INPUT]
    return costs, random.Random(seed).choices(whole, (8, 2, 2, 2, 2, 2), k=len(costs.layers))  # swapped ones first


def whole(seed: int) -> tuple[RunCosts, Kinds]:
    """Return what :func:`drawn` does, with drives."""
    costs, kinds = drawn(seed)
    return with_nvme(costs, kinds, random.Random(seed)), kinds


def in_tiles(seed: int) -> tuple[RunCosts, Kinds]:
    draw = random.Random(seed)
    count, layers = draw.choice((4, 16, 64)), draw.randint(2, 10)
    layer = tiled(count)
    if draw.random() < 0.5:
        layer = replace(layer, in_tiles=replace(layer.in_tiles, result_differs=True))
    in_tiles = [kind for kind in PlacementKind if kind not in (PlacementKind.SWAPPED_WITHOUT_INPUT, PlacementKind.NO_RECOMPUTE)]
    kinds = draw.choices(in_tiles, (8, 2, 1, 1, 1), k=layers)
    link = draw.uniform(5e9, 200e9)
    costs = RunCosts((layer,) * layers, link, link, 0, 1 << 60, head_s=draw.random(), tiles=Tiles((1 << 15) // count))
    return with_nvme(costs, kinds, draw), kinds


@pytest.mark.parametrize("how", (drawn, whole))
def test_layers_that_run_whole_take_the_engines_time(how: Callable[[int], tuple[RunCosts, Kinds]]) -> None:
    for seed, alpha in itertools.product(range(40), ALPHAS):
        solved, engine = both(*how(seed), alpha)
        assert solved.seconds == pytest.approx(engine.seconds, rel=1e-9), seed
        for stall in ("d2h_stall_s", "h2d_stall_s", "nvme_stall_s"):
            assert getattr(solved, stall) == pytest.approx(getattr(engine, stall), abs=1e-9 * engine.seconds), (seed, stall)


@pytest.mark.parametrize("rate", ("d2h_bytes_per_s", "h2d_bytes_per_s", "write_bytes_per_s", "read_bytes_per_s"))
def test_a_wrong_bandwidth_shows(rate: str) -> None:
    """The comparison, to 1e-9, can fail."""
    costs, kinds = whole(7)
    if hasattr(costs, rate):
        wrong = replace(costs, **{rate: 0.7 * getattr(costs, rate)})
    else:
        wrong = replace(costs, nvme=replace(costs.nvme, **{rate: 1.1 * getattr(costs.nvme, rate)}))
    solved, engine = Schedule(wrong, kinds), both(costs, kinds, 0.7)[1]
    assert abs(solved.at(0.7, solved.files(0.7)).seconds / engine.seconds - 1) > 1e-6


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


class OneAhead(SwapEngine):
    """An engine that reloads one small frame at a time."""

    def _next_frames(self, frame: Frame) -> list[Frame]:
        return super()._next_frames(frame)[:1]


def off_at_alpha_0() -> float:
    """Return the largest share by which the engine takes longer than the schedule says, where reloads hide behind the tiles."""
    off = []
    for count, link in itertools.product((4, 8), (20e9, 25e9)):
        costs = replace(run(tiled(count), 6, link=link), tiles=Tiles((1 << 15) // count))
        kinds = [PlacementKind.SWAPPED] * 6
        off.append(simulate(costs, placed(kinds, 0.0)).seconds / Schedule(costs, kinds).at(0.0).seconds - 1)
    return max(off)


def test_the_last_tile_of_the_layer_below_is_back_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    assert off_at_alpha_0() < 0.006
    monkeypatch.setattr(virtual_engine, "SwapEngine", OneAhead)
    assert off_at_alpha_0() > 0.012


@pytest.mark.parametrize("alpha, stored", [(0.388, 0.25), (0.5, 0.5), (0.99, 0.75)])
def test_tiles_are_stored_as_a_whole(alpha: float, stored: float) -> None:
    costs, kinds = replace(run(tiled(4), 4, link=50e9), tiles=Tiles(1 << 13)), [PlacementKind.SWAPPED] * 4
    steps = [Schedule(costs, kinds).at(share).seconds for share in (alpha, stored)]
    assert steps[0] == steps[1]
    assert simulate(costs, placed(kinds, alpha)).seconds == simulate(costs, placed(kinds, stored)).seconds


# ---- with files


@pytest.mark.slow
@pytest.mark.parametrize("alpha", ALPHAS)
def test_layers_in_tiles_take_it_as_well_as_without_files(alpha: float) -> None:
    """The schedule of tiles is one of whole layers, so it is off where compute waits for copies."""
    for seed in range(40):
        costs, kinds = in_tiles(seed)
        solved, engine = both(costs, kinds, alpha)
        without = Schedule(costs, kinds).at(alpha).seconds / simulate(replace(costs, nvme=None), placed(kinds, alpha)).seconds
        assert min(1.0, without) - 0.05 < solved.seconds / engine.seconds < max(1.0, without) + 0.05, seed


def test_runs_wait_for_files_in_both_directions() -> None:
    waits = {"forward": 0, "backward": 0}
    for seed in range(0, 40, 2):
        schedule = Schedule(*whole(seed))
        spans = schedule.timeline(0.7, schedule.files(0.7))
        turn = min((span.begin for span in spans if span.kind == "backward"), default=0.0)
        begins = [span.begin for span in spans if span.kind == "nvme stall"]
        waits["forward"] += any(begin < turn for begin in begins)
        waits["backward"] += any(begin >= turn for begin in begins)
    assert min(waits.values()) >= 5, waits


@pytest.mark.parametrize("how", (whole, in_tiles))
def test_streams_do_one_thing_at_a_time_and_stalls_fill_computes_gaps(how: Callable[[int], tuple[RunCosts, Kinds]]) -> None:
    for seed in range(10):
        schedule = Schedule(*how(seed))
        step, spans = schedule.at(0.7, files := schedule.files(0.7)), schedule.timeline(0.7, files)
        by_stream = {stream: [span for span in spans if span.stream == stream] for stream in {span.stream for span in spans}}
        for stream, mine in by_stream.items():
            assert all(a.end <= b.begin + 1e-9 * step.seconds for a, b in pairwise(mine)), (seed, stream)
        assert sum(span.end - span.begin for span in by_stream["compute"]) == pytest.approx(step.seconds), seed
        for kind, stalls in (("stall", step.d2h_stall_s + step.h2d_stall_s), ("nvme stall", step.nvme_stall_s)):
            found = sum(span.end - span.begin for span in spans if span.kind == kind)
            assert found == pytest.approx(stalls, abs=1e-9 * step.seconds), (seed, kind)


def test_the_host_holds_the_rest_to_the_byte() -> None:
    costs, kinds = whole(7)
    schedule = Schedule(costs, kinds)
    files, blocks = schedule.files(0.7), schedule.blocks(0.7)
    assert files > 0 and sum(blocks[files:]) <= costs.host_budget < sum(blocks[files - 1 :])
    exact = replace(costs, host_budget=sum(blocks[files:]))
    simulate(exact, with_files(kinds, 0.7, files))
    assert Schedule(replace(exact, host_budget=exact.host_budget - 1), kinds).files(0.7) > files
    smallest = replace(costs, host_budget=max(blocks))
    files = Schedule(smallest, kinds).files(0.7)
    simulate(smallest, with_files(kinds, 0.7, files))
    smaller = replace(costs, host_budget=max(blocks) - 1)
    assert Schedule(smaller, kinds).files(0.7) is None
    with pytest.raises(MemoError, match="host memory"):
        simulate(smaller, with_files(kinds, 0.7, files))


def test_files_hold_no_more_than_their_budget() -> None:
    costs, kinds = whole(7)
    schedule = Schedule(costs, kinds)
    written = sum(schedule.blocks(0.7)[: schedule.files(0.7)])
    simulate(replace(costs, nvme=replace(costs.nvme, budget=written)), with_files(kinds, 0.7, schedule.files(0.7)))
    with pytest.raises(MemoError, match="files"):
        simulate(replace(costs, nvme=replace(costs.nvme, budget=written - 1)), with_files(kinds, 0.7, schedule.files(0.7)))
