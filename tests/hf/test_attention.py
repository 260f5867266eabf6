"""Attention of Transformers that no dispatch mode observes, FlexAttention and flash-attn 4, becomes a saved op."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from transformers import modeling_flash_attention_utils as flash
from transformers.integrations import flex_attention as flex

import ds_memo
from ds_memo.attention_kernel import FA4
from ds_memo.hf.attention import keep_unobserved_attention
from tests import attention_kernels
from tests.models import LAYERS, MODELS, Batch, assert_same, step
from tests.remat.test_flash_kernels import active, on_a_cpu  # noqa: F401
from tests.remat.test_functions import Below, ran
from tests.tiles import rig as tiled


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


def of_cute(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int | None, int | None] = (None, None),
) -> torch.Tensor:
    """Stand in for flash-attn 4 with its windows."""
    ran.append("package")
    return attention_kernels.aten._flash_attention_forward(
        q, k, v, None, None, q.shape[1], k.shape[1], 0.0, causal, False, scale=softmax_scale,
        window_size_left=window_size[0], window_size_right=window_size[1],
    )[0]  # fmt: skip


of_cute.__module__ = "flash_attn.cute.interface"


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_flash_attn_4_in_tiles(name: str, groups: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch's flash op runs it, which tiles cut and split by heads. A window is the package's own call, which they cannot."""
    loaded = (of_cute, of_cute, None, flash._pad_input, flash._unpad_input)
    monkeypatch.setattr(flash, "_lazy_imports", lambda *args, **kwargs: loaded)
    torch.manual_seed(0)
    model = tiled.small(name)
    batch = Batch.random(2, 45)
    with active(monkeypatch, FA4) as found, tiled.strict(quiet=True):
        model.config._attn_implementation = "flash_attention_4"
        want = step(model, batch, use_cache=False)
        handle = ds_memo.attach(model, tiled.config(alpha=0.5, groups=groups))
        ran.clear()
        found.clear()
        for _ in range(2):
            assert_same(step(model, batch, use_cache=False), want)
        report = handle.report()
        handle.detach()
    if name == "mistral":
        assert set(ran) == {"package"} and not report["attention_recomputed"]
        assert all("keep_whole" in why for why in report["tiles"]["not_tiled"].values())
        return
    tiled.assert_was_tiled(report)
    assert not ran and not report["attention_recomputed"]
    backwards = sum(op == f"{FA4}:_flash_attention_backward" for op in found)
    assert backwards == 2 * tiled.LAYERS * groups and len(found) == backwards + 2 * tiled.LAYERS
    assert list(report["attention_kernel"]) == [FA4]


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
