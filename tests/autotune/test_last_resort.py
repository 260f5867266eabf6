"""Little memory on both sides: whatever is recomputed, losses and gradients are stock's, and the bytes are as predicted."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import pytest
import torch

import ds_memo
from ds_memo.placement import Placement, PlacementKind
from ds_memo.solve import headroom
from ds_memo.solve.memory import device_bytes
from ds_memo.solve.run_costs import RunCosts
from ds_memo.solve.solver import solve
from tests.everyday import everyday
from tests.inside import inside
from tests.models import LAYERS, Batch, assert_same, build, poisoned_memory, step
from tests.placements import kinds, sets
from tests.runtime.covering import FAMILIES

GIB = 1 << 30
BATCH = Batch.random(2, 60)
ALL = range(LAYERS)
MEMORIES = [(LAYERS, 0), (2, 0), (0, 0), (3, 1)]
"""Layers that recompute attention, and layers on the host."""
NO_HOST = 1e-7


pytestmark = pytest.mark.usefixtures("own_cache")


def profiled(model: Any) -> RunCosts:
    """What the solver is told of a model's pass."""
    told: list[RunCosts] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(headroom, "solve", lambda run, *rest, **more: told.append(run) or solve(run, *rest, **more))
        handle = ds_memo.attach(model, {"plan": {"enabled": False}})
        step(model, BATCH)
        handle.detach()
    return told[0]


@pytest.mark.usefixtures("times_by_flops")
@pytest.mark.parametrize(
    "memory, name",
    everyday(
        itertools.product(MEMORIES, FAMILIES),
        [(memory, FAMILIES[2 * which + 1]) for which, memory in enumerate(MEMORIES)],
        slow=[],
    ),
    ids=str,
)
def test_gradients_are_stocks(memory: tuple[int, int], name: str) -> None:
    """Inputs stay on the device: all of them without attention outputs, some with, all with, and one on the host."""
    again, host = memory
    model = build(name)
    stock = copy.deepcopy(model)
    run = profiled(model)
    placed = kinds(LAYERS, without_gemms=ALL[host:], attention_recomputed=ALL[:again])
    device = device_bytes(run, placed, 0.0) + run.layers[0].smallest_frame_bytes // 4
    on_host = max(NO_HOST, host * run.layers[0].host_bytes(Placement(PlacementKind.SWAPPED_ATTENTION_RECOMPUTED, 0.0)) / GIB)
    memo = {"device_memory_gib": device / GIB, "host_memory_gib": on_host, "plan": {"enabled": False}}
    handle = ds_memo.attach(model, memo)
    for _ in range(2):
        with poisoned_memory():
            assert_same(step(model, BATCH), step(stock, BATCH))
    report, found = handle.report(), sets(inside(handle).policy.pass_solution.solution)
    handle.detach()
    assert found.without_gemms and report["resident_layers"] == 0
    assert report["layers_without_gemms"] == sorted(found.without_gemms) and len(found.attention_recomputed) <= again
    assert (report["attention_recomputed"] > 0) == bool(found.attention_recomputed)
    assert report["stored_bytes_per_layer"] == report["predicted"]["stored_bytes_per_layer"]
    assert report["host"]["slab"] == report["predicted"]["host_bytes"]
    assert report["warnings"] == []


@pytest.mark.slow
def test_the_predicted_bytes_are_the_arenas() -> None:
    """With no host memory at all, at a length where activations dominate; with all layers swapped the sum would be another."""
    tokens = torch.randint(0, 96, (2, 1400), generator=torch.Generator().manual_seed(3))
    model = build("llama")
    memo = {"host_memory_gib": NO_HOST, "device_memory_gib": 0.025}
    handle = ds_memo.attach(model, memo)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    for _ in range(6):
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
    report, run = handle.report(), inside(handle).policy.pass_solution.run
    handle.detach()
    assert report["layers_without_gemms"] and report["host"]["slab"] == 0, report["binding"]
    assert report["predicted"]["device_bytes"] == pytest.approx(report["plan"]["arena"], rel=0.01)
    assert device_bytes(run, [PlacementKind.SWAPPED_ATTENTION_RECOMPUTED] * LAYERS, 0.0) != pytest.approx(
        report["plan"]["arena"], rel=0.05
    )
