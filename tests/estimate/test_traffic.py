"""Bytes that a layer moves through device memory: the formula against the ops of real layers."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from benchmarks.emulated_time import moved_bytes
from ds_memo.estimate import hardware
from ds_memo.estimate.costs import Costs
from ds_memo.estimate.layout import Layout
from ds_memo.estimate.model import from_config
from ds_memo.estimate.requests import working
from ds_memo.estimate.traffic import traffic
from tests.estimate.test_requests import BASE, REAL
from tests.everyday import everyday

GPT_NEOX = {"model_type": "gpt_neox", "hidden_act": "gelu_pytorch_tanh", "rotary_pct": 1.0, "use_parallel_residual": False}
OLMOE = {"model_type": "olmoe", "num_experts": 8, "num_experts_per_tok": 2}
COUNTED = {
    **{name: REAL[name] for name in ("llama", "qwen3", "gpt2", "mixtral", "qwen3_moe", "gemma", "gemma3", "qwen2_moe")},
    "gpt2, gelu_new": REAL["gpt2"] | {"activation_function": "gelu_new"},
    "gpt_neox": {**BASE, **GPT_NEOX, "num_key_value_heads": 4},
    "phi3": {**BASE, "model_type": "phi3"},
    "olmoe": {**BASE, **OLMOE},
}


class Moved(TorchDispatchMode):
    """Count the bytes that all ops but GEMMs and attention read and write."""

    def __init__(self) -> None:
        super().__init__()
        self.nbytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func._schema.name
        if func._overloadpacket not in flop_registry and "attention" not in name and "grouped_mm" not in name:
            self.nbytes += moved_bytes(func, args, kwargs or {}, result)
        return result


def moved(config: dict, layers: int, tokens: int, folder: Path) -> Counter[str]:
    from transformers import AutoConfig, AutoModelForCausalLM

    (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": layers, "n_layer": layers}))
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), dtype=torch.bfloat16).train()
    embeds = torch.randn(1, tokens, 64, dtype=torch.bfloat16)
    with Moved() as forward:
        loss = model(inputs_embeds=embeds, use_cache=False, logits_to_keep=1).logits.float().sum()
    with Moved() as backward:
        loss.backward()
    return Counter(forward=forward.nbytes, backward=backward.nbytes)


def per_token(of: Callable[[int, int], Counter[str]]) -> dict[str, float]:
    """Return one layer's bytes per token; gradients of weights drop out, as they do not grow."""
    runs = {(layers, tokens): of(layers, tokens) for layers in (1, 2) for tokens in (256, 512)}
    return {
        name: (runs[2, 512][name] - runs[1, 512][name] - runs[2, 256][name] + runs[1, 256][name]) / 256
        for name in ("forward", "backward")
    }


@pytest.mark.parametrize("name", everyday(COUNTED, ["llama", "gpt_neox"]))
def test_what_real_layers_move(name, tmp_path, monkeypatch):
    # DeepSpeed's ZeRO-3 leaves its own function here after an earlier test: it adds the bias in an op of its own.
    monkeypatch.setattr(torch.nn.functional, "linear", torch._C._nn.linear)
    want = per_token(lambda layers, tokens: moved(COUNTED[name], layers, tokens, tmp_path))
    got = traffic(from_config(COUNTED[name], name))
    assert {"forward": got.forward, "backward": got.backward} == pytest.approx(want, rel=0.1)


def test_a_replay_leaves_out_what_nothing_saves():
    llama, olmo = (from_config(REAL[name], name) for name in ("llama", "olmo2"))
    assert traffic(llama).forward - traffic(llama).replay == 3 * 2 * 64  # the last residual
    assert 0 < traffic(olmo).forward - traffic(olmo).replay <= 3 * 2 * 64  # the norm before it is needed


def test_fused_kernels_move_less_and_hold_less():
    for name in ("llama", "phi3", "gpt_neox", "gpt2, gelu_new"):
        model = from_config(COUNTED[name], name)
        fused = replace(model, fused=True)
        assert all(less < more for less, more in zip(traffic(fused), traffic(model), strict=True))
        assert working(fused, 64).backward <= working(model, 64).backward
    llama = replace(from_config(REAL["llama"], "llama"), fused=True)
    width = {"norms": 2 * 2 * 64, "rotary": 2 * (64 + 32), "residuals": 2 * 3 * 64, "product": 3 * 224}
    assert traffic(llama).forward == 2 * sum(width.values())


def test_megatrons_kernels_are_those_the_paper_is_calibrated_with():
    model = from_config(REAL["llama"], "llama")
    machine = replace(hardware.load("a800"), multiprocessors=0)  # Megatron fuses GEMMs, too
    megatrons, transformers = (Costs(model, machine, Layout(1), 1 << 16, megatron) for megatron in (False, True))
    assert transformers.layer.forward < megatrons.layer.forward and transformers.head_s < megatrons.head_s
    assert transformers.layer.gemm == megatrons.layer.gemm and transformers.layer.attention == megatrons.layer.attention
