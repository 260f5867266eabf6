"""Slabs of one pool: each may use all of it in turns, and an equal share where passes are open at once."""

from __future__ import annotations

import gc
import itertools
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from ds_memo.errors import MemoError
from ds_memo.swap import pinned_segments, streams
from ds_memo.swap.host_budget import HostBudget, promised_bytes, shared_pool
from ds_memo.swap.host_pool import HostPool
from ds_memo.swap.host_slab import Block, HostSlab
from ds_memo.swap.pinned_segments import PAGE

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
pytestmark = pytest.mark.usefixtures("no_other_client")


def slabs_of(*pages: int, pool: HostPool | None = None) -> list[HostSlab]:
    """Slabs of one pool, with budgets of so many pages."""
    pool = pool or HostPool(CPU)
    return [HostSlab(count * PAGE, pool) for count in pages]


def shares(slabs: list[HostSlab]) -> list[float]:
    return [slab.budget.share / PAGE for slab in slabs]


def begins(slab: HostSlab) -> float:
    """Begin a pass; return the pages that it reserves."""
    slab.budget.pass_begins()
    return slab.budget.reservation / PAGE


def take(slab: HostSlab, pages: int) -> Block:
    return slab.allocate(pages * PAGE, "x")


def drop(slab: HostSlab) -> None:
    """Let a slab go in a reference cycle, as a model that was not detached does."""
    slab.itself = slab


def test_in_turns_each_has_everything_and_nothing_is_mapped_anew():
    slabs, found = slabs_of(10, 10), []
    for slab in slabs * 3:
        assert begins(slab) == 10
        block = take(slab, 10)
        found.append(block.views(0, PAGE)[0].data_ptr())
        slab.free(block)
        slab.budget.forward_over()
    assert len(set(found)) == 1 and slabs[0].size == slabs[1].size == 10 * PAGE
    assert shares(slabs) == [10, 10] and [slab.peak_used for slab in slabs] == [10 * PAGE] * 2


def test_room_in_the_usual_case_is_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is one comparison, which looks at no other client. All else is counted as before."""
    counted: list[bool] = []
    left = HostBudget.left.fget
    monkeypatch.setattr(HostBudget, "left", property(lambda self: (counted.append(True), left(self))[1]))
    for at_once, agreed, most, mine, others, wanted in itertools.product(
        (False, True), (3, 8), (5, 9), (0, 2), (0, 4), range(12)
    ):
        first, second = slabs_of(8, 10)
        budget, pool = first.budget, first.pool
        blocks = [(slab, take(slab, pages)) for slab, pages in ((first, mine), (second, others)) if pages]
        budget.agree(agreed * PAGE)
        budget.has_share, pool.most = at_once, most * PAGE
        counted.clear()
        found, was_counted = budget.has_room(wanted * PAGE), bool(counted)
        assert found == (wanted * PAGE <= left(budget))
        assert was_counted or (found and not at_once)
        assert not was_counted or at_once or mine + others + wanted > min(8, agreed, most)
        for slab, block in blocks:
            slab.free(block)


def test_at_once_each_has_an_equal_share_from_then_on():
    first, second = slabs = slabs_of(10, 10)
    begins(first)
    block = take(first, 8)
    first.budget.forward_over()
    assert begins(second) == 2, "the first still holds more than its part"
    assert shares(slabs) == [5, 5]
    with pytest.raises(MemoError, match=r"x needs .* GiB, .* GiB are left beside .* GiB that other models hold"):
        take(second, 3)
    first.free(block)
    assert second.budget.reservation == 2 * PAGE, "of the pass under way"
    second.budget.forward_over()
    assert begins(second) == 5
    blocks = [take(slab, 5) for slab in slabs]
    assert first.size == 10 * PAGE
    for slab, block in zip(slabs, blocks, strict=True):
        with pytest.raises(MemoError, match=r"0 of .* GiB are left"):
            take(slab, 1)
        slab.free(block)


def test_without_a_share_the_second_runs_out_of_host_memory(monkeypatch):
    """The control: nothing else holds the first back."""
    monkeypatch.setattr(HostBudget, "_at_once", lambda budget: [])
    first, second = slabs_of(10, 10)
    for slab in (first, second):
        begins(slab)
        slab.budget.forward_over()
    _block = take(first, 10)
    with pytest.raises(MemoError, match=r"0 of .* GiB are left beside .* GiB that other models hold"):
        take(second, 5)


def test_dropped_graphs_and_dead_frames_do_not_wait():
    """Not even in reference cycles, as those of a pass that raised, with its traceback."""
    first, second = slabs_of(10, 10)
    dead = []

    class Frame:
        def __init__(self) -> None:
            self.block, self.itself = take(first, 8), self

        def __del__(self) -> None:
            dead.append(self.block)

    class Engine:
        slab = first

        def drain(self) -> None:
            while dead:
                first.free(dead.pop())

        def make_room(self, enough: Callable[[], bool]) -> None: ...

    engine = Engine()
    first.held_by(engine)
    Frame()
    assert first.used == 8 * PAGE
    assert begins(second) == 10 and not first.budget.has_share and not second.budget.has_share
    second.budget.forward_over()
    Frame()
    first.free(take(first, 10))


# ---- the system refuses, ranks agree


def refuse(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pinned_segments, "map_pages", lambda nbytes: (_ for _ in ()).throw(MemoError("no more")))


def test_a_refusal_is_told_to_all(monkeypatch):
    first, second = slabs = slabs_of(10, 10)
    first.free(take(first, 3))
    refuse(monkeypatch)
    with pytest.raises(MemoError, match="no more"):
        take(second, 5)
    for slab in slabs:
        assert slab.budget.offer == (3 * PAGE, "no more") and slab.budget.nbytes == 10 * PAGE
        assert slab.budget.changed() is None, "ranks have not agreed on it"
        slab.budget.agree(*slab.budget.offer)
        assert slab.budget.share == 3 * PAGE
        assert "the system refused more" in slab.budget.changed() and slab.budget.changed() is None


@pytest.mark.parametrize("end", ["over", "interrupted", "its thread has ended"])
def test_forwards_in_two_threads_are_refused(end: str):
    """While both run. Neither a refused forward nor an interrupted one stands in the way of the next."""
    slabs = slabs_of(10, 10)
    first, second = (slab.budget for slab in slabs)
    with ThreadPoolExecutor(1, "elsewhere") as thread:
        thread.submit(first.pass_begins).result(5)
        for _ in range(2):
            with pytest.raises(
                MemoError, match="began in thread MainThread while one runs in thread elsewhere_0 that shares its"
            ):
                second.pass_begins()
            second.forward_over()
        if end == "over":
            thread.submit(first.forward_over).result(5)
        elif end == "interrupted":
            thread.submit(second.pass_begins).result(5)
            thread.submit(second.forward_over).result(5)
    second.pass_begins()
    assert second.reservation == 10 * PAGE and not second.has_share


# ---- slabs that are gone


def test_what_a_model_that_was_let_go_held_is_allocated_again(monkeypatch):
    """Not before the copies of its streams are over."""
    finished, real = [], streams.finish_abandoned
    monkeypatch.setattr("ds_memo.swap.host_pool.finish_abandoned", lambda device: finished.append(1) or real(device))
    first, second = slabs_of(10, 10)
    first.block = take(first, 10)
    drop(first)
    del first
    assert second.pool.used == 10 * PAGE and not finished
    assert begins(second) == 10
    assert take(second, 10).nbytes == second.size == second.pool.used and finished == [1]


def test_abandoned_copies_end_before_memory_is_allocated_again():
    there = streams.ThreadStreams()
    slow = torch.zeros(1)
    there._queues[streams.D2H].put((time.sleep, 0.2))
    there.copy(streams.D2H, slow, torch.ones(1), 4)
    del there
    streams.finish_abandoned(CPU)
    assert slow.item() == 1


def test_what_other_pools_may_still_take_is_promised():
    host, other, dropped, mine = (HostSlab(pages * PAGE, shared_pool(pages, CPU)) for pages in (10, 5, 3, 7))
    assert promised_bytes(mine.pool) == 18 * PAGE
    drop(dropped)
    del dropped
    assert promised_bytes(mine.pool) == 15 * PAGE
    block = take(host, 4)
    assert promised_bytes(mine.pool) == 11 * PAGE
    host.free(block)
    assert promised_bytes(mine.pool) == 11 * PAGE, "it is still held"
    HostSlab(12 * PAGE, host.pool)
    host.budget.nbytes = 2 * PAGE
    assert promised_bytes(mine.pool) == 5 * PAGE, "a lower budget takes nothing from the others'"
    other.close()
    assert promised_bytes(mine.pool) == 0


def test_a_pool_is_shared_by_models_of_one_setting_on_one_device():
    pool = shared_pool(None, CPU)
    assert shared_pool(None, CPU) is pool
    assert shared_pool(8.0, CPU) is not pool and shared_pool(None, torch.device("meta")) is not pool


# ---- compute streams


@pytest.fixture
def compute(monkeypatch: pytest.MonkeyPatch) -> tuple[list[str], list[torch.device]]:
    """The one stream that is current, and the device of each wait for it."""
    stream, waits = ["one"], []
    monkeypatch.setattr(pinned_segments, "pin", lambda segment: None)
    monkeypatch.setattr("ds_memo.swap.host_pool.node_of", lambda device: None)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(HostPool, "_stream", lambda pool: stream[0] if pool.pinned else None)
    monkeypatch.setattr(torch.cuda, "synchronize", waits.append)
    return stream, waits


@pytest.mark.parametrize("device", [CPU, torch.device("cuda", 1)])
def test_a_pool_waits_for_its_own_device(compute, device):
    """Which need not be the current one. Copies of a CPU's pool are not on CUDA, which another model may use."""
    pool = HostPool(device)
    (lost,) = slabs_of(10, pool=pool)
    lost.block = take(lost, 1)
    drop(lost)
    del lost
    gc.collect()
    (slab,) = slabs_of(10, pool=pool)
    slab.free(take(slab, 10))
    slab.close()
    assert set(compute[1]) == ({device} if device != CPU else set())


def test_a_stream_waits_for_what_others_gave_back(compute):
    """No event of it comes behind the copies that their streams have ordered. Its own need no wait."""
    stream, waits = compute
    first, second = slabs_of(10, 10, pool=HostPool(CUDA))
    first.free(take(first, 4))
    block = take(first, 4)
    assert waits == []
    stream[0] = "two"
    held = take(second, 2)
    assert waits == [CUDA]
    stream[0] = "one"
    first.free(block)
    stream[0] = "two"
    second.free(take(second, 4))
    assert waits == [CUDA] * 2
    second.free(take(second, 4))
    assert waits == [CUDA] * 2
    second.free(held)
