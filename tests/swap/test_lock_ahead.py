"""Host memory that a thread locks: taken over segment by segment, with the errors of the thread, and nothing left behind."""

from __future__ import annotations

import gc
import threading
import weakref

import pytest
import torch

from ds_memo.errors import MemoError
from ds_memo.swap import pinned_segments as segments
from ds_memo.swap.host_pool import HostPool
from ds_memo.swap.host_slab import HostSlab
from ds_memo.swap.lock_ahead import LockAhead, segments_for
from ds_memo.swap.pinned_segments import PAGE, Segment
from ds_memo.units import GIB

CUDA = torch.device("cuda", 0)
LONG_S = 30.0
"""Seconds. A test that waits this long hangs."""


class Locking:
    """A stand-in for CUDA's locking, which waits for `let` and notes threads and bytes."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.gate = threading.Semaphore(0)
        self.locked: list[tuple[str, int]] = []
        self.fails: BaseException | None = None
        self._segments: list[weakref.ref[Segment]] = []
        monkeypatch.setattr(segments, "pin", self._pin)
        monkeypatch.setattr(segments, "SEGMENT", 3 * PAGE)
        monkeypatch.setattr("ds_memo.swap.host_pool.node_of", lambda device: None)
        for name in ("current_stream", "synchronize", "set_device"):
            monkeypatch.setattr(torch.cuda, name, lambda device: None)

    def let(self, segments: int) -> None:
        self.gate.release(segments)

    def _pin(self, segment: Segment) -> None:
        assert self.gate.acquire(timeout=LONG_S)
        if self.fails is not None:
            raise self.fails
        self.locked.append((threading.current_thread().name, segment.nbytes))
        self._segments.append(weakref.ref(segment))

    @property
    def held(self) -> int:
        return sum(segment.nbytes for ref in self._segments if (segment := ref()) is not None)


@pytest.fixture
def locking(monkeypatch):
    made = Locking(monkeypatch)
    yield made
    made.let(1000)


def slab(pages: int = 100) -> HostSlab:
    return HostSlab(pages * PAGE, HostPool(CUDA))


def ended() -> bool:
    threads = [thread for thread in threading.enumerate() if thread.name == "ds_memo-lock"]
    for thread in threads:
        thread.join(LONG_S)
    return not any(thread.is_alive() for thread in threads)


@pytest.mark.parametrize(
    "blocks, held, most, expected",
    [
        ([GIB // 2] * 8, 0, 8 * GIB, [GIB] * 4),
        ([3 * GIB // 8] * 5, 0, 8 * GIB, [3 * GIB // 4] * 2 + [3 * GIB // 8]),  # whole blocks
        ([5 * GIB // 2] * 2, 0, 96 * GIB, [GIB, GIB, GIB // 2] * 2),  # but for those that are larger
        ([3 * GIB] * 4, 7 * GIB, 96 * GIB, [GIB] * 6),  # the first two exist
        ([GIB // 2] * 8, 0, 5 * GIB // 2, [GIB, GIB, GIB // 2]),  # the budget
        ([GIB // 2] * 8, 0, 5 * GIB // 2 + 1, [GIB, GIB, GIB // 2]),  # one that does not end on a page
        ([0, 0], 0, GIB, []),
    ],
)
def test_segments_hold_whole_blocks(blocks, held, most, expected):
    assert segments_for(blocks, held, most) == expected


def test_a_block_waits_for_its_segment_alone(locking):
    host = slab()
    host.pool.lock_ahead([3 * PAGE] * 4)
    assert host.size == 0, "the main thread waited"
    locking.let(1)
    first = host.allocate(3 * PAGE, "x")
    assert [len(first.pieces), host.size] == [1, 3 * PAGE]
    locking.let(3)
    blocks = [first, *(host.allocate(3 * PAGE, "x") for _ in range(3))]
    assert all(len(block.pieces) == 1 for block in blocks)
    assert locking.locked == [("ds_memo-lock", 3 * PAGE)] * 4
    assert host.pool.locked_bytes == 12 * PAGE and host.pool.locking_s > 0
    locking.let(1)
    host.allocate(PAGE, "more than was foreseen")
    assert locking.locked[-1] == ("MainThread", PAGE)
    host.pool.lock_ahead([3 * PAGE] * 6)
    locking.let(2)
    host.pool.finish_locking()  # as before a budget is made: what is being locked counts
    assert host.size > 13 * PAGE and ended()


def test_models_in_turns_lock_once(locking):
    pool = HostPool(CUDA)
    models = [HostSlab(100 * PAGE, pool) for _ in range(2)]
    locking.let(8)
    for _ in range(3):
        for host in models:
            pool.lock_ahead([3 * PAGE] * 4)
            for block in [host.allocate(3 * PAGE, "x") for _ in range(4)]:
                host.free(block)
    assert len(locking.locked) == 4 and pool.size == 12 * PAGE


@pytest.mark.parametrize("fails", [MemoError("no more"), ZeroDivisionError("in the thread")])
def test_an_error_of_the_thread_is_one_of_the_frame_that_needs_the_memory(locking, fails):
    locking.fails = fails
    host = slab()
    host.pool.lock_ahead([3 * PAGE] * 4)
    locking.let(2)
    refused = r"host memory: frame 3 needs .* GiB more; no more"
    with pytest.raises(type(fails), match=refused if isinstance(fails, MemoError) else "in the thread"):
        host.allocate(3 * PAGE, "frame 3")
    assert ended() and host.used == host.size == locking.held == 0
    host.pool.release()  # forgets the refusal
    locking.fails = None
    locking.let(1)
    assert host.allocate(3 * PAGE, "x").nbytes == 3 * PAGE


def test_an_interrupted_wait_loses_nothing(locking, monkeypatch):
    host = slab()
    host.pool.lock_ahead([3 * PAGE] * 2)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(LockAhead, "take", lambda ahead, wait: (_ for _ in ()).throw(KeyboardInterrupt))
        host.allocate(3 * PAGE, "x")
    locking.let(2)
    assert [host.allocate(3 * PAGE, "x").nbytes for _ in range(2)] == [3 * PAGE] * 2
    assert locking.locked == [("ds_memo-lock", 3 * PAGE)] * 2


@pytest.mark.parametrize("closed", [True, False])
def test_nothing_stays_locked_by_a_model_that_goes_meanwhile(locking, closed):
    host = slab()
    host.pool.lock_ahead([3 * PAGE] * 4)
    threading.Timer(0.05, locking.let, (1,)).start()  # the segment that is being locked
    if closed:
        host.close()
    del host
    gc.collect()
    assert ended() and len(locking.locked) == 1 and locking.held == 0


def test_memory_of_a_cpu_is_not_locked():
    host = HostSlab(100 * PAGE, HostPool(torch.device("cpu")))
    host.pool.lock_ahead([3 * PAGE] * 4)
    assert host.size == 0 and ended()
