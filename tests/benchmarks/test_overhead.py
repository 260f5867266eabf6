"""Host time over checkpoint: what is measured, never how long it took."""

from __future__ import annotations

import pytest
import torch

from benchmarks.overhead import LAYERS, TILES, measure, of_a_tile, variants
from benchmarks.workloads import small_models


def test_a_tile_takes_what_more_tiles_add() -> None:
    few, many = (f"{tiles} tiles" for tiles in TILES)
    fixed, tile = (10.0, 20.0), (0.5, 1.5)
    medians = {
        name: [start + tiles * each for start, each in zip(fixed, tile, strict=True)]
        for name, tiles in ((few, TILES[0]), (many, TILES[1]))
    }
    assert of_a_tile(medians) == list(tile)


@pytest.mark.slow
def test_every_variant_is_sampled() -> None:
    model = small_models(128, LAYERS, hidden=64, heads=4, kv_heads=2, llama_ffn=128)["llama"]
    samples = measure(model.train(), torch.device("cpu"), rounds=1)
    assert samples.keys() == variants().keys()
    assert all(len(pairs) == 5 and all(min(pair) > 0 for pair in pairs) for pairs in samples.values())
