"""Hybrids in tiles under ZeRO: losses and gradients are those without memo."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.deepspeed.engines import ON_ONE_CPU_RANK, deepspeed, ds_config, start, train
from tests.everyday import everyday
from tests.models import Batch
from tests.tiles.rig import assert_within
from tests.tiles.test_chain import assert_was_tiled, build

pytestmark = [*ON_ONE_CPU_RANK, pytest.mark.filterwarnings("ignore")]
TILES = {"enabled": True, "alpha": 0.5, "resident_layers": 0, "tile_tokens": 7, "plan": {"enabled": False}}
CASES = [("nemotron_h", 3, torch.float32), ("falcon_h1", 3, torch.float32), ("qwen3_next", 2, torch.bfloat16)]


@pytest.mark.parametrize("name, stage, dtype", everyday(CASES, []))
def test_same_as_without_memo(name: str, stage: int, dtype: torch.dtype) -> None:
    def trained(**more: Any) -> tuple[dict[str, torch.Tensor], list[float]]:
        """Return the gradients of a micro batch, and losses of steps."""
        engine = start(ds_config(stage, dtype, gradient_accumulation_steps=1, **more), model=build(name).to(dtype))
        batch = Batch.random(2, 37, dtype)
        engine.backward(engine(inputs_embeds=batch.embeds, labels=batch.labels).loss)
        safe_get = deepspeed.utils.safe_get_full_grad
        found = {name: safe_get(parameter).double() for name, parameter in engine.module.named_parameters()}
        engine.step()
        losses = train(engine, dtype, steps=1, length=37)
        if more:
            assert_was_tiled(engine.memo.report())
            engine.memo.detach()
        engine.destroy()
        return found, losses

    in_tiles, want = trained(memo=TILES), trained()
    assert in_tiles[1] == pytest.approx(want[1], rel=1e-5 if dtype == torch.float32 else 2e-2)
    if dtype == torch.float32:
        assert_within(in_tiles[0], want[0], 1e-5)
