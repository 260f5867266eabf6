"""Batched products: with weights they are GEMMs, kept and split by rows; without they are recomputed and not counted."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import ds_memo
from ds_memo.remat import op_policy
from ds_memo.remat.recipe import Gemm
from tests.faults import put_in
from tests.inside import recipe_of
from tests.models import HIDDEN, Batch, Block, Different, compare_with_stock, step
from tests.remat.products import compare_counts, predicted_share
from tests.remat.situations import BATCH, Lines, drive, toy

aten = torch.ops.aten
ALPHAS = (0.0, 0.5, 1.0)


class Experts(Block):
    """All tokens go to all experts, as in Llama 4; a bias in front makes baddbmm, one behind is added in place."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Parameter(torch.randn(3, HIDDEN, 2 * HIDDEN) / 8)
        self.square = nn.Parameter(torch.randn(3, 2 * HIDDEN, HIDDEN) / 12)
        self.before, self.behind = nn.Parameter(torch.randn(3, 1, HIDDEN)), nn.Parameter(torch.randn(2 * HIDDEN))

    def feed(self, x: torch.Tensor) -> torch.Tensor:
        tokens = self.norm2(x).flatten(0, 1).expand(3, -1, -1)
        inner = torch.bmm(tokens, self.wide.to(x.dtype))
        inner += self.behind
        out = torch.tanh(torch.baddbmm(self.before, F.gelu(inner), self.square))
        return out.sum(0).view_as(x) + self.down(F.gelu(self.up(x)))


class Einsum(Lines):
    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Parameter(torch.randn(3, HIDDEN, 2 * HIDDEN) / 8)
        self.square = nn.Parameter(torch.randn(3, 2 * HIDDEN, HIDDEN) / 12)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = torch.einsum("bsh,ehf->ebsf", self.a(self.norm(x)), self.wide.to(x.dtype))
        return x + torch.einsum("ebsf,efh->bsh", F.gelu(inner), self.square)


class ByHand(Block):
    """Attention of batched products, which read no weight, before experts."""

    def attend(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norm1(x)).chunk(3, -1)
        scores = torch.bmm(q, k.transpose(1, 2)).masked_fill(torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1), -1e4)
        return self.o(torch.bmm(scores.softmax(-1), v))


class Both(ByHand, Experts):
    pass


@pytest.mark.filterwarnings("ignore::ds_memo.errors.MemoWarning")
@pytest.mark.parametrize("alpha", ALPHAS)
@pytest.mark.parametrize("block", [Experts, Einsum, Both])
def test_gradients_and_counts(block: type[nn.Module], alpha: float) -> None:
    config = {"alpha": alpha, "resident_layers": 1}
    compare_with_stock(toy(block), drive, config)
    if block is not Both:  # a count of all products takes those of attention too
        share, memo, stock = compare_counts(toy(block), config)
        assert share == pytest.approx(memo - stock, abs=0.01) and (share == 0) == (alpha == 1)


@pytest.mark.parametrize("alpha", [0.0, 0.5, 1.0])
def test_the_gradients_are_stocks_to_the_bit(alpha: float) -> None:
    """With a matrix product by matrix, a split rounds nothing anew: 32 rows in each, so half of all rows is 48."""
    model = toy(Experts)
    batch = Batch.random(2, 16)
    want = step(model, batch)
    handle = ds_memo.attach(model, {"alpha": alpha, "resident_layers": 0})
    for _ in range(2):
        got = step(model, batch)
    handle.detach()
    assert [name for name, grad in want.grads.items() if not torch.equal(got.grads[name], grad)] == []


def test_the_rows_are_those_of_all_experts() -> None:
    model = toy(Experts)
    handle = ds_memo.attach(model, {"alpha": 0.5, "resident_layers": 0})
    for _ in range(2):
        drive(model, 0)
    recipe = recipe_of(handle)
    (wide, square) = (op for op in recipe.ops if isinstance(op, Gemm) and op.func in op_policy.BATCHED)
    tokens = BATCH.labels.numel()
    assert wide.shape == (3, tokens, 2 * HIDDEN) and (wide.m, wide.rows, wide.biased) == (3 * tokens, 3 * tokens // 2, True)
    assert wide.kept.stored_bytes == wide.rows * 2 * HIDDEN * 4
    assert (square.func, square.rows) == (aten.baddbmm.default, 3 * tokens // 2)
    assert handle.report()["gemm_flops_recomputed_fraction"] == pytest.approx(predicted_share(recipe))


@pytest.mark.filterwarnings("ignore::ds_memo.errors.MemoWarning")
def test_attention_by_products_is_not_kept() -> None:
    """The negative control: a batched product that reads no weight."""
    model = toy(ByHand)
    handle = ds_memo.attach(model, {"alpha": 1.0, "resident_layers": 0})
    drive(model, 0)
    report, recipe = handle.report(), recipe_of(handle)
    assert not any(op.kept for op in recipe.ops if op.func in op_policy.BATCHED)
    assert report["gemm_flops_recomputed_fraction"] == 0 and report["attention_recomputed"] == len(model.blocks)


def test_an_expert_left_out_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The negative control: the rest of the expert at the border is not computed."""

    def whole_ones_only(compute, func, args, kwargs, first, out) -> None:
        rows = args[-2].shape[1]
        if (first := -(-first // rows) * rows) < out.shape[0]:
            compute(func, args, kwargs, first, out)

    put_in(monkeypatch, op_policy, "_compute_batched_rows", whole_ones_only)
    with pytest.raises(Different):
        compare_with_stock(toy(Experts), drive, {"alpha": 0.5, "resident_layers": 0})
