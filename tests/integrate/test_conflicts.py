"""What cannot go together with memo: refused before DeepSpeed starts, or resolved, and always said."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch

import ds_memo
from ds_memo.integrate import conflicts
from tests.integrate.test_deepspeed import MEMO, ds_config, not_started, one_rank, start
from tests.models import LAYERS, VOCAB, Batch, assert_same, build, step

deepspeed = pytest.importorskip("deepspeed")
pytestmark = [
    pytest.mark.skipif(deepspeed.get_accelerator().device_name() != "cpu", reason="one CPU rank; the GPU check covers CUDA"),
    pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning"),
]
__all__ = ["not_started", "one_rank"]  # fixtures, for this module too


@pytest.mark.usefixtures("not_started")
def test_deepcompile() -> None:
    with pytest.raises(ds_memo.MemoConfigError, match=r"compile\.deepcompile compiles the layers.*remove it or memo"):
        start(ds_config(memo=MEMO, compile={"deepcompile": True}))


@pytest.mark.usefixtures("not_started")
@pytest.mark.parametrize("name, which", [("llama", "model.layers.1"), ("plain", "blocks.1")])
def test_a_compiled_layer(name: str, which: str) -> None:
    model = build(name)
    model.get_submodule(which).compile()
    with pytest.raises(ds_memo.MemoError, match=rf"layer {which} is compiled.*leave layers uncompiled"):
        start(ds_config(memo=MEMO), model=model)


@pytest.mark.usefixtures("not_started")
def test_offloaded_gradient_checkpointing() -> None:
    model = build("llama")
    model.gradient_checkpointing_enable(offload=True)
    with pytest.raises(ds_memo.MemoError, match=r'"offload": True} does what memo does in another way; remove one'):
        start(ds_config(memo=MEMO), model=model)


@pytest.mark.filterwarnings("error::ds_memo.errors.MemoWarning")
@pytest.mark.parametrize("options", [{"every_n_layers": 2}, {"gradient_checkpointing_kwargs": {"use_reentrant": True}}])
def test_gradient_checkpointing_of_any_kind_is_taken_over(options: dict[str, Any]) -> None:
    model = build("llama")
    want = step(copy.deepcopy(model), Batch.random(2, 9))
    model.gradient_checkpointing_enable(**options)
    handle = ds_memo.attach(model, {"alpha": 0.5, "resident_layers": 1})
    assert_same(step(model, Batch.random(2, 9)), want)
    assert handle.report()["frames"] == LAYERS
    handle.detach()


@pytest.mark.parametrize("name", ["llama", "gpt2", "mixtral"])
def test_use_cache_in_training(name: str) -> None:
    """Transformers drops the cache under gradient checkpointing, and says so; it would hold every layer's keys and values."""
    model = build(name)
    tokens = torch.randint(0, VOCAB, (2, 9))
    model(input_ids=tokens, labels=tokens, use_cache=True).loss.backward()
    want = {parameter: value.grad.clone() for parameter, value in model.named_parameters()}
    model.zero_grad()
    handle = ds_memo.attach(model, {"alpha": 0.5, "resident_layers": 1})
    out = model(input_ids=tokens, labels=tokens, use_cache=True)
    out.loss.backward()
    assert out.past_key_values is None or out.past_key_values.get_seq_length() == 0
    for parameter, value in model.named_parameters():
        torch.testing.assert_close(value.grad, want[parameter], rtol=1e-4, atol=1e-6)
    handle.detach()


def test_generation_keeps_its_cache() -> None:
    model = build("llama")
    handle = ds_memo.attach(model, {"alpha": 0.5})
    step(model, Batch.random(2, 9))
    frames = handle.report()["frames"]
    out = model.eval()(input_ids=torch.arange(1, 9)[None], use_cache=True)
    assert out.past_key_values.get_seq_length() == 8
    assert handle.report()["frames"] == frames
    handle.detach()


def test_a_mask_for_every_pair(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conflicts, "LONG", 32)
    model = build("llama")
    tokens = torch.randint(1, VOCAB, (2, 32))
    handle = ds_memo.attach(model, {"alpha": 0.5, "resident_layers": 2})
    with warnings.catch_warnings():
        warnings.simplefilter("error", ds_memo.MemoWarning)
        model(input_ids=tokens, labels=tokens, attention_mask=torch.ones_like(tokens)).loss.backward()  # nothing is padded
    padded = torch.ones_like(tokens)
    padded[0, 20:] = 0
    with pytest.warns(ds_memo.MemoWarning, match=r"layer model\.layers\.0 is given an attention mask of shape \(2, 1, 32, 32\)"):
        model(input_ids=tokens, labels=tokens, attention_mask=padded).loss.backward()
    assert any("grow with the square of the length" in line for line in handle.report()["warnings"])
    handle.detach()


def test_eager_attention_is_told() -> None:
    model = build("llama", attn_implementation="eager")
    handle = ds_memo.attach(model, {"alpha": 0.5})
    with pytest.warns(ds_memo.MemoWarning, match='attention that materialises its scores.*Use attn_implementation="sdpa"'):
        step(model, Batch.random(2, 9))
    handle.detach()
