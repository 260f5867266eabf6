"""Host memory from the system: segments that are mapped, touched so that their pages exist, and locked for the device."""

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
from ds_memo.memory.host import memlock_limit
from ds_memo.units import GIB

PAGE = mmap.PAGESIZE
SEGMENT = GIB
"""Bytes of a segment, at most. While the driver locks one, CUDA's calls of all processes wait; Linux 6.11 to 6.13 lock at most
2 GB in one call."""
TOUCHED_APART = 1 << 26
"""Bytes that one thread touches at a time in a segment that is about to be locked."""
_TRY_OUT = 1 << 28
"""Largest RLIMIT_MEMLOCK, in bytes, that `memlock_binds` tries to exceed."""
_TOUCHERS = 8
"""Threads. More are no faster, because memory bandwidth is the limit."""


@dataclass(eq=False)
class Segment:
    """Host memory that was mapped and locked in one go."""

    memory: torch.Tensor
    """uint8, page-aligned."""

    @property
    def nbytes(self) -> int:
        return self.memory.numel()


def memlock_binds() -> bool:
    """Return True if CUDA refuses to lock more host memory than RLIMIT_MEMLOCK.

    Many machines set it to a few MiB, and NVIDIA's driver locks pages regardless. So a small limit is tried; a large limit counts
    as binding.
    """
    limit = memlock_limit()
    if limit is None or limit > _TRY_OUT:
        return limit is not None
    try:
        pin(map_pages(limit + PAGE))
    except MemoError:
        return True
    return False


def map_pages(nbytes: int) -> Segment:
    """Map private, anonymous memory.

    Args:
        nbytes: a multiple of a page.

    Raises:
        MemoError: the system refuses.
    """
    try:
        memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        with suppress(OSError):  # a kernel without huge pages: locking is slower, nothing else
            memory.madvise(mmap.MADV_HUGEPAGE)
        # Every fork (a data loader's) would copy private pages that a device holds.
        memory.madvise(mmap.MADV_DONTFORK)
        return Segment(torch.frombuffer(memory, dtype=torch.uint8))
    except (OSError, MemoryError) as error:
        raise MemoError(
            f"the system refused {nbytes / GIB:.3g} GiB ({error}): look at `ulimit -v` and the memory limit of the container, or "
            "lower memo.alpha or memo.host_memory_gib"
        ) from error


def touch(segment: Segment) -> None:
    """Write to all pages, from several threads, so that they exist. Locking would fault them in one by one."""
    first, end = segment.memory.data_ptr(), segment.memory.data_ptr() + segment.nbytes
    if segment.nbytes <= TOUCHED_APART:
        return
    # Threads inherit this thread's CPUs. Where none is to be had, locking faults the pages in.
    with suppress(RuntimeError), ThreadPoolExecutor(min(_TOUCHERS, len(os.sched_getaffinity(0)))) as threads:
        parts = range(first, end, TOUCHED_APART)
        list(threads.map(lambda part: ctypes.memset(part, 0, min(TOUCHED_APART, end - part)), parts))


def pin(segment: Segment) -> None:
    """Lock a segment for the thread's CUDA device until it is garbage-collected, on any thread.

    Raises:
        MemoError: CUDA refuses.
    """
    cudart = torch.cuda.cudart()
    address = segment.memory.data_ptr()
    status = cudart.cudaHostRegister(address, segment.nbytes, 0)
    if status != cudart.cudaError.success:
        with suppress(RuntimeError):  # the runtime remembers the failure and would report it for the next kernel
            torch.zeros(1, device="cuda")
        raise MemoError(
            f"cudaHostRegister refused {segment.nbytes / GIB:.3g} GiB ({cudart.cudaGetErrorString(status)}): "
            "look at `ulimit -l` and at the memory limit of the cgroup, or lower memo.host_memory_gib"
        )
    # Runs before the mapping goes, which the segment still holds. Not at exit, where CUDA may be gone.
    weakref.finalize(segment, _unpin, torch.cuda.current_device(), address).atexit = False


def _unpin(device: int, address: int) -> None:
    with torch.cuda.device(device):  # the thread may be on another, where CUDA would make a context
        torch.cuda.cudart().cudaHostUnregister(address)
