"""What cannot go together with memo: refused before DeepSpeed starts, or resolved, and always said."""

from __future__ import annotations

import copy
import functools
import inspect
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from transformers import DynamicCache

import ds_memo
from ds_memo.runtime import conflicts
from tests import architectures
from tests.deepspeed.engines import ON_ONE_CPU_RANK
from tests.models import LAYERS, VOCAB, Batch, assert_same, assert_same_grads, build, gradients, step

pytestmark = ON_ONE_CPU_RANK


@pytest.mark.filterwarnings("error::ds_memo.errors.MemoWarning")
@pytest.mark.parametrize("options", [{"every_n_layers": 2}, {"gradient_checkpointing_kwargs": {"use_reentrant": True}}])
def test_gradient_checkpointing_of_any_kind_is_taken_over(options: dict[str, Any]) -> None:
    model = build("llama")
    want = step(copy.deepcopy(model), Batch.random(2, 9))
    model.gradient_checkpointing_enable(**options)
    handle = ds_memo.attach(model, {"alpha": 0.5, "resident_layers": 1})
    assert_same(step(model, Batch.random(2, 9)), want)
    assert handle.report()["frames"] == LAYERS


class OffloadActivations(torch.autograd.graph.saved_tensors_hooks):
    """As TRL's (trl/models/activation_offloading.py): its hooks are functions inside of __init__."""

    def __init__(self) -> None:
        def pack_tensor(tensor: torch.Tensor) -> torch.Tensor:
            return tensor.clone()

        super().__init__(pack_tensor, lambda tensor: tensor)


def deepspeeds() -> Any:
    from deepspeed.runtime.activation_checkpointing.offload_activations import CheckpointHiddenStatesOffload

    return CheckpointHiddenStatesOffload()


@pytest.mark.parametrize("around", [OffloadActivations, deepspeeds, torch.autograd.graph.save_on_cpu])
def test_offloading_around_the_model(around: Callable[[], Any]) -> None:
    model, batch = build("llama"), Batch.random(2, 16)
    stock = copy.deepcopy(model)
    ds_memo.attach(model, {"alpha": 0.5, "resident_layers": 1})
    with pytest.warns(ds_memo.MemoWarning, match="activations are offloaded around this model, too"), around():
        assert_same(step(model, batch), step(stock, batch))


def test_other_hooks_around_the_model_are_no_offloading() -> None:
    handle = ds_memo.attach(model := build("llama"), {"alpha": 0.5, "resident_layers": 1})
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor):
        step(model, Batch.random(2, 16))
    assert not handle.report()["warnings"]


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_use_cache_in_training(name: str) -> None:
    """Transformers drops the cache under gradient checkpointing, and says so; it would hold every layer's keys and values."""
    model = build(name)
    tokens = torch.randint(0, VOCAB, (2, 9))
    model(input_ids=tokens, labels=tokens, use_cache=True).loss.backward()
    want = {parameter: value.grad.clone() for parameter, value in model.named_parameters()}
    model.zero_grad()
    ds_memo.attach(model, {"alpha": 0.5, "resident_layers": 1})
    out = model(input_ids=tokens, labels=tokens, use_cache=True)
    out.loss.backward()
    assert out.past_key_values is None or out.past_key_values.get_seq_length() == 0
    for parameter, value in model.named_parameters():
        torch.testing.assert_close(value.grad, want[parameter], rtol=1e-4, atol=1e-6)


def test_generation_keeps_its_cache() -> None:
    model = build("llama")
    handle = ds_memo.attach(model, {"alpha": 0.5})
    step(model, Batch.random(2, 9))
    frames = handle.report()["frames"]
    out = model.eval()(input_ids=torch.arange(1, 9)[None], use_cache=True)
    assert out.past_key_values.get_seq_length() == 8
    assert handle.report()["frames"] == frames


@pytest.mark.parametrize("inside", ["itself", "a wrapper"])
def test_generation_in_training_mode(inside: str) -> None:
    """Samples in the middle of training: without its cache a model would see its last token only, without a word."""

    class Wrapper(torch.nn.Module):
        def __init__(self, model: torch.nn.Module) -> None:
            super().__init__()
            self.model = model

        def forward(self, **kwargs: Any) -> Any:
            return self.model(**kwargs)

    model = build("llama")
    tokens = torch.randint(1, VOCAB, (2, 8))
    generate = functools.partial(model.generate, tokens, max_new_tokens=6, do_sample=False, eos_token_id=None)
    want = generate()
    outer = model if inside == "itself" else Wrapper(model)
    handle = ds_memo.attach(outer, {"alpha": 0.5, "resident_layers": 1})
    for _ in range(2):
        assert torch.equal(generate(), want)
        outer(input_ids=tokens, labels=tokens).loss.backward()
    assert handle.report()["frames"] == 2 * LAYERS
    handle.detach()
    assert not model.is_gradient_checkpointing


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


CACHES = {"llama": "past_key_values", "mamba": "cache_params"}
"""Their names until Transformers 5.24, which calls both ``cache`` and takes the old names, too."""


def names_of_caches(kind: str, model: nn.Module) -> list[str]:
    return [CACHES[kind], *({"cache"} & inspect.signature(model.forward).parameters.keys())]


@pytest.mark.filterwarnings("ignore::FutureWarning")  # the old name
@pytest.mark.parametrize("wrapped", [False, True])
@pytest.mark.parametrize("kind", CACHES)
def test_earlier_tokens_given_in_training(kind: str, wrapped: bool) -> None:
    """Transformers would drop them without a word to the loss; without training they are welcome."""
    model = architectures.build(kind)
    ds_memo.attach(nn.ModuleDict({"model": model}) if wrapped else model, {"alpha": 0.5, "resident_layers": 1})
    ids = torch.arange(3, 20)[None]
    for name in names_of_caches(kind, model):
        with torch.no_grad():
            cache = model(input_ids=ids[:, :8], use_cache=True)[CACHES[kind]]
            after = model(input_ids=ids[:, 8:9], **{name: cache}).logits
        torch.testing.assert_close(after, model(input_ids=ids[:, :9]).logits[:, -1:])
        with pytest.raises(ds_memo.MemoError, match=r"(Llama|Mamba)\w+ was given earlier tokens in training"):
            model(input_ids=ids[:, 9:], **{name: cache})
        assert model(input_ids=ids, **{name: None}).logits.requires_grad


@pytest.mark.parametrize("kind", CACHES)
def test_a_cache_without_tokens_given_in_training(kind: str) -> None:
    """Exact where layers get none; before Transformers 5.24 state spaces do, and each replay would write to it."""
    model, ids = architectures.build(kind), torch.arange(3, 20)[None]
    stock = copy.deepcopy(model)
    ds_memo.attach(model, {"alpha": 0.5, "resident_layers": 1})
    name = names_of_caches(kind, model)[-1]

    def grads(of: nn.Module) -> Any:
        of(input_ids=ids, labels=ids, **{name: DynamicCache(config=of.config)}).loss.backward()
        return gradients(of)

    if name == "cache_params":
        with pytest.raises(ds_memo.MemoError, match="MambaModel was given earlier tokens in training"):
            grads(model)
    else:
        assert_same_grads(grads(model), grads(stock))
