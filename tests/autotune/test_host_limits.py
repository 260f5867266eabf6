"""The host budget is never exceeded: fake cgroup trees to the byte, RLIMIT_MEMLOCK in processes of their own."""

from __future__ import annotations

import weakref
from pathlib import Path
from typing import Any

import pytest

import ds_memo
from ds_memo.memory import host as host_memory
from ds_memo.memory.host import HOST_HEADROOM
from ds_memo.solve.refusals import NothingFits
from ds_memo.swap import host_budget
from ds_memo.swap.pinned_segments import PAGE
from tests.autotune import host_limits
from tests.models import Batch, assert_same, build, step
from tests.processes import forked

MIB = 1 << 20
BATCH = Batch.random(2, 300)
SWAPPED = {"enabled": True, "resident_layers": 0, "device_memory_gib": 0.0065, "plan": {"enabled": False}}


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What /proc and /sys are from now on."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(host_memory.available_bytes, "__defaults__", (tmp_path, 0))
    monkeypatch.setattr(host_budget, "_pools", weakref.WeakValueDictionary())  # whatever other tests hold lies elsewhere
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/meminfo").write_text(f"MemAvailable: {64 * MIB} kB\n")
    return tmp_path


def limit(tree: Path, room: int) -> None:
    """Leave `room` bytes in the cgroup: 1 GiB is in use, a quarter of it page cache."""
    used, cache = 106 * MIB, 256 * MIB
    folder = tree / "sys/fs/cgroup/job"
    folder.mkdir(parents=True, exist_ok=True)
    (tree / "proc/self/cgroup").write_text("0::/job\n")
    (folder / "memory.max").write_text(f"{room + used - cache}\n")
    (folder / "memory.current").write_text(f"{used}\n")
    (folder / "memory.stat").write_text(f"anon 5\ninactive_file {cache}\n")


def room_for(budget: int) -> int:
    """The least room whose budget this is."""
    room = int(budget / (1 - HOST_HEADROOM)) - 2
    while int(room * (1 - HOST_HEADROOM)) < budget:
        room += 1
    return room


def trained(**more: Any) -> dict[str, Any]:
    model = build("llama")
    handle = ds_memo.attach(model, {**SWAPPED, **more})
    try:
        for _ in range(2):
            assert_same(step(model, BATCH), step(build("llama"), BATCH))
        return handle.report()
    finally:
        handle.detach()


@pytest.mark.slow
def test_a_low_cgroup_is_kept_to_the_byte(tree: Path) -> None:
    limit(tree, 106 * MIB)
    whole = trained()
    assert whole["alpha"] == 1.0 and whole["checkpointing"]
    needed = whole["host"]["slab"]
    assert needed % PAGE == 0
    alphas = []
    for budget in (needed, needed - 1, needed * 3 // 4, needed // 2, needed // 3):
        limit(tree, room_for(budget))
        host = (report := trained())["host"]
        assert host["budget"] == budget
        assert host["peak_used"] <= host["slab"] <= host["budget"]
        assert report["predicted"]["host_bytes"] == host["slab"]
        alphas.append(report["alpha"])
    assert alphas[0] == 1.0 > alphas[1]
    assert alphas == sorted(alphas, reverse=True) and alphas[-1] < 0.5


def test_no_room_is_an_error_before_the_first_layer(tree: Path) -> None:
    limit(tree, 3 * PAGE)
    with pytest.raises(NothingFits, match=r"the inputs of 4 layers that the host has no room for.* GiB are missing"):
        trained(device_memory_gib=1e-4)
    assert trained()["layers_without_gemms"] == [0, 1, 2, 3]  # with what the device has to give


def test_models_of_one_process_share_what_there_is(tree: Path) -> None:
    limit(tree, room := 106 * MIB)
    handles = [ds_memo.attach(build("llama"), SWAPPED) for _ in range(2)]
    handles += [ds_memo.attach(build("llama"), SWAPPED | {"host_memory_gib": 0.03125}) for _ in range(2)]
    with pytest.warns(ds_memo.MemoWarning, match=r"may still take 0\.0312 GiB, and leave 0\.0\d+ GiB of host memory to this one"):
        handles.append(ds_memo.attach(build("llama"), SWAPPED))
    try:
        budgets = [handle.report()["host"]["budget"] for handle in handles]
        rest = int((room - 32 * MIB) * (1 - HOST_HEADROOM))
        assert budgets == [int(room * (1 - HOST_HEADROOM))] * 2 + [32 * MIB] * 2 + [rest]
    finally:
        for handle in handles:
            handle.detach()
    assert trained()["host"]["budget"] == budgets[0]


def test_more_is_not_taken_than_the_cgroup_has_whatever_is_configured(tree: Path) -> None:
    limit(tree, 106 * MIB)
    needed = trained()["host"]["slab"]
    limit(tree, needed - 1)
    host = trained(host_memory_gib=64.0)["host"]
    assert host["peak_used"] <= host["slab"] <= host["budget"] == needed - 1


# ---- limits that the kernel keeps


@pytest.mark.slow
def test_locked_memory_stays_below_rlimit_memlock() -> None:
    memlock = 6 * MIB + 4095
    said = forked(host_limits.memlock, memlock, True)
    host = said["report"]["host"]
    assert said.get("errors") is None and said["changes"] == []
    assert host["peak_used"] <= host["slab"] <= host["budget"] == int(memlock * (1 - HOST_HEADROOM))
    assert 0 < said["report"]["alpha"] < 1
    assert said["locked"] == host["slab"]  # the kernel counts what the slab does
    assert host["locked_bytes_per_s"] > 0


@pytest.mark.slow
def test_without_looking_the_kernel_refuses_and_training_goes_on_with_less() -> None:
    """The control: the limit binds. Calls without room are recomputed; the next passes are solved for less."""
    said = forked(host_limits.memlock, 6 * MIB, False)
    assert said["budget_at_start"] > 6 * MIB
    assert said.get("errors") is None
    (warning,) = (warning for warning in said["warnings"] if warning.startswith("layer calls are recomputed"))
    assert "mlock refused" in warning
    assert said["changes"][0].startswith("host budget lowered to") and "the system refused more" in said["changes"][0]
    host = said["report"]["host"]
    assert host["peak_used"] <= host["slab"] <= 6 * MIB
    assert said["report"]["bytes_to_host"] > 0
