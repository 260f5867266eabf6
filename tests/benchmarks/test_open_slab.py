"""Host memory of turns: mapped once while a slab stays open, and by each turn without one."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch

from benchmarks import open_slab
from benchmarks.point import own_pinned_bytes
from benchmarks.rivals import RIVALS, Budget
from benchmarks.timing import Trainer
from benchmarks.workloads import batch, build, shapes
from ds_memo.swap import pinned_segments
from ds_memo.swap.host_budget import shared_pool
from ds_memo.units import GIB

CPU = torch.device("cpu")
BUDGET = Budget(CPU, GIB // 4, bandwidth=1e9, layer_forward_s=1e-3)
TURNS = ("ds_memo, tiles", "paper", "ds_memo, tiles")
"""The first one stores the most."""


@pytest.fixture
def mapped(monkeypatch):
    """Bytes of every segment that is mapped."""
    found, map_pages = [], pinned_segments.map_pages
    monkeypatch.setattr(pinned_segments, "map_pages", lambda nbytes: found.append(nbytes) or map_pages(nbytes))
    return found


def take_turns(budget):
    shape = shapes(CPU)["gpt7b"]
    trainer = Trainer(build(shape, CPU), batch(shape, shape.lengths[0], CPU))
    for name in TURNS:
        with RIVALS[name].on(trainer.model, budget) as installed:
            trainer.step(installed)


@pytest.mark.slow
@pytest.mark.parametrize("held", [True, False], ids=["held open", "not held"])
def test_turns_map_host_memory_once_while_a_slab_is_open(held, mapped):
    with open_slab.held_open(BUDGET) if held else nullcontext(BUDGET) as budget:
        take_turns(budget)
        pool = shared_pool(BUDGET.host_bytes / GIB, CPU)
        assert (pool.size > 0) is held
        first = mapped.copy()
        take_turns(budget)
        assert (mapped == first) is held
    assert pool.size == 0 and not pool.clients


def test_a_rival_with_pinned_memory_of_its_own_has_room():
    shape = shapes(CPU)["gpt7b"]
    trainer = Trainer(build(shape, CPU), batch(shape, shape.lengths[0], CPU))
    rows = {"none": {"memory": {"device_peak": 1000}}}
    assert own_pinned_bytes(trainer, RIVALS["save_on_cpu"], rows) == 2000
    inputs = shape.layers * shape.lengths[0] * shape.size.hidden * 4
    assert own_pinned_bytes(trainer, RIVALS["hf_offload"], rows) == 2 * inputs
    assert own_pinned_bytes(trainer, RIVALS["paper"], rows) == 0
