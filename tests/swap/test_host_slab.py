"""The host slab: mapped once and reused by frames of any length, page-aligned, within its budget."""

from __future__ import annotations

import random
import re
import weakref
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ds_memo.errors import MemoError
from ds_memo.swap import pinned_segments as segments
from ds_memo.swap.host_pool import HostPool
from ds_memo.swap.host_slab import Block, HostSlab
from ds_memo.swap.pinned_segments import PAGE, TOUCHED_APART, Segment, map_pages, touch
from ds_memo.units import GIB

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


def slab(pages: int = 100) -> HostSlab:
    return HostSlab(pages * PAGE, HostPool(CPU))


def fill(block: Block, value: int) -> None:
    for piece in block.pieces:
        piece.memory.fill_(value)


def values(block: Block) -> list[int]:
    return torch.cat(block.views(0, block.nbytes)).unique().tolist()


def addresses(block: Block) -> list[tuple[int, int]]:
    return [(piece.memory.data_ptr(), piece.nbytes) for piece in block.pieces]


class System:
    """A stand-in for `map_pages` and `pin`: it counts, and gives `limit` bytes at most."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, limit: int = 1 << 62) -> None:
        self.limit = limit
        self.asked = self.mapped = self.pinned = self.synchronized = 0
        self._segments: list[weakref.ref[Segment]] = []
        monkeypatch.setattr(segments, "map_pages", self._map)
        monkeypatch.setattr(segments, "pin", self._pin)
        monkeypatch.setattr("ds_memo.swap.host_pool.node_of", lambda device: None)
        monkeypatch.setattr(HostPool, "_stream", lambda pool: None)
        monkeypatch.setattr(torch.cuda, "synchronize", self._synchronize)

    @property
    def held(self) -> list[int]:
        """Return the bytes of the living segments."""
        return [segment.nbytes for ref in self._segments if (segment := ref()) is not None]

    def _map(self, nbytes: int) -> Segment:
        self.asked += 1
        if sum(self.held) + nbytes > self.limit:
            raise MemoError("no more")
        self.mapped += nbytes
        segment = map_pages(nbytes)
        self._segments.append(weakref.ref(segment))
        return segment

    def _pin(self, segment: Segment) -> None:
        self.pinned += segment.nbytes

    def _synchronize(self, device: torch.device | None) -> None:
        self.synchronized += 1


def allocated(host: HostSlab, *pages: int) -> list[Block]:
    return [host.allocate(count * PAGE, "x") for count in pages]


def test_which_free_ranges_are_allocated():
    """The smallest that is enough; else the largest together, and only what they lack is mapped."""
    host, pages = slab(200), (52, 49, 51, 20)
    blocks = allocated(host, *pages)
    at = {count: addresses(block)[0][0] for count, block in zip(pages, blocks, strict=True)}
    for block in blocks:
        host.free(block)
    taken = allocated(host, 50, 50, 49)
    assert [addresses(block)[0][0] for block in taken] == [at[51], at[52], at[49]]
    for block in taken:
        host.free(block)
    (most,) = allocated(host, 108)
    assert addresses(most) == [(at[52], 52 * PAGE), (at[51], 51 * PAGE), (at[20], 5 * PAGE)]
    (all_and_more,) = allocated(host, 68)
    assert addresses(all_and_more)[:2] == [(at[49], 49 * PAGE), (at[20] + 5 * PAGE, 15 * PAGE)]
    assert len(all_and_more.pieces) == 3 and host.size == host.used == 176 * PAGE


def test_a_view_of_a_block_is_cut_where_its_pieces_are():
    host = slab()
    blocks = allocated(host, 2, 3, 1)
    host.free(blocks[0])
    host.free(blocks[1])
    (block,) = allocated(host, 5)
    assert [piece.nbytes // PAGE for piece in block.pieces] == [3, 2]
    for begin, nbytes, lengths in (
        (0, 5 * PAGE, [3 * PAGE, 2 * PAGE]),
        (PAGE, 2 * PAGE, [2 * PAGE]),
        (3 * PAGE, 2 * PAGE, [2 * PAGE]),
        (3 * PAGE - 256, 512, [256, 256]),
        (3 * PAGE, 0, []),
    ):
        assert [len(view) for view in block.views(begin, nbytes)] == lengths
    for at, view in enumerate(block.views(0, 5 * PAGE)):
        view.fill_(at)
    assert torch.cat(block.views(3 * PAGE - 1, 2)).tolist() == [0, 1]


def test_too_little_says_who_needs_what_in_gib_and_changes_nothing():
    host = HostSlab(3 * GIB, HostPool(CPU))
    block = host.allocate(2 * GIB, "frame model.layers.0")  # mapped, never touched
    with pytest.raises(MemoError) as caught:
        host.allocate(int(1.5 * GIB), "frame model.layers.1")
    message = str(caught.value)
    assert re.search(r"frame model\.layers\.1 needs 1\.5\d* GiB, 1(\.0*)? of 3(\.0*)? GiB are left", message), message
    for way_out in ("memo.alpha", "memo.resident_layers", "memo.host_memory_gib"):
        assert way_out in message
    assert host.used == host.size == 2 * GIB
    host.free(block)
    assert sorted(addresses(host.allocate(2 * GIB, "z"))) == sorted(addresses(block))
    assert host.allocate(GIB, "all that the budget has").nbytes == GIB


def test_a_block_that_was_found_again_is_freed_once():
    """As one that its frame still had when Ctrl-C came, after the slab had taken it back."""
    host = slab(10)
    lost, kept = allocated(host, 4, 1)
    host.free(lost)
    host.free(lost)
    assert host.used == host.pool.used == PAGE
    host.free(*allocated(host, 9))
    with pytest.raises(MemoError, match=f"{PAGE} bytes of it were allocated"):
        host.close()
    host.free(kept)
    assert host.blocks == [] and host.used == host.pool.used == 0


# ---- any order of any lengths

STEPS = st.lists(st.tuples(st.sampled_from(["allocate", "allocate", "free"]), st.integers(1, 40 * PAGE)), max_size=60)


@pytest.mark.slow
@settings(max_examples=300)
@given(st.integers(1, 100 * PAGE), STEPS)
def test_whatever_fits_the_budget_is_allocated_and_no_more_is_held(budget, steps):
    with pytest.MonkeyPatch.context() as patch:
        system = System(patch, limit=budget)
        host = HostSlab(budget, HostPool(CUDA))
        blocks: list[tuple[int, Block]] = []
        for number, (what, amount) in enumerate(steps):
            if what == "free" and blocks:
                value, block = blocks.pop(amount % len(blocks))
                assert values(block) == [value], "two blocks overlap"
                host.free(block)
                del block
            elif what == "allocate":
                pages, free = -(-amount // PAGE) * PAGE, len(host.pool._free_ranges)
                if host.used + pages > budget:
                    with pytest.raises(MemoError, match="GiB are left"):
                        host.allocate(amount, "x")
                else:
                    block = host.allocate(amount, "x")
                    assert block.nbytes == pages and all(begin % PAGE == 0 for begin, _ in addresses(block))
                    assert len(host.pool._free_ranges) <= free, "more than one range was cut"
                    fill(block, number % 251)
                    blocks.append((number % 251, block))
                    del block
            assert sum(block.nbytes for _, block in blocks) == host.used <= host.size <= min(budget, host.peak_used)
            assert sum(system.held) == host.size, "what the slab gave back is still there"
            assert host.budget.offer == (budget, "")
        for value, block in blocks:
            assert values(block) == [value], "two blocks overlap"
            host.free(block)
        assert all(free.nbytes == free.segment.nbytes for free in host.pool._free_ranges), "free neighbours were not made one"


@pytest.mark.parametrize("lengths", ["random", "growing slowly"])
def test_lengths_that_change_do_not_lock_anew(monkeypatch, lengths):
    """Frames of the given pages in a stack, as training allocates and frees them."""
    system = System(monkeypatch)
    host, frames = HostSlab(1 << 40, HostPool(CUDA)), 8
    draw = random.Random(0)
    pieces, step_bytes = [], []
    for step in range(120):
        pages = draw.randint(10, 300) if lengths == "random" else 10 + 2 * step
        blocks = [host.allocate(pages * PAGE, "x") for _ in range(frames)]
        step_bytes.append(host.used)
        pieces += [len(block.pieces) for block in blocks]
        while blocks:
            host.free(blocks.pop())
    assert host.size == host.peak_used == max(step_bytes) == sum(system.held)
    assert system.pinned <= (1.2 if lengths == "random" else 3) * host.size < sum(step_bytes) / 10
    assert len(system.held) <= 4 * frames
    assert max(pieces) <= 3 * frames and sum(pieces) / len(pieces) < 4


def test_what_is_replaced_was_synchronized_with(monkeypatch):
    """A copy may still read the idle segments that a new one replaces."""
    system = System(monkeypatch)
    host = HostSlab(1 << 40, HostPool(CUDA))
    for block in [host.allocate(PAGE, "short") for _ in range(5)]:
        host.free(block)
    del block
    assert system.synchronized == 0
    long = host.allocate(50 * PAGE, "long")
    assert len(long.pieces) == 1
    assert (system.synchronized, system.held) == (1, [50 * PAGE])


# ---- the system says no


def test_a_refusal_of_the_system_is_remembered(monkeypatch):
    system = System(monkeypatch, limit=4 * PAGE)
    host = slab()
    host.free(*allocated(host, 3))
    short = host.allocate(2 * PAGE, "a short frame")
    assert (host.used, host.size, host.budget.offer) == (2 * PAGE, 3 * PAGE, (100 * PAGE, ""))
    with pytest.raises(MemoError, match=r"a third frame needs .* GiB more; no more"):
        host.allocate(3 * PAGE, "a third frame")
    assert (host.used, host.size, host.budget.offer) == (short.nbytes, 3 * PAGE, (3 * PAGE, "no more"))
    assert host.budget.share == 100 * PAGE, "other ranks have not heard of it yet"
    asked = system.asked
    assert not host.budget.has_memory(3 * PAGE) and system.asked == asked, "the system was asked again"
    assert host.allocate(PAGE, "a fourth frame").nbytes == PAGE
    host.budget.agree(*host.budget.offer)
    assert host.budget.changed().endswith("the system refused more: no more") and host.budget.offer == (3 * PAGE, "")


def test_segments_are_a_gib_at_most(monkeypatch):
    """A larger block lies in several. Those that were locked before the system refused one are kept."""
    monkeypatch.setattr(segments, "SEGMENT", 4 * PAGE)
    system = System(monkeypatch, limit=15 * PAGE)
    host = HostSlab(100 * PAGE, HostPool(CUDA))
    (block,) = allocated(host, 10)
    assert [piece.nbytes for piece in block.pieces] == system.held == [4 * PAGE, 4 * PAGE, 2 * PAGE]
    assert not host.budget.has_memory(9 * PAGE)
    assert (host.size, host.budget.offer) == (14 * PAGE, (14 * PAGE, "no more"))
    host.free(block)
    assert host.allocate(14 * PAGE, "y").nbytes == 14 * PAGE


def test_a_line_says_how_much_was_locked(monkeypatch, capsys):
    monkeypatch.setattr("ds_memo.swap.host_pool._TOLD_S", 0.0)
    System(monkeypatch, limit=15 * PAGE)
    host = HostSlab(100 * PAGE, HostPool(CUDA))
    host.budget.pass_begins()
    allocated(host, 10)
    host.budget.forward_over()
    assert re.search(r"ds_memo locked .* GiB of host memory in 0\.\d s\n$", capsys.readouterr().err)


# ---- segments


def memory_map(segment: Segment) -> dict[str, str]:
    """Return the kernel's description of a segment's mapping."""
    address, found, inside = segment.memory.data_ptr(), {}, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        name, _, value = line.partition(":")
        if " " in name:  # the head of a mapping: its addresses
            begin, end = (int(word, 16) for word in line.split()[0].split("-"))
            inside = begin <= address < end
        elif inside:
            found[name] = value.strip()
    return found


def test_pages_are_there_before_they_are_locked():
    """All pages exist, also in a last part smaller than a thread's. Locking would fault them in one by one."""
    block = map_pages(2 * TOUCHED_APART + PAGE)
    block.memory[PAGE] = 1
    before = int(memory_map(block)["Rss"].split()[0]) << 10
    touch(block)
    after = int(memory_map(block)["Rss"].split()[0]) << 10
    assert before < block.nbytes / 2 and after >= block.nbytes


def test_a_fork_does_not_copy_blocks():
    """At a fork the kernel copies private pages that a device holds, and data loaders fork."""
    assert "dc" in memory_map(map_pages(PAGE))["VmFlags"].split()
