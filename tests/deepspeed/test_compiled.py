"""Compiled layers under DeepSpeed: `engine.compile()` at every ZeRO stage."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

from tests.compiled_layers.rig import recompilations
from tests.deepspeed.engines import MEMO, ON_ONE_CPU_RANK, ds_config, start, train
from tests.everyday import everyday
from tests.models import Batch

pytestmark = ON_ONE_CPU_RANK


@functools.cache
def uncompiled(name: str, stage: int) -> tuple[list[float], dict[str, Any]]:
    engine = start(ds_config(stage, memo=MEMO), name)
    losses, report = train(engine, steps=3), engine.memo.report()
    engine.memo.detach()
    return losses, report


@pytest.mark.parametrize("stage, name", everyday([(1, "plain"), (3, "plain"), (3, "llama")], [(1, "plain"), (3, "plain")]))
def test_every_stage(stage: int, name: str) -> None:
    """Losses and counts are those of uncompiled layers. Under ZeRO-3 layers are gathered whole, so that they can be traced."""
    losses, counted = uncompiled(name, stage)
    torch._dynamo.reset()
    engine = start(ds_config(stage, memo=MEMO), name)
    engine.compile(backend="aot_eager")
    assert train(engine, steps=3) == pytest.approx(losses, rel=1e-5)
    report = engine.memo.report()
    assert {type(layer.latest).__name__ for layer in engine.memo._session.layers} == {"CompiledRecipe"}
    for key in ("bytes_to_host", "stored_bytes_per_layer", "attention_recomputed", "gemm_flops_recomputed_fraction"):
        assert report[key] == counted[key], key
    assert not report["warnings"]
    engine.memo.detach()
    torch._dynamo.reset()


@pytest.mark.slow
def test_lengths_change() -> None:
    """Code is compiled again no more often than stock's."""
    counts, losses = [], []
    for memo in ({"enabled": False}, {**MEMO, "resident_layers": 0}):
        engine = start(ds_config(3, memo=memo))
        engine.compile(backend="aot_eager")
        losses.append([])

        def run(engine: Any = engine, found: list[float] = losses[-1]) -> None:
            for length in (17, 17, 24, 24, 33, 33):
                ids = Batch.random(2, length).labels  # not embeddings: the first layer's input needs no gradient then
                loss = engine(input_ids=ids, labels=ids).loss
                engine.backward(loss)
                engine.step()
                found.append(loss.item())

        counts.append(recompilations(run))
        if memo["enabled"]:
            assert {type(layer.latest).__name__ for layer in engine.memo._session.layers} == {"CompiledRecipe"}
            engine.memo.detach()
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
    assert 0 < counts[1].total() <= counts[0].total(), counts
    torch._dynamo.reset()
