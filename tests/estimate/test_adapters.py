"""Estimates of LoRA and QLoRA: states, kept bytes and FLOPs, against PEFT's and bitsandbytes' real modules."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from ds_memo.estimate import model as models
from ds_memo.estimate.costs import Costs
from ds_memo.estimate.errors import EstimateError
from ds_memo.estimate.estimate import estimate
from ds_memo.estimate.hardware import load as hardware
from ds_memo.estimate.layout import GpuLayout
from ds_memo.estimate.methods import state_bytes
from ds_memo.estimate.model import Model, from_config
from ds_memo.estimate.question import Question
from ds_memo.profile.caught_call import layer_calls
from ds_memo.profile.layer import measure
from ds_memo.runtime.attach import attach_model
from tests.estimate.models import LLAMA_8B, SMALL
from tests.quantized import stored_bytes, with_adapters

CPU, RTX4090 = torch.device("cpu"), hardware("rtx4090")
CONFIG = SMALL["llama"] | {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4}
"""Wide enough for whole blocks of scales."""
WAYS = pytest.mark.parametrize("quantized", [False, True], ids=["lora", "qlora"])


def estimated(quantized: bool | None, rank: int = 4) -> Model:
    """Return the estimator's model; None: all parameters are trained."""
    return from_config(dict(CONFIG), "small", rank=None if quantized is None else rank, quantized=bool(quantized))


def real(quantized: bool) -> torch.nn.Module:
    config = {key: value for key, value in CONFIG.items() if key != "model_type"}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **config), dtype=torch.bfloat16)
    return with_adapters(model, 4, quantized)


def states(model: Model) -> dict[str, float]:
    return state_bytes(Costs(model, RTX4090, GpuLayout(1, zero=0), 1024))


@WAYS
def test_states_are_those_of_a_real_model(quantized: bool) -> None:
    found, model = states(estimated(quantized)), real(quantized)
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    in_bf16 = sum(p.nbytes for p in model.parameters() if p.requires_grad)
    assert found["parameters"] == pytest.approx(stored_bytes(model) + in_bf16, rel=1e-4)
    assert (found["gradients"], found["optimizer states"]) == (2 * trained, 12 * trained)


def test_states_of_all_parameters_are_not_those_of_adapters() -> None:
    """The comparisons above tell the ways from each other."""
    full, lora, qlora = (states(estimated(quantized)) for quantized in (None, False, True))
    assert full["gradients"] > 10 * lora["gradients"] == 10 * qlora["gradients"]
    assert qlora["parameters"] < 0.6 * lora["parameters"]


@WAYS
def test_a_layer_keeps_what_a_real_one_keeps(quantized: bool) -> None:
    """By memo's recipe: outputs in order, roles and bytes; what autograd saves; FLOPs of products and attention."""
    model = real(quantized)
    memo = attach_model(model, {"plan": {"enabled": False}, "host_memory_gib": 0.01}, device=CPU)
    try:
        given, kinds = {"inputs_embeds": torch.randn(1, 1024, 256, dtype=torch.bfloat16)}, [0] * len(memo.layers)
        (call,) = layer_calls(memo.remat.instead, CPU, model, (), given, kinds, bool).values()
        there = measure(call, 1024, CPU)
    finally:
        memo.detach()
    here = estimated(quantized).measured._sample(0, 1024, 1, RTX4090)
    assert [(output.role, output.nbytes) for output in here.outputs] == [(o.role, o.nbytes) for o in there.outputs]
    assert here.no_recompute_bytes == pytest.approx(there.no_recompute_bytes, rel=0.03)
    assert (here.gemm_flops, here.attention_flops) == (there.gemm_flops, there.attention_flops)
    without = estimated(None).measured._sample(0, 1024, 1, RTX4090)
    assert len(without.outputs) < len(here.outputs)


def test_frozen_products_have_no_gradient_of_the_weight() -> None:
    """4 of 6 FLOPs for each parameter and token remain, beside 6 for each of an adapter; attention has as many as before."""
    s, rank = 4096, 32
    full, lora = (models.load(str(LLAMA_8B), rank=r) for r in (None, rank))
    frozen = full.parameters - full.vocab * full.hidden
    norms = (2 * full.layers + 1) * full.hidden
    assert lora.adapters is not None and lora.adapters.parameters == 83_886_080  # PEFT prints as many
    less = full.sequence_flops(s) - lora.sequence_flops(s)
    assert less == pytest.approx(2.0 * s * (frozen - norms) - 6.0 * s * lora.trained, rel=1e-6)
    times = [Costs(model, RTX4090, GpuLayout(1, zero=0), 1 << 15) for model in (full, lora)]
    assert times[1].head_s < times[0].head_s and times[1].layers()[0].backward_s < times[0].layers()[0].backward_s


def test_unpacking_takes_time_for_every_tile() -> None:
    lora, qlora = (Costs(estimated(quantized), RTX4090, GpuLayout(1, zero=0), 1 << 15) for quantized in (False, True))
    (tiles,), (whole,), (packed,) = lora.tilings(4096), [lora.layers()[0]], [qlora.layers()[0]]
    assert packed.forward_s > whole.forward_s and packed.backward_s > whole.backward_s
    in_tiles = qlora.layers(tiles)[0].forward_s - lora.layers(tiles)[0].forward_s
    assert in_tiles > 1.2 * (packed.forward_s - whole.forward_s) > 0


def test_answers_say_what_is_trained() -> None:
    answer = estimate(Question(estimated(True), RTX4090, 1, 2048, tile_tokens=0))
    assert answer.status == "ok" and answer.layout.zero == 0
    adapters = answer.as_json()["adapters"]
    assert (adapters["rank"], adapters["quantized"], adapters["parameters"]) == (4, True, answer.question.model.trained)
    assert any("assumed of rtx4090" in note and "attention_kernels.flash.backward" in note for note in answer.notes)


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        ({"offload": "optimizer"}, "--offload optimizer with QLoRA of rank 4"),
        ({"tp": 2}, "--tp 2 with QLoRA of rank 4"),
        ({"zero": 3}, "--zero 3 with QLoRA of rank 4"),
    ],
)
def test_layouts_that_are_not_estimated_are_refused(asked: dict, says: str) -> None:
    with pytest.raises(EstimateError, match=says):
        estimate(Question(estimated(True), RTX4090, 2, 2048, **asked))


@pytest.mark.parametrize(("name", "says"), [("gpt2", "have no torch.nn.Linear"), ("deepseek_v3", "PEFT adapts the experts")])
def test_models_whose_adapters_are_not_estimated_are_refused(name: str, says: str) -> None:
    with pytest.raises(EstimateError, match=says):
        from_config(dict(SMALL[name]), name, rank=4)
