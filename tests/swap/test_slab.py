"""The host slab: exact, page-aligned, within its budget."""

from __future__ import annotations

import mmap
import re
import weakref
from pathlib import Path

import pytest

from ds_memo.errors import MemoError
from ds_memo.swap import slab as slab_module
from ds_memo.swap.host_memory import GIB
from ds_memo.swap.slab import _TOUCHED_APART, Block, HostSlab, _map, _touch

PAGE = mmap.PAGESIZE


def slab(pages: int = 100) -> HostSlab:
    return HostSlab(pages * PAGE, pinned=False)


@pytest.mark.parametrize("nbytes", [1, PAGE - 1, PAGE, PAGE + 1, 3 * PAGE - 7, 9 * PAGE])
def test_blocks_are_page_aligned_and_of_exact_size(nbytes):
    host = slab()
    block = host.take(nbytes, "x")
    assert block.memory.data_ptr() % PAGE == 0
    assert nbytes <= block.nbytes < nbytes + PAGE, "no rounding beyond the page"
    assert host.size == host.used == host.peak_used == block.nbytes
    block.memory.fill_(7)


def test_a_block_is_used_again():
    host = slab()
    block = host.take(50 * PAGE, "x")
    address = block.memory.data_ptr()
    host.give(block)
    assert (host.used, host.size) == (0, 50 * PAGE)
    assert host.take(48 * PAGE + 1, "a little shorter").memory.data_ptr() == address
    assert host.size == 50 * PAGE


def test_the_smallest_idle_block_that_fits_is_lent():
    host = slab(200)
    blocks = {pages: host.take(pages * PAGE, "x") for pages in (52, 49, 51, 20)}
    for block in blocks.values():
        host.give(block)
    assert host.take(50 * PAGE, "y") is blocks[51]
    assert host.take(50 * PAGE, "y") is blocks[52]
    assert host.take(49 * PAGE, "y") is blocks[49]


def test_a_short_frame_does_not_get_a_long_block():
    host = slab()
    long = host.take(50 * PAGE, "long")
    host.give(long)
    assert host.take(PAGE, "short").nbytes == PAGE
    assert host.take(50 * PAGE, "long") is long


def test_lent_blocks_do_not_overlap():
    host = slab()
    blocks = [host.take((1 + index % 3) * PAGE, "x") for index in range(12)]
    for index, block in enumerate(blocks):
        block.memory.fill_(index)
    assert [block.memory.unique().tolist() for block in blocks] == [[index] for index in range(12)]


def test_peak_used_remembers():
    host = slab()
    first, second = host.take(2 * PAGE, "x"), host.take(3 * PAGE, "y")
    host.give(first)
    host.give(second)
    host.take(PAGE, "z")
    assert host.peak_used == 5 * PAGE


def test_idle_blocks_that_are_too_small_make_room():
    host = slab(10)
    for block in [host.take(2 * PAGE, "short") for _ in range(5)]:
        host.give(block)
    assert host.size == 10 * PAGE
    host.take(7 * PAGE, "long")
    assert host.size <= host.budget


def test_the_whole_budget_can_be_lent():
    host = slab(10)
    host.take(4 * PAGE, "x")
    host.take(6 * PAGE, "y")
    assert host.size == host.budget


def test_too_little_says_who_needs_what_in_gib():
    host = HostSlab(3 * GIB, pinned=False)
    host.take(2 * GIB, "frame model.layers.0")  # mapped, never touched
    with pytest.raises(MemoError) as caught:
        host.take(int(1.5 * GIB), "frame model.layers.1")
    message = str(caught.value)
    assert re.search(r"frame model\.layers\.1 needs 1\.5\d* GiB, 1(\.0*)? of 3(\.0*)? GiB are left", message), message
    for way_out in ("memo.alpha", "memo.resident_layers", "memo.host_memory_gib"):
        assert way_out in message


def test_a_refused_take_changes_nothing_that_is_lent():
    host = slab(4)
    block = host.take(3 * PAGE, "x")
    with pytest.raises(MemoError):
        host.take(2 * PAGE, "y")
    assert (host.used, host.size) == (3 * PAGE, 3 * PAGE)
    host.give(block)
    assert host.take(3 * PAGE, "z") is block


def test_closing_with_a_lent_block_raises():
    host = slab()
    block = host.take(PAGE, "x")
    with pytest.raises(MemoError, match=f"{PAGE} bytes of it were lent"):
        host.close()
    host.give(block)
    host.close()
    assert host.size == 0


def test_short_frames_do_not_use_up_the_blocks_of_long_ones():
    """Two long and two short frames fit the budget in whatever order they come."""
    host = slab(2 * 10 + 2)
    for block in [host.take(10 * PAGE, "long") for _ in range(2)]:
        host.give(block)
    for name in ("short", "short"):
        host.take(PAGE, name)
    for name in ("long", "long"):
        host.take(10 * PAGE, name)


def test_what_the_system_refuses_is_tried_again_without_idle_blocks(monkeypatch):
    """They hold a part of the limit that the new one meets."""
    whole, held = slab_module._map, []

    def limited(nbytes):
        held[:] = [ref for ref in held if ref() is not None]
        if sum(ref().nbytes for ref in held) + nbytes > 4 * PAGE:
            raise MemoError("no more")
        block = whole(nbytes)
        held.append(weakref.ref(block))
        return block

    monkeypatch.setattr(slab_module, "_map", limited)
    lender = slab()
    lender.give(lender.take(3 * PAGE, "a long frame"))
    lent = lender.take(2 * PAGE, "a short frame")
    assert (lender.used, lender.size, lender.refused) == (2 * PAGE, 2 * PAGE, None)
    with pytest.raises(MemoError, match=r"a third frame needs .* GiB more; no more"):
        lender.take(3 * PAGE, "a third frame")
    assert (lender.used, lender.size, lender.refused) == (lent.nbytes, lent.nbytes, 2 * PAGE)


def memory_map(block: Block) -> dict[str, str]:
    """What the kernel says of the mapping that a block lies in."""
    address, found, inside = block.memory.data_ptr(), {}, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        name, _, value = line.partition(":")
        if " " in name:  # the head of a mapping: its addresses
            begin, end = (int(word, 16) for word in line.split()[0].split("-"))
            inside = begin <= address < end
        elif inside:
            found[name] = value.strip()
    return found


def test_pages_are_there_before_they_are_locked():
    """All of them, and in a last part that is none of the threads' size; locking would bring them one after the other."""
    block = _map(2 * _TOUCHED_APART + PAGE)
    block.memory[PAGE] = 1
    before = int(memory_map(block)["Rss"].split()[0]) << 10
    _touch(block)
    after = int(memory_map(block)["Rss"].split()[0]) << 10
    assert before < block.nbytes / 2 and after >= block.nbytes


def test_a_fork_does_not_copy_blocks():
    """The kernel copies private pages that a device holds at once, and data loaders fork."""
    assert "dc" in memory_map(_map(PAGE))["VmFlags"].split()
