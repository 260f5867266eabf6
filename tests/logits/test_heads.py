"""Output heads of the families: loss and gradients as with whole logits."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from ds_memo.logits import lazy_head
from ds_memo.logits.head_bytes import head_bytes
from tests.everyday import everyday
from tests.logits.rig import (
    EXACT,
    HIDDEN,
    IDS,
    LABELS,
    SINGLE,
    TILE,
    VOCAB,
    Witness,
    attached,
    causal,
    compare,
    lazy_calls,
    logits_of,
    lora,
    step,
    with_labels,
)
from tests.models import assert_same_grads

MAMBA = {"mamba_d_ssm": 16, "mamba_n_heads": 4, "mamba_d_head": 4, "mamba_n_groups": 1, "mamba_d_state": 4}


def own_loss(model: nn.Module) -> torch.Tensor:
    logits = logits_of(model)
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), LABELS[:, 1:].flatten()) + 1e-2 * logits.logsumexp(-1).square().mean()


HEADS: dict[str, tuple[str, dict[str, Any]]] = {
    "plain": ("Llama", {}),
    "tied": ("Llama", {"tie_word_embeddings": True}),
    "soft cap": ("Gemma2", {"final_logit_softcapping": 3.0, "attn_implementation": "eager"}),
    "scale": ("Cohere", {"logit_scale": 0.3}),
    "divisor": ("Granite", {"logits_scaling": 4.0}),
    "Qwen3": ("Qwen3", {}),
    "router loss": ("Mixtral", {"output_router_logits": True, "num_local_experts": 2, "experts_implementation": "eager"}),
    "bias": ("Phi", {"resid_pdrop": 0.0}),
    "multiplier": ("FalconH1", {"lm_head_multiplier": 0.4, **MAMBA}),
}


@pytest.mark.parametrize("name", everyday(HEADS, ["tied", "soft cap"]))
def test_a_family(name: str) -> None:
    kind, more = HEADS[name]
    eager = {"warns": "", "attention": "eager"} if name == "soft cap" else {}  # memo's attention rounds otherwise
    compare(causal(kind, **more), with_labels, SINGLE, **eager)
    compare(causal(kind, **more), own_loss, EXACT, **eager)


@pytest.mark.parametrize("frozen", ["lm_head.", "model."])
def test_what_is_frozen_has_no_gradient(frozen: str) -> None:
    model = causal()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not name.startswith(frozen))
    compare(model, with_labels, SINGLE)
    compare(model, own_loss)


SHIFTED = F.pad(LABELS, (0, 1), value=-100)[:, 1:].contiguous()
PADDED = torch.arange(IDS.shape[1]) < torch.tensor([[280], [120]])
CALLS: dict[str, dict[str, Any]] = {
    "num_items_in_batch": {"num_items_in_batch": torch.tensor(370)},
    "shift_labels": {"shift_labels": SHIFTED},
    "padding": {"attention_mask": PADDED.long()},
    "logits_to_keep": {"logits_to_keep": 290, "labels": LABELS[:, -290:]},
}


@pytest.mark.parametrize("name", CALLS)
def test_how_a_script_calls_the_model(name: str) -> None:
    compare(causal(), lambda model: model(**{"input_ids": IDS, "labels": LABELS, **CALLS[name]}).loss, SINGLE)


ADAPTERS: dict[str, dict[str, Any]] = {
    "in layers": {"target_modules": ["q_proj"]},
    "on the head": {"target_modules": ["q_proj", "lm_head"]},
    "DoRA": {"target_modules": ["lm_head"], "use_dora": True},
    "modules_to_save": {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]},
}


@pytest.mark.parametrize("name", everyday(ADAPTERS, ["on the head"]))
def test_adapters(name: str) -> None:
    model = lora(causal(), **ADAPTERS[name])
    compare(model, with_labels, SINGLE)
    compare(model, own_loss)


def wider(model: nn.Module) -> nn.Module:
    model.resize_token_embeddings(VOCAB + 31, mean_resizing=False)
    return model.double()


def tied(model: nn.Module) -> None:
    model.config.tie_word_embeddings = True
    model.lm_head.weight = model.model.embed_tokens.weight
    model.tie_weights()


LATER: dict[str, tuple[Callable[[], nn.Module], Callable[[nn.Module], Any]]] = {
    "resized": (lambda: wider(causal()), lambda model: model.resize_token_embeddings(VOCAB)),
    "resized, tied": (lambda: wider(causal(tie_word_embeddings=True)), lambda model: model.resize_token_embeddings(VOCAB)),
    "set": (causal, lambda model: model.set_output_embeddings(nn.Linear(HIDDEN, VOCAB).double())),
    "another weight": (
        lambda: wider(causal()),
        lambda model: setattr(model.lm_head, "weight", nn.Parameter(torch.rand(VOCAB, HIDDEN).double())),
    ),
    "tied": (causal, tied),
    "LoRA": (causal, lambda model: lora(model, target_modules=["q_proj", "lm_head"])),
    "modules_to_save": (causal, lambda model: lora(model, target_modules=["q_proj"], modules_to_save=["lm_head"])),
}


@pytest.mark.parametrize("name", LATER)
def test_a_head_that_changes_while_attached(name: str) -> None:
    make, change = LATER[name]
    model = make()
    former = model.lm_head
    with attached(model) as handle:
        step(model, own_loss)
        changed = change(model)
        whole = changed if name in ("LoRA", "modules_to_save") else model
        model.zero_grad()
        with Witness() as witness:
            got = step(whole, own_loss)
        (head,) = handle._session.heads
        assert head.module() is model.get_output_embeddings() and head.lazy_calls and witness.rows <= TILE
        assert head.bytes == head_bytes(TILE, VOCAB, HIDDEN, sum(each.numel() for each in head.module().parameters()), 8)
        assert ("forward" in vars(former)) is (former is head.module())
    model.zero_grad()
    assert_same_grads(got, step(whole, own_loss), EXACT)
    assert "forward" not in {**vars(former), **vars(head.module())}


def test_dropout_in_the_head_is_stock_until_evaluation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lazy_head, "TILE_BYTES", 0)  # any logits are large
    model = lora(causal(), target_modules=["lm_head"], lora_dropout=0.5)
    want = step(model, own_loss)
    with attached(model, warns="has dropout") as handle:
        assert_same_grads(step(model, own_loss), want, EXACT)
        assert lazy_calls(handle) == 0
        own_loss(model.eval())
        assert lazy_calls(handle) == 1


@pytest.mark.parametrize("how", ["a list", "a weight's place"])
def test_a_head_that_reads_another_tensor_is_stock(how: str) -> None:
    """Tiles would give that tensor no gradient."""
    found = []
    for memo in (False, True):
        model, factor = causal(), torch.tensor(0.5, dtype=torch.float64, requires_grad=True)
        head = model.lm_head
        if how == "a list":
            head.forward, head.held = (lambda x, head=head: nn.functional.linear(x, head.weight) * head.held[0]), [factor]
        else:
            weight = head.weight.detach()
            del head.weight
            head.weight = weight * factor
        with attached(model, warns="") if memo else nullcontext() as handle:
            logits_of(model).logsumexp(-1).sum().backward()
            assert not memo or lazy_calls(handle) == 0
        found.append(factor.grad)
    torch.testing.assert_close(*found, rtol=EXACT, atol=0)


def to_the_model_without_adapters(model: nn.Module) -> torch.Tensor:
    """As DPO and GRPO find a reference under PEFT."""
    with torch.no_grad(), model.disable_adapter():
        theirs = logits_of(model)
    logs = logits_of(model).log_softmax(-1)
    return (logs.exp() * (logs - theirs.log_softmax(-1))).sum(-1).mean()


def test_a_reference_is_the_model_without_its_adapters() -> None:
    """The head's tiles are computed later, when they are on again."""
    compare(lora(causal(), target_modules=["q_proj", "lm_head"]), to_the_model_without_adapters)


def test_logits_of_evaluation_are_read_while_training() -> None:
    model = lora(causal(), target_modules=["lm_head"], lora_dropout=0.5).eval()
    want = logits_of(model).logsumexp(-1).detach()
    with attached(model):
        logits = logits_of(model)
        model.train()
        torch.testing.assert_close(logits.logsumexp(-1).detach(), want, rtol=EXACT, atol=0)
    assert model.training and all(module.training for module in model.modules())


def under_autocast(model: nn.Module) -> torch.Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return with_labels(model)


HALF: dict[str, tuple[torch.dtype, Callable[[nn.Module], torch.Tensor]]] = {
    "weights": (torch.bfloat16, with_labels),
    "autocast": (torch.float32, under_autocast),
}


@pytest.mark.parametrize("name", HALF)
def test_bfloat16_is_as_near_to_float64_as_stock(name: str) -> None:
    """Gradients of the head are summed in float32 over tiles."""
    dtype, loss = HALF[name]
    model = causal(dtype=dtype)
    stock = step(model, loss)
    with attached(model):
        lazy = step(model, loss)
    exact = step(model.double(), with_labels)

    def apart(found: dict[str, Any], key: str) -> float:
        return float((found[key].double() - exact[key]).norm() / exact[key].norm())

    for key in ("the loss", "lm_head.weight", "model.norm.weight", "model.embed_tokens.weight"):
        assert apart(lazy, key) <= 1.1 * apart(stock, key), f"{key}: {apart(lazy, key):.2e}, stock {apart(stock, key):.2e}"
