"""The pool of host memory that the slabs of a process's models allocate from, in turn or at once.

Host memory is locked for the device once and reused by frames of any length. Locking runs at a few GB/s. So neither new lengths
from batch to batch nor models that take turns (an actor and its critic) must lock anew: a frame that fits no free range gets
several. PyTorch's pinned pool is not used, because it rounds every block up to a power of two.

    segment   mapped and locked in one go, a GiB at most; begins and ends on a page, as everything here does
    range     a part of a segment: either free, or a piece of an allocated block; free neighbours are merged

Two rules keep the pieces few. A frame takes the smallest free range that is large enough, or else several of the largest, and
cuts only the last. So it makes at most one border, which disappears when both sides are free, by the end of the step. And a new
segment replaces idle ones that are smaller, so slowly growing lengths do not pile up segments.

There are no locks; host_budget.py says why.
"""

from __future__ import annotations

import os
import sys
import time
import weakref
from bisect import bisect_left
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from threading import Thread
from typing import Any

import torch

from ds_memo.errors import MemoError
from ds_memo.memory.numa import node_of, on
from ds_memo.swap import pinned_segments
from ds_memo.swap.pinned_segments import PAGE, Segment
from ds_memo.swap.streams import finish_abandoned
from ds_memo.units import GIB

_TOLD_S = 1.0
"""Seconds of locking that are worth a line."""


@dataclass(frozen=True, slots=True)
class Range:
    """Bytes `begin` to `end` of a segment: whole pages."""

    segment: Segment
    begin: int
    end: int
    stream: int | None = None
    """CUDA's handle of the compute stream that it was allocated on; None: the range is free, or the device is a CPU."""

    @property
    def nbytes(self) -> int:
        return self.end - self.begin

    @property
    def memory(self) -> torch.Tensor:
        return self.segment.memory[self.begin : self.end]


class HostPool:
    """Allocates ranges. It never holds more bytes than the most that were allocated at once.

    Args:
        device: copies from and to the memory. For a CUDA device the memory is locked (cudaHostRegister).
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.pinned = device.type == "cuda"
        self.node = node_of(device)
        """NUMA node for locked memory; None: the node that the thread runs on."""
        self.size = 0
        """Bytes held now, allocated or free."""
        self.used = 0
        """Bytes allocated now, in whole pages."""
        self.clients: weakref.WeakSet[Any] = weakref.WeakSet()
        """The slabs (HostSlab) that share the pool and are not closed."""
        self.holders: weakref.WeakSet[Any] = weakref.WeakSet()
        """Their engines (SwapEngine), whose frames hold the blocks."""
        self.forward_in: Thread | None = None
        """The thread in which a client's training forward runs. It stays set if that was interrupted."""
        self.locked_bytes, self.locking_s = 0, 0.0
        """Bytes that were locked so far, and the seconds that this took."""
        self._told_bytes, self._told_s = 0, 0.0
        """Those of them that `tell_of_locking` has printed."""
        self.most = sys.maxsize
        """The most bytes that the system has not refused; `why_no_more` is its error."""
        self.why_no_more = ""
        self.given = 0
        """The most bytes that were held when the system refused more, or since."""
        self._segments: list[Segment] = []
        self._free_ranges: list[Range] = []
        self._unsettled = False
        """True while ranges change hands, and since then if Ctrl-C came meanwhile."""
        self.lost: deque[Mapping[Any, Sequence[Range]]] = deque()
        """Ranges of slabs that were garbage-collected, with their models, before they freed them."""
        self._freed_on: set[int | None] = set()
        """Compute streams of the ranges freed since the device was last synchronized."""

    @property
    def limit(self) -> int:
        """Bytes that the clients may hold together."""
        return max((client.budget.nbytes for client in self.clients), default=0)

    @contextmanager
    def changing(self) -> Iterator[None]:
        """Let a client allocate or free a block, and note inside that it has."""
        self.recount()
        self._unsettled = True
        yield
        self._unsettled = False

    def recount(self) -> None:
        """Find out from the clients' blocks which ranges are free, if Ctrl-C came while they changed hands."""
        if not self._unsettled:
            return
        if self.pinned:
            torch.cuda.synchronize(self.device)
        held = [piece for client in self.clients for piece in client.recount()]
        held += [piece for blocks in self.lost for pieces in blocks.values() for piece in pieces]
        self.used = sum(piece.nbytes for piece in held)
        self.size = sum(segment.nbytes for segment in self._segments)
        self._free_ranges = []
        for segment in self._segments:
            borders = sorted((piece.begin, piece.end) for piece in held if piece.segment is segment)
            for (_, begin), (end, _) in pairwise([(0, 0), *borders, (segment.nbytes, segment.nbytes)]):
                if begin < end:
                    self._free_ranges.append(Range(segment, begin, end))
        self._unsettled = False

    def allocate(self, nbytes: int, wanted_by: str) -> list[Range]:
        """Allocate `nbytes`, a multiple of a page.

        Raises:
            Refused: the system refuses. No allocated range has changed.
        """
        stream = self._stream()
        self._prepare(nbytes, stream, wanted_by)
        self.used += nbytes
        return self._cut(nbytes, stream)

    def has_free(self, nbytes: int) -> bool:
        """Return True if `nbytes` are free now."""
        return self.used + nbytes <= self.size

    def has_memory(self, nbytes: int) -> bool:
        """Return True if `nbytes` are free now. Ask the system for those that are not."""
        if self.has_free(nbytes):
            return True
        with self.changing():
            try:
                self._prepare(nbytes, self._stream(), "a layer call")
            except Refused:
                return False
        return True

    def _stream(self) -> int | None:
        """Return CUDA's handle of the present compute stream: torch takes long to make a Stream, and to compare two."""
        if not self.pinned:
            return None
        return torch._C._cuda_getCurrentRawStream(torch.cuda.current_device() if self.device.index is None else self.device.index)

    def _prepare(self, nbytes: int, stream: int | None, wanted_by: str) -> None:
        """Have `nbytes` free. Map only what free memory lacks."""
        self.free_lost()
        if not self._freed_on <= {stream}:  # other streams' copies may still use it, and no event orders them
            torch.cuda.synchronize(self.device)
            self._freed_on.clear()
        if (missing := self.used + nbytes - self.size) > 0:
            self._grow(missing, wanted_by)

    def free(self, pieces: Sequence[Range]) -> None:
        """Free these ranges. The stream that they were allocated on must already wait for all copies from and to them."""
        for piece in pieces:
            self.used -= piece.nbytes
            self._freed_on.add(piece.stream)
            begin, end = piece.begin, piece.end
            for free in [free for free in self._free_ranges if free.segment is piece.segment]:
                if begin == free.end or free.begin == end:
                    self._free_ranges.remove(free)
                    begin, end = min(begin, free.begin), max(end, free.end)
            self._free_ranges.append(Range(piece.segment, begin, end))

    def drain(self) -> None:
        """Free the blocks of dead frames, of all models."""
        for engine in list(self.holders):
            engine.drain()
        self.free_lost()

    def free_lost(self) -> None:
        """Free the ranges of slabs that are gone. `allocate` does this first."""
        if self.lost:
            finish_abandoned(self.device)  # there is no event behind its copies
        while self.lost:
            for pieces in self.lost.popleft().values():
                self.free(pieces)

    def release(self) -> None:
        """Release all idle segments to the system."""
        self.free_lost()
        self._release(self._idle())
        self.most, self.why_no_more, self.given = sys.maxsize, "", 0  # the next model asks the system anew

    def _cut(self, nbytes: int, stream: int | None) -> list[Range]:
        """Take `nbytes` from as few free ranges as possible: the largest first, the last from the smallest that is enough."""
        ranges = sorted(self._free_ranges, key=_size)
        pieces = []
        while nbytes:
            found = ranges.pop(min(bisect_left(ranges, nbytes, key=_size), len(ranges) - 1))
            self._free_ranges.remove(found)
            piece = Range(found.segment, found.begin, min(found.end, found.begin + nbytes), stream)
            if piece.end < found.end:
                self._free_ranges.append(Range(found.segment, piece.end, found.end))
            pieces.append(piece)
            nbytes -= piece.nbytes
        return pieces

    def _grow(self, missing: int, wanted_by: str) -> None:
        if (held := self.size) + missing <= self.most:
            nbytes, size = missing + self._swallow(missing), 0
            try:
                while nbytes:
                    size = min(nbytes, pinned_segments.SEGMENT)
                    self._add(self._mapped(size))
                    nbytes -= size
                return
            except MemoError as error:
                self.given, self.why_no_more = max(held, self.size), str(error)
                self.most = max(self.given, self.size + size - PAGE)
        raise Refused(f"host memory: {wanted_by} needs {missing / GIB:.3g} GiB more; {self.why_no_more}")

    def _mapped(self, nbytes: int) -> Segment:
        """Map a segment; for a CUDA device lock it, on the device's NUMA node."""
        begin = time.perf_counter()
        segment = pinned_segments.map_pages(nbytes)
        if self.pinned:
            with on(self.node):
                pinned_segments.touch(segment)
                pinned_segments.pin(segment)
            self.locked_bytes += nbytes
            self.locking_s += time.perf_counter() - begin
        return segment

    def tell_of_locking(self) -> None:
        """Print how much memory was locked since the last line, on rank 0, if that took a second: a first pass waits for it."""
        nbytes, seconds = self.locked_bytes - self._told_bytes, self.locking_s - self._told_s
        if seconds >= _TOLD_S and os.environ.get("RANK", "0") == "0":
            self._told_bytes, self._told_s = self.locked_bytes, self.locking_s
            print(f"ds_memo locked {nbytes / GIB:.3g} GiB of host memory in {seconds:.1f} s", file=sys.stderr)

    def _add(self, segment: Segment) -> None:
        self._segments.append(segment)
        self.size += segment.nbytes
        self.given = max(self.given, self.size)
        self._free_ranges.append(Range(segment, 0, segment.nbytes))

    def _swallow(self, nbytes: int) -> int:
        """Release the idle segments that a new segment, larger by their bytes, will replace. Return their bytes.

        Each is no larger than the new bytes and the smaller ones together. So memory that is locked a second time ends up in a
        segment at least twice as large, and that happens only a few times.
        """
        going, grown = [], nbytes
        for idle in self._idle():
            if idle.nbytes > grown or idle.nbytes >= pinned_segments.SEGMENT:
                break
            going.append(idle)
            grown += idle.nbytes
        self._release(going)
        return grown - nbytes

    def _idle(self) -> list[Range]:
        """Return the segments that are entirely free, the smallest first."""
        return sorted((free for free in self._free_ranges if free.nbytes == free.segment.nbytes), key=_size)

    def _release(self, idle: list[Range]) -> None:
        """Forget free ranges that span their segments. A segment is unlocked and unmapped with its last reference, the
        caller's."""
        if idle and self.pinned:
            torch.cuda.synchronize(self.device)  # a copy from them may still be under way
        for free in idle:
            self._segments.remove(free.segment)
            self._free_ranges.remove(free)
            self.size -= free.nbytes


class Refused(MemoError):
    """The system refused memory that the budget allowed."""


def _size(part: Range) -> int:
    return part.nbytes
