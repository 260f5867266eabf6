"""Changes in place: what lazy logits, their views and ordinary tensors hold afterwards, and all gradients, are stock's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: F401  programs use it
from torch import nn

from ds_memo import MemoError
from ds_memo.logits import tensor
from ds_memo.logits.shared_memory import Memory
from tests.everyday import everyday
from tests.logits.rig import BATCH, EXACT, IDS, LENGTH, VOCAB, attached, causal, compare, logits_of, step
from tests.models import Different, assert_same_grads

_DRAWN = torch.Generator().manual_seed(5)
FULL = torch.rand(BATCH, LENGTH, VOCAB, generator=_DRAWN, dtype=torch.float64) - 0.5
SOME = torch.randint(0, VOCAB, (BATCH, LENGTH, 2), generator=_DRAWN)
PIECE = torch.rand(BATCH, LENGTH, 2, generator=_DRAWN, dtype=torch.float64)
COLUMNS = torch.tensor([2, 5])


def total(logits: torch.Tensor) -> torch.Tensor:
    return logits.logsumexp(-1).sum()


class Square(torch.autograd.Function):
    """As fused losses do, it takes logits and returns a gradient that is whole."""

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(logits)
        return (logits * logits).sum(-1)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return 2 * ctx.saved_tensors[0] * gradient[..., None]


RECORDED = """
    x.mul_(2)  x.div_(0.7)  x.sub_(FULL)  x.clamp_(-1, 1)  x.tanh_()  x.masked_fill_(FULL > 0, -9.0)
    x[..., 5] = -9.0  x[..., 3:6] = 0.5  x[FULL > 0] = 0.5  x[IDS > 50] = 0.5  x[:, :, COLUMNS] = 0.5
    x[x < x.topk(20, -1).values[..., -1:].detach()] = -1e9  x[:, :, 7:9] = torch.tensor(0.25)
    x.view(-1, VOCAB).mul_(2)  x.reshape(x.shape).add_(1)  x[:, 1:].contiguous().mul_(2)  x.clone().mul_(2)
"""
"""Changes that make nothing whole."""
WHOLE = """
    x.scatter_(-1, SOME, -9.0)  x.index_fill_(-1, COLUMNS, -9.0)  x.copy_(FULL)  x.zero_()  x.fill_(1.0)  x.relu_()
    F.relu(x, inplace=True)  x.cumsum_(-1)  torch._foreach_mul_([x], 2.0)  nn.init.constant_(x, 2.0)
    x.lerp_(FULL, 0.5)  x.mT.mul_(2)  x[..., 3].fill_(-9.0)  x[..., 3] *= 2  x.select(-1, 0).fill_(1.0)
    x.scatter_add_(-1, SOME, PIECE)  x[:, SOME[0, :, 0]] = 0.1
    x.addcmul_(FULL, FULL)  x.untyped_storage()  x.data_ptr()
    nn.ReLU(inplace=True)(x)  x[..., COLUMNS] += PIECE  x[:, 1:, [1, 0]] = 2  x[1:][0] = x[0]
    x[..., 3:6] *= 2  x[..., 3:6].sub_(1)  x[:, 5:9] /= 3  x[:, 5:9, :7].mul_(2)  x[:, 3] = 0.0  x[0].mul_(2)
    x[:1].mul_(2).add_(1)  torch.ops.aten.mul_(x, 2)  x.detach().mul_(2)  x[:, 1:].detach().add_(1)
    x.index_put_((torch.tensor([1]),), FULL[0])
"""
THROUGH_OTHERS = """
    x.narrow(-1, 0, 3).zero_()  x.flatten().mul_(2)  x.expand(BATCH, LENGTH, VOCAB).mul_(2)
"""
"""Changes of ordinary tensors that share the memory: an autograd.Function that gets the logits then is refused."""


def programs(text: str) -> list[str]:
    return [each.strip() for line in text.splitlines() for each in line.split("  ") if each.strip()]


def run(program: str, logits: torch.Tensor) -> None:
    exec(program, globals() | {"x": logits})


READS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "values": lambda y: (y.double() * torch.linspace(0.5, 2, y.shape[-1])).sin().sum(),
    "function": lambda y: Square.apply(y).sum(),
    "without gradients": lambda y: y.sin().sum(),
}


PROGRAMS = [*programs(RECORDED), *programs(WHOLE)]
EACH = [(program, [*READS][number % len(READS)]) for number, program in enumerate(PROGRAMS)]


@pytest.mark.parametrize("program, read", everyday(EACH, EACH[::2]))
def test_logits_and_their_views_follow(program: str, read: str) -> None:
    def use(model: nn.Module) -> torch.Tensor:
        logits = logits_of(model)
        before = [logits, logits[:, 1:], logits[..., 4:], logits.transpose(1, 2), logits.detach(), logits.view(-1, VOCAB)]
        copies = [logits * 1, logits[:, 2:].contiguous(), logits[IDS > 50]]
        run(program, logits)
        return torch.stack([READS[read](each) for each in (*before, *copies)]).sum()

    compare_runs(use, read != "without gradients")


@pytest.mark.parametrize("program", programs(THROUGH_OTHERS))
def test_a_change_through_an_ordinary_tensor(program: str) -> None:
    test_logits_and_their_views_follow(program, "values")
    with pytest.raises(MemoError, match="was given lazy logits that became real and were then changed"):
        test_logits_and_their_views_follow(program, "function")


def compare_runs(use: Callable[[nn.Module], torch.Tensor], grad: bool = True) -> None:
    def found(model: nn.Module) -> dict[str, torch.Tensor | None]:
        with torch.set_grad_enabled(grad):
            return step(model, use) if grad else {"the loss": use(model)}

    model = causal()
    want = found(model)
    with attached(model, warns=""):
        assert_same_grads(found(model), want, EXACT)


@pytest.mark.parametrize("program", everyday(programs(RECORDED), programs(RECORDED)[::4]))
def test_what_is_recorded_makes_nothing_whole(program: str) -> None:
    def loss(model: nn.Module) -> torch.Tensor:
        logits = logits_of(model)
        run(program, logits)
        return total(logits) + total(logits[:, 3:])

    compare(causal(), loss)


INTO_OTHERS = """
    b += x  b.mul_(x)  b[x > 0] = 0.5  b[0] = x[1]  torch.add(x, 1, out=b)  b[x > 0] += 1  b.copy_(x)
    b[:, 2:4] = x[:, :2]
"""


@pytest.mark.parametrize("program", programs(INTO_OTHERS))
def test_an_ordinary_tensor_takes_logits(program: str) -> None:
    def use(model: nn.Module) -> torch.Tensor:
        logits, buffer = logits_of(model), FULL.clone()
        with torch.set_grad_enabled("out=" not in program):
            exec(program, globals() | {"x": logits, "b": buffer})
        return buffer.sin().sum() + total(logits)

    compare_runs(use)


def test_a_hook_is_of_the_logits_as_they_are_now() -> None:
    def use(model: nn.Module) -> torch.Tensor:
        logits = logits_of(model)
        first = logits.sum()
        logits.mul_(0.5)
        logits.register_hook(lambda gradient: gradient * 3)
        return first + total(logits)

    compare_runs(use)


# ---- negative controls


def on_a_temporary(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(tensor, "_written", lambda *args: [])


def unseen(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(tensor, "version_of", lambda each: 0)
    patch.setattr(tensor, "_follow", lambda memory, counts: None)


def views_as_they_were(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(tensor.LazyLogits, "content", property(lambda self: self._made[1]))


def gradients_as_before(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Memory, "aliases", lambda self: [])


CONTROLS = [
    ((on_a_temporary,), "x.scatter_(-1, SOME, -9.0)", MemoError),
    ((on_a_temporary, unseen), "x.scatter_(-1, SOME, -9.0)", Different),
    ((views_as_they_were,), "x.mul_(2)", Different),
    ((gradients_as_before,), "x.mul_(2)", Different),
]


@pytest.mark.parametrize(("changes", "program", "objection"), CONTROLS)
def test_the_comparison_objects(
    changes: tuple[Callable[..., None], ...], program: str, objection: type, monkeypatch: pytest.MonkeyPatch
) -> None:
    for change in changes:
        change(monkeypatch)
    with pytest.raises(objection):
        test_logits_and_their_views_follow(program, "function")
