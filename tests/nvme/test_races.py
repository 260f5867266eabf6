"""With late copies, late files and freed memory that loses its value, gradients are the host home's to the last bit.

The negative controls: with any one wait taken out, the checker objects, and where a test of numbers can, it does, too.
"""

from __future__ import annotations

import functools
from contextlib import nullcontext

import pytest
import torch

from ds_memo.nvme.home import FileHome
from ds_memo.swap.pinned_segments import PAGE
from ds_memo.swap.stream_protocol import H2D
from ds_memo.swap.streams import ThreadStreams
from tests.everyday import everyday
from tests.nvme.rig import FRAMES, Watched, attached_with_files, late_files
from tests.swap import races, scenarios
from tests.swap.delayed import DelayedStreams
from tests.swap.ordered import OrderedStreams, OrderError
from tests.swap.rig import attached
from tests.swap.schedules import Setup, differing, play

SCHEDULES = (38, 2, 6, 7, 10, 12, 42, 13, 15, 18, 19, 21, 32, 22, 28, 31, 35, 39, 45, 44, 48, 55, 58, 63)
"""Those that read from files; more than half of all are too short to. The everyday group has the quickest."""
GROUPS = 6
ORDERED_SCHEDULES = SCHEDULES[:12]
ACTIONS = 6

pytestmark = pytest.mark.filterwarnings("ignore::ds_memo.MemoWarning")


@functools.cache
def by_host(seed: int) -> tuple[dict[str, torch.Tensor], int]:
    """Return a schedule's results from the host home, and the bytes of its largest frame."""
    setup, Watched.largest = Setup(seed), 0
    with attached(setup.model, ThreadStreams(), setup.config, slab=Watched):
        return play(setup.model, seed, ACTIONS), Watched.largest


def by_files(seed: int, streams, path, home: type[FileHome] = FileHome) -> tuple[dict[str, torch.Tensor], int]:
    """Return a schedule's results with files behind a host of a few frames, and the bytes that were read from them."""
    setup, (_, largest) = Setup(seed), by_host(seed)
    watching = streams if isinstance(streams, OrderedStreams) else nullcontext()
    with watching, attached_with_files(setup.model, streams, setup.config, path, FRAMES * (largest or PAGE), home) as memo:
        results = play(setup.model, seed, ACTIONS)
        return results, memo.engine.home.files.meters[False].nbytes


@pytest.mark.parametrize("group", everyday(range(GROUPS), [0]))
def test_random_schedules_with_late_copies_late_files_and_poisoned_memory(group, tmp_path):
    read = 0
    for seed in SCHEDULES[group::GROUPS]:
        with late_files(seed):
            ours, nbytes = by_files(seed, DelayedStreams(seed), tmp_path)
        wrong = differing(ours, by_host(seed)[0])
        assert not wrong, f"schedule {seed}: {len(wrong)} results differ, first {wrong[0]}"
        read += nbytes
    assert read


@pytest.mark.parametrize("group", everyday(range(GROUPS), []))
def test_random_schedules_are_ordered_by_events_and_waits(group, tmp_path):
    for seed in ORDERED_SCHEDULES[group::GROUPS]:
        checker = OrderedStreams()
        ours, _ = by_files(seed, checker, tmp_path)
        checker.verify()
        assert not checker.violations
        assert not differing(ours, by_host(seed)[0])


# ---- stories, and the engine without one of its waits

STORY_HOST = 3


def tell(story, streams, path, home: type[FileHome] = FileHome) -> dict[str, torch.Tensor]:
    """Train as a story says, with files behind a host of so many frames."""
    host = STORY_HOST * told_by_host(story)[1]
    attach = functools.partial(attached_with_files, path=path, host_bytes=host, home=home)
    return races.tell(story, streams, slab=Watched, attach=attach)


@functools.cache
def told_by_host(story) -> tuple[dict[str, torch.Tensor], int]:
    """Return a story's results from the host home, and the bytes of its largest frame."""
    Watched.largest = 0
    return races.tell(story, ThreadStreams(), slab=Watched), Watched.largest


@pytest.mark.parametrize("story", everyday(scenarios.STORIES, [scenarios.train, scenarios.abandon_reloads]))
def test_stories(story, tmp_path):
    reference, _ = told_by_host(story)
    checker = OrderedStreams()
    assert not differing(tell(story, checker, tmp_path), reference)
    assert checker.checked > 100
    assert not checker.violations
    with late_files(0):
        assert not differing(tell(story, DelayedStreams(0), tmp_path), reference)


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
        self.files.read = lambda extent, block, after: read(extent, block, without(H2D, after))


def without(stream: str, events: tuple) -> tuple:
    return tuple(event for event in events if event.stream != stream)


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


MUTANTS = [
    WritesTooEarly,
    ReadsTooEarly,
    WaitsForNoTransfer,
    TakesWritesForDone,
    TakesReadsForDone,
]
SHOWS_IN_GRADIENTS = [WritesTooEarly, TakesWritesForDone, TakesReadsForDone]


@pytest.mark.slow
@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.__name__)
def test_without_this_wait_the_checker_objects(mutant, tmp_path):
    for story in scenarios.STORIES:
        checker = OrderedStreams()
        try:
            with late_files(0, delays_s=(2e-3,)):
                tell(story, checker, tmp_path, mutant)
            checker.verify()
        except (OrderError, AssertionError):
            pass
        if checker.violations:
            return
    pytest.fail("no story shows it")


@pytest.mark.slow
@pytest.mark.parametrize("mutant", SHOWS_IN_GRADIENTS, ids=lambda mutant: mutant.__name__)
def test_without_this_wait_gradients_are_wrong(mutant, tmp_path):
    story = scenarios.train
    with late_files(0, delays_s=(3e-2,)):  # later than all copies, on a busy machine, too
        assert differing(tell(story, DelayedStreams(0, delays_s=(3e-3,)), tmp_path, mutant), told_by_host(story)[0])
