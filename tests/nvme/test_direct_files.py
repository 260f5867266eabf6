"""Files on this disk: bytes that come back, the system's refusals at each call, threads and their end."""

from __future__ import annotations

import contextlib
import errno
import gc
import itertools
import os
import random
import threading
import time
import weakref

import pytest
import torch

from ds_memo.errors import MemoError
from ds_memo.nvme import direct_files as module
from ds_memo.nvme.direct_files import THREADS, DirectFiles
from ds_memo.nvme.extents import Space
from ds_memo.swap.host_pool import Range
from ds_memo.swap.host_slab import Block
from ds_memo.swap.pinned_segments import PAGE
from ds_memo.swap.streams import D2H, finish_abandoned
from tests.everyday import everyday
from tests.nvme.conftest import descriptors
from tests.nvme.files import CPU, Files, content, fill, slab_of
from tests.runtime.traces import memo_threads

SMALL = 16 * PAGE
"""A stripe that makes many parts of little."""


@pytest.fixture
def small_stripes(monkeypatch):
    monkeypatch.setattr(module, "STRIPE", SMALL)
    monkeypatch.setattr(module, "_AT_ONCE", SMALL)


@pytest.fixture
def make(tmp_path):
    """Files that are closed at the end."""
    with contextlib.ExitStack() as undo:

        def made(**options) -> Files:
            files = Files(tmp_path, **options)
            undo.callback(files.close)
            return files

        yield made


def faulty(monkeypatch: pytest.MonkeyPatch, name: str, nth: int, fault) -> list[int]:
    """Put a fault into the n-th call of os.pwritev or os.preadv. Return the bytes of each call."""
    calls, real, turn = [], getattr(os, name), threading.Lock()

    def call(handle, buffers, at, *more):
        with turn:
            calls.append(sum(map(len, buffers)))
            mine = len(calls) == nth
        return fault(real, handle, buffers, at) if mine else real(handle, buffers, at, *more)

    monkeypatch.setattr(module.os, name, call)
    return calls


def raises(number):
    def fault(*_):
        raise OSError(number, os.strerror(number))

    return fault


# ---- bytes


def test_blocks_of_several_pieces(make, small_stripes):
    files, slab = make(directories=2), slab_of(200)
    whole = slab.allocate(90 * PAGE, "a test")
    (piece,) = whole.pieces
    cuts = [0, 1, 4, 37, 60, 90]
    pieces = [Range(piece.segment, first * PAGE, end * PAGE) for first, end in itertools.pairwise(cuts)]
    random.Random(0).shuffle(pieces)
    block = Block(pieces)
    fill(block, 5)
    wanted = content(block)
    extent = files.store(block)
    fill(block, 6)
    assert torch.equal(files.load(extent, block), wanted)


@pytest.mark.parametrize("at_once, seed", everyday([(SMALL, 0), (3 * SMALL, 1), (1 << 26, 2)], [(SMALL, 0)]))
def test_random_traffic(at_once, seed, make, small_stripes, monkeypatch):
    """Writes, reads and frees under way at once, into extents that others had."""
    monkeypatch.setattr(module, "_AT_ONCE", at_once)
    draw, files, slab = random.Random(seed), make(directories=1 + seed % 3, budget=900 * PAGE), slab_of(2000)
    held, under_way = [], []
    for number in range(150):
        if draw.random() < 0.55 or not held:
            block = slab.allocate(draw.randint(1, 60) * PAGE, "a test")
            fill(block, number)
            wanted = content(block)
            try:
                extent = files.extent(block.nbytes, "a test")
            except MemoError:
                slab.free(block)
                continue
            under_way.append((files.write(block, extent, ()), block))
            held.append((extent, wanted, under_way[-1][0]))
        else:
            extent, wanted, write = held.pop(draw.randrange(len(held)))
            files.finished(write)
            block = slab.allocate(extent.nbytes, "a test")
            assert torch.equal(files.load(extent, block), wanted)
            files.free(extent)
            slab.free(block)
        for transfer, block in [pair for pair in under_way if files.done(pair[0])]:
            under_way.remove((transfer, block))
            fill(block, -1 & 0xFFFF)
            slab.free(block)
    files.finish()
    assert {len(os.listdir(found.path)) for found in files.directories} == {0}


def test_files_grow_as_they_are_wanted_and_no_further(make, monkeypatch, small_stripes):
    monkeypatch.setattr(module, "_GROWS_BY", 4 * SMALL)
    files = make(directories=2, budget=16 * SMALL + PAGE)
    assert files.budget == 16 * SMALL
    sizes = lambda: [os.fstat(file.handle).st_blocks * 512 for file in files._files]  # noqa: E731
    assert sizes() == [0, 0]
    held = [files.extent(SMALL, "a test")]
    assert sizes() == [2 * SMALL] * 2
    held += [files.extent(9 * SMALL, "a test")]
    assert sizes() == [5 * SMALL] * 2
    with pytest.raises(MemoError, match=r"the frame needs .* GiB, .* GiB are left\. Raise memo\.nvme\.gib"):
        files.extent(7 * SMALL, "the frame")
    held += [files.extent(6 * SMALL, "a test")]
    assert sizes() == [8 * SMALL] * 2
    for extent in held:
        files.free(extent)
    files.extent(16 * SMALL, "a test")
    assert sizes() == [8 * SMALL] * 2


def test_a_budget_is_whole_rows_and_allocated_at_once_where_it_is_given(make, small_stripes):
    files = make(directories=2, budget=8 * SMALL, preallocate=True)
    assert [os.fstat(file.handle).st_blocks * 512 for file in files._files] == [4 * SMALL] * 2
    assert make(directories=3, budget=3 * SMALL - 1, preallocate=True).budget == 0
    files = make(directories=3, budget=30 * SMALL)
    files.limit(8 * SMALL)
    files.extent(6 * SMALL, "a test")
    with pytest.raises(MemoError, match="are left"):
        files.extent(PAGE, "a test")


# ---- order


def held_back(files: Files) -> tuple[object, threading.Event]:
    """Return an event of a copy stream, and what lets that stream go on to it."""
    may_go = threading.Event()
    files.streams._queues[D2H].put((may_go.wait,))
    return files.streams.mark(D2H), may_go


def test_a_transfer_waits_for_its_events(make):
    files, slab = make(), slab_of(8)
    block = slab.allocate(4 * PAGE, "a test")
    fill(block, 1)
    sent, may_go = held_back(files)
    extent = files.extent(block.nbytes, "a test")
    write = files.write(block, extent, (sent,))
    time.sleep(0.02)
    assert not files.done(write) and files.meters[True].nbytes == 0
    fill(block, 2)
    wanted = content(block)
    may_go.set()
    files.finished(write)
    fill(block, 3)
    assert torch.equal(files.load(extent, block), wanted)


def test_waiting_beside_ends_with_compute(make):
    files, slab = make(), slab_of(8)
    sent, may_go = held_back(files)
    write = files.write(slab.allocate(PAGE, "a test"), files.extent(PAGE, "a test"), (sent,))
    assert not files.wait_beside(write, files.streams.mark("compute"))
    assert files.stall_s == 0
    threading.Timer(0.05, may_go.set).start()
    files.finished(write)
    assert files.stall_s > 0.01
    assert files.wait_beside(write, files.streams.mark("compute"))


# ---- refusals


@pytest.mark.parametrize("nth", range(1, 7))
@pytest.mark.parametrize("name", ["pwritev", "preadv"])
def test_each_call_refused_in_turn(name, nth, make, monkeypatch, small_stripes):
    """A transfer of six parts over two files: any of them fails it, the others end, and it can be done again."""
    monkeypatch.setenv("RANK", "3")
    files, slab = make(directories=2), slab_of(200)
    block = slab.allocate(6 * SMALL, "a test")
    fill(block, 1)
    wanted = content(block)
    extent = files.store(block)
    calls = faulty(monkeypatch, name, nth, raises(errno.EIO))
    move = files.store if name == "pwritev" else lambda block: files.load(extent, block)
    what = "write" if name == "pwritev" else "read"
    where = "|".join(str(found.path) for found in files.directories)
    with pytest.raises(MemoError, match=rf"^rank 3 could not {what} its file in ({where}): .*{os.strerror(errno.EIO)}"):
        move(block)
    files.finish()
    assert len(calls) >= nth
    assert torch.equal(files.load(extent, block), wanted)
    move(block)


@pytest.mark.parametrize("views", [1, 7, 512])
@pytest.mark.parametrize("name", ["pwritev", "preadv"])
def test_one_call_moves_all_stripes_of_a_file_and_goes_on_where_it_was_cut(name, views, make, monkeypatch, small_stripes):
    monkeypatch.setattr(module, "_AT_ONCE", 1 << 26)
    monkeypatch.setattr(module, "_VIEWS", views)
    files, slab = make(directories=2), slab_of(400)
    block = slab.allocate(10 * SMALL, "a test")
    fill(block, 1)
    wanted = content(block)

    def cut(real, handle, buffers, at):
        return real(handle, [*buffers[:2], buffers[2][:PAGE]] if len(buffers) > 2 else [buffers[0][:PAGE]], at)

    calls = faulty(monkeypatch, name, 1, cut)
    extent = files.store(block)
    fill(block, 2)
    assert torch.equal(files.load(extent, block), wanted)
    assert len(calls) == 2 * -(-5 // views) + 1


@pytest.mark.parametrize("moved", [0, 512, PAGE + 1])
@pytest.mark.parametrize("name", ["pwritev", "preadv"])
def test_a_part_of_a_page_or_nothing_is_an_error(name, moved, make, monkeypatch):
    files, slab = make(), slab_of(200)
    block = slab.allocate(4 * PAGE, "a test")
    extent = files.store(block)
    faulty(monkeypatch, name, 1, lambda *_: moved)
    with pytest.raises(MemoError, match=f"{moved} of {4 * PAGE} bytes were moved"):
        files.store(block) if name == "pwritev" else files.load(extent, block)


# ---- the end


def test_closing_ends_threads_and_gives_the_space_back_also_while_it_is_referred_to(tmp_path):
    before = set(memo_threads()), descriptors()
    files = Files(tmp_path, directories=2)
    files.store(slab_of(8).allocate(PAGE, "a test"))
    assert len(set(memo_threads()) - before[0]) == 2 * THREADS + 1 + 2
    assert len(descriptors() - before[1]) == 2
    files.close()
    files.close()
    assert set(memo_threads()) <= before[0] and descriptors() <= before[1]
    with pytest.raises(MemoError, match="are closed"):
        files.store(slab_of(8).allocate(PAGE, "a test"))


def test_files_that_are_never_closed_end_once_their_transfers_are_over(tmp_path):
    """The pool of an abandoned model waits for them before it gives its blocks to another."""
    files, slab = Files(tmp_path), slab_of(8)
    block = slab.allocate(4 * PAGE, "a test")
    fill(block, 1)
    extent, wanted = files.store(block), content(block)
    fill(block, 2)
    sent, may_go = held_back(files)
    files.read(extent, block, (sent,))
    gone, streams = weakref.ref(files), files.streams
    del files
    gc.collect()
    assert gone() is None and not torch.equal(content(block), wanted)
    threading.Timer(0.05, may_go.set).start()
    finish_abandoned(CPU)
    assert torch.equal(content(block), wanted)
    streams.close()


def test_memory_of_a_transfer_that_is_over_is_let_go(make):
    files, slab = make(), slab_of(8)
    block = slab.allocate(4 * PAGE, "a test")
    gone = weakref.ref(block.pieces[0].segment.memory.untyped_storage())
    transfer = files.write(block, files.extent(4 * PAGE, "a test"), ())
    files.finished(transfer)
    slab.free(block)
    slab.close()
    del block, slab
    gc.collect()
    assert gone() is None


@pytest.mark.processes
def test_a_forked_process_has_no_files_and_does_not_hang(make):
    files, slab = make(), slab_of(8)
    block = slab.allocate(PAGE, "a test")
    extent = files.store(block)
    child = os.fork()
    if not child:
        told = 1
        with contextlib.suppress(BaseException):
            try:
                files.load(extent, block)
            except MemoError as error:
                told = 0 if "was forked" in str(error) else 2
            DirectFiles.close(files)
        os._exit(told)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    files.load(extent, block)


# ---- space against a model: one flag for each page


def lowest_gap(used: list[bool], pages: int) -> int | None:
    return next((at for at in range(len(used) - pages + 1) if not any(used[at : at + pages])), None)


@pytest.mark.parametrize("seed", everyday(range(20), [0, 1]))
def test_random_use_against_a_model(seed):
    draw, space, used, mine = random.Random(seed), Space(), [], []
    for _ in range(400):
        action = draw.random()
        if action < 0.05:
            space.grow(pages := draw.randint(1, 40))
            used += [False] * pages
        elif action < 0.6:
            pages = draw.randint(1, 12)
            expected, extent = lowest_gap(used, pages), space.allocate(pages)
            assert (extent and extent.begin) == expected
            if extent is not None:
                assert extent.nbytes == pages
                used[extent.begin : extent.begin + pages] = [True] * pages
                mine.append(extent)
            else:
                tail = next((at for at in range(len(used), 0, -1) if used[at - 1]), 0)
                assert space.missing_for == len(used) - tail
        elif mine:
            extent = mine.pop(draw.randrange(len(mine)))
            space.free(extent)
            used[extent.begin : extent.begin + extent.nbytes] = [False] * extent.nbytes
        assert space.extents == mine or set(space.extents) == set(mine)
        assert space.size == len(used)
    for extent in mine:
        space.free(extent)
    assert space.missing_for == space.size == len(used)


def test_an_extent_that_is_freed_twice_frees_no_others():
    space = Space()
    space.grow(10)
    first = space.allocate(4)
    space.free(first)
    second = space.allocate(4)
    space.free(first)
    assert space.extents == [second]
    assert space.allocate(6) is not None and space.allocate(1) is None
