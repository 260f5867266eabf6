"""Layers compute their input where the host ends the length, as solved; where they cannot, later passes are solved without."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

import ds_memo
from ds_memo.placement import Placement, PlacementKind, Tiles
from ds_memo.units import GIB
from tests.inside import inside
from tests.models import FP32, Batch, step
from tests.tiles.rig import assert_within, small

TOKENS, LAYERS, TILE = 2048, 6, 128
BATCH = Batch.random(1, TOKENS)

pytestmark = [pytest.mark.usefixtures("own_cache", "times_by_flops"), pytest.mark.slow]


def section(model: Any, share: float) -> dict[str, Any]:
    """Return a "memo" section with this share of the host memory that inputs and attention's outputs take."""
    handle = ds_memo.attach(model, {"plan": {"enabled": False}})
    step(model, BATCH)
    profile = inside(handle).tuner.profile
    handle.detach()
    layer = profile.costs([(1, TOKENS)], 0, 0, tiles=Tiles(TILE)).layers[0]
    host = share * LAYERS * layer.host_bytes(Placement(PlacementKind.SWAPPED, 0.0))
    device = layer.working_at_0.backward + layer.attention_bytes + layer.hidden_bytes // 2
    return {"alpha": 0.0, "tile_tokens": TILE, "host_memory_gib": host / GIB, "device_memory_gib": device / GIB,
            "plan": {"enabled": False}}  # fmt: skip


def train(model: Any, memo: dict[str, Any], want: dict[str, Any], steps: int = 3) -> Any:
    """Return the report of a few steps, each with stock's gradients."""
    handle = ds_memo.attach(model, memo)
    for _ in range(steps):
        assert_within(step(model, BATCH).grads, want, FP32)
    report = handle.report()
    handle.detach()
    return report


def test_inputs_are_computed_before_attention_is_recomputed() -> None:
    model = small("llama", layers=LAYERS)
    want = step(copy.deepcopy(model), BATCH).grads
    plenty, little = (train(model, section(model, share), want) for share in (1.1, 0.8))
    assert plenty["layers_without_input"] == [] and plenty["tiles"]["input_every"] == 1
    assert little["layers_without_input"] and little["tiles"]["input_every"] > 1
    assert plenty["attention_recomputed"] == little["attention_recomputed"] == 0
    assert little["host"]["peak_used"] <= little["host"]["budget"] < plenty["host"]["peak_used"]
    assert little["host"]["peak_used"] == pytest.approx(little["predicted"]["host_bytes"], rel=0.05)  # pages: tiles are small


@pytest.mark.filterwarnings("ignore")
def test_layers_that_do_not_follow_each_other_are_solved_for_as_such() -> None:
    model = small("llama", layers=LAYERS)
    for layer in model.model.layers:  # another tensor, of the same values
        layer.register_forward_pre_hook(lambda module, args: (args[0] * torch.ones(()), *args[1:]))
    want = step(copy.deepcopy(model), BATCH).grads
    report = train(model, section(model, 0.8), want)
    assert report["layers_without_input"] == [] and report["attention_recomputed"] > 0
    assert any("it stores its input, which was to be computed again" in warning for warning in report["warnings"])
