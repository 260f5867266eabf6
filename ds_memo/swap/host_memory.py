"""How much host memory this node has left for us: the cgroup's limit, the kernel's word, RLIMIT_MEMLOCK."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from pathlib import Path

GIB = 1 << 30
RESERVE = 0.10
"""Share of what is free that is left to data loaders, optimizer staging and the page cache."""


def available_bytes(pinned: bool, root: Path = Path("/")) -> int:
    """Bytes that could still be taken without meeting a limit.

    Args:
        pinned: the memory will be locked for a device, so RLIMIT_MEMLOCK counts too.
        root: where /proc and /sys are looked for.
    """
    limits = [_mem_available(root), *_cgroup_room(root)]
    if pinned:
        locked, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
        if locked != resource.RLIM_INFINITY:
            limits.append(locked)
    return max(0, min(limits))


def budget_bytes(host_memory_gib: float | None, ranks_on_node: int, pinned: bool) -> int:
    """Bytes that this rank may take: an equal share of the configured or, if absent, of the free memory less a reserve."""
    free = available_bytes(pinned)
    node = free * (1 - RESERVE) if host_memory_gib is None else min(host_memory_gib * GIB, free)
    return int(node) // ranks_on_node


def ranks_on_node() -> int:
    """Ranks sharing this node's memory, as the launchers tell it (DeepSpeed and torchrun set LOCAL_WORLD_SIZE)."""
    return max(1, int(os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("LOCAL_SIZE") or 1))


def _mem_available(root: Path) -> int:
    for line in (root / "proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise OSError("/proc/meminfo has no MemAvailable line")


def _cgroup_room(root: Path) -> Iterator[int]:
    """Bytes left in each memory cgroup above this process; reclaimable page cache counts as free."""
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
                if text == "max":
                    continue
                stat = dict(row.split() for row in (folder / "memory.stat").read_text().splitlines())
                yield int(text) - int((folder / used).read_text()) + int(stat.get(cache, 0))
            except OSError:
                continue  # the root group has no limit files; a namespace may hide the upper levels
