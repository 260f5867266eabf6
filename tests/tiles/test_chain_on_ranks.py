"""Layers without attention in tiles on ranks that share a sequence: logits and gradients are the stock model's on one rank.

Values are float64: see test_chain.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch.distributed as dist

import ds_memo
from ds_memo.deepspeed import sequence
from tests.distributed_harness.common import DistributedTest
from tests.models import poisoned_memory
from tests.sequence.float64 import float64
from tests.sequence.whole_and_parts import Batch, Lengths
from tests.tiles.rig import config
from tests.tiles.test_chain import EXACT, build

WRONG = 1e-3
ONE: Lengths = ((75,), (75,))
"""No tile length divides a part, and there is padding."""
PACKED: Lengths = ((13, 1, 18, 43), (32, 43))
"""Documents that begin inside a tile, at a stretch of tiles (16, 23), and at a token's distance."""
LONG, LONG_PACKED = ((139,),), ((40, 88, 11),)
"""Two tiles of 64 tokens on each of two ranks. A document begins with the second stretch."""


def run(name: str, lengths: Lengths, tile: int, alpha: float, ulysses: int, steps: int = 2) -> tuple[float, dict[str, Any]]:
    """Return the largest relative distance of logits or a gradient from the stock model's, of all ranks, and the report."""
    with float64(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = build(name)
        batch = Batch(lengths, vocabulary=model.config.get_text_config().vocab_size)
        want = batch.apart(model)
        sequence.set_up(model, dist.get_world_size(), ulysses=ulysses)
        handle = ds_memo.attach(model, config(tile, alpha))
        found = []
        for _ in range(steps):
            with poisoned_memory():
                found.append(batch.in_parts(model).off(want))
        report = handle.report()
        handle.detach()
    everywhere: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, max(max(off[:2]) for off in found))
    return max(everywhere), report


def check(name: str, lengths: Lengths, tile: int, alpha: float, ulysses: int = 2, **how: Any) -> dict[str, Any]:
    distance, report = run(name, lengths, tile, alpha, ulysses, **how)
    assert distance < EXACT, (name, lengths, tile, alpha, ulysses, distance)
    assert report["tiles"]["not_tiled"] == {}
    assert report["tiles"]["layers"] == list(range(report["layers"]))
    return report


class TestTwoRanks(DistributedTest):
    world_size = 2

    def test_same_as_whole(self):
        """The delta rule among documents; Mamba-2 around a ring; a convolution alone, whose tiles are shorter than its halo."""
        check("qwen3_next", PACKED, 16, 0.5)
        check("nemotron_h", ONE, 23, 1.0, ulysses=1)
        check("lfm2", PACKED, 5, 0.0)

    @pytest.mark.slow
    @pytest.mark.sweep
    @pytest.mark.parametrize("name", FAMILIES)
    @pytest.mark.parametrize("tile", [5, 16, 23, 64])
    def test_every_family(self, name, tile):
        """A tile of 64 tokens holds no part of a shorter sequence."""
        for alpha in (0.0, 1.0):
            for lengths in ((LONG, LONG_PACKED) if tile == 64 else (ONE, PACKED)):
                check(name, lengths, tile, alpha, ulysses=1 if alpha else 2)
