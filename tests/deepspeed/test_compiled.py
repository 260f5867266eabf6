"""Compiled layers under DeepSpeed: `engine.compile()` at every ZeRO stage."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

from tests.deepspeed.engines import MEMO, ON_ONE_CPU_RANK, ds_config, start, train
from tests.everyday import everyday

pytestmark = ON_ONE_CPU_RANK


def config(stage: int) -> dict[str, Any]:
    return ds_config(memo=MEMO, zero_optimization={"stage": stage, "stage3_param_persistence_threshold": 0})


@functools.cache
def uncompiled(name: str, stage: int) -> tuple[list[float], dict[str, Any]]:
    engine = start(config(stage), name)
    losses, report = train(engine, steps=3), engine.memo.report()
    engine.memo.detach()
    return losses, report


@pytest.mark.parametrize(
    "stage, name", everyday([(stage, name) for stage in range(4) for name in ("plain", "llama")], [(1, "plain"), (3, "plain")])
)
def test_every_stage(stage: int, name: str) -> None:
    """Losses and counts are those of uncompiled layers. Under ZeRO-3 layers are gathered whole, so that they can be traced."""
    losses, counted = uncompiled(name, stage)
    torch._dynamo.reset()
    engine = start(config(stage), name)
    engine.compile(backend="aot_eager")
    assert train(engine, steps=3) == pytest.approx(losses, rel=1e-5)
    report = engine.memo.report()
    assert {type(layer.latest).__name__ for layer in engine.memo._session.layers} == {"CompiledRecipe"}
    for key in ("bytes_to_host", "stored_bytes_per_layer", "attention_recomputed", "gemm_flops_recomputed_fraction"):
        assert report[key] == counted[key], key
    assert not report["warnings"]
    engine.memo.detach()
    torch._dynamo.reset()
