"""Lazy logits and what surrounds a model: checkpoints, hooks, DDP, torch.compile, generation, copies, detach."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from ds_memo.logits.tensor import LazyLogits
from tests.everyday import everyday
from tests.logits.rig import (
    BATCH,
    EXACT,
    IDS,
    SINGLE,
    TILE,
    VOCAB,
    attached,
    causal,
    compare,
    lazy_calls,
    logits_of,
    step,
    with_labels,
)  # fmt: skip
from tests.models import assert_same_grads


def mean(logits: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.view(-1, VOCAB), IDS.view(-1))


def both(logits: torch.Tensor) -> torch.Tensor:
    return mean(logits) + logits.logsumexp(-1).mean()


def embeds(model: nn.Module) -> torch.Tensor:
    return model.get_input_embeddings()(IDS)


def around_model(model: nn.Module, reentrant: bool) -> torch.Tensor:
    return checkpoint(lambda x: both(model(inputs_embeds=x).logits), embeds(model), use_reentrant=reentrant)


def around_loss(model: nn.Module, reentrant: bool) -> torch.Tensor:
    return checkpoint(both, logits_of(model), use_reentrant=reentrant)


def logits_out(model: nn.Module, reentrant: bool) -> torch.Tensor:
    return both(checkpoint(lambda x: model(inputs_embeds=x).logits, embeds(model), use_reentrant=reentrant))


AROUND = [(way, reentrant) for way in (around_model, around_loss, logits_out) for reentrant in (False, True)]


@pytest.mark.parametrize(("way", "reentrant"), everyday(AROUND, AROUND[:1]))
def test_torch_checkpoint(way: Callable[..., torch.Tensor], reentrant: bool) -> None:
    compare(causal(), lambda model: way(model, reentrant), warns=None if way is around_loss else "torch.utils.checkpoint")


def twice(model: nn.Module) -> torch.Tensor:
    logits = logits_of(model)
    loss = mean(logits)
    loss.backward(retain_graph=True)
    return loss + logits.logsumexp(-1).mean()


def thrice_the_same(model: nn.Module) -> torch.Tensor:
    """The gradients that came with the loss are used once."""
    loss = mean(logits_of(model))
    loss.backward(retain_graph=True)
    (3 * loss).backward(retain_graph=True)
    return loss


def scaled_by_a_hook(model: nn.Module) -> torch.Tensor:
    """As DeepSpeed scales gradients."""
    logits = logits_of(model)
    logits.register_hook(lambda gradient: gradient / 4)
    logits.register_hook(lambda gradient: gradient * torch.tensor(3.0))
    return both(logits)


def two_calls(model: nn.Module) -> torch.Tensor:
    return both(logits_of(model)) + mean(model(input_ids=IDS.flip(0)).logits) * 3


def gradient_of_logits_alone(model: nn.Module) -> torch.Tensor:
    """autograd.grad, which accumulates nothing in parameters."""
    (found,) = torch.autograd.grad(mean(logits_of(model)), [model.get_output_embeddings().weight])
    return both(logits_of(model)) + found.square().sum()


def under_anomaly_detection(model: nn.Module) -> torch.Tensor:
    with torch.autograd.detect_anomaly():
        both(logits_of(model)).backward()
    return both(logits_of(model))


def saved_on_the_cpu(model: nn.Module) -> torch.Tensor:
    with torch.autograd.graph.save_on_cpu():
        return both(logits_of(model))


BACKWARDS = [
    twice, thrice_the_same, scaled_by_a_hook, two_calls, gradient_of_logits_alone, under_anomaly_detection, saved_on_the_cpu,
]  # fmt: skip


@pytest.mark.parametrize("loss", BACKWARDS)
@pytest.mark.filterwarnings("ignore:Anomaly Detection:UserWarning")
def test_backwards(loss: Callable[[nn.Module], torch.Tensor]) -> None:
    compare(causal(), loss, warns="" if loss is saved_on_the_cpu else None)  # memo tells that layers are swapped already


@pytest.mark.parametrize("how", [{}, {"find_unused_parameters": True}, {"static_graph": True}], ids=str)
def test_distributed_data_parallel(how: dict[str, Any]) -> None:
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:

        def loss(model: nn.Module) -> torch.Tensor:
            nonlocal wrapped  # alive until the backward
            wrapped = nn.parallel.DistributedDataParallel(model, **how)
            return both(wrapped(input_ids=IDS).logits)

        wrapped = None
        compare(causal(), loss)
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.slow
@pytest.mark.parametrize(("loss", "tolerance"), [(with_labels, SINGLE), (lambda model: both(logits_of(model)), EXACT)])
def test_a_compiled_model(loss: Callable[[nn.Module], torch.Tensor], tolerance: float) -> None:
    model = causal()
    want = step(model, loss)
    with attached(model, warns="") as handle:
        compiled = torch.compile(model, backend="aot_eager")
        torch.manual_seed(7)
        value = loss(compiled)
        value.backward()
        got = {"the loss": value.detach(), **{name: p.grad for name, p in model.named_parameters()}}
        assert lazy_calls(handle) == 1
    assert_same_grads(got, want, tolerance)


def test_generation_and_few_rows_are_stock() -> None:
    model = causal().eval()
    few = {"input_ids": IDS[:, : TILE // BATCH]}
    more = {"max_new_tokens": 6, "do_sample": False}
    with torch.no_grad():
        want, words = model(**few).logits, model.generate(IDS[:, :5], **more)
        with attached(model) as handle:
            assert torch.equal(model(**few).logits, want) and torch.equal(model.generate(IDS[:, :5], **more), words)
            assert lazy_calls(handle) == 0
            long = model.generate(IDS[:1], **more)
        assert torch.equal(long, model.generate(IDS[:1], **more))


def test_a_copy_of_an_attached_model_has_its_own_head() -> None:
    """DPO copies the model as its reference, and trains on."""
    model = causal()
    with attached(model, warns=""):
        other = copy.deepcopy(model)
        with torch.no_grad():
            other.lm_head.weight.mul_(2)
            twice = other(input_ids=IDS).logits
            once = logits_of(model)
            torch.testing.assert_close(twice.logsumexp(-1), (once * 2).logsumexp(-1))
            other.lm_head.weight.div_(2)
        want = step(other, lambda model: both(logits_of(model)))
        assert_same_grads(step(model, lambda model: both(logits_of(model))), want, EXACT)
    assert type(logits_of(other)) is torch.Tensor


def test_detach_gives_the_stock_head_back() -> None:
    model = causal()
    before = vars(model.lm_head).copy()
    with attached(model):
        assert isinstance(logits_of(model), LazyLogits)
    assert type(logits_of(model)) is torch.Tensor and vars(model.lm_head).keys() == before.keys()


def test_logits_that_outlive_the_handle_are_right() -> None:
    model = causal()
    want = both(logits_of(model)).detach()
    with attached(model):
        kept = logits_of(model)
    torch.testing.assert_close(both(kept).detach(), want, rtol=EXACT, atol=0)


def test_one_row_more_than_a_tile() -> None:
    ids = IDS.view(-1)[None, : TILE + 1]
    compare(causal(), lambda model: model(input_ids=ids).logits.logsumexp(-1).mean())
