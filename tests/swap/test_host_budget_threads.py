"""Slabs of one pool whose models train in threads, and any of them may free."""

from __future__ import annotations

import queue
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from random import Random

import pytest

from ds_memo.errors import MemoError
from ds_memo.swap.host_pool import HostPool
from ds_memo.swap.host_slab import HostSlab
from ds_memo.swap.pinned_segments import PAGE
from tests.swap.budgets import CPU, two

pytestmark = pytest.mark.usefixtures("no_other_client")


@pytest.fixture
def elsewhere() -> Iterator[ThreadPoolExecutor]:
    """Another thread, which lives as long as the test."""
    with ThreadPoolExecutor(1) as thread:
        yield thread


def test_passes_of_two_threads_have_a_part_each_before_either_lends(elsewhere: ThreadPoolExecutor):
    first, second = two()
    elsewhere.submit(first.pass_begins).result(5)
    second.pass_begins()
    assert [elsewhere.submit(first.reserve).result(5), second.reserve()] == [5 * PAGE] * 2
    elsewhere.submit(first.allocate, 5 * PAGE, "x").result(5)
    second.allocate(5 * PAGE, "y")


def test_what_a_pass_was_promised_it_has_though_another_thread_begins_one(elsewhere: ThreadPoolExecutor):
    first, second = two()
    elsewhere.submit(first.pass_begins).result(5)
    assert elsewhere.submit(first.reserve).result(5) == 10 * PAGE
    second.pass_begins()
    assert second.reserve() == 0
    with pytest.raises(MemoError, match="GiB are left"):
        second.allocate(PAGE, "y")
    first.free(elsewhere.submit(first.allocate, 10 * PAGE, "x").result(5))
    elsewhere.submit(first.forward_over).result(5)
    for slab in (first, second):
        slab.pass_begins()
        assert slab.reserve() == 5 * PAGE
        slab.forward_over()


@pytest.mark.parametrize("where", ["here", "in a thread that ended"])
def test_a_forward_that_was_interrupted_claims_nothing_of_others(where: str):
    first, second = two()
    with ThreadPoolExecutor(1) as thread:
        for begin in (first.pass_begins, first.reserve):
            begin() if where == "here" else thread.submit(begin).result(5)
    second.pass_begins()
    assert second.reserve() == 10 * PAGE and not second.has_share


def test_threads_that_train_a_model_each_are_never_refused():
    """Whatever comes first: each takes no more than it was promised, and all together no more than the host has."""
    pool, pages, failures, most = HostPool(CPU), 24, [], []
    slabs = [HostSlab(pages * PAGE, pool) for _ in range(3)]

    def train(slab: HostSlab, random: Random) -> None:
        try:
            for _ in range(300):
                slab.pass_begins()
                claim = slab.reserve() // PAGE
                frames = [slab.allocate(PAGE, "x") for _ in range(random.randint(0, claim))]
                slab.forward_over()
                most.append(pool.used)
                for frame in frames:
                    slab.free(frame)
        except MemoError as error:
            failures.append(error)

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        threads = [threading.Thread(target=train, args=(slab, Random(n)), daemon=True) for n, slab in enumerate(slabs)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
    finally:
        sys.setswitchinterval(before)
    assert not failures and not any(thread.is_alive() for thread in threads)
    assert max(most) <= pages * PAGE and pool.used == 0 and [slab.used for slab in slabs] == [0] * 3
    assert [slab.share for slab in slabs] == [pages // 3 * PAGE] * 3


def test_blocks_are_counted_by_any_thread_that_frees_them():
    """A thread whose model's pass begins gives dead frames of another thread's model back."""
    slab, given = HostSlab(1000 * PAGE, HostPool(CPU)), queue.SimpleQueue()

    def give_back() -> None:
        while (block := given.get()) is not None:
            slab.free(block)

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        other = threading.Thread(target=give_back)
        other.start()
        for _ in range(8000):
            given.put(slab.allocate(PAGE, "x"))
            while slab.used > 500 * PAGE:
                time.sleep(0)
        given.put(None)
        other.join()
    finally:
        sys.setswitchinterval(before)
    assert slab.used == slab.pool.used == 0


def test_a_block_that_was_found_again_is_given_back_once():
    """By a thread that had it from a dead frame, when the slab has taken it back already."""
    slab = HostSlab(10 * PAGE, HostPool(CPU))
    lost, kept = slab.allocate(4 * PAGE, "x"), slab.allocate(PAGE, "y")
    for block in slab.blocks:
        if block is not kept:
            slab.free(block)
    slab.free(lost)
    assert slab.used == slab.pool.used == PAGE
    slab.free(slab.allocate(9 * PAGE, "z"))
    slab.free(kept)
    assert slab.blocks == [] and slab.used == slab.pool.used == 0


def test_frames_in_reference_cycles_do_not_refuse_a_pass():
    """As those of a pass that raised, with its traceback."""
    slab, dead = HostSlab(10 * PAGE, HostPool(CPU)), []

    class Frame:
        def __init__(self) -> None:
            self.block, self.itself = slab.allocate(8 * PAGE, "x"), self

        def __del__(self) -> None:
            dead.append(self.block)

    def drain() -> None:
        while dead:
            slab.free(dead.pop())

    slab.drain = lambda: drain
    Frame()
    assert slab.used == 8 * PAGE
    slab.free(slab.allocate(10 * PAGE, "y"))
