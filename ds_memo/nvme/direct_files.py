"""Files that bypass the page cache, read and written by threads: one file in each directory, blocks striped over them.

Each file has a few threads and a queue. A transfer is cut by files and at most so many bytes; its parts are done in the order of
issue, several at once. One more thread begins transfers: it alone watches events, so that the others cost no interpreter time.
They sleep in the system's calls, which hold no interpreter lock. docs/nvme.md compares this with DeepSpeed's AsyncIO.
"""

from __future__ import annotations

import errno
import mmap
import os
import queue
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from ds_memo.errors import MemoError
from ds_memo.nvme.directory import Directory, buffers_silently, grow, private_file
from ds_memo.nvme.extents import Extent, Space
from ds_memo.swap.host_slab import Block
from ds_memo.swap.pinned_segments import PAGE
from ds_memo.swap.stream_protocol import Streams
from ds_memo.swap.streams import finish_first, use_device_of
from ds_memo.units import GIB, round_up

STRIPE = 1 << 23
"""Bytes that lie together in one file."""
_AT_ONCE = 1 << 26
"""Bytes that one call of the system moves, at most. A thread waits for the interpreter's lock after each: while Python computes,
calls of 8 MiB reach half of a drive's 6 GB/s, calls of 64 MiB nine tenths (tests/nvme/test_busy_interpreter.py)."""
_VIEWS = 512
"""Memory areas of one call, at most; the system takes 1,024."""
THREADS = 4
"""Calls under way at once, for each file."""
_GROWS_BY = 1 << 30
"""Bytes by which files without a given size grow at least."""
_LOOKS = 1e-3
"""Seconds between two looks at compute, while the host waits."""
_POLLS = 2e-4
"""Seconds between two looks at the events that a transfer waits for."""


class DirectTransfer:
    """One block on its way to the files or back."""

    def __init__(self, writes: bool, after: tuple[Any, ...], parts: list[tuple[_File, list[memoryview], int]]) -> None:
        self.writes = writes
        self.after = after
        self.parts: list[tuple[_File, list[memoryview], int]] = parts
        """(file, memory, offset in the file); empty once it has begun."""
        self.left = len(parts)
        """Parts that are not done yet."""
        self.failure: BaseException | None = None
        """Why it failed; None: it has not."""
        self.over = threading.Event()


class DirectFiles:
    """Files that host blocks are written to and read from. Its methods are called by one thread.

    Transfers of one direction are done in the order of issue.

    Args:
        directories: one file in each.
        budget: bytes of all files together.
        streams: whose events transfers wait for.
        preallocate: allocate the budget now, not as it is wanted.

    Raises:
        MemoError: the system refuses a file, or the bytes.
    """

    def __init__(self, directories: Sequence[Directory], budget: int, streams: Streams, preallocate: bool) -> None:
        self._row = STRIPE * len(directories)
        self.limit(budget)
        self.stall_s = 0.0
        """Seconds that `wait` has kept compute idle."""
        self._streams = streams
        self._space = Space()
        self._files: list[_File] = []
        self._under_way: list[DirectTransfer] = []
        self.meters = {True: Meter(), False: Meter()}
        """One for writes (True), one for reads."""
        self._issued: queue.SimpleQueue = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        try:
            for directory in directories:
                self._files.append(_File(directory))
            if preallocate and self.budget:
                self._grow(self.budget)
            # The threads refer to the files and queues only, so they end even if this object is never closed.
            self._stop = weakref.finalize(self, _stop, self._issued, self._threads)
            self._start(_begin_transfers, self._issued, list(self._files), streams)
            for file in self._files:
                for _ in range(THREADS):
                    self._start(_move_parts, file, self.meters)
        except BaseException:
            self._files.clear()
            self._issued.put(None)
            raise

    @property
    def directories(self) -> list[Directory]:
        return [file.directory for file in self._files]

    def limit(self, budget: int) -> None:
        """Let the files take so many bytes at most, in whole rows of stripes."""
        self.budget = budget // self._row * self._row

    def buffer_silently(self) -> list[bool]:
        """Return of each file whether its file system keeps it in the page cache all the same. Overwrites its first bytes."""
        memory = memoryview(mmap.mmap(-1, PAGE))
        return [buffers_silently(file.handle, memory) for file in self._files]

    def extent(self, nbytes: int, wanted_by: str) -> Extent:
        """Allocate space. Raise MemoError if there is none."""
        nbytes = round_up(nbytes, PAGE)
        while (extent := self._space.allocate(nbytes)) is None:
            more = nbytes - self._space.missing_for
            left = max(0, self.budget - self._space.size)
            if more > left:
                raise MemoError(
                    f"files for activations: {wanted_by} needs {nbytes / GIB:.3g} GiB, {left / GIB:.3g} of "
                    f"{self.budget / GIB:.3g} GiB are left. Raise memo.nvme.gib, or lower memo.alpha or the batch"
                )
            try:
                self._grow(min(left, max(more, _GROWS_BY)))
            except MemoError:
                self._grow_at_last(more)
        return extent

    def free(self, extent: Extent) -> None:
        """Free space. No transfer from or to it may be under way."""
        self._space.free(extent)

    def extents(self) -> list[Extent]:
        return self._space.extents

    def write(self, block: Block, extent: Extent, after: tuple[Any, ...]) -> DirectTransfer:
        """Write a block once these events of streams are over. The caller keeps it allocated meanwhile."""
        return self._transfer(True, block, extent, after)

    def read(self, extent: Extent, block: Block, after: tuple[Any, ...]) -> DirectTransfer:
        return self._transfer(False, block, extent, after)

    def done(self, transfer: DirectTransfer) -> bool:
        return transfer.over.is_set()

    def wait(self, transfer: DirectTransfer, compute: Any) -> None:
        """Wait until a transfer is over or has failed. Time behind `compute`, an event, counts as a stall."""
        idle_since = time.perf_counter() if self._streams.done(compute) else None
        while not transfer.over.wait(_LOOKS):
            self._check_threads()
            if idle_since is None and self._streams.done(compute):
                idle_since = time.perf_counter()
        if idle_since is not None:
            self.stall_s += time.perf_counter() - idle_since

    def wait_beside(self, transfer: DirectTransfer, compute: Any) -> bool:
        """Wait until a transfer is over or has failed, no longer than until `compute`, an event; return True if it is."""
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
            for thread in self._threads:
                thread.join()
            self._files.clear()  # this closes them, which frees their space

    def _transfer(self, writes: bool, block: Block, extent: Extent, after: tuple[Any, ...]) -> DirectTransfer:
        self._check_threads()
        transfer = DirectTransfer(writes, after, self._parts(block, extent))
        self._under_way = [other for other in self._under_way if not other.over.is_set()]
        try:
            self._under_way.append(transfer)
            self._issued.put(transfer)
        except BaseException:  # Ctrl-C, before or after: what is issued twice begins once
            self._issued.put(transfer)
            raise
        return transfer

    def _parts(self, block: Block, extent: Extent) -> list[tuple[_File, list[memoryview], int]]:
        """Cut a block into parts: (file, memory, offset in the file). The stripes of a block in one file follow each other."""
        parts, at = [], extent.begin
        growing: dict[int, tuple[_File, list[memoryview], int]] = {}
        for view in block.views(0, extent.nbytes):
            memory = memoryview(view.numpy())
            while memory:
                stripe, within = divmod(at, STRIPE)
                row, number = divmod(stripe, len(self._files))
                piece = memory[: STRIPE - within]
                part = growing.get(number)
                if part is None or _nbytes(part[1]) + len(piece) > _AT_ONCE or len(part[1]) == _VIEWS:
                    part = growing[number] = self._files[number], [], row * STRIPE + within
                    parts.append(part)
                part[1].append(piece)
                memory, at = memory[len(piece) :], at + len(piece)
        return parts

    def _grow_at_last(self, nbytes: int) -> None:
        """Make the space larger by what is wanted now. If not even that is there, never ask the system again."""
        try:
            self._grow(nbytes)
        except MemoError:
            self.limit(self._space.size)
            raise

    def _grow(self, nbytes: int) -> None:
        """Make the space larger by at least this, in whole rows of stripes."""
        nbytes = min(round_up(nbytes, self._row), self.budget - self._space.size)
        for file in self._files:
            grow(file.handle, file.directory, self._space.size // len(self._files), nbytes // len(self._files))
        self._space.grow(nbytes)

    def _start(self, work: Callable[..., None], *args: Any) -> None:
        name = f"ds_memo-files-{len(self._threads)}"
        thread = threading.Thread(target=_work, args=(self._streams, work, *args), name=name, daemon=True)
        thread.start()
        self._threads.append(thread)

    def _check_threads(self) -> None:
        if not self._stop.alive or not all(thread.is_alive() for thread in self._threads):
            raise MemoError(
                "files for activations are closed, or this process was forked from the one that opened them. Train in that one"
            )


class Meter:
    """Bytes moved in one direction, and the time in which any were."""

    def __init__(self) -> None:
        self.nbytes = 0
        """Those of calls that failed do not count."""
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
    """One file and its queue. The descriptor is closed with the last reference: the owner's, or a thread's."""

    def __init__(self, directory: Directory) -> None:
        self.directory = directory
        self.handle = private_file(directory)
        # Not at exit: threads may still be at work, and another file could get the number.
        weakref.finalize(self, os.close, self.handle).atexit = False
        self.queue: queue.SimpleQueue = queue.SimpleQueue()


def _work(streams: Streams, work: Callable[..., None], *args: Any) -> None:
    """Run one of the threads. Each of them asks for events, or frees the last reference to one."""
    use_device_of(streams)
    work(*args)


def _begin_transfers(issued: queue.SimpleQueue, files: list[_File], streams: Streams) -> None:
    """Hand the parts of transfers over to the files' threads, each behind its events, in the order of issue."""
    while (transfer := issued.get()) is not None:
        try:
            for event in transfer.after:
                while not streams.done(event):
                    time.sleep(_POLLS)
        except BaseException as failure:
            transfer.failure = failure
        parts, transfer.parts = transfer.parts, []
        for file, memory, at in parts:
            file.queue.put((transfer, memory, at))
        parts = file = memory = transfer = None  # an idle thread must not keep memory alive
    for file in files:
        for _ in range(THREADS):
            file.queue.put(None)


def _move_parts(file: _File, meters: dict[bool, Meter]) -> None:
    """Do the parts of transfers that lie in one file."""
    while (part := file.queue.get()) is not None:
        transfer, memory, at = part
        nbytes = _nbytes(memory)
        try:
            if transfer.failure is None:
                moved = 0
                meters[transfer.writes].begin()
                try:
                    _move_all(file.handle, memory, at, transfer.writes)
                    moved = nbytes
                finally:
                    meters[transfer.writes].end(moved)
        except BaseException as failure:  # raised where the transfer is waited for, by the thread that can act on it
            what = "write" if transfer.writes else "read"
            rank = os.environ.get("RANK", "0")
            transfer.failure = MemoError(f"rank {rank} could not {what} its file in {file.directory.path}: {failure}")
        with _COUNTS:
            transfer.left -= 1
            over = not transfer.left
        del part, memory  # an idle thread must not keep memory alive, nor one that is told
        if over:
            transfer.over.set()
        del transfer


_COUNTS = threading.Lock()
"""Guards the counts of parts: threads of several files have parts of one transfer."""


def _move_all(handle: int, memory: list[memoryview], at: int, writes: bool) -> None:
    """Move all of this memory to or from a file, in as many calls of the system as it takes. Leaves the list empty."""
    while memory:
        moved = os.pwritev(handle, memory, at) if writes else os.preadv(handle, memory, at)
        if moved <= 0 or moved % PAGE:
            raise OSError(errno.EIO, f"{os.strerror(errno.EIO)}: {moved} of {_nbytes(memory)} bytes were moved")
        at += moved
        while memory and moved >= len(memory[0]):
            moved -= len(memory.pop(0))
        if moved:
            memory[0] = memory[0][moved:]


def _nbytes(memory: list[memoryview]) -> int:
    return sum(map(len, memory))


def _stop(issued: queue.SimpleQueue, threads: list[threading.Thread]) -> None:
    finish_first(threads)
    issued.put(None)
