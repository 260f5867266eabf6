"""Tiles are solved for: where the whole layer does not fit, layers run in tiles, as predicted, with stock's gradients."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

import ds_memo
from ds_memo.placement import Tiles
from ds_memo.solve.memory import device_bytes
from ds_memo.solve.placement_kinds import place
from ds_memo.units import GIB
from tests import architectures
from tests.inside import inside
from tests.models import FP32, Batch, step
from tests.tiles.rig import assert_within, small

TOKENS = 2048
LAYERS = 2
SMALL = Tiles(128, 2)

pytestmark = [pytest.mark.usefixtures("own_cache"), pytest.mark.slow]


def trained(model: Any, steps: int = 1, **section: Any) -> tuple[Any, dict[str, Any]]:
    """Train under memo; return the last step's outcome and the report."""
    handle = ds_memo.attach(model, section)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    held = []
    for number in range(steps):
        outcome = step(model, Batch.random(1, TOKENS, seed=number))
        optimizer.step()
        report = handle.report()
        held.append((report["predicted"] or {}).get("host_bytes", 0))
    profile = inside(handle).tuner.profile
    handle.detach()
    return outcome, {**report, "profile_itself": profile, "most_host_bytes": max(held)}


@pytest.fixture(scope="module")
def profile(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("profiles")
    return trained(small("llama"), plan={"enabled": False}, cache_dir=str(folder))[1]["profile_itself"]


def least(profile: Any, tiles: Tiles | None) -> int:
    """Return the device bytes that swapped layers take, without head and loss."""
    return device_bytes(profile.costs([(1, TOKENS)] * len(profile.kinds), 0, 0, tiles=tiles), place(LAYERS, 0), 0.0)


def test_a_profile_has_tiles(profile: Any) -> None:
    assert len(profile.kinds[0].in_tiles) == 3 and profile.kinds[0].not_tiled == ""
    assert least(profile, SMALL) < 0.6 * least(profile, None)


@pytest.mark.parametrize("alpha", (None, 0.5))
def test_layers_that_do_not_fit_run_in_tiles(profile: Any, alpha: float | None) -> None:
    model = small("llama")
    stock = copy.deepcopy(model)
    budget = 1.5 * least(profile, SMALL)
    assert budget < least(profile, None), "whole layers do not fit"
    section = {"device_memory_gib": budget / GIB, "alpha": alpha} if alpha is not None else {"device_memory_gib": budget / GIB}
    outcome, report = trained(model, steps=5, **section)
    want = step(stock, Batch.random(1, TOKENS, seed=4))
    assert_within(outcome.grads, want.grads, FP32)
    assert report["tiles"]["layers"] == [0, 1] and report["tiles"]["not_tiled"] == {}
    assert alpha is None or report["attention_recomputed"] == 0, "a solved split recomputes it where copies are slow"
    assert [line for line in report["warnings"] if not line.startswith("profile: ")] == [], "a busy CPU is no warning of tiles"
    # What the test itself and the model's tables hold is a large part of so little: tests/benchmarks/test_emulator.py has 2 %.
    assert report["predicted"]["device_bytes"] == pytest.approx(report["plan"]["arena"], rel=0.15)
    assert report["host"]["slab"] == pytest.approx(report["most_host_bytes"], rel=0.02), "the first steps may hold more"
    assert alpha is None or report["alpha"] == alpha
    missed = {name: count for name, count in report["plan"]["misses"].items() if count and name != "native"}
    assert report["plan"]["hits"] > 100 and not missed, "native: what the test keeps of a step outlives its pass"


@pytest.mark.filterwarnings("ignore")
def test_layers_with_and_without_attention() -> None:
    model = architectures.build("lfm2", num_hidden_layers=LAYERS, layer_types=["conv", "full_attention"])
    stock = copy.deepcopy(model)
    profile = trained(copy.deepcopy(model), plan={"enabled": False})[1]["profile_itself"]
    assert [len(kind.in_tiles) for kind in profile.kinds] == [3, 3]
    budget = 1.5 * least(profile, SMALL)
    assert budget < least(profile, None), "whole layers do not fit"
    outcome, report = trained(model, steps=5, device_memory_gib=budget / GIB)
    assert_within(outcome.grads, step(stock, Batch.random(1, TOKENS, seed=4)).grads, FP32)
    assert report["tiles"]["layers"] == [0, 1] and report["tiles"]["not_tiled"] == {}
    assert report["predicted"]["device_bytes"] == pytest.approx(report["plan"]["arena"], rel=0.15)
    assert report["host"]["slab"] == pytest.approx(report["most_host_bytes"], rel=0.02)


def test_a_given_tile_with_the_rest_solved() -> None:
    _, report = trained(small("llama"), tile_tokens=512, plan={"enabled": False})
    assert report["tiles"]["tokens"] == 512 and report["tiles"]["layers"] == [0, 1]
    assert report["alpha"] is not None and report["predicted"]["device_bytes"] > 0
