"""Device memory left for activations, by the numbers of PyTorch and the driver."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from ds_memo.memory import device as device_memory
from ds_memo.memory.device import (
    GIB,
    UNSEEN,
    device_budget,
    device_usage,
    keep_blocks_whole,
    lost_bytes,
    states_to_come,
)
from ds_memo.solve.headroom import HEADROOM

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


@pytest.fixture
def card(monkeypatch):
    """A card of 80 GiB: 50 free, 20 held by this process, of which 12 in use, 10 held by others."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (50 * GIB, 80 * GIB))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 20 * GIB)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 12 * GIB)
    monkeypatch.setattr(torch.cuda, "get_per_process_memory_fraction", lambda device: 1.0)


@pytest.fixture
def host(monkeypatch):
    monkeypatch.setattr(device_memory, "available_bytes", lambda: 100 * GIB)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")


@pytest.mark.parametrize(
    ("configured", "to_come", "headroom", "expected_gib"),
    [
        (None, 0, HEADROOM, 58 * (1 - HEADROOM)),  # free, and what the caching allocator holds unused
        (None, 0, 0.0, 57),  # for what the driver loads late
        (None, 0, UNSEEN, 58 * (1 - UNSEEN)),
        (None, 10 * GIB, UNSEEN, 58 * (1 - UNSEEN) - 10),
        (None, 90 * GIB, UNSEEN, 0),
        (40.0, 0, 0.0, 28),
        (40.0, 0, HEADROOM, 28 * (1 - HEADROOM)),  # of the whole device, less what is in use
        (75.0, 0, HEADROOM, 58 * (1 - HEADROOM)),  # more than there is
        (12.0, 0, HEADROOM, 0),
        (5.0, 0, HEADROOM, 0),
    ],
)
def test_a_card(card, configured, to_come, headroom, expected_gib):
    budget = device_budget(CUDA, configured, to_come, headroom)
    assert budget.nbytes == pytest.approx(expected_gib * GIB, abs=1)
    assert budget.nbytes == max(0, budget.free - budget.withheld - budget.to_come)
    assert budget.free == max(0, min(58, (configured or 99) - 12)) * GIB and budget.to_come == to_come
    assert budget.why == (f"headroom of {headroom:.0%}" if headroom else "" if configured else "for the driver")
    assert device_usage(CUDA) == {"total": 80 * GIB, "free": 50 * GIB, "held": 20 * GIB}
    assert device_usage(CPU) is None


def test_nccl_takes_more_and_a_process_may_be_limited_to_a_part(card, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(torch.distributed, "is_initialized", lambda: True)
        patch.setattr(torch.distributed, "get_backend", lambda: "nccl")
        assert device_budget(CUDA, None, 0, 0.0).nbytes == 56 * GIB
    monkeypatch.setattr(torch.cuda, "get_per_process_memory_fraction", lambda device: 0.25)
    assert device_budget(CUDA, None, 0, 0.0).nbytes == int(8 * 0.95 * GIB)  # 20 of 80, less what is in use, and for the driver


def test_what_the_allocator_lost_is_left_alone(card, monkeypatch):
    peaks = {"reserved_bytes.all.peak": 30 * GIB, "requested_bytes.all.peak": 22 * GIB}
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda device: peaks)
    monkeypatch.setattr(torch.cuda, "memory_snapshot", lambda: [{"is_expandable": False}])
    assert (lost_bytes(CUDA), lost_bytes(CPU)) == (8 * GIB, 0)
    why = "1.25 x 8 GiB lost between blocks of PyTorch's allocator"
    assert device_budget(CUDA, None, 0, HEADROOM, lost_bytes(CUDA)) == (48 * GIB, 58 * GIB, 10 * GIB, why, 0)
    little = device_budget(CUDA, None, GIB, HEADROOM, GIB)
    assert (little.nbytes, little.why) == (int(58 * GIB * (1 - HEADROOM)) - GIB, "headroom of 8%")
    assert device_budget(CUDA, None, 0, 0.0, 8 * GIB).nbytes == 57 * GIB  # what could be had at most


def test_segments_that_expand_lose_nothing(monkeypatch):
    """Their free pages go back to the device."""
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda device: pytest.fail("asked for"))
    monkeypatch.setattr(torch.cuda, "memory_snapshot", lambda: [{"is_expandable": False}, {"is_expandable": True}])
    assert lost_bytes(CUDA) == 0


@pytest.fixture
def settings(monkeypatch):
    """Record the settings that torch's allocator gets."""
    given, make = [], torch._C._accelerator_setAllocatorSettings
    monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", lambda made: (given.append(made), make(made)))
    monkeypatch.setattr(device_memory, "_asked", False)
    monkeypatch.setattr(device_memory, "_given", "")
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "memory_snapshot", list)
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.delenv(name, raising=False)
    make("")
    yield given
    make("")


def test_blocks_that_are_kept_whole_lose_nothing(settings, monkeypatch):
    peaks = {"reserved_bytes.all.peak": 30 * GIB, "requested_bytes.all.peak": 22 * GIB}
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda device: peaks)
    for on, said, lost in ((True, ["max_split_size_mb:32"], 0), (True, [], 0), (False, [""], 8 * GIB), (False, [], 8 * GIB)):
        keep_blocks_whole(CUDA, on)
        assert (settings, lost_bytes(CUDA)) == (said, lost)
        settings.clear()


@pytest.mark.parametrize("name", ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"])
def test_settings_of_the_users_own_stay(settings, monkeypatch, name):
    monkeypatch.setenv(name, "expandable_segments:True")
    keep_blocks_whole(CUDA, True)
    monkeypatch.delenv(name)
    keep_blocks_whole(CPU, True)
    assert settings == [] and not device_memory._blocks_are_whole()


@pytest.mark.parametrize("own, added", [
    ("garbage_collection_threshold:0.8", True), ("roundup_power2_divisions:[64:8,256:4],expandable_segments:False", True),
    ("max_split_size_mb:512", False), ("max_split_size_mb:32", False),
])  # fmt: skip
def test_settings_that_are_made_at_run_time_stay(settings, own, added):
    """PyTorch drops all that a new text lacks."""
    now = torch._C._accelerator_getAllocatorSettings
    torch._C._accelerator_setAllocatorSettings(own)
    keep_blocks_whole(CUDA, True)
    assert now() == (f"{own},max_split_size_mb:32" if added else own) and device_memory._blocks_are_whole() is ("mb:32" in now())
    keep_blocks_whole(CUDA, False)
    assert now() == own
    keep_blocks_whole(CUDA, True)
    torch._C._accelerator_setAllocatorSettings(own)  # in between, too
    assert device_memory._blocks_are_whole() is ("mb:32" in own)
    keep_blocks_whole(CUDA, False)
    assert now() == own


@pytest.mark.parametrize("mib, blocks, split", [(96, 2, True), (96, 1, False), (20, 2, False)])
def test_where_a_large_block_is_split_already(settings, monkeypatch, mib, blocks, split):
    """Torch would give a part of its segment back to the device. Only there is its cache emptied, at 20 cudaMallocs a time."""
    flushes = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: flushes.append(1))
    segments = [{"address": 0, "total_size": n << 20, "blocks": [0] * held} for n, held in ((64, 1), (mib, blocks))]
    monkeypatch.setattr(torch.cuda, "memory_snapshot", lambda: segments)
    keep_blocks_whole(CUDA, True)
    assert bool(settings) is not split and device_memory._blocks_are_whole() is not split
    assert bool(flushes) is split
    segments.clear()
    keep_blocks_whole(CUDA, True)  # asked once
    assert device_memory._blocks_are_whole() is not split
    keep_blocks_whole(CUDA, False)
    keep_blocks_whole(CUDA, True)
    assert device_memory._blocks_are_whole()


def test_without_a_context_nothing_is_split_and_none_is_made(settings, monkeypatch):
    """The snapshot would make a context on the first device, not on this rank's."""
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    monkeypatch.setattr(torch.cuda, "memory_snapshot", lambda: pytest.fail("makes a context"))
    keep_blocks_whole(CUDA, True)
    assert settings == ["max_split_size_mb:32"] and device_memory._blocks_are_whole


def test_a_cpu_shares_the_host_with_the_other_ranks(host):
    assert device_budget(CPU, None, 0, HEADROOM).nbytes == int(100 * GIB * (1 - HEADROOM)) // 4
    assert device_budget(CPU, None, GIB, UNSEEN).nbytes == int(100 * GIB * (1 - UNSEEN)) // 4 - GIB
    assert device_budget(CPU, None, 0, 0.0).nbytes == 25 * GIB
    assert device_budget(CPU, None, 500 * GIB, UNSEEN).nbytes == 0
    assert device_budget(CPU, 1.5, 500 * GIB, UNSEEN).nbytes == int(1.5 * GIB), "what is configured is for activations"


def test_states_that_the_first_step_will_make():
    model = nn.Sequential(nn.Linear(10, 20, bias=False), nn.Linear(20, 5, bias=False).bfloat16(), nn.Linear(5, 5))
    model[2].requires_grad_(False)
    gradients, adam = 4 * 200 + 2 * 100, 8 * 300
    assert states_to_come(model, has_engine=False) == gradients + adam
    assert states_to_come(model, has_engine=True) == gradients
    model[0].weight.grad = torch.zeros(20, 10)
    assert states_to_come(model, has_engine=True) == 2 * 100
    assert states_to_come(nn.Identity(), has_engine=False) == 0


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_this_card():
    before = device_budget(CUDA, None, 0, HEADROOM).nbytes
    held = torch.empty(GIB, dtype=torch.uint8, device=CUDA)
    after = device_budget(CUDA, None, 0, HEADROOM).nbytes
    assert before - after == pytest.approx(GIB * (1 - HEADROOM), rel=0.05)
    del held
