"""Segments: their pages exist before they are locked, and a fork never copies them."""

from __future__ import annotations

from pathlib import Path

from ds_memo.swap.pinned_segments import PAGE, TOUCHED_APART, Segment, map_pages, touch


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
