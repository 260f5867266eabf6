"""Slabs that share a pool."""

from __future__ import annotations

import torch

from ds_memo.swap.host_pool import HostPool
from ds_memo.swap.host_slab import HostSlab
from ds_memo.swap.pinned_segments import PAGE

CPU = torch.device("cpu")


def two(first: int = 10, second: int = 10) -> tuple[HostSlab, HostSlab]:
    """Slabs of one pool, with budgets of so many pages."""
    pool = HostPool(CPU)
    return HostSlab(first * PAGE, pool), HostSlab(second * PAGE, pool)
