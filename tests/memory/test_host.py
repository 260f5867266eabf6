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


@pytest.fixture
def unlimited(monkeypatch):
    monkeypatch.setattr(resource, "getrlimit", lambda _: (resource.RLIM_INFINITY, resource.RLIM_INFINITY))


def node(root: Path, cgroup: str, free_gib: float = 100) -> Path:
    write(root / "proc/meminfo", f"MemTotal: 999999999 kB\nMemFree: 1 kB\nMemAvailable:   {int(free_gib * (1 << 20))} kB\n")
    write(root / "proc/self/cgroup", cgroup)
    return root


def write(path: Path, text: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"{text}\n")


def v2(root: Path, group: str, limit_gib: float | str, used_gib: float = 0, cache_gib: float = 0) -> None:
    folder = root / "sys/fs/cgroup" / group
    write(folder / "memory.max", limit_gib if isinstance(limit_gib, str) else int(limit_gib * GIB))
    write(folder / "memory.current", int(used_gib * GIB))
    write(folder / "memory.stat", f"anon 5\nfile {int(2 * cache_gib * GIB)}\ninactive_file {int(cache_gib * GIB)}")


def v1(root: Path, group: str, limit_gib: float, used_gib: float = 0, cache_gib: float = 0) -> None:
    folder = root / "sys/fs/cgroup/memory" / group
    write(folder / "memory.limit_in_bytes", min(NO_LIMIT_V1, int(limit_gib * GIB)))
    write(folder / "memory.usage_in_bytes", int(used_gib * GIB))
    write(folder / "memory.stat", f"cache 1\ninactive_file 7\ntotal_inactive_file {int(cache_gib * GIB)}")


def free_gib(root: Path) -> float:
    return available_bytes(root=root) / GIB


def test_without_cgroups_the_kernels_word_counts(tmp_path):
    node(tmp_path, "0::/")
    assert free_gib(tmp_path) == 100
    (tmp_path / "proc/self/cgroup").unlink()
    assert free_gib(tmp_path) == 100


def test_v2_in_a_namespace(tmp_path):
    """A container sees its own group as the root."""
    v2(node(tmp_path, "0::/"), "", 40, used_gib=10)
    assert free_gib(tmp_path) == 30


def test_v2_nested_groups_the_tightest_counts(tmp_path):
    node(tmp_path, "0::/slice/job/step")
    v2(tmp_path, "slice", 60)
    v2(tmp_path, "slice/job", 40, used_gib=25)
    v2(tmp_path, "slice/job/step", 50, used_gib=1)
    assert free_gib(tmp_path) == 15


def test_v2_max_is_no_limit(tmp_path):
    node(tmp_path, "0::/slice/job")
    v2(tmp_path, "slice", "max", used_gib=70)
    v2(tmp_path, "slice/job", "max", used_gib=70)
    assert free_gib(tmp_path) == 100
    v2(tmp_path, "slice", 80, used_gib=70)
    assert free_gib(tmp_path) == 10


def test_page_cache_that_can_be_reclaimed_counts_as_free(tmp_path):
    v2(node(tmp_path, "0::/job"), "job", 40, used_gib=38, cache_gib=20)
    assert free_gib(tmp_path) == 22


def test_v2_group_that_the_namespace_hides(tmp_path):
    node(tmp_path, "0::/../../outside")
    v2(tmp_path, "", 12)
    assert free_gib(tmp_path) == 12


def test_v2_without_the_memory_controller(tmp_path):
    node(tmp_path, "0::/user.slice/session")
    write(tmp_path / "sys/fs/cgroup/user.slice/cgroup.procs", "1")
    v2(tmp_path, "user.slice/session", 8)
    assert free_gib(tmp_path) == 8


def test_v1_nested(tmp_path):
    node(tmp_path, "5:cpu,cpuacct:/elsewhere\n9:memory:/docker/abc\n0::/unified")
    v1(tmp_path, "", NO_LIMIT_V1 / GIB, used_gib=90)
    v1(tmp_path, "docker", 64, used_gib=30)
    v1(tmp_path, "docker/abc", 48, used_gib=20, cache_gib=2)
    assert free_gib(tmp_path) == 30


def test_v1_mounted_at_the_containers_group(tmp_path):
    node(tmp_path, "9:memory:/docker/abc")
    v1(tmp_path, "", 16, used_gib=4)
    assert free_gib(tmp_path) == 12


def test_v1_controllers_mounted_together(tmp_path):
    node(tmp_path, "3:hugetlb,memory:/job")
    v1(tmp_path, "job", 16)
    assert free_gib(tmp_path) == 16


def test_an_exhausted_group_leaves_nothing(tmp_path):
    v2(node(tmp_path, "0::/"), "", 4, used_gib=5)
    assert free_gib(tmp_path) == 0


def test_a_path_with_a_colon(tmp_path):
    node(tmp_path, "0::/kubepods/pod:1")
    v2(tmp_path, "kubepods/pod:1", 6)
    assert free_gib(tmp_path) == 6


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


def test_unlimited_locked_memory(hundred_gib_free, unlimited):
    assert budget_bytes(20.0, 1, locked=True) == 20 * GIB


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, 1),
        ({"LOCAL_WORLD_SIZE": "8"}, 8),
        ({"LOCAL_SIZE": "4"}, 4),
        ({"LOCAL_WORLD_SIZE": "8", "LOCAL_SIZE": "4"}, 8),
        ({"LOCAL_WORLD_SIZE": ""}, 1),
        ({"LOCAL_WORLD_SIZE": "0"}, 1),
        ({"OMPI_COMM_WORLD_LOCAL_SIZE": "8"}, 8),
        ({"MPI_LOCALNRANKS": "8", "LOCAL_SIZE": "4"}, 4),
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
