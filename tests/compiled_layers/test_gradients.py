"""Loss, gradients, stored bytes and repeated work of compiled layers, against compiled stock and eager memo."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ds_memo.compiled_layers.compiled_call import CompiledCall
from tests.compiled_layers.rig import TOLERANCE, compare, compiled, run, worst
from tests.everyday import everyday
from tests.faults import put_in
from tests.models import LAYERS, Batch, Toy, build

MODELS = ("llama", "qwen3", "gemma3", "neox", "mixtral")
DAILY = ("plain", "aot_eager", 0.5)
CASES = [
    DAILY,
    *((name, "aot_eager", 0.5) for name in MODELS),
    ("mixtral", "inductor", 0.5),
]
"""Alpha changes no graph: test_recompilations.py."""


def check(off: float, compiled: dict[str, Any], eager: dict[str, Any], tolerance: float = TOLERANCE) -> None:
    assert off <= tolerance
    for got, want in zip(compiled["stored_bytes_per_layer"], eager["stored_bytes_per_layer"], strict=True):
        assert got == pytest.approx(want, rel=0.03)
    assert compiled["attention_recomputed"] == 0
    assert compiled["gemm_flops_recomputed_fraction"] == pytest.approx(eager["gemm_flops_recomputed_fraction"], abs=0.01)
    assert compiled["bytes_to_host"] == pytest.approx(eager["bytes_to_host"], rel=0.03)
    assert compiled["warnings"] == eager["warnings"] == []


@pytest.mark.parametrize("name, backend, alpha", everyday(CASES, [DAILY]))
def test_against_compiled_stock(name: str, backend: str, alpha: float) -> None:
    two = {"layers" if name == "plain" else "num_hidden_layers": 2}
    check(*compare(build(name, **two), {"alpha": alpha, "resident_layers": 1}, backend=backend))


@pytest.mark.slow
@pytest.mark.parametrize("name, how", [("llama", "model"), ("plain", "wrapped")])
def test_ways_to_compile(name: str, how: str) -> None:
    check(*compare(build(name), {"alpha": 0.5, "resident_layers": 1}, how=how))


@pytest.mark.parametrize("config", [{"alpha": 1.0, "resident_layers": LAYERS}, {"ablation": "full_recompute"}])
def test_layers_on_the_device(config: dict[str, Any]) -> None:
    off, got, eager = compare(Toy(), config, steps=1)
    assert off <= TOLERANCE and got["bytes_to_host"] == 0
    assert got["attention_recomputed"] == eager["attention_recomputed"] == (LAYERS if "ablation" in config else 0)
    assert got["gemm_flops_recomputed_fraction"] == pytest.approx(eager["gemm_flops_recomputed_fraction"], abs=0.01)


def test_a_wrong_row_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: one number of one supplied tensor is off, and the comparison fails."""

    def off_by_one(right: Any, *args: Any) -> torch.Tensor:
        tensor = right(*args)
        tensor[(0,) * tensor.dim()] += 1.0
        return tensor

    put_in(monkeypatch, CompiledCall, "_in_frame", off_by_one)
    off, *_ = compare(Toy(), {"alpha": 0.5, "resident_layers": 0}, steps=1)
    assert off > 100 * TOLERANCE


@pytest.mark.slow
def test_the_tolerance_is_that_of_stock() -> None:
    """Two compiled runs of stock that differ in what is saved differ by no more."""
    torch._dynamo.reset()
    batch = Batch.random(2, 40)
    want = run(compiled(build("llama"), backend="inductor"), batch)
    torch._dynamo.reset()
    with torch._functorch.config.patch(activation_memory_budget=0.0):
        got = run(compiled(build("llama"), backend="inductor"), batch)
    assert worst(got, want) <= TOLERANCE
