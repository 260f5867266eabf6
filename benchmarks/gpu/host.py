"""Host memory of a virtual machine that grows only as it is used: used once, so that budgets count the grown memory."""

from __future__ import annotations

import mmap
import os
import time

import torch

from benchmarks.emulated_process import is_emulated
from ds_memo.memory.host import available_bytes, budget_bytes
from ds_memo.units import GIB

STEP = 4 * GIB
PATIENCE_S = 2.0
"""Seconds to wait for growth after each block."""
MOST_S = 40.0
"""Seconds that a machine may grow."""
BESIDE = 16 * GIB
"""Bytes needed besides a host budget."""


def budget(host_gib: float | None, device: torch.device, enough_gib: float = 48.0) -> int:
    """Return the bytes of host memory that rivals may use. Trials on a CPU take all there is.

    Args:
        host_gib: at most; None: all there is, once the machine has grown to `enough_gib` and BESIDE.
    """
    if device.type == "cuda" and not is_emulated():
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


def grow(wanted: int) -> int:
    """Use memory, block by block, while the machine is smaller than `wanted` and grows, for MOST_S at most; then free it.

    A machine may begin to grow only when it is half full.

    Returns:
        Bytes that the machine has then.
    """
    held, half, end = [], available_bytes() // 2, time.monotonic() + MOST_S
    while (before := total_bytes()) < wanted and time.monotonic() < end:
        step = min(STEP, available_bytes() // 2) >> 20 << 20
        try:
            held.append(touch(step))
        except (OSError, MemoryError, ValueError):  # it is as large as it gets
            break
        waited = time.monotonic() + PATIENCE_S
        while total_bytes() == before and time.monotonic() < waited:
            time.sleep(PATIENCE_S / 10)
        if total_bytes() == before and sum(map(len, held)) >= half:
            break
    held.clear()
    return total_bytes()
