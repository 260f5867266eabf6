"""The rows of a GEMM that the replay computes: how many they are, and what follows if their last bits are not the forward's."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

import ds_memo
from ds_memo.placement import EVEN_ROWS
from ds_memo.remat import follower, op_policy
from tests.models import HEADS, HIDDEN, Batch, Block, Different, Outcome, Toy, assert_same, compare_with_stock, step
from tests.remat.situations import toy

compute_rows = op_policy.compute_rows


@pytest.mark.parametrize("alpha", [0.2, 0.5, 0.999])
def test_they_fill_whole_tiles_of_gemm_kernels(alpha: float, monkeypatch: pytest.MonkeyPatch) -> None:
    rows, length, seen = 1_100, 550, set()

    def noted(func: Any, args: Any, kwargs: Any, first: int, out: torch.Tensor) -> None:
        seen.add((out.shape[0], first))
        compute_rows(func, args, kwargs, first, out)

    monkeypatch.setattr(op_policy, "compute_rows", noted)
    batch = Batch.random(2, length)
    with follower.in_python():
        compare_with_stock(toy(layers=2), lambda model, _: step(model, batch), {"alpha": alpha, "resident_layers": 0}, steps=1)
    ((m, first),) = seen
    assert m == rows and (m - first) % EVEN_ROWS == 0 and alpha * m - EVEN_ROWS < first <= alpha * m


# ---- other last bits

LENGTH = 128


def with_large_logits(scale: float, dtype: torch.dtype = torch.float32) -> Toy:
    model = toy(Block)
    with torch.no_grad():
        for block in model.blocks:
            block.qkv.weight[: 2 * HIDDEN].mul_(scale)
    return model.to(dtype)


def largest_logit(model: Toy, batch: Batch) -> float:
    """Return the largest magnitude of a logit in a step."""
    found = []

    def note(qkv: Any, args: Any, out: torch.Tensor) -> None:
        q, k, _ = out.float().view(1, LENGTH, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        found.append(float((q @ k.transpose(-2, -1)).abs().max()) * q.shape[-1] ** -0.5)

    handles = [block.qkv.register_forward_hook(note) for block in model.blocks]
    with torch.no_grad():
        model(inputs_embeds=batch.embeds, labels=batch.labels)
    for handle in handles:
        handle.remove()
    return max(found)


def off_by(monkeypatch: pytest.MonkeyPatch, steps: int, scale: float, dtype: torch.dtype) -> tuple[float, float]:
    """Return the largest relative difference of a gradient from stock's, and what is allowed.

    Args:
        steps: by which each recomputed number is moved up or down to a neighbour.
    """
    generator = torch.Generator().manual_seed(1)

    def moved(func: Any, args: Any, kwargs: Any, first: int, out: torch.Tensor) -> None:
        compute_rows(func, args, kwargs, first, out)
        rest = out[first:]
        for _ in range(steps):
            way = (torch.rand(rest.shape, generator=generator) - 0.5).sign().to(rest.dtype) * math.inf
            rest.copy_(torch.nextafter(rest, way))

    batch = Batch.random(1, LENGTH, dtype)
    model, stock = (with_large_logits(scale, dtype) for _ in range(2))
    handle = ds_memo.attach(model, {"alpha": 0.5, "resident_layers": 0})
    monkeypatch.setattr(op_policy, "compute_rows", moved)
    with follower.in_python():
        got, want = step(model, batch), step(stock, batch)
    handle.detach()
    allowed = torch.finfo(dtype).eps * (4 + largest_logit(stock, batch))
    return worst(got, want), allowed


def worst(got: Outcome, want: Outcome) -> float:
    """Return the largest relative difference of a gradient."""
    distances = [
        (got.grads[name].double() - want.grads[name].double()).norm() / want.grads[name].double().norm() for name in want.grads
    ]
    return float(torch.stack(distances).max())


@pytest.mark.slow
@pytest.mark.parametrize("dtype, scale", [(torch.float32, 1), (torch.float32, 50), (torch.bfloat16, 1), (torch.bfloat16, 8)])
def test_gradients_are_off_by_no_more_than_logits_are(dtype: torch.dtype, scale: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """A logit of size L, here 2 to 4,000, is off by about eps L, and so is its probability with the forward's log-sum-exp."""
    difference, allowed = off_by(monkeypatch, 1, scale, dtype)
    assert 0 < difference <= allowed


@pytest.mark.slow
@pytest.mark.parametrize("dtype, scale", [(torch.float32, 50), (torch.bfloat16, 8)])
def test_more_would_show(dtype: torch.dtype, scale: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """The negative control: rows of which each number is off by some eight units in the last place."""
    difference, allowed = off_by(monkeypatch, 64, scale, dtype)
    assert difference > allowed


@pytest.mark.slow
def test_logits_above_one_over_eps_have_no_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """In bfloat16 a logit of 700 is off by several, and exp() of that is no small error. docs/how_it_works.md says so."""
    difference, _ = off_by(monkeypatch, 1, 20, torch.bfloat16)
    assert difference > 1


@pytest.mark.slow
@pytest.mark.parametrize("alpha", [0.0, 1.0])
def test_at_alpha_0_and_1_no_gemm_is_split(alpha: float, monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*args: Any) -> None:
        raise AssertionError("rows were computed separately")

    monkeypatch.setattr(op_policy, "compute_rows", never)
    batch = Batch.random(1, LENGTH, torch.bfloat16)

    def same(got: Outcome, want: Outcome, tolerance: float) -> None:
        assert_same(got, want, 0.0)

    settings = {"alpha": alpha, "resident_layers": 0}
    compare_with_stock(with_large_logits(20, torch.bfloat16), lambda model, _: step(model, batch), settings, same=same)
    with follower.in_python():  # which calls what was replaced
        compare_with_stock(with_large_logits(20, torch.bfloat16), lambda model, _: step(model, batch), settings, same=same)
        with pytest.raises((AssertionError, Different)):
            settings["alpha"] = 0.5
            compare_with_stock(with_large_logits(20, torch.bfloat16), lambda model, _: step(model, batch), settings)
