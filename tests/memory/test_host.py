"""Free host memory, by fake /proc and /sys trees of every kind of node."""

from __future__ import annotations

import os
import resource
from pathlib import Path

import pytest

from ds_memo.memory import host as host_memory
from ds_memo.memory.host import HOST_HEADROOM, available_bytes, budget_bytes, ranks_on_node
from ds_memo.units import GIB

NO_LIMIT_V1 = 9223372036854771712


def write(path: Path, text: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"{text}\n")


def free_gib(root: Path, cgroup: str, *groups: tuple) -> float:
    """Return the GiB that are free by /proc with 100 GiB and these groups: (version, path, limit, used, reclaimable cache)."""
    write(root / "proc/meminfo", f"MemTotal: 999999999 kB\nMemFree: 1 kB\nMemAvailable:   {100 << 20} kB\n")
    write(root / "proc/self/cgroup", cgroup)
    for version, group, limit, *more in groups:
        used, cache = [*more, 0, 0][:2]
        folder = root / "sys/fs/cgroup" / ("memory" if version == 1 else "") / group
        names = ("memory.limit_in_bytes", "memory.usage_in_bytes") if version == 1 else ("memory.max", "memory.current")
        write(folder / names[0], limit if isinstance(limit, str) else min(NO_LIMIT_V1, int(limit * GIB)))
        write(folder / names[1], int(used * GIB))
        stat = (
            "cache 1\ninactive_file 7\ntotal_inactive_file" if version == 1 else f"anon 5\nfile {2 * cache * GIB}\ninactive_file"
        )
        write(folder / "memory.stat", f"{stat} {cache * GIB}")
    return available_bytes(root=root) / GIB


NODES = {
    "without groups": (100, "0::/"),
    "a container sees its own group as the root": (30, "0::/", (2, "", 40, 10)),
    "the tightest of nested groups": (15, "0::/s/job/step", (2, "s", 60), (2, "s/job", 40, 25), (2, "s/job/step", 50, 1)),
    "max is no limit": (100, "0::/s/job", (2, "s", "max", 70), (2, "s/job", "max", 70)),
    "max below a limit": (10, "0::/s/job", (2, "s", 80, 70), (2, "s/job", "max", 70)),
    "page cache that can be reclaimed": (22, "0::/job", (2, "job", 40, 38, 20)),
    "a group that the namespace hides": (12, "0::/../../outside", (2, "", 12)),
    "a level without the memory controller": (8, "0::/user.slice/session", (2, "user.slice/session", 8)),
    "version 1, nested": (
        30,
        "5:cpu,cpuacct:/elsewhere\n9:memory:/docker/abc\n0::/unified",
        (1, "", NO_LIMIT_V1 / GIB, 90),
        (1, "docker", 64, 30),
        (1, "docker/abc", 48, 20, 2),
    ),
    "version 1, mounted at the container's group": (12, "9:memory:/docker/abc", (1, "", 16, 4)),
    "version 1, controllers mounted together": (16, "3:hugetlb,memory:/job", (1, "job", 16)),
    "an exhausted group": (0, "0::/", (2, "", 4, 5)),
    "a path with a colon": (6, "0::/kubepods/pod:1", (2, "kubepods/pod:1", 6)),
}


@pytest.mark.parametrize("name", NODES)
def test_the_tightest_limit_counts(name, tmp_path):
    expected, cgroup, *groups = NODES[name]
    assert free_gib(tmp_path, cgroup, *groups) == expected


def test_without_a_list_of_groups_the_kernels_word_counts(tmp_path):
    free_gib(tmp_path, "0::/")
    (tmp_path / "proc/self/cgroup").unlink()
    assert available_bytes(root=tmp_path) == 100 * GIB


@pytest.fixture
def hundred_gib_free(monkeypatch):
    monkeypatch.setattr(host_memory, "available_bytes", lambda held=0: 100 * GIB + held)


@pytest.mark.parametrize(
    ("asked_gib", "ranks", "expected_gib"),
    [
        (None, 1, 100 * (1 - HOST_HEADROOM)),
        (None, 8, 100 * (1 - HOST_HEADROOM) / 8),
        (64.0, 1, 64),
        (64.0, 8, 8),
        (0.5, 4, 0.125),
        (1000.0, 4, 25),
    ],
)
def test_ranks_share_equally(hundred_gib_free, asked_gib, ranks, expected_gib):
    budget = budget_bytes(asked_gib, ranks, locked=False)
    assert budget == pytest.approx(expected_gib * GIB, abs=ranks)
    assert budget * ranks <= 100 * GIB


@pytest.mark.parametrize(("ranks", "expected_gib"), [(1, 70), (2, 20), (4, 0)])
def test_what_others_may_still_take_is_not_free(hundred_gib_free, ranks, expected_gib):
    """Each rank of the node has promised the same bytes."""
    budget = budget_bytes(None, ranks, locked=False, promised=30 * GIB)
    assert budget == pytest.approx(expected_gib * (1 - HOST_HEADROOM) * GIB, abs=ranks)
    assert budget_bytes(64.0, ranks, locked=False, promised=30 * GIB) == 64 * GIB // ranks


@pytest.mark.parametrize("ranks", [1, 4])
def test_locked_memory_is_limited_for_each_process(hundred_gib_free, monkeypatch, ranks):
    """Ranks share the node's memory, but each process has its own RLIMIT_MEMLOCK."""
    assert budget_bytes(20.0, ranks, locked=False) == 20 * GIB // ranks
    monkeypatch.setattr(resource, "getrlimit", lambda _: (3 * GIB, 5 * GIB))
    assert budget_bytes(20.0, ranks, locked=True) == 3 * GIB
    assert budget_bytes(None, ranks, locked=True) == int(3 * GIB * (1 - HOST_HEADROOM))
    assert budget_bytes(4.0, 4, locked=True) == GIB
    monkeypatch.setattr(resource, "getrlimit", lambda _: (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    assert budget_bytes(20.0, 1, locked=True) == 20 * GIB


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, 1),
        ({"LOCAL_WORLD_SIZE": "8"}, 8),
        ({"LOCAL_WORLD_SIZE": "8", "LOCAL_SIZE": "4"}, 8),
        ({"LOCAL_WORLD_SIZE": "0"}, 1),
        ({"SLURM_NTASKS_PER_NODE": "8", "WORLD_SIZE": "16"}, 8),
        ({"SLURM_NTASKS_PER_NODE": "8"}, 1),  # a shell inside an allocation
    ],
)
def test_ranks_on_the_node(monkeypatch, environment, expected):
    for name in [name for name in os.environ if name.startswith(("LOCAL_", "WORLD_SIZE", "OMPI_", "MPI_", "MV2_", "SLURM_"))]:
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert ranks_on_node() == expected


def test_this_machine():
    assert 0 < budget_bytes(None, 1, locked=False) <= 100_000 * GIB
