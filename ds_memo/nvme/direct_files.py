"""Files that bypass the page cache, read and written by threads: one file in each directory, blocks striped over them.

Each file has a few threads and a queue. A transfer is cut where stripes end; its parts are done in the order of issue, several at
once. Threads sleep in the system's calls, which hold no interpreter lock. docs/nvme.md compares this with DeepSpeed's AsyncIO.
"""

from __future__ import annotations

import errno
import mmap
import os
import queue
import threading
import time
import weakref
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any

from ds_memo.errors import MemoError
from ds_memo.nvme.directory import Directory, buffers_silently, grow, private_file
from ds_memo.nvme.extents import Space
from ds_memo.nvme.file_protocol import Extent
from ds_memo.swap.host_slab import Block
from ds_memo.swap.pinned_segments import PAGE
from ds_memo.swap.stream_protocol import Streams
from ds_memo.units import GIB, round_up

STRIPE = 1 << 23
"""Bytes that lie together in one file, and the most that one call of the system moves."""
THREADS = 4
"""Of each file: calls under way at once."""
_GROWS_BY = 1 << 30
"""Bytes by which files without a given size grow at least."""
_LOOKS = 1e-3
"""Seconds between two looks at compute, while the host waits."""
_POLLS = 1e-4
"""Seconds between two looks at the events that a transfer waits for."""


class DirectTransfer:
    """One block on its way; see :class:`ds_memo.nvme.file_protocol.Transfer`."""

    def __init__(self, writes: bool, after: tuple[Any, ...], parts: int) -> None:
        self.writes = writes
        self.after = after
        self.parts = parts
        """Not done yet."""
        self.failure: BaseException | None = None
        self.over = threading.Event()


class DirectFiles:
    """The real :class:`ds_memo.nvme.file_protocol.Files`. Its methods are called by one thread.

    Args:
        directories: one file in each.
        budget: bytes of all files together.
        streams: whose events transfers wait for.
        preallocate: allocate the budget now, not as it is wanted.

    Raises:
        MemoError: the system refuses a file, or the bytes.
    """

    def __init__(self, directories: Sequence[Directory], budget: int, streams: Streams, preallocate: bool) -> None:
        self.budget = budget // (STRIPE * len(directories)) * (STRIPE * len(directories))
        self.stall_s = 0.0
        self._streams = streams
        self._space = Space()
        self._files: list[_File] = []
        self._under_way: list[DirectTransfer] = []
        self.meters = {True: Meter(), False: Meter()}
        """Of writes (True) and reads."""
        self._stop = weakref.finalize(self, _stop, self._files)
        try:
            for directory in directories:
                self._files.append(_File(directory, self.meters, streams))
            if preallocate:
                self._grow(self.budget)
        except BaseException:
            self._stop()
            raise

    @property
    def directories(self) -> list[Directory]:
        return [file.directory for file in self._files]

    def buffer_silently(self) -> list[bool]:
        """Return of each file whether its file system keeps it in the page cache all the same. Overwrites its first bytes."""
        memory = memoryview(mmap.mmap(-1, PAGE))
        return [buffers_silently(file.handle, memory) for file in self._files]

    def extent(self, nbytes: int, wanted_by: str) -> Extent:
        nbytes = round_up(nbytes, PAGE)
        while (extent := self._space.allocate(nbytes)) is None:
            more = nbytes - self._space.missing_for
            left = self.budget - self._space.size
            if more > left:
                raise MemoError(
                    f"files for activations: {wanted_by} needs {nbytes / GIB:.3g} GiB, {left / GIB:.3g} of "
                    f"{self.budget / GIB:.3g} GiB are left. Raise memo.nvme.gib, or lower memo.alpha or the batch"
                )
            self._grow(min(left, max(more, _GROWS_BY)))
        return extent

    def free(self, extent: Extent) -> None:
        self._space.free(extent)

    def extents(self) -> list[Extent]:
        return self._space.extents

    def write(self, block: Block, extent: Extent, after: tuple[Any, ...]) -> DirectTransfer:
        return self._transfer(True, block, extent, after)

    def read(self, extent: Extent, block: Block, after: tuple[Any, ...]) -> DirectTransfer:
        return self._transfer(False, block, extent, after)

    def done(self, transfer: DirectTransfer) -> bool:
        return transfer.over.is_set()

    def wait(self, transfer: DirectTransfer, compute: Any) -> None:
        idle_since = time.perf_counter() if self._streams.done(compute) else None
        while not transfer.over.wait(_LOOKS):
            self._check_threads()
            if idle_since is None and self._streams.done(compute):
                idle_since = time.perf_counter()
        if idle_since is not None:
            self.stall_s += time.perf_counter() - idle_since

    def wait_beside(self, transfer: DirectTransfer, compute: Any) -> bool:
        while not (transfer.over.is_set() or self._streams.done(compute)):
            self._check_threads()
            transfer.over.wait(_LOOKS)
        return transfer.over.is_set()

    def finish(self) -> None:
        for transfer in self._under_way:
            while not transfer.over.wait(1.0):
                self._check_threads()
        self._under_way.clear()

    def close(self) -> None:
        if self._stop.alive:
            with suppress(MemoError):  # in a forked child
                self.finish()
            self._stop()
            for file in self._files:
                file.join()

    def _transfer(self, writes: bool, block: Block, extent: Extent, after: tuple[Any, ...]) -> DirectTransfer:
        self._check_threads()
        parts = list(self._parts(block, extent))
        transfer = DirectTransfer(writes, after, len(parts))
        self._under_way = [other for other in self._under_way if not other.over.is_set()]
        self._under_way.append(transfer)
        for file, memory, at in parts:
            file.queue.put((transfer, memory, at))
        return transfer

    def _parts(self, block: Block, extent: Extent) -> Iterator[tuple[_File, memoryview, int]]:
        """Yield the parts of a block: (file, memory, offset in the file)."""
        at = extent.begin
        for view in block.views(0, extent.nbytes):
            memory = memoryview(view.numpy())
            while memory:
                stripe, within = divmod(at, STRIPE)
                part = memory[: STRIPE - within]
                row, number = divmod(stripe, len(self._files))
                yield self._files[number], part, row * STRIPE + within
                memory, at = memory[len(part) :], at + len(part)

    def _grow(self, nbytes: int) -> None:
        """Make the space larger by at least this, in whole rows of stripes."""
        row = STRIPE * len(self._files)
        nbytes = min(round_up(nbytes, row), self.budget - self._space.size)
        for file in self._files:
            grow(file.handle, file.directory, self._space.size // len(self._files), nbytes // len(self._files))
        self._space.grow(nbytes)

    def _check_threads(self) -> None:
        if not self._stop.alive or not all(file.is_alive for file in self._files):
            raise MemoError("files for activations are closed, or this process was forked from the one that opened them")


class Meter:
    """Bytes moved in one direction, and the time in which any were."""

    def __init__(self) -> None:
        self.nbytes = 0
        self.busy_s = 0.0
        self._lock = threading.Lock()
        self._calls = 0
        self._since = 0.0

    def begin(self) -> None:
        with self._lock:
            if not self._calls:
                self._since = time.perf_counter()
            self._calls += 1

    def end(self, nbytes: int) -> None:
        with self._lock:
            self.nbytes += nbytes
            self._calls -= 1
            if not self._calls:
                self.busy_s += time.perf_counter() - self._since

    def zero(self) -> None:
        """Begin anew. Nothing may be under way."""
        self.nbytes, self.busy_s = 0, 0.0


class _File:
    """One file, its queue and its threads. They refer to it, not to its owner; the descriptor is closed with the last of them."""

    def __init__(self, directory: Directory, meters: dict[bool, Meter], streams: Streams) -> None:
        self.directory = directory
        self.handle = private_file(directory)
        weakref.finalize(self, os.close, self.handle)
        self.queue: queue.SimpleQueue = queue.SimpleQueue()
        self._threads = [
            threading.Thread(target=self._work, args=(meters, streams), name=f"ds_memo-file-{number}", daemon=True)
            for number in range(THREADS)
        ]
        for thread in self._threads:
            thread.start()

    @property
    def is_alive(self) -> bool:
        return all(thread.is_alive() for thread in self._threads)

    def stop(self) -> None:
        for _ in self._threads:
            self.queue.put(None)

    def join(self) -> None:
        for thread in self._threads:
            thread.join()

    def _work(self, meters: dict[bool, Meter], streams: Streams) -> None:
        while (part := self.queue.get()) is not None:
            transfer, memory, at = part
            self._move(transfer, memory, at, meters[transfer.writes], streams)
            del part, transfer, memory  # an idle thread must not keep memory alive

    def _move(self, transfer: DirectTransfer, memory: memoryview, at: int, meter: Meter, streams: Streams) -> None:
        try:
            for event in transfer.after:
                while not streams.done(event):
                    time.sleep(_POLLS)
            if transfer.failure is None:
                meter.begin()
                try:
                    _move_all(self.handle, memory, at, transfer.writes)
                finally:
                    meter.end(len(memory))
        except BaseException as failure:  # raised where the transfer is waited for, by the thread that can act on it
            what = "write" if transfer.writes else "read"
            rank = os.environ.get("RANK", "0")
            transfer.failure = MemoError(f"rank {rank} could not {what} its file in {self.directory.path}: {failure}")
        with _COUNTS:
            transfer.parts -= 1
            if not transfer.parts:
                transfer.over.set()


_COUNTS = threading.Lock()
"""Guards the counts of parts: threads of several files have parts of one transfer."""


def _move_all(handle: int, memory: memoryview, at: int, writes: bool) -> None:
    """Move all of this memory to or from a file, in as many calls of the system as it takes."""
    while memory:
        moved = os.pwritev(handle, [memory], at) if writes else os.preadv(handle, [memory], at)
        if moved <= 0 or moved % PAGE:
            raise OSError(errno.EIO, f"{os.strerror(errno.EIO)}: {moved} of {len(memory)} bytes were moved")
        memory, at = memory[moved:], at + moved


def _stop(files: list[_File]) -> None:
    for file in files:
        file.stop()
