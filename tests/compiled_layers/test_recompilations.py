"""How often layers are compiled again: never for alpha, and for lengths as often as stock."""

from __future__ import annotations

import copy
from collections.abc import Iterable

import pytest
import torch
from torch import nn

import ds_memo
from ds_memo.placement import Placement, PlacementKind
from tests.compiled_layers.rig import TOLERANCE, compiled, recompilations, run, worst
from tests.everyday import everyday
from tests.models import Batch, build

STEPS = ((0.1, 40), (0.3, 24), (0.7, 40), (0.9, 56), (1.0, 24), (0.0, 33))
"""Alpha and length of each step."""


def drive(model: nn.Module, steps: Iterable[tuple[float, int]] = STEPS) -> None:
    handle = ds_memo.attach(model, {"alpha": 0.5, "resident_layers": 1})
    policy, last = handle._session.policy, len(handle._session.layers) - 1
    stored = set()
    for alpha, length in steps:
        swapped = Placement(PlacementKind.SWAPPED, alpha)
        policy.placement = lambda layer, p=swapped: Placement(PlacementKind.ON_DEVICE) if layer.index == last else p
        run(model, Batch.random(2, length))
        stored.add(handle.report()["stored_bytes_per_layer"][0])
    assert len(stored) == len(steps)  # alpha and length had an effect
    handle.detach()


def drive_stock(model: nn.Module) -> None:
    for _, length in STEPS:
        run(model, Batch.random(2, length))


@pytest.mark.parametrize(
    "name, how",
    everyday([(name, how) for name in ("plain", "llama", "gemma3") for how in ("layer", "model")], [("plain", "layer")]),
)
def test_no_more_than_stock(name: str, how: str) -> None:
    model = build(name)
    stock = compiled(copy.deepcopy(model), how, backend="aot_eager")
    compiled(model, how, backend="aot_eager")
    of_stock = recompilations(lambda: drive_stock(stock))
    of_memo = recompilations(lambda: drive(model))
    assert max(of_memo.values()) <= max(of_stock.values())
    if how == "layer":  # a whole model is cut into pieces, and each of them has lengths of its own
        placements = 2  # swapped and resident, each of which is a compiled layer by itself
        assert of_memo.total() <= placements * of_stock.total()


def test_alpha_alone_recompiles_nothing() -> None:
    model = compiled(build("plain"), backend="aot_eager")
    assert not recompilations(lambda: drive(model, [(alpha, 40) for alpha in (0.0, 0.25, 0.5, 1.0)]))


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_gradients_while_alpha_and_length_change(backend: str) -> None:
    torch._dynamo.reset()
    model = build("llama")
    stock = compiled(copy.deepcopy(model), backend=backend)
    handle = ds_memo.attach(compiled(model, backend=backend), {"alpha": 0.5, "resident_layers": 1})
    policy = handle._session.policy
    for alpha, length in STEPS:
        policy.placement = lambda layer, alpha=alpha: Placement(PlacementKind.SWAPPED, alpha)
        batch = Batch.random(2, length)
        assert worst(run(model, batch), run(stock, batch)) <= TOLERANCE
    handle.detach()
