"""Some layers without checkpointing beside some with it: stock's losses and gradients, frames in time, bytes as predicted."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import pytest
import torch

import ds_memo
from ds_memo.solve import headroom
from ds_memo.solve.memory import device_bytes
from ds_memo.solve.placement_kinds import place
from ds_memo.solve.solver import Solution, judged, solve
from tests.everyday import everyday
from tests.inside import inside
from tests.models import LAYERS, Batch, assert_same, build, poisoned_memory, step
from tests.placements import kinds
from tests.runtime.covering import FAMILIES

GIB = 1 << 30
BATCH = Batch.random(2, 60)


CASES = list(zip(itertools.cycle([{3}, {0}, {1, 3}, {0, 1, 2}]), FAMILIES, strict=False))
"""Layers without recompute, and the family."""
pytestmark = pytest.mark.usefixtures("own_cache")


def attached(monkeypatch: pytest.MonkeyPatch, model: Any, alpha: float, **layers: set[int]) -> Any:
    """With these placements, whatever would be best."""

    def decided(run: Any, *given: Any, **_: Any) -> Solution:
        return judged(run, alpha, kinds(LAYERS, **layers), "as the test wants it")

    monkeypatch.setattr(headroom, "solve", decided)
    return ds_memo.attach(model, {"enabled": True})


@pytest.mark.parametrize("plain, name", everyday(CASES, CASES[::3]), ids=str)
def test_gradients_are_stocks(monkeypatch: pytest.MonkeyPatch, name: str, plain: set[int]) -> None:
    model = build(name)
    stock = copy.deepcopy(model)
    handle = attached(monkeypatch, model, 0.5, no_recompute=plain)
    for _ in range(5):  # the later ones follow a plan
        with poisoned_memory():
            assert_same(step(model, BATCH), step(stock, BATCH))
    report, traffic = handle.report(), inside(handle).engine.traffic
    assert report["layers_without_recompute"] == sorted(plain) and report["checkpointing"]
    assert report["stored_bytes_per_layer"] == report["predicted"]["stored_bytes_per_layer"]
    assert [nbytes == 0 for nbytes in report["stored_bytes_per_layer"]] == [layer in plain for layer in range(LAYERS)]
    assert report["host"]["peak_used"] == report["predicted"]["host_bytes"]  # the slab is the process's, and other models' too
    assert report["plan"]["hits"] > 0 and sum(report["plan"]["misses"].values()) == 0
    # A layer without recompute above has every swapped one come back in time, as a resident one would.
    first = 0 if LAYERS - 1 in plain else 5
    assert (traffic.frames_on_demand, traffic.frames_prefetched) == (first, 5 * (LAYERS - len(plain)) - first)


def test_among_all_other_placements(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build("llama")
    stock = copy.deepcopy(model)
    handle = attached(monkeypatch, model, 0.5, no_recompute={3}, on_device={1}, attention_recomputed={0, 2}, without_gemms={2})
    for _ in range(2):
        assert_same(step(model, BATCH), step(stock, BATCH))
    report = handle.report()
    lists = [report[f"layers_{where}"] for where in ("without_recompute", "on_device", "without_gemms")]
    assert lists == [[3], [1], [2]] and report["attention_recomputed"] == 4
    assert report["stored_bytes_per_layer"] == report["predicted"]["stored_bytes_per_layer"]
    assert "1 of them resident, 1 without GEMMs, 1 without recompute" in str(report)


def test_a_second_backward_and_one_that_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build("llama")
    stock = copy.deepcopy(model)
    handle = attached(monkeypatch, model, 0.5, no_recompute={1, 3})
    tokens = torch.randint(0, 90, (2, 60), generator=torch.Generator().manual_seed(3))
    for each in (model, stock):
        loss = each(input_ids=tokens, labels=tokens).loss
        loss.backward(retain_graph=True)
        loss.backward()
    for mine, theirs in zip(model.parameters(), stock.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-4, atol=1e-6)
    layer = inside(handle).layers[1].module()

    def fail(*args: Any) -> None:
        raise RuntimeError("in the layer without recompute")

    hook = layer.mlp.register_forward_hook(fail)
    with pytest.raises(RuntimeError, match="in the layer without recompute"):
        model(input_ids=tokens, labels=tokens)
    hook.remove()
    model.zero_grad()
    stock.zero_grad()
    assert_same(step(model, BATCH), step(stock, BATCH))
    inside(handle).engine.drain()
    assert inside(handle).slab.used == 0


@pytest.mark.slow
def test_the_solver_leaves_layers_without_recompute_and_knows_their_bytes() -> None:
    """In a device that has room for two layers without recompute; the planned arena is what was predicted."""
    tokens = torch.randint(0, 96, (2, 1400), generator=torch.Generator().manual_seed(3))
    told: list[Any] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(headroom, "solve", lambda run, *rest, **more: told.append(run) or solve(run, *rest, **more))
        probe = build("llama")
        handle = ds_memo.attach(probe, {"enabled": True, "plan": {"enabled": False}})
        probe(input_ids=tokens, labels=tokens).loss.backward()
        handle.detach()
    room = device_bytes(told[0], place(LAYERS, residents=2, no_recompute=2), 1.0)
    model = build("llama")
    whole = {"cross_entropy": "whole"}  # with them a step's peak is at the last layers, as the prediction's
    handle = ds_memo.attach(model, {"enabled": True, "kernels": whole, "device_memory_gib": (room * 1.001 + 4096) / GIB})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    for _ in range(6):
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
    report, solved = handle.report(), inside(handle).policy.pass_solution
    handle.detach()
    assert report["layers_without_recompute"] == [2, 3] and report["layers_on_device"] == [0, 1], report["binding"]
    assert report["predicted"]["device_bytes"] == pytest.approx(report["plan"]["arena"], rel=0.01)
    assert device_bytes(solved.run, place(LAYERS, LAYERS), 1.0) != pytest.approx(report["plan"]["arena"], rel=0.05)
