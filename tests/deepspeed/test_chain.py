"""Layers without attention in tiles under ZeRO: the losses are those without memo."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from benchmarks.tile_models import without_random_numbers
from tests import architectures
from tests.deepspeed.engines import ON_ONE_CPU_RANK, ds_config, start, train

pytestmark = [*ON_ONE_CPU_RANK, pytest.mark.filterwarnings("ignore")]
TILES = {"alpha": 0.5, "resident_layers": 0, "tile_tokens": 7, "plan": {"enabled": False}}


def model(name: str) -> nn.Module:
    return without_random_numbers(architectures.build(name))


@pytest.mark.parametrize("name, stage, dtype", [("nemotron_h", 3, torch.float32), ("qwen3_next", 2, torch.bfloat16)])
def test_losses_are_those_without_memo(name: str, stage: int, dtype: torch.dtype) -> None:
    def losses(**more: Any) -> list[float]:
        engine = start(ds_config(stage, dtype, **more), model=model(name).to(dtype))
        found = train(engine, dtype)
        if more:
            report = engine.memo.report()
            assert report["tiles"]["layers"] == [0, 1, 2, 3] and not report["tiles"]["not_tiled"]
            engine.memo.detach()
        engine.destroy()
        return found

    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    assert losses(memo={"enabled": True, **TILES}) == pytest.approx(losses(), rel=tolerance)
