"""Host memory that this node has left, by cgroup limits, the kernel's MemAvailable, and RLIMIT_MEMLOCK."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ds_memo.units import GIB

HOST_HEADROOM = 0.10
"""Share of the free memory for data loaders, optimizer staging and the page cache."""

_NO_LIMIT = 1 << 62
"""cgroup v1 writes "no limit" as the largest multiple of a page."""


def available_bytes(root: Path = Path("/"), held: int = 0) -> int:
    """Return the bytes that can still be allocated on this node within all limits.

    Args:
        root: the folder that holds /proc and /sys.
        held: bytes that are allocated already but count as free.
    """
    return max(0, held + min([_mem_available(root), *(group.room for group in _cgroups(root))]))


def budget_bytes(host_memory_gib: float | None, ranks_on_node: int, locked: bool, promised: int = 0, held: int = 0) -> int:
    """Return the bytes that this rank may take: an equal share of the configured memory, else of the free memory less headroom.

    Args:
        host_memory_gib: GiB of the node, as configured.
        locked: True if the bytes are locked, so that RLIMIT_MEMLOCK, a limit per process, counts too.
        promised: free bytes of each rank that its other models may still take. They do not lower the configured memory.
        held: bytes of the budget that each rank holds already.
    """
    free = available_bytes(held=held * ranks_on_node)
    limit: float | None = memlock_limit() if locked else None
    if host_memory_gib is None:
        node = max(0, free - promised * ranks_on_node) * (1 - HOST_HEADROOM)
        limit = limit and limit * (1 - HOST_HEADROOM)
    else:
        node = min(host_memory_gib * GIB, free)
    share = int(node) // ranks_on_node
    return share if limit is None else min(share, int(limit))


def memlock_limit() -> int | None:
    """RLIMIT_MEMLOCK in bytes (`ulimit -l`); None: unlimited."""
    limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return None if limit == resource.RLIM_INFINITY else limit


def ranks_on_node() -> int:
    """Return the ranks that share this node's memory, from the variables of torchrun, DeepSpeed, Open MPI, Intel MPI, MVAPICH or
    Slurm. Slurm's counts only in runs of several ranks, because a shell inside an allocation has it too."""
    names = ["LOCAL_WORLD_SIZE", "LOCAL_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS", "MV2_COMM_WORLD_LOCAL_SIZE"]
    if int(os.environ.get("WORLD_SIZE") or 1) > 1:
        names.append("SLURM_NTASKS_PER_NODE")
    return max(1, int(next((text for name in names if (text := os.environ.get(name))), 1)))


def _mem_available(root: Path) -> int:
    for line in (root / "proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise OSError("/proc/meminfo has no MemAvailable line")


@dataclass(frozen=True)
class Cgroup:
    """A memory cgroup above this process. Bytes."""

    path: str
    limit: int
    used: int
    cache: int
    """Page cache within `used`, which the kernel reclaims when memory runs short: it counts as free."""

    @property
    def room(self) -> int:
        return self.limit - self.used + self.cache


def host_usage() -> dict[str, Any]:
    """Return the numbers that a budget follows from, in bytes, for reports and profiles."""
    return {
        "available_to_kernel": _mem_available(Path("/")),
        "cgroups": [asdict(group) for group in _cgroups(Path("/"))],
        "memlock_limit": memlock_limit(),
        "ranks_on_node": ranks_on_node(),
    }


def _cgroups(root: Path) -> Iterator[Cgroup]:
    """Yield the memory cgroups above this process that have a limit."""
    try:
        memberships = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in memberships:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            base, limit, used, cache = root / "sys/fs/cgroup", "memory.max", "memory.current", "inactive_file"
        elif "memory" in controllers.split(","):
            base = root / "sys/fs/cgroup/memory"
            limit, used, cache = "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"
        else:
            continue
        group = Path(path.lstrip("/"))
        for level in (group, *group.parents):
            folder = base / level
            try:
                text = (folder / limit).read_text().strip()
                if text == "max" or int(text) >= _NO_LIMIT:
                    continue
                stat = dict(row.split() for row in (folder / "memory.stat").read_text().splitlines())
                taken, reclaimable = int((folder / used).read_text()), int(stat.get(cache, 0))
                yield Cgroup(f"/{level}" if level.name else "/", int(text), taken, reclaimable)
            except OSError:
                continue  # the root group has no limit files; a namespace may hide the upper levels
