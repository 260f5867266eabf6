"""Host memory of a virtual machine that grows only as it is used: used once, so that budgets count the grown memory."""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Callable, Sized

import torch

from ds_memo.memory.host import available_bytes, budget_bytes
from ds_memo.units import GIB

STEP = 4 * GIB
PATIENCE_S = 2.0
"""Seconds to wait for growth after each block."""
IDLE_S = 15.0
"""Seconds without growth, while memory is used, after which a machine counts as grown: a large one takes minutes to half fill."""
MOST_S = 40.0
"""Seconds that a machine may grow."""
BESIDE = 16 * GIB
"""Bytes needed besides a host budget."""


def budget(host_gib: float | None, device: torch.device, enough_gib: float = 48.0) -> int:
    """Return the bytes of host memory that rivals may use. Trials on a CPU take all there is.

    Args:
        host_gib: at most; None: all there is, once the machine has grown to `enough_gib` and BESIDE.
    """
    if device.type == "cuda":
        grow(int((host_gib or enough_gib) * GIB) + BESIDE)
    return budget_bytes(host_gib, 1, locked=False)


def total_bytes() -> int:
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def touch(nbytes: int) -> mmap.mmap:
    """Map memory and write to every page."""
    block = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    page = b"\1" * (1 << 20)
    for _ in range(nbytes >> 20):
        block.write(page)
    return block


def grow(
    wanted: int,
    total: Callable[[], int] = total_bytes,
    free: Callable[[], int] = lambda: available_bytes(),
    use: Callable[[int], Sized] = touch,
    wait: Callable[[float], None] = time.sleep,
    clock: Callable[[], float] = time.monotonic,
) -> int:
    """Use memory, step by step, while the machine is smaller than `wanted` and grows, for MOST_S at most; then free it.

    Returns:
        Bytes that the machine has then.
    """
    held, most, begin = [], free() // 2, clock()
    grew = begin
    while (before := total()) < wanted and (step := min(STEP, free() // 2) >> 20 << 20) >= 1 << 24 and clock() - begin < MOST_S:
        try:
            held.append(use(step))
        except (OSError, MemoryError):  # it is as large as it gets
            break
        for _ in range(10):
            if total() > before:
                grew = clock()
                break
            wait(PATIENCE_S / 10)
        else:
            if sum(map(len, held)) >= most or clock() - grew > IDLE_S:  # half full, and still as small
                break
    held.clear()
    return total()
