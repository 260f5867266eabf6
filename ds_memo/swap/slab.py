"""The host slab: where swapped rows wait.

Host memory is locked for the device once and used again by frames of any length. Locking runs at a few GB/s, so lengths that
change from batch to batch must not lock anew: a frame that fits no free range gets several. Never PyTorch's pinned pool, which
rounds every block up to a power of two.

    segment   mapped and locked in one go; begins and ends on a page, as everything here does
    range     a part of a segment: a piece of a block that is lent, or free; free neighbours become one
    block     what a frame is lent: one range as a rule

What keeps the pieces few: a block takes the smallest free range that is enough, or else the largest ones, and cuts only the
last. So a frame makes one border at most, which goes once both its sides are free, at the end of a step at the latest. And a new
segment takes the place of idle ones that are no larger, so lengths that grow slowly do not make ever more of them.
"""

from __future__ import annotations

import ctypes
import gc
import mmap
import os
import weakref
from bisect import bisect_left
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass

import torch

from ds_memo.errors import MemoError
from ds_memo.swap.host_memory import GIB, memlock_limit
from ds_memo.swap.numa import Node, on

PAGE = mmap.PAGESIZE
_TRY_OUT = 1 << 28
_TOUCHED_APART = 1 << 26
"""Bytes that one thread touches at a time, of a segment that is about to be locked."""
_TOUCHERS = 8
"""Threads; more are no faster, memory itself is the limit."""

_open: weakref.WeakSet[HostSlab] = weakref.WeakSet()
"""All of this process that are not closed."""


@dataclass(eq=False)
class Segment:
    """Host memory that was mapped, and locked, in one go."""

    memory: torch.Tensor
    """uint8, page-aligned."""

    @property
    def nbytes(self) -> int:
        return self.memory.numel()


@dataclass(frozen=True, slots=True)
class Range:
    """Bytes `begin` to `end` of a segment: whole pages."""

    segment: Segment
    begin: int
    end: int

    @property
    def nbytes(self) -> int:
        return self.end - self.begin

    @property
    def memory(self) -> torch.Tensor:
        return self.segment.memory[self.begin : self.end]


@dataclass(eq=False)
class Block:
    """Host memory lent to one frame."""

    pieces: list[Range]
    """One as a rule."""

    @property
    def nbytes(self) -> int:
        return sum(piece.nbytes for piece in self.pieces)

    def views(self, begin: int, nbytes: int) -> list[torch.Tensor]:
        """The block's bytes from `begin` on, in order: uint8 views, one per piece that they lie in.

        They are cut on multiples of a page from the block's begin, so what is aligned in the block is aligned in them.
        """
        found, at = [], 0
        for piece in self.pieces:
            first, last = max(begin, at), min(begin + nbytes, at + piece.nbytes)
            if first < last:
                found.append(piece.segment.memory[piece.begin + first - at : piece.begin + last - at])
            at += piece.nbytes
        return found


class HostSlab:
    """Lends blocks. Never holds more than was lent at most at once, nor more than `budget` bytes, and can lend all of these.

    Args:
        budget: bytes; may be changed. What is held beyond it goes with the next block, as far as it lies idle.
        pinned: lock the memory for CUDA (cudaHostRegister).
        node: the NUMA node that pinned memory should lie on; absent: wherever the thread happens to run.
    """

    def __init__(self, budget: int, pinned: bool, node: Node | None = None) -> None:
        self.budget = budget
        self.size = 0
        """Bytes held now, lent or free."""
        self.used = 0
        """Bytes lent now, in whole pages."""
        self.peak_used = 0
        self.node = node
        self.refused: int | None = None
        """Bytes held when the system refused memory that the budget allowed; None: it never did. For whoever chooses alpha."""
        self._pinned = pinned
        self._free: list[Range] = []
        _open.add(self)

    def take(self, nbytes: int, wanted_by: str) -> Block:
        """Lend a block of `nbytes`, rounded up to a page. Only what free memory lacks is mapped.

        Raises:
            MemoError: the budget does not allow it beside what is lent, or the system refuses; names `wanted_by`, needed and
                available GiB. Nothing that is lent has changed.
        """
        pages = -(-nbytes // PAGE) * PAGE
        if self.used + pages > self.budget:
            raise MemoError(
                f"host memory: {wanted_by} needs {pages / GIB:.3g} GiB, {max(0, self.budget - self.used) / GIB:.3g} of "
                f"{self.budget / GIB:.3g} GiB are left. Lower memo.alpha, raise memo.resident_layers or memo.host_memory_gib, "
                "or run fewer forwards before a backward."
            )
        if self.size > self.budget:
            self._shrink()
        if (missing := self.used + pages - self.size) > 0:
            self._grow(missing, wanted_by)
        block = Block(self._cut(pages))
        self.used += pages
        self.peak_used = max(self.peak_used, self.used)
        return block

    def give(self, block: Block) -> None:
        """Take a block back. All copies from and to it must be ordered before whatever the next borrower issues."""
        self.used -= block.nbytes
        for piece in block.pieces:
            begin, end = piece.begin, piece.end
            for free in [free for free in self._free if free.segment is piece.segment]:
                if begin == free.end or free.begin == end:
                    self._free.remove(free)
                    begin, end = min(begin, free.begin), max(end, free.end)
            self._free.append(Range(piece.segment, begin, end))

    def close(self) -> None:
        """Give everything back to the system. Nothing may still be lent."""
        if self.used:
            raise MemoError(f"the host slab was closed while {self.used} bytes of it were lent")
        self._release(self._idle())
        _open.discard(self)

    def _cut(self, nbytes: int) -> list[Range]:
        """Free ranges of so many bytes together, as few as will do: the largest first, the last the smallest that is enough."""
        ranges = sorted(self._free, key=_size)
        pieces = []
        while nbytes:
            found = ranges.pop(min(bisect_left(ranges, nbytes, key=_size), len(ranges) - 1))
            self._free.remove(found)
            piece = Range(found.segment, found.begin, min(found.end, found.begin + nbytes))
            if piece.end < found.end:
                self._free.append(Range(found.segment, piece.end, found.end))
            pieces.append(piece)
            nbytes -= piece.nbytes
        return pieces

    def _grow(self, missing: int, wanted_by: str) -> None:
        held = self.size
        nbytes = missing + self._swallow(missing)
        try:
            segment = _map(nbytes)
            if self._pinned:
                with on(self.node):
                    _touch(segment)
                    _pin(segment)
        except MemoError as error:
            self.refused = held
            raise MemoError(f"host memory: {wanted_by} needs {missing / GIB:.3g} GiB more; {error}") from error
        self.size += nbytes
        self._free.append(Range(segment, 0, nbytes))

    def _swallow(self, nbytes: int) -> int:
        """Give those idle segments back that a new one of so many bytes takes the place of; returns their bytes.

        None is larger than the new bytes and the segments before it together. So a byte that is locked anew lies in a segment at
        least twice as large as before: that happens a few times at most.
        """
        going, grown = [], nbytes
        for idle in self._idle():
            if idle.nbytes > grown:
                break
            going.append(idle)
            grown += idle.nbytes
        self._release(going)
        return grown - nbytes

    def _shrink(self) -> None:
        """Give idle segments back until the budget is kept: it was lowered."""
        beyond, going = self.size - self.budget, []
        for idle in self._idle():
            if beyond > 0:
                going.append(idle)
                beyond -= idle.nbytes
        self._release(going)

    def _idle(self) -> list[Range]:
        """Segments of which nothing is lent, the smallest first."""
        return sorted((free for free in self._free if free.nbytes == free.segment.nbytes), key=_size)

    def _release(self, segments: list[Range]) -> None:
        """Their locks and mappings end with the last reference: whoever calls must not hold any."""
        if segments and self._pinned:
            torch.cuda.synchronize()  # a copy from them may still be under way
        for segment in segments:
            self._free.remove(segment)
            self.size -= segment.nbytes


def _size(part: Range) -> int:
    return part.nbytes


def promised_bytes() -> int:
    """What the slabs of this process may still take."""
    if _open:
        gc.collect()  # that of a model which was let go without detach() is in reference cycles
    return sum(max(0, slab.budget - slab.size) for slab in _open)


def memlock_binds() -> bool:
    """Whether CUDA refuses to lock more host memory than RLIMIT_MEMLOCK says.

    Many machines set it to a few MiB, and NVIDIA's driver locks pages without asking it. So a small limit is tried out; a large
    one is taken at its word.
    """
    limit = memlock_limit()
    if limit is None or limit > _TRY_OUT:
        return limit is not None
    try:
        _pin(_map(limit + PAGE))
    except MemoError:
        return True
    return False


def _map(nbytes: int) -> Segment:
    try:
        memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        with suppress(OSError):  # a kernel without them: slower to lock, nothing else
            memory.madvise(mmap.MADV_HUGEPAGE)
        # The pages of private memory that a device holds are copied at every fork, a data loader's say.
        memory.madvise(mmap.MADV_DONTFORK)
        return Segment(torch.frombuffer(memory, dtype=torch.uint8))
    except (OSError, MemoryError) as error:
        raise MemoError(
            f"the system refused {nbytes / GIB:.3g} GiB ({error}): look at `ulimit -v` and the memory limit of the container, or "
            "lower memo.alpha or memo.host_memory_gib"
        ) from error


def _touch(segment: Segment) -> None:
    """Have the pages there, on several CPUs at once: the driver, which needs them, would ask for one after the other."""
    first, end = segment.memory.data_ptr(), segment.memory.data_ptr() + segment.nbytes
    if segment.nbytes <= _TOUCHED_APART:
        return
    with ThreadPoolExecutor(min(_TOUCHERS, len(os.sched_getaffinity(0)))) as threads:  # they inherit this thread's CPUs
        parts = range(first, end, _TOUCHED_APART)
        list(threads.map(lambda part: ctypes.memset(part, 0, min(_TOUCHED_APART, end - part)), parts))


def _pin(segment: Segment) -> None:
    cudart = torch.cuda.cudart()
    address = segment.memory.data_ptr()
    status = cudart.cudaHostRegister(address, segment.nbytes, 0)
    if status != cudart.cudaError.success:
        with suppress(RuntimeError):  # the runtime remembers the failure and would blame the next kernel for it
            torch.zeros(1, device="cuda")
        raise MemoError(
            f"cudaHostRegister refused {segment.nbytes / GIB:.3g} GiB ({status}): "
            "look at `ulimit -l` and at the memory limit of the cgroup, or lower memo.host_memory_gib."
        )
    # Runs before the mapping goes: the segment still holds it. Not at exit, where CUDA may be gone already.
    weakref.finalize(segment, cudart.cudaHostUnregister, address).atexit = False
