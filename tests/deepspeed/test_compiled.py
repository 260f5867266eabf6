"""Compiled layers under DeepSpeed: `engine.compile()` at every ZeRO stage."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.compiled_layers.rig import layers_of
from tests.deepspeed.engines import MEMO, ON_ONE_CPU_RANK, ds_config, start, train
from tests.everyday import everyday
from tests.inside import kinds_of_recipes
from tests.models import build

pytestmark = ON_ONE_CPU_RANK


COMPILED: dict[str, Callable[[Any], None]] = {
    "engine": lambda engine: engine.compile(backend="aot_eager"),  # what Accelerate does, and the Trainer's torch_compile=True
    "model": lambda engine: engine.module.compile(backend="aot_eager"),
    "layer": lambda engine: layers_of(engine.module)[1].compile(backend="aot_eager"),  # Accelerate's regional compilation
    "assigned": lambda engine: layers_of(engine.module).__setitem__(
        1, torch.compile(layers_of(engine.module)[1], backend="aot_eager")
    ),
}
DAILY = [("engine", 1, "plain")]
CASES = [*DAILY, ("layer", 0, "plain"), ("model", 0, "plain"), ("assigned", 0, "plain"), ("engine", 3, "llama")]


def engine_of(name: str, stage: int) -> Any:
    return start(ds_config(stage, memo=MEMO), model=build(name, **({"num_hidden_layers": 2} if name == "llama" else {})))


@functools.cache
def uncompiled(name: str, stage: int) -> tuple[list[float], dict[str, Any]]:
    engine = engine_of(name, stage)
    losses, report = train(engine, steps=2), engine.memo.report()
    engine.memo.detach()
    return losses, report


@pytest.mark.parametrize("how, stage, name", everyday(CASES, DAILY))
def test_compiled_after_initialize(how: str, stage: int, name: str) -> None:
    """Layers are compiled one by one, with the losses and counts of uncompiled ones. Under ZeRO-3 they are gathered whole, so
    that they can be traced."""
    losses, counted = uncompiled(name, stage)
    torch._dynamo.reset()
    engine = engine_of(name, stage)
    COMPILED[how](engine)
    assert train(engine, steps=2) == pytest.approx(losses, rel=1e-5)
    of_all = how in ("engine", "model")
    kinds = ["CompiledRecipe" if of_all or number == 1 else "Recipe" for number in range(len(layers_of(engine.module)))]
    report = engine.memo.report()
    assert kinds_of_recipes(engine.memo) == kinds and not report["warnings"]
    for key in ("frames", "bytes_to_host", "stored_bytes_per_layer", "attention_recomputed", "gemm_flops_recomputed_fraction"):
        assert report[key] == counted[key], key
    engine.memo.detach()
    assert (layers_of(engine.module)[1]._compiled_call_impl is not None) == (how == "layer")  # as it was
