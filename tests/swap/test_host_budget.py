"""Slabs of one pool: each may use all of it in turns, and an equal share where passes are open at once."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from ds_memo.errors import MemoError
from ds_memo.swap import streams
from ds_memo.swap.host_budget import HostBudget, promised_bytes, shared_pool
from ds_memo.swap.host_pool import HostPool
from ds_memo.swap.host_slab import Block, HostSlab
from ds_memo.swap.pinned_segments import PAGE
from tests.swap.budgets import CPU, two

CUDA = torch.device("cuda", 0)
pytestmark = pytest.mark.usefixtures("no_other_client")


def test_in_turns_each_has_everything_and_nothing_is_mapped_anew():
    slabs = two()
    found = []
    for slab in slabs * 3:
        slab.budget.pass_begins()
        block = slab.allocate(10 * PAGE, "x")
        found.append(block.views(0, PAGE)[0].data_ptr())
        assert slab.budget.reservation == 10 * PAGE
        slab.free(block)
        slab.budget.forward_over()
    assert len(set(found)) == 1 and slabs[0].size == slabs[1].size == 10 * PAGE
    assert [slab.budget.share for slab in slabs] == [10 * PAGE] * 2
    assert [slab.peak_used for slab in slabs] == [10 * PAGE] * 2


def test_at_once_each_has_an_equal_share_from_then_on():
    first, second = two()
    first.budget.pass_begins()
    block = first.allocate(8 * PAGE, "x")
    first.budget.forward_over()
    second.budget.pass_begins()
    assert (first.budget.share, second.budget.share) == (5 * PAGE, 5 * PAGE)
    assert second.budget.reservation == 2 * PAGE, "the first still holds more than its part"
    with pytest.raises(MemoError, match=r"needs .* GiB, .* GiB are left beside .* GiB that other models hold"):
        second.allocate(3 * PAGE, "y")
    first.free(block)
    assert second.budget.reservation == 2 * PAGE, "of the pass under way"
    second.budget.forward_over()
    second.budget.pass_begins()
    assert second.budget.reservation == 5 * PAGE
    blocks = [slab.allocate(5 * PAGE, "x") for slab in (first, second)]
    assert first.size == 10 * PAGE
    for slab, block in zip((first, second), blocks, strict=True):
        with pytest.raises(MemoError, match=r"0 of .* GiB are left"):
            slab.allocate(1, "y")
        slab.free(block)


def test_without_a_share_the_second_runs_out_of_host_memory(monkeypatch):
    """The control: nothing else holds the first back."""
    monkeypatch.setattr(HostBudget, "_at_once", lambda slab: [])
    first, second = two()
    for _ in range(3):
        for slab in (first, second):
            slab.budget.pass_begins()
            slab.budget.forward_over()
        first_block = first.allocate(first.budget.reservation, "x")
        with pytest.raises(MemoError, match=r"y needs .* GiB, 0 of .* GiB are left beside .* GiB that other models hold"):
            second.allocate(5 * PAGE, "y")
        first.free(first_block)


def test_a_reservation_holds_until_the_forward_is_over():
    """Though a forward inside it, of another model, gives both a share."""
    outer, inner = two()
    outer.budget.pass_begins()
    blocks = [outer.allocate(PAGE, "x")]
    inner.budget.pass_begins()
    inner.budget.forward_over()
    assert (outer.budget.share, inner.budget.share) == (5 * PAGE, 5 * PAGE) and outer.budget.reservation == 10 * PAGE
    blocks.append(outer.allocate(9 * PAGE, "x"))
    outer.budget.forward_over()
    assert outer.budget.reservation == 5 * PAGE
    for block in blocks:
        outer.free(block)


def test_only_models_that_took_part_have_a_share():
    """A third, whose passes come in turns, may use everything that the others do not hold."""
    pool = HostPool(CPU)
    first, second, third = (HostSlab(12 * PAGE, pool) for _ in range(3))
    third.free(third.allocate(PAGE, "x"))
    block = first.allocate(PAGE, "x")
    second.budget.pass_begins()
    second.budget.forward_over()
    assert [slab.budget.share for slab in (first, second, third)] == [6 * PAGE, 6 * PAGE, 12 * PAGE]
    first.free(block)
    third.budget.pass_begins()
    assert third.budget.reservation == 12 * PAGE and not third.budget.has_share


def test_dropped_graphs_and_dead_frames_do_not_wait():
    """Not even in reference cycles, as those of a pass that raised, with its traceback."""
    first, second = two()
    dead = []

    class Frame:
        def __init__(self) -> None:
            self.block, self.itself = first.allocate(8 * PAGE, "x"), self

        def __del__(self) -> None:
            dead.append(self.block)

    class Engine:
        def __init__(self, slab: HostSlab) -> None:
            self.slab = slab
            slab.held_by(self)

        def drain(self) -> None:
            while dead:
                self.slab.free(dead.pop())

        def make_room(self, enough: Callable[[], bool]) -> None: ...

    engine = Engine(first)
    Frame()
    assert first.used == 8 * PAGE
    second.budget.pass_begins()
    assert second.budget.reservation == 10 * PAGE and not first.budget.has_share and not second.budget.has_share
    second.budget.forward_over()
    Frame()
    first.free(first.allocate(10 * PAGE, "y"))
    assert engine.slab is first


def test_one_that_never_lends_has_no_part():
    """A reference model, which is only evaluated."""
    pool = HostPool(CPU)
    first, second, _reference = (HostSlab(10 * PAGE, pool) for _ in range(3))
    block = first.allocate(PAGE, "x")
    second.budget.pass_begins()
    assert [first.budget.share, second.budget.share] == [5 * PAGE] * 2
    assert block.nbytes == PAGE


def three_that_wait_together() -> tuple[list[HostSlab], list[Block]]:
    """Three clients of 12 pages, each with one allocated."""
    pool = HostPool(CPU)
    slabs, blocks = [HostSlab(12 * PAGE, pool) for _ in range(3)], []
    for slab in slabs:
        slab.budget.pass_begins()
        blocks.append(slab.allocate(PAGE, "x"))
    return slabs, blocks


def test_a_third_has_its_part_too():
    slabs, _blocks = three_that_wait_together()
    assert [slab.budget.share for slab in slabs] == [4 * PAGE] * 3


def test_the_limit_is_of_all_together():
    """Clients that do not say that a pass begins."""
    first, second = two(10, 8)
    blocks = [first.allocate(PAGE, "x") for _ in range(2)], second.allocate(8 * PAGE, "y")
    with pytest.raises(MemoError, match="GiB are left"):
        first.allocate(PAGE, "z")
    del blocks


def test_a_closed_slab_leaves_what_is_held_to_the_others():
    first, second = two()
    first.free(first.allocate(6 * PAGE, "x"))
    first.close()
    assert second.size == 6 * PAGE
    second.free(second.allocate(6 * PAGE, "y"))
    assert second.size == 6 * PAGE
    second.close()
    assert second.size == 0


def test_a_refusal_is_told_to_all(monkeypatch):
    first, second = two()
    first.free(first.allocate(3 * PAGE, "x"))
    monkeypatch.setattr("ds_memo.swap.pinned_segments.map_pages", lambda nbytes: (_ for _ in ()).throw(MemoError("no more")))
    with pytest.raises(MemoError, match="no more"):
        second.allocate(5 * PAGE, "y")
    assert first.budget.offer == second.budget.offer == (3 * PAGE, "no more")
    assert (first.budget.nbytes, second.budget.nbytes) == (10 * PAGE, 10 * PAGE)
    for slab in (first, second):
        assert slab.budget.changed() is None, "ranks have not agreed on it"
        slab.budget.agree(*slab.budget.offer)
        assert slab.budget.share == 3 * PAGE
        assert "the system refused more" in slab.budget.changed() and slab.budget.changed() is None


def test_models_share_what_the_system_gave(monkeypatch):
    first, second = two()
    block = first.allocate(5 * PAGE, "x")
    second.budget.pass_begins()
    monkeypatch.setattr("ds_memo.swap.pinned_segments.map_pages", lambda nbytes: (_ for _ in ()).throw(MemoError("no more")))
    with pytest.raises(MemoError, match="no more"):
        second.allocate(5 * PAGE, "y")
    second.budget.forward_over()
    first.free(block)
    blocks = []
    for slab in (first, second):
        slab.budget.agree(*slab.budget.offer)
        slab.budget.pass_begins()
        assert slab.budget.share == slab.budget.reservation == 5 * PAGE // 2
        assert "the system refused more" in slab.budget.changed()
        blocks.append(slab.allocate(2 * PAGE, "x"))
        slab.budget.forward_over()
    assert second.pool.used == 4 * PAGE


def test_what_ranks_agree_on_is_no_change():
    slab, _ = two()
    slab.budget.pass_begins()
    slab.budget.agree(6 * PAGE)
    assert slab.budget.changed() is None and slab.budget.reservation == slab.budget.share == 6 * PAGE < slab.budget.nbytes


@pytest.mark.parametrize("end", ["over", "interrupted", "its thread has ended"])
def test_forwards_in_two_threads_are_refused(end: str):
    """While both run. Neither a refused forward nor an interrupted one stands in the way of the next."""
    first, second = two()
    with ThreadPoolExecutor(1, "elsewhere") as thread:
        thread.submit(first.budget.pass_begins).result(5)
        for _ in range(2):
            with pytest.raises(
                MemoError, match="began in thread MainThread while one runs in thread elsewhere_0 that shares its"
            ):
                second.budget.pass_begins()
            second.budget.forward_over()
        if end != "its thread has ended":
            if end == "over":
                thread.submit(first.budget.forward_over).result(5)
            else:
                thread.submit(second.budget.pass_begins).result(5)
                thread.submit(second.budget.forward_over).result(5)
            second.budget.pass_begins()
    second.budget.pass_begins()
    assert second.budget.reservation == 10 * PAGE and not second.budget.has_share


def test_what_a_model_that_was_let_go_held_is_allocated_again(monkeypatch):
    """Not before the copies of its streams are over."""
    finished = []
    real = streams.finish_abandoned
    monkeypatch.setattr("ds_memo.swap.host_pool.finish_abandoned", lambda device: finished.append(1) or real(device))
    first, second = two()
    block = first.allocate(10 * PAGE, "x")
    first.itself = first, block
    del first, block
    assert second.pool.used == 10 * PAGE and not finished
    second.budget.pass_begins()
    assert second.budget.reservation == 10 * PAGE
    assert second.allocate(10 * PAGE, "y").nbytes == second.size == second.pool.used and finished == [1]


def test_a_pool_of_the_cpu_does_not_wait_for_cuda(monkeypatch):
    """Which another model of the process may use: no copies of this pool are there."""
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    pool = HostPool(CPU)
    lost = HostSlab(10 * PAGE, pool)
    lost.itself = lost, lost.allocate(PAGE, "x")
    del lost
    gc.collect()
    assert HostSlab(10 * PAGE, pool).allocate(10 * PAGE, "y").nbytes == pool.used


def test_abandoned_copies_end_before_memory_is_allocated_again():
    there = streams.ThreadStreams()
    slow = torch.zeros(1)
    there._queues[streams.D2H].put((time.sleep, 0.2))
    there.copy(streams.D2H, slow, torch.ones(1))
    del there
    streams.finish_abandoned(CPU)
    assert slow.item() == 1


def test_what_other_pools_may_still_take_is_promised():
    host, other, dropped, mine = (HostSlab(pages * PAGE, shared_pool(pages, CPU)) for pages in (10, 5, 3, 7))
    assert promised_bytes(mine.pool) == 18 * PAGE
    dropped.itself = dropped
    del dropped
    assert promised_bytes(mine.pool) == 15 * PAGE
    block = host.allocate(4 * PAGE, "x")
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


@pytest.fixture
def compute(monkeypatch: pytest.MonkeyPatch) -> tuple[list[str], list[str]]:
    """The one stream that is current, and a line for each wait for the device."""
    stream, calls = ["one"], []
    monkeypatch.setattr("ds_memo.swap.pinned_segments.pin", lambda segment: None)
    monkeypatch.setattr("ds_memo.swap.host_pool.node_of", lambda device: None)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream[0])
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: calls.append("waited"))
    return stream, calls


def test_a_pool_waits_for_its_own_device(monkeypatch):
    """Which need not be the current one: a model may lie on another."""
    asked, there = set(), torch.device("cuda", 1)
    monkeypatch.setattr("ds_memo.swap.pinned_segments.pin", lambda segment: None)
    monkeypatch.setattr("ds_memo.swap.host_pool.node_of", lambda device: None)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    for name in ("current_stream", "synchronize"):
        monkeypatch.setattr(torch.cuda, name, lambda *device, name=name: asked.add((name, device)))
    pool = HostPool(there)
    lost = HostSlab(10 * PAGE, pool)
    lost.itself = lost, lost.allocate(PAGE, "x")
    del lost
    gc.collect()
    slab = HostSlab(10 * PAGE, pool)
    slab.free(slab.allocate(PAGE, "y"))
    slab.close()
    assert asked == {("current_stream", (there,)), ("synchronize", (there,))}


def test_another_compute_stream_waits_for_everything(compute):
    """No event of it comes behind the copies that the last borrower's stream has ordered."""
    stream, calls = compute
    slab = HostSlab(10 * PAGE, HostPool(CUDA))
    slab.free(slab.allocate(PAGE, "x"))
    slab.free(slab.allocate(PAGE, "x"))
    assert calls == []
    stream[0] = "another"
    slab.free(slab.allocate(PAGE, "x"))
    assert calls == ["waited"]


def test_a_stream_that_lent_before_waits_for_what_others_gave_back_since(compute):
    """Models on two streams, in turns: the second's next pass is on the stream that borrowed last."""
    stream, calls = compute
    pool = HostPool(CUDA)
    first, second = (HostSlab(10 * PAGE, pool) for _ in range(2))
    block = first.allocate(4 * PAGE, "x")
    stream[0] = "two"
    held = second.allocate(2 * PAGE, "y")
    stream[0] = "one"
    first.free(block)
    stream[0] = "two"
    assert calls == []
    second.free(second.allocate(4 * PAGE, "y"))
    assert calls == ["waited"]
    second.free(second.allocate(4 * PAGE, "y"))
    assert calls == ["waited"]
    second.free(held)


def test_one_that_could_not_lend_keeps_its_part_when_a_third_comes():
    """Parts are of all together, also where the first had left nothing to the second."""
    pool = HostPool(CPU)
    slabs = [HostSlab(12 * PAGE, pool) for _ in range(3)]
    slabs[0].budget.pass_begins()
    block = slabs[0].allocate(10 * PAGE, "x")
    for slab in slabs[1:]:
        slab.budget.pass_begins()
        assert slab.budget.reservation == 2 * PAGE
        slab.budget.forward_over()
    slabs[0].budget.forward_over()
    assert [slab.budget.share for slab in slabs] == [4 * PAGE] * 3
    slabs[0].free(block)
    blocks = [slab.allocate(4 * PAGE, "x") for slab in slabs]
    with pytest.raises(MemoError, match="GiB are left"):
        slabs[0].allocate(PAGE, "y")
    assert pool.used == 12 * PAGE
    del blocks


def test_what_is_configured_has_no_part():
    """A client that can do with less has what the fixed one leaves."""
    first, second = two()
    first.budget.needs = 0
    block = first.allocate(7 * PAGE, "x")
    second.budget.pass_begins()
    assert (first.budget.share, second.budget.share) == (10 * PAGE, 3 * PAGE) and second.budget.reservation == 3 * PAGE
    beside = second.allocate(2 * PAGE, "y")
    first.budget.pass_begins()
    assert first.budget.reservation == 10 * PAGE and first.budget.left == PAGE and second.budget.reservation == 3 * PAGE
    for slab, last in ((first, block), (second, beside)):
        slab.free(last)


def test_one_that_comes_later_gets_its_part_from_one_that_has_one():
    """The later one's passes begin first, when no model waits."""
    first, second = two()
    block = first.allocate(PAGE, "x")
    second.budget.pass_begins()
    first.free(block)
    first.close()
    later = HostSlab(10 * PAGE, second.pool)
    later.budget.pass_begins()
    block = later.allocate(8 * PAGE, "x")
    second.budget.pass_begins()
    assert (later.budget.share, second.budget.share) == (5 * PAGE, 5 * PAGE)
    assert second.budget.reservation == 2 * PAGE, "the later one holds more than its part"
    later.free(block)
    second.budget.pass_begins()
    assert second.budget.reservation == 5 * PAGE


@pytest.mark.parametrize("end", ["closed", "garbage"])
def test_who_is_left_has_the_part_of_one_that_is_gone(end: str):
    slabs, blocks = three_that_wait_together()
    assert all("other models' passes wait" in slab.budget.changed() for slab in slabs)
    for left in (2, 1):
        for slab in slabs:
            slab.budget.forward_over()
        del slab
        gone = slabs.pop()
        if end == "closed":
            gone.free(blocks.pop())
            gone.close()
        del gone
        slabs[0].budget.pass_begins()
        assert [slab.budget.share for slab in slabs] == [12 // left * PAGE] * left
        assert slabs[0].budget.reservation == slabs[0].budget.share and slabs[0].budget.changed().startswith(
            "host budget raised to"
        )
    slabs[0].allocate(11 * PAGE, "all the others had")
    assert slabs[0].size == 12 * PAGE


def test_who_is_left_has_what_a_configured_one_held():
    first, second = two()
    first.budget.needs = 0
    block = first.allocate(7 * PAGE, "x")
    second.budget.pass_begins()
    assert second.budget.share == 3 * PAGE
    first.free(block)
    first.close()
    second.budget.pass_begins()
    assert second.budget.share == second.budget.reservation == 10 * PAGE
