"""PyTorch's caching allocator, simulated: the bytes it reserves for a trace, to compare a plan with.

    python -m benchmarks.caching_allocator trace.txt run.pickle      # GiB over two iterations, beside the plan's peak

The rules are those of c10/cuda/CUDACachingAllocator.cpp (pytorch/pytorch at commit eb42ad6), for one stream and default
settings:

- Sizes are rounded up to 512 bytes. Up to 1 MiB is served by the small pool, the rest by the large one.
- The smallest free block that holds the request serves it, the lower address among equals. The rest is split off if it
  is at least 512 bytes (small pool, expandable segments) or more than 1 MiB (large pool, native).
- native: with no such block, a new segment of 2 MiB (small pool), 20 MiB (requests below 10 MiB), or the request
  rounded up to 2 MiB.
- expandable: each pool is one segment that grows at its end by pages of 2 MiB (small pool) or 20 MiB (large). A free
  block at the end counts as large as all the address space behind it, so blocks in the middle are preferred.
- Freed blocks merge with free neighbours of the same segment.

Not simulated: several streams, record_stream, cudaMalloc's own granularity, a full device, garbage collection.
"""

from __future__ import annotations

import argparse
from bisect import bisect_left, insort
from dataclasses import dataclass
from itertools import count

from ds_memo.plan import plan_trace, read_trace
from ds_memo.plan.snapshot import SUFFIXES, read_snapshot
from ds_memo.plan.trace import Trace, rounded
from ds_memo.units import GIB, MIB, round_up

SMALL, SMALL_BUFFER, LARGE_BUFFER, MIN_LARGE, ROUND_LARGE = MIB, 2 * MIB, 20 * MIB, 10 * MIB, 2 * MIB


@dataclass(eq=False, slots=True)
class _Block:
    """A stretch of a segment; prev and next are its neighbours there."""

    small: bool
    segment: int
    start: int
    size: int
    free: bool = False
    prev: _Block | None = None
    next: _Block | None = None

    @property
    def key(self) -> tuple[int, int, int]:
        return (self.size, self.segment, self.start)


@dataclass(frozen=True)
class Reserved:
    """Bytes. `allocated` is the most in use at once after rounding, `reserved` the most held from the device."""

    reserved: int
    allocated: int


def simulate(trace: Trace, *, expandable: bool = False, iterations: int = 1) -> Reserved:
    """Replay the trace and return its peaks; several iterations show what is left over from the first.

    Tensors that the trace never frees are freed at the end of an iteration. O(n log n), some 5 µs a request.
    """
    allocator = _Allocator(expandable)
    for _ in range(iterations):
        alive: dict[str, _Block] = {}
        for id_, size in trace.requests:
            if size is None:
                if id_ in alive:
                    allocator.free(alive.pop(id_))
            elif size:
                alive[id_] = allocator.malloc(rounded(size))
        for block in alive.values():
            allocator.free(block)
    return Reserved(allocator.reserved, allocator.most_allocated)


class _Allocator:
    def __init__(self, expandable: bool):
        self.expandable = expandable
        self.pools: dict[bool, list[tuple[int, int, int]]] = {True: [], False: []}  # sorted keys of the free blocks
        self.free_blocks: dict[tuple[int, int, int], _Block] = {}
        self.tails: dict[bool, _Block] = {}  # expandable: each pool's last block
        self.segments = count()
        self.reserved = self.allocated = self.most_allocated = 0

    def malloc(self, size: int) -> _Block:
        small = size <= SMALL
        block = self._best_fit(small, size)
        if block is None:
            block = self._grow(small, size) if self.expandable else self._segment(small, size)
        rest = block.size - size
        if rest >= 512 if small or self.expandable else rest > SMALL:
            self._split(block, size)
        self.allocated += block.size
        self.most_allocated = max(self.most_allocated, self.allocated)
        return block

    def free(self, block: _Block) -> None:
        self.allocated -= block.size
        if block.prev is not None and block.prev.free:
            self._remove(block.prev)
            block = self._merge(block.prev, block)
        if block.next is not None and block.next.free:
            self._remove(block.next)
            block = self._merge(block, block.next)
        self._add(block)

    # ---- the pool of free blocks

    def _add(self, block: _Block) -> None:
        block.free = True
        insort(self.pools[block.small], block.key)
        self.free_blocks[block.key] = block

    def _remove(self, block: _Block) -> None:
        pool = self.pools[block.small]
        del pool[bisect_left(pool, block.key)]
        del self.free_blocks[block.key]
        block.free = False

    def _best_fit(self, small: bool, size: int) -> _Block | None:
        pool = self.pools[small]
        at = bisect_left(pool, (size, -1, -1))
        if at == len(pool):
            return None
        # The expandable end counts as endless: any other fitting block goes first.
        if self.expandable and self.free_blocks[pool[at]] is self.tails.get(small) and at + 1 < len(pool):
            at += 1
        block = self.free_blocks[pool[at]]
        self._remove(block)
        return block

    def _split(self, block: _Block, size: int) -> None:
        rest = _Block(block.small, block.segment, block.start + size, block.size - size, prev=block, next=block.next)
        if rest.next is not None:
            rest.next.prev = rest
        block.next, block.size = rest, size
        if self.tails.get(block.small) is block:
            self.tails[block.small] = rest
        self._add(rest)

    def _merge(self, low: _Block, high: _Block) -> _Block:
        low.size += high.size
        low.next = high.next
        if low.next is not None:
            low.next.prev = low
        if self.tails.get(low.small) is high:
            self.tails[low.small] = low
        return low

    # ---- memory from the device

    def _segment(self, small: bool, size: int) -> _Block:
        if small:
            bytes_ = SMALL_BUFFER
        elif size < MIN_LARGE:
            bytes_ = LARGE_BUFFER
        else:
            bytes_ = round_up(size, ROUND_LARGE)
        self.reserved += bytes_
        return _Block(small, next(self.segments), 0, bytes_)

    def _grow(self, small: bool, size: int) -> _Block:
        page = SMALL_BUFFER if small else LARGE_BUFFER
        tail = self.tails.get(small)
        if tail is not None and tail.free:
            self._remove(tail)
            more = round_up(size - tail.size, page)
            tail.size += more
            block = tail
        else:
            more = round_up(size, page)
            if tail is None:
                block = _Block(small, next(self.segments), 0, more)
            else:
                block = _Block(small, tail.segment, tail.start + tail.size, more, prev=tail)
                tail.next = block
            self.tails[small] = block
        self.reserved += more
        return block


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("traces", nargs="+")
    for path in parser.parse_args().traces:
        trace = read_snapshot(path) if path.endswith(SUFFIXES) else read_trace(path)
        native, expandable = (simulate(trace, expandable=how, iterations=2).reserved / GIB for how in (False, True))
        plan = plan_trace(trace).peak / GIB
        print(f"{path}: plan {plan:.3f} GiB, native {native:.3f} GiB, expandable segments {expandable:.3f} GiB")


if __name__ == "__main__":
    main()
