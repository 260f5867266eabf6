"""Random training schedules of models in tiles: late copies and memory that loses its value change no bit.

The schedules are those of the swap engine's tests. Here each draws tiles besides, and is compared with stock, too.
"""

from __future__ import annotations

import functools
import random
from typing import Any

import pytest
import torch

from ds_memo.swap.engine import SwapEngine
from ds_memo.swap.streams import ThreadStreams
from tests.models import Different
from tests.swap import scenarios
from tests.swap.conftest import alone  # noqa: F401  a fixture
from tests.swap.delayed import DelayedStreams
from tests.swap.mutants import engine_without, waits
from tests.swap.ordered import OrderedStreams
from tests.swap.races import SHOWS_IN_GRADIENTS, noticed, racing, tell
from tests.swap.schedules import Setup, differing, play
from tests.tiles.rig import assert_within

SCHEDULES = 80
DAILY = (8, 21, 31, 46, 79, 86, 97, 100, 102, 107)
"""Schedules of small models."""
GROUPS = 8
ORDERED_SCHEDULES = 8
ACTIONS = 6

pytestmark = pytest.mark.filterwarnings("ignore::ds_memo.MemoWarning")


IN_TILES = {"tile_tokens": 16, "head_groups": 2}
"""The stories run in these tiles."""


def tiles_of(seed: int) -> dict[str, Any]:
    """Draw tiles for a schedule. Its lengths are 5, 16 and 24, its batches 1 and 2."""
    draw = random.Random(seed + 10_000)
    return {"tile_tokens": draw.choice([5, 7, 9, 15, 24]), "head_groups": draw.choice([1, 2, 4])}


def run(seed: int, streams: Any, engine: type[SwapEngine] = SwapEngine) -> dict[str, torch.Tensor]:
    setup = Setup(seed)
    with racing(setup, streams, engine, **tiles_of(seed)) as memo:
        results = play(setup.model, seed, ACTIONS)
        tiles = memo.report()["tiles"] or {"layers": [], "not_tiled": {}}  # a schedule may have no training forward
        assert all("a hook of its" in reason for reason in tiles["not_tiled"].values())  # the action "raise" sets one
        run.tiled += len(tiles["layers"])  # type: ignore[attr-defined]
        return results


run.tiled = 0  # type: ignore[attr-defined]


@functools.cache
def reference(seed: int) -> dict[str, torch.Tensor]:
    return run(seed, ThreadStreams())


def assert_as_stock(seed: int, results: dict[str, torch.Tensor]) -> None:
    """Compare a schedule's results with those of the model by itself."""
    try:
        assert_within(results, play(Setup(seed).model, seed, ACTIONS), 1e-5)
    except Different as different:
        raise Different(f"schedule {seed}: {different}") from None


@pytest.mark.parametrize("seed", DAILY)
def test_a_random_schedule_with_late_copies_and_poisoned_memory(seed: int) -> None:
    before = run.tiled  # type: ignore[attr-defined]
    assert_as_stock(seed, run(seed, DelayedStreams(seed)))
    assert run.tiled > before  # type: ignore[attr-defined]


def test_without_a_wait_a_random_schedule_is_wrong() -> None:
    mutant = engine_without("bring_back: self.streams.wait(COMPUTE, frame.back)")
    with pytest.raises(Different):
        assert_as_stock(DAILY[0], run(DAILY[0], DelayedStreams(0, delays_s=(3e-3,)), mutant))


@pytest.mark.slow
@pytest.mark.parametrize("group", range(GROUPS))
def test_random_schedules_with_late_copies_and_poisoned_memory(group: int) -> None:
    """Every result is the same to the last bit as with copies in time."""
    before = run.tiled  # type: ignore[attr-defined]
    for seed in range(group, SCHEDULES, GROUPS):
        wrong = differing(run(seed, DelayedStreams(seed)), reference(seed))
        assert not wrong, f"schedule {seed}: {len(wrong)} results differ, first {wrong[0]}"
        assert_as_stock(seed, reference(seed))
    assert run.tiled > before  # type: ignore[attr-defined]


@pytest.mark.slow
@pytest.mark.parametrize("group", range(4))
def test_random_schedules_are_ordered_by_events(group: int) -> None:
    for seed in range(group, ORDERED_SCHEDULES, 4):
        checker = OrderedStreams()
        ours = run(seed, checker)
        checker.verify()
        assert not checker.violations
        assert not differing(ours, reference(seed))


# ---- stories, and the engine without one of its waits


STORIES = [scenarios.train, scenarios.raise_in_a_layer, scenarios.drop_on_the_way_back, scenarios.abandon_reloads]
"""Those in which a tile's forward or backward ends early, and a plain one; tests/swap tells all, in whole layers."""


@pytest.mark.slow
@pytest.mark.parametrize("story", STORIES, ids=lambda story: story.__name__)
def test_stories(story: Any) -> None:
    want = tell(story, ThreadStreams(), **IN_TILES)
    checker = OrderedStreams()
    assert not differing(tell(story, checker, **IN_TILES), want)
    assert checker.checked > 100
    assert not checker.violations
    assert not differing(tell(story, DelayedStreams(0), **IN_TILES), want)


@pytest.mark.slow
@pytest.mark.parametrize("wait", [wait for wait, story in SHOWS_IN_GRADIENTS.items() if story is scenarios.train])
def test_without_this_wait_gradients_are_wrong(wait: str) -> None:
    late = DelayedStreams(0, delays_s=(3e-3,))
    wrong = tell(scenarios.train, late, engine_without(wait), **IN_TILES)
    assert differing(wrong, tell(scenarios.train, ThreadStreams(), **IN_TILES))


@pytest.mark.slow
@pytest.mark.parametrize("wait", [wait for wait in waits() if not wait.startswith("abort")])  # no story aborts a tile: tests/swap
def test_without_this_wait_the_checker_objects(wait: str) -> None:
    assert noticed(wait, **IN_TILES)
