"""Helpers of the tests of training situations, and the ways in which a model runs through each: whole, in tiles, compiled."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from ds_memo.compiled_layers import ops
from ds_memo.swap.frame import Frame
from tests.compiled_layers.rig import TOLERANCE, compiled, worst
from tests.everyday import everyday
from tests.inside import inside
from tests.models import CONFIGS, FP32, HIDDEN, Batch, Block, Outcome, Toy, assert_same, compare_with_stock, step
from tests.tiles import rig as tiles

BATCH = Batch.random(2, 17)
WAYS: dict[str, dict[str, Any]] = {
    "mixed": CONFIGS[0],
    "recomputed": CONFIGS[1],
    "tiles": tiles.config(tile=16, alpha=0.3, groups=2),
    "groups": tiles.config(tile=16, alpha=0.3, groups=2, input_every=3),
    "compiled": CONFIGS[0],
}
"""Whole layers with both of CONFIGS, four tiles of BATCH, layers in tiles that compute their inputs, and layers that are compiled
one by one."""
IN_TILES = "tiles", "groups"


def every_way(*but: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Run a test in each way, as argument `way`, except in those that are named. Compilers are slow, and groups have tiles."""
    ways = [way for way in WAYS if way not in but]
    return pytest.mark.parametrize("way", everyday(ways, [way for way in ways if way not in ("groups", "compiled")]))


def assert_in_way(way: str, got: Outcome, want: Outcome) -> None:
    """Compare a step with stock's: whole layers have its loss to the bit."""
    (tiles.assert_step if way in IN_TILES else assert_same)(got, want)


def compare(
    model: nn.Module, drive: Callable[[nn.Module, int], Outcome], way: str, steps: int = 3, tolerance: float = FP32
) -> dict[str, Any]:
    """Drive a stock copy and an attached copy of a model through the same steps, in one way. Return the last report."""
    if way in IN_TILES:
        report = compare_with_stock(model, drive, WAYS[way], steps, tolerance, same=tiles.assert_step)
        tiles.assert_was_tiled(report, len(tiles.layers_of(model)))
        return report
    if way != "compiled":
        return compare_with_stock(model, drive, WAYS[way], steps, tolerance)

    def same(got: Outcome, want: Outcome, _: float) -> None:
        assert worst(got, want) <= max(tolerance, TOLERANCE)

    torch._dynamo.reset()
    report = compare_with_stock(
        model, drive, WAYS[way], steps, same=same, prepare=lambda model: compiled(model, backend="aot_eager")
    )
    assert ops.calls_alive() == 0
    assert report["bytes_to_host"] > 0 and report["attention_recomputed"] == 0 and not report["warnings"]
    return report


def drive(model: nn.Module, number: int) -> Outcome:
    return step(model, BATCH)


def toy(block: Any = Block, **kwargs: Any) -> Toy:
    torch.manual_seed(0)
    return Toy(block, **kwargs)


class Lines(nn.Module):
    """The parts of a layer: three Linears and a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(HIDDEN, HIDDEN) for _ in range(3))
        self.norm = nn.LayerNorm(HIDDEN)


class Log(list):
    """An observer that notes the events."""

    def layer_begins(self, layer: int) -> None:
        self.append(("begins", layer))

    def layer_ends(self, layer: int) -> None:
        self.append(("ends", layer))

    def layer_replays(self, layer: int) -> None:
        self.append(("replays", layer))

    def interrupted(self) -> None:
        self.append("interrupted")


def assert_nothing_leaked(handle: Any, frames: weakref.WeakSet[Frame]) -> None:
    if frames:
        gc.collect()  # a traceback may hold them in a reference cycle
    assert not frames
    inside(handle).engine.drain()  # what the next forward does first
    assert inside(handle).slab.used == inside(handle).engine.traffic.blocks_lost == 0
