"""Host memory of a virtual machine that grows only as it is used: used once, so that budgets see what there can be."""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Callable, Sized

from ds_memo.swap.host_memory import GIB, available_bytes

STEP = 4 * GIB
PATIENCE_S = 2.0
"""How long a machine is waited for until its memory counts as all there is."""


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
    free: Callable[[], int] = lambda: available_bytes(locked=False),
    use: Callable[[int], Sized] = touch,
    wait: Callable[[float], None] = time.sleep,
) -> int:
    """Use memory, step by step, as long as the machine is smaller than `wanted` and grows; give it back.

    Returns:
        Bytes that the machine has then. One that has them already, or does not grow, is left as it is.
    """
    held, most = [], free() // 2
    while (before := total()) < wanted and (step := min(STEP, free() // 2) >> 20 << 20) >= 1 << 24:
        held.append(use(step))
        for _ in range(10):
            if total() > before:
                break
            wait(PATIENCE_S / 10)
        else:
            if sum(map(len, held)) >= most:  # half full, and still as small
                break
    held.clear()
    return total()
