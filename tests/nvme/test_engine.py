"""The engine, driven by hand: what is written, evicted and read when, and frames that die, fail or are interrupted."""

from __future__ import annotations

import errno
import gc
import threading
import weakref
from contextlib import suppress
from dataclasses import replace

import pytest
import torch

from ds_memo.errors import MemoError
from ds_memo.nvme import direct_files
from ds_memo.nvme.file_home import FileHome
from ds_memo.swap.engine import SwapEngine
from ds_memo.swap.host_pool import HostPool
from ds_memo.swap.host_slab import HostSlab
from ds_memo.swap.pinned_segments import PAGE
from ds_memo.swap.stream_protocol import COMPUTE, D2H
from ds_memo.swap.streams import ThreadStreams
from tests.nvme.files import CPU, directory
from tests.nvme.ordered_files import OrderedFiles
from tests.nvme.rig import late_files
from tests.nvme.test_direct_files import faulty, raises
from tests.swap.by_hand import Rig
from tests.swap.delayed import DelayedStreams
from tests.swap.ordered import OrderedStreams, OrderError

ROWS = (PAGE // 256, 64)
"""Shape of a tensor of one page."""


class NvmeRig(Rig):
    """An engine with files, of pages of one host, whose frames are one page each."""

    def __init__(self, path, pages: int, streams=None, nvme: bool = True, budget: int = 1 << 25) -> None:
        self.path, self.nvme, self.warnings, self.budget = path, nvme, [], budget
        super().__init__(streams or DelayedStreams(0), pages)

    def __post_init__(self) -> None:
        super().__post_init__()
        files = direct_files.DirectFiles([directory(self.path)], self.budget, self.streams, preallocate=False)
        self.files = OrderedFiles(files, self.streams) if isinstance(self.streams, OrderedStreams) else files
        self.make_engine(FileHome)

    def make_engine(self, home: type[FileHome]) -> None:
        self.home = home(self.streams, self.slab, self.files, self.warnings.append)
        self.engine = SwapEngine(self.streams, self.slab, CPU, self.home)

    def page(self, value: float, nvme: bool | None = None):
        tensors = [torch.full(ROWS, value)]
        frame = self.begin(tensors)
        frame.placement = replace(frame.placement, nvme=self.nvme if nvme is None else nvme)
        self.engine.keep(frame, frame.layout.kept[0], tensors[0])
        self.engine.end(frame)
        return frame

    def value(self, frame) -> float:
        (tensor,) = self.replay(frame)
        (value,) = tensor.unique().tolist()
        return value

    def states(self, frames) -> list[str]:
        return [frame.filed.state for frame in frames]


@pytest.fixture
def make(tmp_path):
    made = []

    def rig(*args, **options) -> NvmeRig:
        made.append(NvmeRig(tmp_path, *args, **options))
        return made[-1]

    yield rig
    for rig in made:
        rig.engine.close()
        assert rig.slab.used == 0


def nothing_is_left(rig: NvmeRig) -> bool:
    gc.collect()
    rig.engine.free_failed_graphs()
    return rig.slab.used == 0 and rig.files.extents() == []


def goes_through(rig: NvmeRig, frames) -> bool:
    """Return True if every frame comes back with the number of its age, in the order of a backward."""
    return all(rig.value(frame) == frame.age - 1 for frame in reversed(frames))


def pages(rig: NvmeRig, count: int, **options) -> list:
    """Run so many layers, each of which keeps a page with its number."""
    return [rig.page(float(rig.engine.traffic.frames), **options) for _ in range(count)]


def eight_of_which_one_is(rig: NvmeRig, state: str) -> list:
    """Run eight layers and as much of their backward as brings a frame into a state; return the frames that are left."""
    frames = pages(rig, 8)
    for _ in range({"reading": 3}.get(state, 1)):
        rig.replay(frames.pop())
    if state == "writing":
        frames += pages(rig, 1)
    elif state == "in_both":
        rig.files.finish()
        rig.home.note_written()
    return frames


# ---- the schedule


def test_a_host_of_four_pages_holds_twelve(make):
    rig = make(4)
    with late_files(1):
        frames = pages(rig, 12)
        assert rig.slab.used <= rig.slab.budget.nbytes
        assert rig.states(frames[:8]) == ["in_file"] * 8
        while frames:
            assert goes_through(rig, [frames.pop()])
    assert rig.files.meters[True].nbytes == 12 * PAGE
    assert rig.files.meters[False].nbytes == 8 * PAGE, "what stays in the cache is not read"
    rig.layer_of([])
    assert rig.files.extents() == []


# ---- frames that die


@pytest.mark.parametrize("thread", ["this", "a copy's"])
@pytest.mark.parametrize("state", ["writing", "in_both", "in_file", "reading"])
def test_a_frame_may_die_in_any_state(state, thread, make):
    rig = make(4)
    with late_files(2, delays_s=(3e-3,)):
        frames = eight_of_which_one_is(rig, state)
        cycle = [frames.pop(rig.states(frames).index(state))]
        dead = weakref.ref(cycle[0])
        cycle.append(cycle)
        del cycle
        if thread == "this":
            gc.collect()
        else:
            rig.streams._queues[D2H].put((gc.collect,))
            rig.streams.wait(COMPUTE, rig.streams.mark(D2H))
        assert dead() is None
        more = pages(rig, 6)
        assert rig.slab.used <= rig.slab.budget.nbytes
        assert set(rig.files.extents()) == {frame.filed.extent for frame in frames + more if frame.filed.extent}
        assert goes_through(rig, more)


@pytest.mark.parametrize("mutant", [False, True])
def test_reads_come_behind_copies_to_the_host(mutant, make):
    """A dropped graph's copy is under way into a block that a read gets. The negative control reads at once."""
    checker = OrderedStreams()
    with checker:
        rig = make(4, streams=checker)
        frames = pages(rig, 8)
        if mutant:
            read = rig.files.read
            rig.files.read = lambda extent, block, after: read(extent, block, after[:1])
        rig.files.finish()
        dropped = rig.page(99.0, nvme=False)
        del dropped
        try:
            rig.replay(frames[2])
        except OrderError:
            assert mutant
    assert bool(checker.violations) == mutant
    rig.files.__dict__.pop("read", None)


class FreesUnderTransfers(FileHome):
    def forget(self, filed) -> None: ...


class ClosesUnderTransfers(FileHome):
    def close(self) -> None: ...


@pytest.mark.parametrize("home", [FileHome, FreesUnderTransfers, ClosesUnderTransfers])
@pytest.mark.parametrize("way", ["dies", "closes"])
def test_no_block_is_freed_under_a_transfer(home, way, tmp_path):
    """With the wait taken out, the checker objects."""
    checker = OrderedStreams()
    with checker, late_files(0, delays_s=(5e-3,)):
        rig = NvmeRig(tmp_path, 4, streams=checker)
        rig.make_engine(home)
        frames = [rig.page(1.0)]
        with suppress(OrderError, AssertionError):
            if way == "dies":
                frames.clear()
                rig.engine.drain()
            rig.engine.close()
        rig.files.close()
    wrong = {"dies": FreesUnderTransfers, "closes": ClosesUnderTransfers}[way]
    assert bool(checker.violations) == (home is wrong)


# ---- refusals


@pytest.mark.parametrize("nth", range(1, 7))
def test_each_read_refused_in_turn_loses_that_backward_alone(nth, make, monkeypatch):
    rig = make(4)
    frames, failed = pages(rig, 10), []
    with monkeypatch.context() as patch:
        faulty(patch, "preadv", nth, raises(errno.EIO))
        for frame in reversed(frames):
            try:
                rig.value(frame)
            except MemoError as error:
                assert "could not be read back, and this backward is lost: rank 0 could not read its file in" in str(error)
                failed.append(frame)
    assert len(failed) == 1
    assert goes_through(rig, failed), "the system's next answer is right"
    assert rig.slab.used <= rig.slab.budget.nbytes


def test_files_without_room_leave_the_rest_on_the_host_and_say_so_once(make, monkeypatch):
    monkeypatch.setattr(direct_files, "STRIPE", PAGE)
    rig = make(8, budget=3 * PAGE)
    frames = pages(rig, 9)
    assert len(rig.warnings) == 1 and "It stays in host memory" in rig.warnings[0]
    with pytest.raises(MemoError, match="host memory"):
        frames += pages(rig, 11)
    assert goes_through(rig, frames)


# ---- Ctrl-C


@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize("nth", range(1, 6))
def test_ctrl_c_as_a_read_is_issued_gives_no_wrong_bytes(nth, before, make):
    rig = make(4)
    with late_files(0, delays_s=(3e-3,)):
        frames = pages(rig, 10)
        read, calls = rig.files.read, []

        def interrupted(*args):
            calls.append(1)
            if before and len(calls) == nth:
                raise KeyboardInterrupt
            transfer = read(*args)
            if len(calls) == nth:
                raise KeyboardInterrupt
            return transfer

        rig.files.read = interrupted
        with pytest.raises(KeyboardInterrupt):
            assert goes_through(rig, frames)
        del rig.files.read
        rig.engine._ahead = []
        assert goes_through(rig, [frame for frame in frames if frame.state != "ready"])
        frames.clear()
        assert nothing_is_left(rig)


# ---- the end


@pytest.mark.parametrize("state", ["writing", "in_both", "in_file", "reading"])
def test_closing_with_living_frames(state, make):
    rig = make(4)
    with late_files(0, delays_s=(3e-3,)):
        frames = eight_of_which_one_is(rig, state)
        assert state in rig.states(frames)
        rig.engine.close()
    assert (rig.slab.used, rig.slab.size) == (0, 0)
    for frame in frames:
        with pytest.raises(MemoError, match="is wanted by a backward after ds_memo was detached"):
            rig.engine.bring_back(frame)
    assert not [thread for thread in threading.enumerate() if thread in rig.files._threads]


def test_two_models_that_share_a_pool_make_room_for_each_other(tmp_path):
    pool = HostPool(CPU)
    rigs = []
    for _ in range(2):
        rig = NvmeRig(tmp_path, 4, streams=ThreadStreams())
        rig.slab.leave()
        rig.slab = HostSlab(4 * PAGE, pool)
        rig.make_engine(FileHome)
        rigs.append(rig)
    frames = [(rig, rig.page(float(number))) for number in range(6) for rig in rigs]
    assert pool.used <= 4 * PAGE == pool.limit
    for number, (rig, frame) in reversed(list(enumerate(frames))):
        assert rig.value(frame) == number // 2
        assert pool.used <= pool.limit
    held = pages(rigs[0], 2, nvme=False)
    rigs[0].engine.close()
    rigs[1].files.extent = lambda *_: (_ for _ in ()).throw(MemoError("none"))
    with pytest.raises(MemoError, match="host memory: frame x needs"):  # one that is closed is asked for no room
        pages(rigs[1], 5)
    rigs[1].engine.free_failed_graphs()
    rigs[1].engine.close()
    assert held and pool.size == 0
