"""With late copies, late files, and freed memory that loses its value, the gradients stay the same to the last bit.

The negative controls: with any single wait taken out, the checkers object, and where a test of numbers can, it does, too.
"""

from __future__ import annotations

import itertools

import pytest

from ds_memo.nvme.file_home import FileHome
from ds_memo.swap.host_slab import Block
from ds_memo.swap.stream_protocol import H2D
from ds_memo.swap.streams import ThreadStreams
from tests.everyday import everyday
from tests.nvme.conftest import nothing_is_left  # noqa: F401  a fixture
from tests.nvme.rig import late_files
from tests.swap import scenarios
from tests.swap.crumbs import Crumbs
from tests.swap.delayed import DelayedStreams
from tests.swap.mutants import engine_without, waits
from tests.swap.ordered import OrderedStreams
from tests.swap.races import ACTIONS, IN_TILES, SHOWS_IN_GRADIENTS, by_host, noticed, run, tell, told
from tests.swap.rig import attached
from tests.swap.schedules import Setup, differing, play
from tests.tiles.rig import assert_within

SEEDS = {
    "whole": (*range(0, 48, 6), *(seed for seed in range(48) if seed % 6)),
    "tiles": (8, 21, 31, 46, 79, 86, 97, 100, 102, 107, *(seed for seed in range(41) if seed not in (8, 21, 31))),
    "groups": tuple(range(24)),
    "files": (38, 42, 32, 45, 2, 6, 7, 10, 12, 13, 15, 18, 19, 21, 22, 28, 31, 35, 39, 44, 48, 55, 58, 63),
}
"""Schedules, the quickest first. Over files those that read from them; more than half of all are too short to."""
GROUPS, ORDERED_GROUPS = 12, 3
FIRST = [(way, 0) for way in SEEDS]
LATE_S = (3e-3,)
pytestmark = pytest.mark.filterwarnings("ignore::ds_memo.MemoWarning")


def part_of(way: str, group: int) -> tuple[int, ...]:
    count = -(-len(SEEDS[way]) // GROUPS)
    return SEEDS[way][group * count : (group + 1) * count]


@pytest.mark.parametrize(
    "way, group",
    everyday(itertools.product(SEEDS, range(GROUPS)), FIRST, [(way, 1) for way in SEEDS]),
)
def test_random_schedules_with_late_copies_and_poisoned_memory(way, group, tmp_path):
    """In tiles the results are stock's, too, up to rounding."""
    total = 0
    for seed in part_of(way, group):
        with late_files(seed):
            ours, done = run(way, seed, DelayedStreams(seed), tmp_path)
        total += done
        reference = run(way, seed, ThreadStreams())[0] if way in IN_TILES else by_host(seed)[0]
        wrong = differing(ours, reference)
        assert not wrong, f"schedule {seed}: {len(wrong)} results differ, first {wrong[0]}"
        if way in IN_TILES:
            assert_within(reference, play(Setup(seed).model, seed, ACTIONS), 1e-5)
    assert total


@pytest.mark.parametrize(
    "way, group", everyday(itertools.product(SEEDS, range(ORDERED_GROUPS)), FIRST[:1], [(way, 1) for way in SEEDS])
)
def test_random_schedules_are_ordered_by_events_and_waits(way, group, tmp_path):
    for seed in SEEDS[way][group : 4 * ORDERED_GROUPS : ORDERED_GROUPS]:
        checker = OrderedStreams()
        ours, _ = run(way, seed, checker, tmp_path)
        checker.verify()
        assert not checker.violations
        assert not differing(ours, run(way, seed, ThreadStreams())[0] if way in IN_TILES else by_host(seed)[0])


@pytest.mark.slow
def test_random_schedules_over_blocks_of_many_pieces():
    """Every kept tensor crosses borders, and its copies come late: every bit is the same."""
    crossed = Crumbs.crossed
    for seed in SEEDS["whole"][:6]:
        checker = OrderedStreams()
        late = run("whole", seed, DelayedStreams(seed, delays_s=(0.0, 1e-5, 1e-4)), slab=Crumbs)[0]
        assert not differing(late, by_host(seed)[0])
        assert not differing(run("whole", seed, checker, slab=Crumbs)[0], by_host(seed)[0])
        checker.verify()
    assert Crumbs.crossed > crossed


# ---- stories that need one wait each

TILED = [scenarios.train, scenarios.raise_in_a_layer, scenarios.drop_on_the_way_back, scenarios.abandon_reloads]
"""Those in which a tile's forward or backward ends early, and a plain one."""
WHOLE = [("whole", story) for story in scenarios.STORIES]
DAILY = [*WHOLE[::2], ("files", scenarios.train), ("groups", scenarios.raise_while_inputs_are_computed)]
TOLD = [*WHOLE, *(("tiles", story) for story in TILED)]
TOLD += [(way, story) for way in ("groups", "files") for story in scenarios.STORIES]


@pytest.mark.parametrize("way, story", everyday(TOLD, DAILY))
def test_stories(way, story, tmp_path):
    reference = tell(story, ThreadStreams(), "tiles") if way in IN_TILES else told(story)[0]
    checker = OrderedStreams()
    assert not differing(tell(story, checker, way, tmp_path), reference)
    assert checker.checked > 100 and not checker.violations
    with late_files(0):
        assert not differing(tell(story, DelayedStreams(0), way, tmp_path), reference)


@pytest.mark.parametrize("residents", [0, 2])
def test_an_unused_reload_is_dropped_before_another_begins(residents):
    story = scenarios.abandon_reloads
    model = scenarios.stack(story)
    with attached(model, ThreadStreams(), {"alpha": 0.5, "resident_layers": residents}) as memo:
        engine, returning = memo.engine, []
        reload = engine._reload

        def counting(frame):
            reload(frame)
            returning.append(sum(ref() is not None and ref().state == "returning" for ref in engine._stack))

        engine._reload = counting
        story(memo, model, scenarios.batches())
    assert len(returning) > 8 and max(returning) == 1


# ---- the engine without one of its waits

WAITS = [("groups" if "_late" in wait else "whole", wait) for wait in waits()]
WAITS += [("tiles", wait) for wait in SHOWS_IN_GRADIENTS]


@pytest.mark.parametrize("way, wait", everyday(WAITS, WAITS[: len(waits())]))
def test_without_this_wait_the_checker_objects(way, wait):
    assert noticed(way, wait)


@pytest.mark.parametrize("wait", SHOWS_IN_GRADIENTS)
@pytest.mark.parametrize("way", everyday(["whole", "tiles"], ["whole"]))
def test_without_this_wait_gradients_are_wrong(way, wait):
    story = SHOWS_IN_GRADIENTS[wait] if way == "whole" else scenarios.train
    if story is SHOWS_IN_GRADIENTS[wait]:
        wrong = tell(story, DelayedStreams(0, delays_s=LATE_S), way, engine=engine_without(wait))
        assert differing(wrong, tell(story, ThreadStreams(), way))


def test_without_a_wait_a_random_schedule_is_wrong():
    mutant, seed = engine_without("bring_back: self.streams.wait(COMPUTE, frame.back)"), SEEDS["tiles"][0]
    wrong, _ = run("tiles", seed, DelayedStreams(0, delays_s=LATE_S), engine=mutant)
    assert differing(wrong, run("tiles", seed, ThreadStreams())[0])


# ---- files without one of their waits


class WritesTooEarly(FileHome):
    """Writes not behind `sent`."""

    def __init__(self, *args) -> None:
        super().__init__(*args)
        write = self.files.write
        self.files.write = lambda block, extent, after: write(block, extent, ())


class ReadsTooEarly(FileHome):
    """Reads not behind copies to the device."""

    def __init__(self, *args) -> None:
        super().__init__(*args)
        read = self.files.read
        self.files.read = lambda extent, block, after: read(extent, block, tuple(e for e in after if e.stream != H2D))


class WaitsForNoTransfer(FileHome):
    """Reloads, frees and evicts under transfers."""

    def wait(self, filed) -> None: ...


class TakesWritesForDone(FileHome):
    def note_written(self) -> None:
        done, self.files.done = self.files.done, lambda transfer: True
        try:
            super().note_written()
        finally:
            self.files.done = done


class TakesReadsForDone(FileHome):
    def has(self, frame) -> bool:
        return True

    def fetch(self, frame) -> None:
        wait, self.wait = self.wait, lambda filed: None
        try:
            super().fetch(frame)
        finally:
            self.wait = wait


MUTANTS = [WritesTooEarly, TakesWritesForDone, TakesReadsForDone, ReadsTooEarly, WaitsForNoTransfer]


@pytest.mark.slow
@pytest.mark.parametrize("mutant", MUTANTS)
def test_without_this_wait_for_files_the_checker_objects(mutant, tmp_path):
    with late_files(0, delays_s=(2e-3,)):
        assert noticed("files", None, tmp_path, mutant)


@pytest.mark.slow
@pytest.mark.parametrize("mutant", MUTANTS[:3])
def test_without_this_wait_for_files_gradients_are_wrong(mutant, tmp_path):
    with late_files(0, delays_s=(3e-2,)):  # later than all copies, on a busy machine, too
        wrong = tell(scenarios.train, DelayedStreams(0, delays_s=LATE_S), "files", tmp_path, mutant)
    assert differing(wrong, told(scenarios.train)[0])


# ---- how pieces are cut

RIGHT = Block.parts


def same_rows_for_each_piece(block, begin, nbytes):
    return [(memory, first, 0, size) for memory, first, _, size in RIGHT(block, begin, nbytes)]


def no_second_piece(block, begin, nbytes):
    return RIGHT(block, begin, nbytes)[:1]


@pytest.mark.parametrize("wrong", everyday([same_rows_for_each_piece, no_second_piece], [same_rows_for_each_piece]))
def test_pieces_cut_wrongly_are_noticed(wrong, monkeypatch):
    story = scenarios.train
    assert not differing(tell(story, DelayedStreams(0), slab=Crumbs), told(story)[0])
    monkeypatch.setattr(Block, "parts", wrong)
    assert not differing(tell(story, DelayedStreams(0)), told(story)[0]), "with one piece there is nothing to cut"
    assert differing(tell(story, DelayedStreams(0), slab=Crumbs), told(story)[0])
