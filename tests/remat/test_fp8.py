"""Products in fp8: rows and their scales are split, the operands' quantization is repeated. Gradients are stock's to the bit."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import ds_memo
from ds_memo.remat import op_policy
from ds_memo.remat.recipe import Gemm
from tests.inside import recipe_of
from tests.models import HIDDEN, Batch, Block, Different, Outcome, compare_with_stock, step
from tests.remat.products import compare_counts, predicted_share
from tests.remat.situations import toy

aten = torch.ops.aten
ALPHAS = (0.0, 0.5, 1.0)
BATCH = Batch.random(2, 17)
KINDS = {"tensor": aten._scaled_mm, "row": aten._scaled_mm, "v2": aten._scaled_mm_v2, "grouped": aten._scaled_grouped_mm}
LIMIT = torch.finfo(torch.float8_e4m3fn).max
ENDS = (9, 9, 22, 34)
"""Where each expert's rows end. At alpha 0.5 the third has 5 left: with 3 or fewer, the CPU's kernel rounds in another order."""


@pytest.fixture(autouse=True)
def grouped_on_a_cpu() -> Iterator[None]:
    """Give _scaled_grouped_mm a CPU kernel: PyTorch has one for CUDA alone."""

    def kernel(a: Any, b: Any, scale_a: Any, scale_b: Any, offs: Any, *others: Any) -> torch.Tensor:
        begins = [0, *offs.tolist()[:-1]]
        parts = [
            aten._scaled_mm(a[i:j], b[g].t().contiguous().t(), scale_a[i:j, None], scale_b[g][None], None, None, torch.float32)
            for g, (i, j) in enumerate(zip(begins, offs.tolist(), strict=True))
            if i < j
        ]
        return torch.cat(parts)

    library = torch.library.Library("aten", "IMPL")
    library.impl("_scaled_grouped_mm", kernel, "CPU")
    yield
    library._destroy()


def quantized(x: torch.Tensor, dim: int | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Return x in fp8, and its scale: one of all values (None), or of each row along `dim`."""
    largest = x.abs().amax() if dim is None else x.abs().amax(dim, keepdim=True)
    scale = largest / LIMIT
    return (x / scale).to(torch.float8_e4m3fn), scale


class _Product(torch.autograd.Function):
    """A linear in fp8 whose gradients are computed in float32."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, kind: str) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        by_row = kind != "tensor"
        (a, scale_a), (b, scale_b) = quantized(x, -1 if by_row else None), quantized(weight, -2 if by_row else None)
        if kind == "v2":
            return aten._scaled_mm_v2(a, b, [scale_a], [1], [], [scale_b], [1], [], None, torch.float32)
        if kind == "grouped":
            experts = b.expand(len(ENDS), -1, -1)
            ends = torch.tensor(ENDS, dtype=torch.int32)
            return aten._scaled_grouped_mm(
                a, experts, scale_a[:, 0], scale_b.expand(len(ENDS), -1), ends, out_dtype=torch.float32
            )
        return aten._scaled_mm(a, b, scale_a, scale_b, out_dtype=torch.float32)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple:
        x, weight = ctx.saved_tensors
        return grad @ weight.t(), x.t() @ grad, None


class Fp8(Block):
    kind: str

    def linear(self, x: torch.Tensor, layer: nn.Linear) -> torch.Tensor:
        rows = x.flatten(0, 1)
        return _Product.apply(rows, layer.weight.t(), self.kind).view(*x.shape[:2], -1) + layer.bias

    def feed(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(F.gelu(self.linear(self.norm2(x), self.up)), self.down)


def block(kind: str) -> type[Fp8]:
    return type("Fp8", (Fp8,), {"kind": kind})


def drive(model: nn.Module, number: int) -> Outcome:
    return step(model, BATCH)


@pytest.mark.parametrize("alpha", ALPHAS)
@pytest.mark.parametrize("kind", KINDS)
def test_gradients_rows_and_counts(kind: str, alpha: float) -> None:
    model = toy(block(kind))
    want = drive(model, 0)
    handle = ds_memo.attach(model, {"alpha": alpha, "resident_layers": 0})
    for _ in range(2):
        got = drive(model, 0)
    report, recipe = handle.report(), recipe_of(handle)
    handle.detach()
    assert [name for name, grad in want.grads.items() if not torch.equal(got.grads[name], grad)] == []
    up, down = (op for op in recipe.ops if isinstance(op, Gemm) and op.func is KINDS[kind].default)
    tokens = BATCH.labels.numel()
    assert (up.shape, up.rows, up.flops) == ((tokens, 2 * HIDDEN), int(alpha * tokens), 2 * tokens * HIDDEN * 2 * HIDDEN)
    assert up.wanted and not down.wanted
    assert report["gemm_flops_recomputed_fraction"] == pytest.approx(predicted_share(recipe))
    assert (report["gemm_flops_recomputed_fraction"] == 0) == (alpha == 1) and report["attention_recomputed"] == 0
    assert report["warnings"] == []


@pytest.mark.parametrize("alpha", ALPHAS)
def test_the_share_is_what_ran(alpha: float) -> None:
    share, memo, stock = compare_counts(toy(block("row")), {"alpha": alpha, "resident_layers": 0})
    assert (share, stock) == (pytest.approx(memo, abs=0.01), 0)


@pytest.mark.parametrize("kind", ["row", "v2", "grouped"])
def test_scales_of_other_rows_are_noticed(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The negative control."""
    monkeypatch.setattr(op_policy, "_rest_of", lambda scale, first: scale[: len(scale) - first])
    with pytest.raises(Different):
        compare_with_stock(toy(block(kind)), drive, {"alpha": 0.5, "resident_layers": 0})


@pytest.mark.parametrize("strides", [(1, 34), (3, 1)])
def test_scales_of_blocks_along_a_row(strides: tuple[int, int]) -> None:
    """1 x 128 blocks: CUDA wants these scales dense, by column. Scales of blocks of rows do not split."""
    scale = torch.arange(3 * 34.0).as_strided((34, 3), strides)
    rest = op_policy._rest_of(scale, 9)
    assert torch.equal(rest, scale[9:])
    assert rest.stride() == ((1, 25) if strides[0] == 1 else (3, 1))
    assert op_policy._splits(scale, 34)
    assert not op_policy._splits(scale[:1], 34)
    assert not op_policy._splits(scale.to(torch.float8_e8m0fnu), 34)
