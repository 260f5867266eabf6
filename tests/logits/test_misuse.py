"""Bad use of lazy logits: exact, or one clear error."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from ds_memo import MemoError
from tests.logits.rig import BATCH, EXACT, HIDDEN, IDS, LENGTH, VOCAB, attached, causal, lazy_calls, logits_of
from tests.tiles.rig import strict


def total(logits: torch.Tensor) -> torch.Tensor:
    return logits.logsumexp(-1).sum()


def clamped_gradient(logits: torch.Tensor) -> None:
    logits.register_hook(lambda gradient: gradient.clamp(-1, 1))
    total(logits).backward()


def hooked_view(logits: torch.Tensor) -> None:
    logits[:, 1:].register_hook(lambda gradient: gradient / 2)
    logits.mul_(2)


class Dirty(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor) -> torch.Tensor:
        ctx.mark_dirty(logits)
        return logits

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient


REFUSED: dict[str, tuple[Callable[[torch.Tensor], Any], str]] = {
    "a hook that clamps": (clamped_gradient, "clamp.* of the gradient of lazy logits, which is never whole"),
    "a gradient of logits": (lambda y: torch.autograd.grad(total(y), y), "grad of the gradient of lazy logits"),
    "a gradient kept": (lambda y: y.retain_grad(), "retain_grad.* of the gradient of lazy logits"),
    "a hook on a view that changes": (hooked_view, "logits that have a hook, or a view with one, are changed in place"),
    "other strides": (lambda y: y.transpose_(0, 1), "transpose_ of lazy logits, which take no other memory"),
    "another memory": (
        lambda y: setattr(y, "data", torch.ones(y.shape)),
        "data of lazy logits, which take no other",
    ),
    "marked as changed": (lambda y: Dirty.apply(y).sum(), "marked lazy logits as changed"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_one_clear_error(name: str) -> None:
    use, says = REFUSED[name]
    model = causal()
    with attached(model, warns=""), pytest.raises(MemoError, match=says):
        use(logits_of(model))


def test_a_gradient_of_a_gradient_is_refused() -> None:
    model = causal()
    with attached(model), pytest.raises(MemoError, match="create_graph=True"):
        loss = F.cross_entropy(logits_of(model).view(-1, VOCAB), IDS.view(-1))
        torch.autograd.grad(loss, [model.lm_head.weight], create_graph=True)


# ---- under torch.func


HIDDEN_STATES = torch.randn(BATCH, LENGTH, HIDDEN, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def of_head(head: nn.Module) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda weight: total(torch.func.functional_call(head, {"weight": weight}, (HIDDEN_STATES,)))


HEAD_TRANSFORMS: dict[str, Callable[[nn.Module, torch.Tensor], Any]] = {
    "grad": lambda head, weight: torch.func.grad(of_head(head))(weight),
    "jvp": lambda head, weight: torch.func.jvp(of_head(head), (weight,), (weight,))[1],
    "vmap": lambda head, weight: torch.func.vmap(lambda rows: head(rows).logsumexp(-1))(HIDDEN_STATES),
}


@pytest.mark.parametrize("name", HEAD_TRANSFORMS)
def test_a_head_called_under_a_transform_is_stock(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(F, "linear", torch._C._nn.linear)  # ZeRO-3 leaves one in its place that knows no jvp
    head = causal().requires_grad_(False).lm_head
    want = HEAD_TRANSFORMS[name](head, head.weight.detach())
    model = causal().requires_grad_(False)
    with attached(model) as handle:
        torch.testing.assert_close(HEAD_TRANSFORMS[name](model.lm_head, head.weight.detach()), want, rtol=EXACT, atol=0)
        assert lazy_calls(handle) == 0


# ---- kept


def test_logits_read_after_a_step_are_of_the_weights_before() -> None:
    model = causal()
    want = logits_of(model).detach().logsumexp(-1)
    with attached(model):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        logits = logits_of(model)
        F.cross_entropy(logits.view(-1, VOCAB), IDS.view(-1)).backward()
        optimizer.step()
        torch.testing.assert_close(logits.detach().logsumexp(-1), want, rtol=EXACT, atol=0)
        assert not torch.equal(logits_of(model).logsumexp(-1), want)


CHANGES: dict[str, Callable[[nn.Module], Any]] = {
    "weights": lambda model: model.lm_head.weight.detach().mul_(2),
    "weights by .data": lambda model: model.lm_head.weight.data.mul_(2),
    "hidden states": lambda model: HIDDEN_NOW[0].detach().add_(1),
    "hidden states by .data": lambda model: HIDDEN_NOW[0].data.neg_(),
}
HIDDEN_NOW: list[torch.Tensor] = []
"""What the head was called with."""


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("read", [total, lambda y: F.cross_entropy(y.view(-1, VOCAB), IDS.view(-1)), lambda y: y.relu_()])
def test_logits_read_after_their_head_was_changed_by_hand(change: str, read: Callable[[torch.Tensor], Any]) -> None:
    model = causal()
    model.lm_head.register_forward_pre_hook(lambda _, args: HIDDEN_NOW.__setitem__(slice(None), args))
    with attached(model), strict():
        logits = logits_of(model)
        CHANGES[change](model)
        with pytest.raises(MemoError, match=r"after the output head's .* were changed in place"):
            read(logits).sum()


@pytest.mark.parametrize("change", ["weights", "weights by .data"])
def test_a_backward_after_the_head_was_changed(change: str) -> None:
    model = causal()
    with attached(model):
        loss = total(logits_of(model))
        CHANGES[change](model)
        with pytest.raises(MemoError, match=r"after the output head's .* were changed in place"):
            loss.backward()


FULL = torch.rand(BATCH, LENGTH, VOCAB, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
OPERANDS: dict[str, tuple[torch.Tensor, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]]] = {
    "a number": (torch.tensor(0.7, dtype=torch.float64), lambda y, x: y / x),
    "a vector": (torch.ones(VOCAB, dtype=torch.float64), lambda y, x: y + x),
    "a mask": (IDS[..., None] > 50, lambda y, x: y.masked_fill(x, 1.0)),
    "targets": (IDS.clone(), lambda y, x: F.cross_entropy(y.view(-1, VOCAB), x.view(-1), reduction="none")[:, None]),
    "class weights": (
        torch.ones(VOCAB, dtype=torch.float64),
        lambda y, x: F.cross_entropy(y.view(-1, VOCAB), IDS.view(-1), weight=x, reduction="none")[:, None] + y[0, :1, 0],
    ),
    "an index": (torch.arange(5), lambda y, x: y.index_select(-1, x)),
    "what is set": (torch.ones(()), lambda y, x: [y.__setitem__((..., 3), x), y][1]),
    "an index of what is set": (torch.arange(5), lambda y, x: [y.__setitem__((..., x), 0.5), y][1]),
    "as large": (FULL, lambda y, x: y + x),
}


@pytest.mark.parametrize("name, by_data", [*((name, number % 2 > 0) for number, name in enumerate(OPERANDS)), ("as large", True)])
def test_an_operand_that_changes_later(name: str, by_data: bool) -> None:
    """Small ones are copied; a change of a large one is refused."""
    operand, use = OPERANDS[name]

    def loss(model: nn.Module) -> torch.Tensor:
        mine = operand.clone()
        found = use(logits_of(model), mine)
        changes = mine.data if by_data else mine.detach()
        changes.logical_not_() if operand.dtype == torch.bool else changes.add_(1)
        return total(found)

    model = causal()
    want = loss(model)
    with attached(model):
        if name == "as large":
            with pytest.raises(MemoError, match="was changed in place after lazy logits were computed with it"):
                loss(model)
        else:
            torch.testing.assert_close(loss(model), want, rtol=EXACT, atol=0)
