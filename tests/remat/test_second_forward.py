"""The share of recomputed GEMM FLOPs beside a count of every product in a backward, with memo and without."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import ds_memo
from ds_memo.remat import checkpoint
from tests.models import HIDDEN, VOCAB, Block
from tests.remat.products import Flops, compare_counts
from tests.remat.situations import BATCH, Lines, toy

pytestmark = pytest.mark.filterwarnings("ignore::ds_memo.errors.MemoWarning")
ON_DEVICE, SWAPPED = {"alpha": 1.0, "resident_layers": 4}, {"alpha": 0.5, "resident_layers": 0}


class Tiled(Block):
    """An MLP in DeepSpeed's tiles, whose backward runs its forward again."""

    def feed(self, x: torch.Tensor) -> torch.Tensor:
        from deepspeed.runtime.sequence_parallel.ulysses_sp import TiledMLP

        return TiledMLP.apply(lambda self, x: Block.feed(self, x), self, x, 3, list(self.parameters()))


class _Again(torch.autograd.Function):
    """A product whose backward, written by hand, computes it once more."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return F.gelu(x @ weight)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, weight = ctx.saved_tensors
        grad = torch.ops.aten.gelu_backward(grad, x @ weight)
        return grad @ weight.T, x.flatten(0, 1).T @ grad.flatten(0, 1)


class _Once(torch.autograd.Function):
    """A product with the usual two of its gradient."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, weight = ctx.saved_tensors
        return grad @ weight.T, x.flatten(0, 1).T @ grad.flatten(0, 1)


def calls(function: type[torch.autograd.Function]) -> type[nn.Module]:
    class Calls(Lines):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.b(torch.tanh(function.apply(self.a(self.norm(x)), self.c.weight)))

    return Calls


class Checkpoints(Lines):
    """A Function under a checkpoint inside the layer. What that one recomputes is not counted twice."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.utils.checkpoint.checkpoint(
            lambda x: torch.tanh(_Again.apply(self.a(self.norm(x)), self.c.weight)), x, use_reentrant=False
        )
        return x + self.b(y)


@pytest.mark.parametrize("config", [ON_DEVICE, SWAPPED], ids=["on_device", "swapped"])
@pytest.mark.parametrize("block, again", [(Tiled, True), (calls(_Again), True), (calls(_Once), False), (Block, False)])
def test_what_functions_run_again_is_counted(block: Any, again: bool, config: dict) -> None:
    share, memo, stock = compare_counts(toy(block), config)
    assert share == pytest.approx(memo, abs=0.02)  # rows are whole
    assert (stock > 0.2) == again
    assert again or config is SWAPPED or share == 0


def test_a_checkpoint_inside_is_not_counted_twice() -> None:
    share, memo, _ = compare_counts(toy(Checkpoints), ON_DEVICE)
    assert share == pytest.approx(memo)


def test_without_the_hooks_the_share_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    """The negative control."""
    monkeypatch.setattr(checkpoint, "count_in_functions", lambda *arguments: None)
    share, memo, stock = compare_counts(toy(Tiled), ON_DEVICE)
    assert share == 0 and memo == pytest.approx(stock) and stock > 0.2


def test_calls_in_flight_and_second_backwards_are_counted_once_each() -> None:
    """Two forwards before the first backward, and one graph whose backward runs twice."""
    model = toy(Tiled)
    handle = ds_memo.attach(model, ON_DEVICE)
    shares = []
    for turn in range(2):
        first, second = (model(BATCH.embeds, BATCH.labels).loss for _ in range(2))
        for loss in (second, first):  # at first, the analysed call's backward comes last
            loss.backward(retain_graph=turn == 1)
        shares.append(handle.report()["gemm_flops_recomputed_fraction"])
    first.backward()
    of_one = shares[0]
    assert shares[1] == of_one > 0.2
    assert handle.report()["gemm_flops_recomputed_fraction"] == pytest.approx(of_one * 5 / 4)
    handle.detach()


def test_gemms_behind_a_departure_are_counted() -> None:
    """Every other call leaves the recipe at its second product."""

    class Turns(Lines):
        def forward(self, x: torch.Tensor, other: bool) -> torch.Tensor:
            y = torch.tanh(self.a(self.norm(x)))
            return x + torch.tanh(self.b(torch.tanh(y @ self.c.weight[:, :32] @ self.b.weight[:32] if other else self.c(y))))

    model, forward, backward = toy(Turns), 0, 0
    handle = ds_memo.attach(model, ON_DEVICE)
    for number in range(6):
        with Flops() as mode:
            loss = model(BATCH.embeds, BATCH.labels, other=number % 2 == 1).loss
        forward += mode.total - 2 * BATCH.labels.numel() * HIDDEN * VOCAB
        with Flops() as mode:
            loss.backward()
        backward += mode.total - 4 * BATCH.labels.numel() * HIDDEN * VOCAB
    share = handle.report()["gemm_flops_recomputed_fraction"]
    handle.detach()
    assert share == pytest.approx((backward - 2 * forward) / forward) and share > 0
