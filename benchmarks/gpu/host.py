"""Host memory of a virtual machine that grows only as it is used: used once, so that budgets see what there can be."""

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
"""How long a machine is waited for until its memory counts as all there is."""
IDLE_S = 15.0
"""One that has not grown for so long, while its memory was being used, does not grow: a large one takes minutes to half fill."""
MOST_S = 40.0
"""How long a machine may grow: the time that one is lent for is short."""
BESIDE = 16 * GIB
"""What is needed beside a host budget."""


def budget(host_gib: float | None, device: torch.device, enough_gib: float = 48.0) -> int:
    """Bytes of host memory that rivals may use. Trials on a CPU take what there is.

    Args:
        host_gib: at most; None: what is there, once the machine has grown to `enough_gib` and what is needed beside.
    """
    if device.type == "cuda":
        grow(int((host_gib or enough_gib) * GIB) + BESIDE)
    return budget_bytes(host_gib, 1, locked=False)


def total_bytes() -> int:
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def touch(nbytes: int) -> mmap.mmap:
    """Memory of which every page is there."""
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
    """Use memory, step by step, as long as the machine is smaller than `wanted` and grows, for MOST_S at most; give it back.

    Returns:
        Bytes that the machine has then. One that has them already, or does not grow, is left as it is.
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
