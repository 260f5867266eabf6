"""Attention of Transformers that no dispatch mode observes, FlexAttention and flash-attn 4, becomes a saved op."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from transformers import modeling_flash_attention_utils as flash
from transformers.integrations import flex_attention as flex

import ds_memo
from ds_memo.hf.attention import keep_unobserved_attention
from tests.models import LAYERS, MODELS, Batch, assert_same, step
from tests.remat.test_functions import Below, ran


@pytest.fixture(autouse=True)
def as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every test finds Transformers as it is imported, and leaves it so."""
    for module, name in ((flex, "compile_friendly_flex_attention"), (flash, "lazy_import_flash_attention")):
        function = getattr(module, name)
        monkeypatch.setattr(module, name, getattr(function, "__wrapped__", function))
    monkeypatch.setattr(flash, "_loaded_implementation", None, raising=False)  # not in Transformers 4.56


def flash_attn_func(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, softmax_scale: float | None = None, causal: bool = False
) -> torch.Tensor:
    """Stand in for flash-attn 4: its layout, (b, s, heads, d), and the used part of its signature."""
    assert causal
    k, v = (x.repeat_interleave(q.shape[2] // x.shape[2], dim=2) for x in (k, v))
    return Below.apply(*(x.transpose(1, 2) for x in (q, k, v)))[0].transpose(1, 2)


def of_flex_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **kwargs: Any) -> Any:
    """Stand in for FlexAttention: PyTorch's own has no backward on a CPU."""
    ran.append("flex")
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=kwargs["scale"])
    return out if kwargs["return_aux"] is None else (out, None)


def compare(implementation: str) -> None:
    torch.manual_seed(0)
    model = MODELS["qwen3"](attn_implementation="sdpa")
    model.config._attn_implementation = implementation  # set_attn_implementation() asks for a GPU
    batches = [Batch.random(2, length) for length in (17, 17, 24)]
    wants = [step(model, batch, use_cache=False) for batch in batches]
    handle = ds_memo.attach(model, {"alpha": 0.5, "resident_layers": 1})
    ran.clear()
    for batch, want in zip(batches, wants, strict=True):
        assert_same(step(model, batch, use_cache=False), want)
    report = handle.report()
    assert len(ran) == LAYERS * len(batches), "forwards alone"
    assert report["attention_recomputed"] == 0 and not report["warnings"]
    handle.detach()


def test_flash_attn_4(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = (flash_attn_func, flash_attn_func, None, flash._pad_input, flash._unpad_input)
    monkeypatch.setattr(flash, "_lazy_imports", lambda *args, **kwargs: loaded)
    compare("flash_attention_4")


@pytest.mark.slow
def test_flex_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    torch._dynamo.reset()
    monkeypatch.setattr(flex.WrappedFlexAttention, "__call__", lambda self: of_flex_attention)
    compare("flex_attention")


def test_packages_whose_ops_are_known_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def function() -> None:
        pass

    function.__module__ = "flash_attn.flash_attn_interface"
    monkeypatch.setattr(flash, "_lazy_imports", lambda *args, **kwargs: (function, None, None, None, None))
    monkeypatch.setattr(flash, "_lazy_define_process_function", lambda function: function)
    keep_unobserved_attention()
    assert flash.lazy_import_flash_attention("flash_attention_2")[0][:2] == (function, None)
