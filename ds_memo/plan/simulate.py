"""What PyTorch's caching allocator would have reserved for the same trace: the number to compare a plan with.

The rules are those of c10/cuda/CUDACachingAllocator.cpp (pytorch/pytorch at commit eb42ad6), for one stream and default
settings:

- Sizes are rounded up to 512 bytes. Up to 1 MiB is served by the small pool, the rest by the large one.
- The smallest free block that holds the request is taken, the lower address among equals. The rest is split off if it
  is at least 512 bytes (small pool, expandable segments) or more than 1 MiB (large pool, native).
- native: with no such block, a new segment of 2 MiB (small pool), 20 MiB (requests below 10 MiB), or the request
  rounded up to 2 MiB. Where that passes the capacity, wholly free segments are given back and it is tried once more.
- expandable: each pool is one segment that grows at its end by pages of 2 MiB (small pool) or 20 MiB (large). A free
  block at the end counts as large as all the address space behind it, so blocks in the middle are preferred.
- Freed blocks merge with free neighbours of the same segment.

What is not simulated: several streams, record_stream, cudaMalloc's own granularity, garbage collection.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass
from itertools import count

from .trace import Trace, rounded

MIB = 2**20
SMALL, SMALL_BUFFER, LARGE_BUFFER, MIN_LARGE, ROUND_LARGE = MIB, 2 * MIB, 20 * MIB, 10 * MIB, 2 * MIB


@dataclass(eq=False)
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
    """Bytes. `allocated` is the most in use at once after rounding, `reserved` the most held from the device.

    `retries` counts cudaMalloc failures that made it give back its cache (each one stalls the device); `fits` is False
    where even that was not enough, and the trace was abandoned there.
    """

    reserved: int
    allocated: int
    retries: int
    fits: bool


def simulate(trace: Trace, *, expandable: bool = False, capacity: int | None = None, iterations: int = 1) -> Reserved:
    """Replays the trace; several iterations show what is left over from the first.

    Tensors that the trace never frees are freed at the end of an iteration.

    Raises:
        ValueError: A capacity together with expandable segments: giving back their pages is not simulated.
    """
    if expandable and capacity is not None:
        raise ValueError("a capacity is simulated for native segments only")
    allocator = _Allocator(expandable, capacity)
    for _ in range(iterations):
        alive: dict[str, _Block] = {}
        for request in trace.requests:
            if request.size is None:
                if request.id in alive:
                    allocator.free(alive.pop(request.id))
            elif request.size:
                block = allocator.malloc(rounded(request.size))
                if block is None:
                    return Reserved(allocator.most_reserved, allocator.most_allocated, allocator.retries, False)
                alive[request.id] = block
        for block in alive.values():
            allocator.free(block)
    return Reserved(allocator.most_reserved, allocator.most_allocated, allocator.retries, True)


class _Allocator:
    def __init__(self, expandable: bool, capacity: int | None):
        self.expandable, self.capacity = expandable, capacity
        self.pools: dict[bool, list[tuple[tuple[int, int, int], _Block]]] = {True: [], False: []}  # free blocks, sorted
        self.tails: dict[bool, _Block] = {}  # expandable: each pool's last block
        self.segments = count()
        self.reserved = self.allocated = self.most_reserved = self.most_allocated = self.retries = 0

    def malloc(self, size: int) -> _Block | None:
        small = size <= SMALL
        block = self._best_fit(small, size)
        if block is None:
            block = self._grow(small, size) if self.expandable else self._segment(small, size)
            if block is None:
                return None
        rest = block.size - size
        if rest >= 512 if small or self.expandable else rest > SMALL:
            self._split(block, size)
        self.allocated += block.size
        self.most_allocated = max(self.most_allocated, self.allocated)
        self.most_reserved = max(self.most_reserved, self.reserved)
        return block

    def free(self, block: _Block) -> None:
        self.allocated -= block.size
        if block.prev is not None and block.prev.free:
            block = self._merge(block.prev, block)
        if block.next is not None and block.next.free:
            self._take(block.next)
            block = self._merge(block, block.next, taken=True)
        self._give(block)

    # ---- the pool of free blocks

    def _give(self, block: _Block) -> None:
        block.free = True
        insort(self.pools[block.small], (block.key, block), key=lambda entry: entry[0])

    def _take(self, block: _Block) -> None:
        pool = self.pools[block.small]
        del pool[bisect_left(pool, block.key, key=lambda entry: entry[0])]
        block.free = False

    def _best_fit(self, small: bool, size: int) -> _Block | None:
        pool = self.pools[small]
        at = bisect_left(pool, (size, -1, -1), key=lambda entry: entry[0])
        if at == len(pool):
            return None
        # The expandable end counts as endless: any other block that fits goes first.
        if self.expandable and pool[at][1] is self.tails.get(small) and at + 1 < len(pool):
            at += 1
        block = pool[at][1]
        self._take(block)
        return block

    def _split(self, block: _Block, size: int) -> None:
        rest = _Block(block.small, block.segment, block.start + size, block.size - size, prev=block, next=block.next)
        if rest.next is not None:
            rest.next.prev = rest
        block.next, block.size = rest, size
        if self.tails.get(block.small) is block:
            self.tails[block.small] = rest
        self._give(rest)

    def _merge(self, low: _Block, high: _Block, taken: bool = False) -> _Block:
        if not taken:
            self._take(low)
        low.size += high.size
        low.next = high.next
        if low.next is not None:
            low.next.prev = low
        if self.tails.get(low.small) is high:
            self.tails[low.small] = low
        return low

    # ---- memory from the device

    def _segment(self, small: bool, size: int) -> _Block | None:
        if small:
            bytes_ = SMALL_BUFFER
        elif size < MIN_LARGE:
            bytes_ = LARGE_BUFFER
        else:
            bytes_ = -(-size // ROUND_LARGE) * ROUND_LARGE
        if self.capacity is not None and self.reserved + bytes_ > self.capacity:
            self.retries += 1
            self._release_cached()
            if self.reserved + bytes_ > self.capacity:
                return None
        self.reserved += bytes_
        return _Block(small, next(self.segments), 0, bytes_)

    def _release_cached(self) -> None:
        for pool in self.pools.values():
            for _, block in list(pool):
                if block.prev is None and block.next is None:
                    self._take(block)
                    self.reserved -= block.size

    def _grow(self, small: bool, size: int) -> _Block:
        page = SMALL_BUFFER if small else LARGE_BUFFER
        tail = self.tails.get(small)
        if tail is not None and tail.free:
            self._take(tail)
            more = -(-(size - tail.size) // page) * page
            tail.size += more
            block = tail
        else:
            more = -(-size // page) * page
            if tail is None:
                block = _Block(small, next(self.segments), 0, more)
            else:
                block = _Block(small, tail.segment, tail.start + tail.size, more, prev=tail)
                tail.next = block
            self.tails[small] = block
        self.reserved += more
        return block
