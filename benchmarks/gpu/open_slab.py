"""Host memory that is locked once for all turns of a process.

The last model of a process releases its pool. Each turn would map, touch and lock tens of GiB again. A slab that stays open keeps
the pool.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from benchmarks.rivals import Budget
from ds_memo.swap.host_budget import shared_pool
from ds_memo.swap.host_slab import HostSlab
from ds_memo.units import GIB


@contextlib.contextmanager
def held_open(budget: Budget) -> Iterator[Budget]:
    """Within the block the pool of ds_memo stays, with what it holds."""
    device = torch.empty(0, device=budget.device).device  # with its index, as parameters have it
    slab = HostSlab(0, shared_pool(budget.host_bytes / GIB, device))
    try:
        yield budget
    finally:
        slab.close()
