"""The host slab: where swapped rows wait.

Blocks of exact size (rounded to a page), locked for the device once and used again by later frames. Never PyTorch's pinned pool,
which rounds every block up to a power of two.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import weakref
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
"""Bytes that one thread touches at a time, of a block that is about to be locked."""
_TOUCHERS = 8
"""Threads; more are no faster, memory itself is the limit."""
WASTE = 1 / 16
"""Share of a frame's size that the block lent to it may be too large by."""


@dataclass(eq=False)
class Block:
    """A piece of host memory lent to one frame."""

    memory: torch.Tensor
    """uint8, page-aligned."""

    @property
    def nbytes(self) -> int:
        return self.memory.numel()


class HostSlab:
    """Lends blocks and never holds more than `budget` bytes.

    Args:
        budget: bytes.
        pinned: lock the blocks for CUDA (cudaHostRegister).
        node: the NUMA node that pinned blocks should lie on; absent: wherever the thread happens to run.
    """

    def __init__(self, budget: int, pinned: bool, node: Node | None = None) -> None:
        self.budget = budget
        self.size = 0
        """Bytes held now, lent or idle."""
        self.used = 0
        """Bytes lent now."""
        self.peak_used = 0
        self.node = node
        self.refused: int | None = None
        """Bytes held when the system refused a block that the budget allowed; None: it never did. For whoever chooses alpha."""
        self._pinned = pinned
        self._idle: list[Block] = []

    def take(self, nbytes: int, wanted_by: str) -> Block:
        """Lend a block of at least `nbytes` bytes: the smallest idle one that fits closely, else a new one.

        A block that is much too large is not lent: a long frame that comes later would find it taken, and the budget too.

        Raises:
            MemoError: the budget does not allow it; names `wanted_by`, needed and available GiB.
        """
        pages = -(-nbytes // PAGE) * PAGE
        fitting = [block for block in self._idle if pages <= block.nbytes <= pages + int(pages * WASTE)]
        if fitting:
            block = min(fitting, key=lambda candidate: candidate.nbytes)
            self._idle.remove(block)
        else:
            block = self._new(pages, wanted_by)
        self.used += block.nbytes
        self.peak_used = max(self.peak_used, self.used)
        return block

    def give(self, block: Block) -> None:
        """Take a block back. All copies from and to it must be ordered before whatever the next borrower issues."""
        self.used -= block.nbytes
        self._idle.append(block)

    def close(self) -> None:
        """Give everything back to the system. Nothing may still be lent."""
        if self.used:
            raise MemoError(f"the host slab was closed while {self.used} bytes of it were lent")
        while self._idle:
            self._free(self._idle.pop())

    def _new(self, nbytes: int, wanted_by: str) -> Block:
        while self.size + nbytes > self.budget and self._idle:  # of no use to this frame: replaced, not added to
            self._free(self._idle.pop())
        if self.size + nbytes > self.budget:
            raise MemoError(
                f"host memory: {wanted_by} needs {nbytes / GIB:.3g} GiB, {(self.budget - self.size) / GIB:.3g} of "
                f"{self.budget / GIB:.3g} GiB are left. Lower memo.alpha, raise memo.resident_layers or memo.host_memory_gib, "
                "or run fewer forwards before a backward."
            )
        while True:
            try:
                block = _map(nbytes)
                if self._pinned:
                    with on(self.node):
                        _touch(block)
                        _pin(block)
                break
            except MemoError as error:
                if self._idle:  # blocks of another size, which count against the same limit
                    self._free(self._idle.pop())
                    continue
                self.refused = self.size
                raise MemoError(f"host memory: {wanted_by} needs {nbytes / GIB:.3g} GiB more; {error}") from error
        self.size += nbytes
        return block

    def _free(self, block: Block) -> None:
        self.size -= block.nbytes
        if self._pinned:
            torch.cuda.synchronize()  # a copy from the block may still be under way
        # The lock and the mapping end with the block itself.


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


def _map(nbytes: int) -> Block:
    try:
        memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        with suppress(OSError):  # a kernel without them: slower to lock, nothing else
            memory.madvise(mmap.MADV_HUGEPAGE)
        # The pages of private memory that a device holds are copied at every fork, a data loader's say.
        memory.madvise(mmap.MADV_DONTFORK)
        return Block(torch.frombuffer(memory, dtype=torch.uint8))
    except (OSError, MemoryError) as error:
        raise MemoError(
            f"the system refused {nbytes / GIB:.3g} GiB ({error}): look at `ulimit -v` and the memory limit of the container, or "
            "lower memo.alpha or memo.host_memory_gib"
        ) from error


def _touch(block: Block) -> None:
    """Have the pages there, on several CPUs at once: the driver, which needs them, would ask for one after the other."""
    first, end = block.memory.data_ptr(), block.memory.data_ptr() + block.nbytes
    if block.nbytes <= _TOUCHED_APART:
        return
    with ThreadPoolExecutor(min(_TOUCHERS, len(os.sched_getaffinity(0)))) as threads:  # they inherit this thread's CPUs
        parts = range(first, end, _TOUCHED_APART)
        list(threads.map(lambda part: ctypes.memset(part, 0, min(_TOUCHED_APART, end - part)), parts))


def _pin(block: Block) -> None:
    cudart = torch.cuda.cudart()
    address = block.memory.data_ptr()
    status = cudart.cudaHostRegister(address, block.nbytes, 0)
    if status != cudart.cudaError.success:
        with suppress(RuntimeError):  # the runtime remembers the failure and would blame the next kernel for it
            torch.zeros(1, device="cuda")
        raise MemoError(
            f"cudaHostRegister refused {block.nbytes / GIB:.3g} GiB ({status}): "
            "look at `ulimit -l` and at the memory limit of the cgroup, or lower memo.host_memory_gib."
        )
    # Runs before the mapping goes: the block still holds it. Not at exit, where CUDA may be gone already.
    weakref.finalize(block, cudart.cudaHostUnregister, address).atexit = False
