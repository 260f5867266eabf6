"""Kernels by bands against a softmax in float64 with explicit masks."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
import torch

from ds_memo.sequence import kernels
from ds_memo.sequence.kernels import Flash, KernelCall, Math, backward, forward, merge, side_by_side
from ds_memo.sequence.masks import Band, Mask, plan
from ds_memo.sequence.parts import SequenceParts
from tests.sequence.layouts import dense, of_all, random_documents

EXACT = 1e-12


def visible(parts: SequenceParts, mask: Mask, rows: int) -> torch.Tensor:
    """Return which keys queries see (b, s, s)."""
    return dense(mask, parts.length, tuple(parts.documents[row % len(parts.documents)] for row in range(rows)))


def layout(ring: int, length: int, documents: Any = ((0,),)) -> list[SequenceParts]:
    return of_all(1, ring, length, tuple(map(tuple, documents)))


def reference(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, seen: torch.Tensor, scale: float, softcap: float, shared: list[int]
) -> tuple[torch.Tensor, torch.Tensor]:
    k, v = k[:, :, shared], v[:, :, shared]
    logits = torch.einsum("bshd,bthd->bhst", q, k) * scale
    if softcap:
        logits = softcap * torch.tanh(logits / softcap)
    logits = logits.masked_fill(~seen[:, None], -math.inf)
    lse = logits.logsumexp(-1)
    weights = torch.where(seen[:, None], (logits - lse[..., None].nan_to_num(neginf=0)).exp(), 0)
    return torch.einsum("bhst,bthe->bshe", weights, v), lse


def ring_of(
    parts: SequenceParts, inputs: list[torch.Tensor], mask: Mask, scale: float, softcap: float, own: int
) -> tuple[list[torch.Tensor], list[Any]]:
    """Compute one ring number's queries step by step; return out, lse and gradients by q and by all keys and values."""
    q, k, v, grad = inputs
    steps, ring = plan(parts, mask).steps, parts.ranks.ring
    places = [torch.cat([torch.arange(*piece) for piece in parts.pieces_of_ring(number)]) for number in range(ring)]
    q, grad = q[:, places[own]], grad[:, places[own]]
    shape = *q.shape[:3], v.shape[3]
    wide = kernels._accumulator(q)
    out, lse = q.new_zeros(shape, dtype=wide), q.new_full((shape[0], shape[2], shape[1]), -math.inf, dtype=wide)
    found = []
    for step, bands in enumerate(steps):
        keys = places[(own - step) % ring]
        if bands:
            found.append(forward(q, k[:, keys], v[:, keys], bands, scale, softcap))
            merge(out, lse, *found[-1])
    dq, dk, dv = (torch.zeros_like(x, dtype=wide) for x in (q, k, v))
    for step, bands in enumerate(steps):
        keys = places[(own - step) % ring]
        if bands:
            a, b, c = backward(grad, q, k[:, keys], v[:, keys], out.to(q.dtype), lse, bands, scale, softcap)
            dq += a
            dk[:, keys] += b
            dv[:, keys] += c
    return [out, lse, dq, dk, dv], found


def error(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the largest difference by the largest value. Infinities are equal or NaN."""
    assert found.shape == expected.shape
    finite = expected.masked_fill(expected.isinf(), 0)
    return ((found.double() - expected).masked_fill(found == expected, 0).abs().max() / finite.abs().max()).item()


def differences(
    everywhere: list[SequenceParts], mask: Mask, rows: int = 1, heads: tuple[int, int] = (4, 2), sizes: tuple[int, int] = (8, 8),
    softcap: float = 0.0, dtype: torch.dtype = torch.float64,
    device: str = "cpu",
) -> list[float]:  # fmt: skip
    """Return errors of out, lse and the gradients over all ring numbers, relative to the largest value."""
    length = everywhere[0].length
    torch.manual_seed(length)
    (h, hk), (d, e) = heads, sizes
    inputs = [torch.randn(rows, length, n, size, dtype=torch.float64) for n, size in ((h, d), (hk, d), (hk, e), (h, e))]
    inputs = [x.to(dtype) for x in inputs]
    q, k, v = (x.double().detach().requires_grad_() for x in inputs[:3])
    key_of = [i * hk // h for i in range(h)]
    seen = visible(everywhere[0], mask, rows)
    out, lse = reference(q, k, v, seen, 0.3, softcap, key_of)
    grads = torch.autograd.grad(out, (q, k, v), inputs[3].double())
    whole = [x.detach() for x in (out, lse, *grads)]
    total = [torch.zeros_like(x) for x in whole]
    for own, parts in enumerate(everywhere):
        at = torch.cat([torch.arange(*piece) for piece in parts.pieces_of_ring(own)])
        got = [x.cpu().double() for x in ring_of(parts, [x.to(device) for x in inputs], mask, 0.3, softcap, own)[0]]
        total[0][:, at], total[1][:, :, at], total[2][:, at] = got[:3]
        total[3] += got[3]
        total[4] += got[4]
    return [error(*pair) for pair in zip(total, whole, strict=True)]


MASKS = [Mask(), Mask("window", 7), Mask("chunk", 6), Mask("both")]


@pytest.mark.parametrize("ring", [1, 2, 3])
@pytest.mark.parametrize("mask", MASKS, ids=lambda mask: mask.kind)
def test_ring_steps_merge_to_the_softmax_over_all_keys(ring: int, mask: Mask, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "BLOCK", 5)
    kernels._work.cache_clear()
    rng = random.Random(ring)
    for _ in range(6):
        length, rows = rng.randrange(9, 60), rng.choice([1, 2])
        documents = random_documents(rng, length, rows)
        assert max(differences(layout(ring, length, documents), mask, rows)) < EXACT
    kernels._work.cache_clear()


@pytest.mark.parametrize(
    "case",
    [
        {"heads": (6, 6)},
        {"heads": (6, 1)},
        {"sizes": (12, 5)},
        {"sizes": (5, 12)},
        {"softcap": 1.5},
        {"softcap": 0.7, "heads": (6, 2), "sizes": (6, 3)},
    ],
    ids=str,
)
@pytest.mark.parametrize("mask", MASKS[:2], ids=lambda mask: mask.kind)
def test_heads_of_any_number_and_size(case: dict[str, Any], mask: Mask, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "SIDE", 7)
    kernels._work.cache_clear()
    documents = [[0, 5, 31], [0]]
    assert max(differences(layout(2, 40, documents), mask, 2, **case)) < EXACT
    kernels._work.cache_clear()


# float32 rounds to 6e-8 and bfloat16 to 4e-3 of a value; sums of about 40 products are a few times that off
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-6), (torch.bfloat16, 2e-2)], ids=str)
@pytest.mark.parametrize("softcap", [0.0, 1.5])
def test_lower_precision(dtype: torch.dtype, tolerance: float, softcap: float) -> None:
    errors = differences(layout(2, 40, [[0, 17]]), Mask("window", 9), dtype=dtype, softcap=softcap)
    assert max(errors) < tolerance


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize(
    "case",
    [{}, {"sizes": (24, 16)}, {"sizes": (264, 8)}, {"softcap": 1.5}],
    ids=str,
)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)], ids=str)
def test_on_cuda(case: dict[str, Any], dtype: torch.dtype, tolerance: float) -> None:
    for mask in (Mask(), Mask("window", 70), Mask("chunk", 60), Mask("both")):
        for ring, documents in ((1, [[0]]), (1, [[0, 5, 310]]), (2, [[0, 5, 310], [0]]), (3, [[0]])):
            errors = differences(layout(ring, 600, documents), mask, 2, dtype=dtype, device="cuda", **case)
            assert max(errors) < tolerance, (mask, ring, documents, errors)


def test_a_window_wider_than_the_kernel_s_own_blocks() -> None:
    assert max(differences(layout(1, 1500), Mask("window", 700), heads=(1, 1))) < EXACT


@pytest.mark.parametrize("softcap", [0.0, 2.0])
def test_a_query_that_sees_nothing(softcap: float) -> None:
    q, k, v, grad = (torch.randn(1, 8, 2, 8, dtype=torch.float64) for _ in range(4))
    bands = [Band(None, (2, 5), (1, 4), None, 0)]
    out, lse = forward(q, k, v, bands, 0.3, softcap)
    rest = [0, 1, 5, 6, 7]
    assert not out[:, rest].any() and (lse[:, :, rest] == -math.inf).all() and lse[:, :, 2:5].isfinite().all()
    dq, dk, dv = backward(grad, q, k, v, out, lse, bands, 0.3, softcap)
    assert not dq[:, rest].any() and dq[:, 3].any() and not dk[:, 4:].any() and dv[:, 1:4].any()
    assert all(x.isfinite().all() for x in (dq, dk, dv))
    empty = torch.zeros_like(out), torch.full_like(lse, -math.inf)
    merge(*empty, *(x.clone() for x in empty))
    assert not empty[0].any() and (empty[1] == -math.inf).all()
    merge(*empty, out, lse)
    assert torch.allclose(empty[0], out, atol=EXACT) and torch.equal(empty[1], lse)


def test_no_bands() -> None:
    q = torch.randn(1, 4, 2, 8)
    out, lse = forward(q, q, q, [], 0.3)
    assert not out.any() and (lse == -math.inf).all()
    assert not any(x.any() for x in backward(q, q, q, q, out, lse, [], 0.3))


def test_gradients_want_the_log_sum_exp_of_all_steps() -> None:
    """Negative control: that of one step is wrong."""
    parts = layout(2, 40)[1]
    q, k, v, grad = (torch.randn(1, 40, 2, 8, dtype=torch.float64) for _ in range(4))
    (out, lse, dq, *_), found = ring_of(parts, [q, k, v, grad], Mask(), 0.3, 0.0, 1)
    at = [torch.cat([torch.arange(*piece) for piece in parts.pieces_of_ring(number)]) for number in (1, 0)]
    given = [(grad[:, at[1]] * 0 + grad[:, at[0]], q[:, at[0]], k[:, keys], v[:, keys]) for keys in at]
    steps = plan(parts, Mask()).steps
    right = sum(backward(*x, out, lse, bands, 0.3)[0] for x, bands in zip(given, steps, strict=True))
    wrong = sum(backward(*x, out, found[i][1].where(found[i][1].isfinite(), lse), steps[i], 0.3)[0] for i, x in enumerate(given))
    assert error(right, dq) < EXACT
    assert error(wrong, dq) > 1e-3


# ---- what flash attention is called with -------------------------------------------------------------------------------------


def documented(calls: list[KernelCall], rows: int, s: int, t: int) -> torch.Tensor:
    """Return how often each query is given each key, where flash attention counts windows from the bottom right."""
    flat = any(call.borders for call in calls)
    counts = torch.zeros((1, rows * s, rows * t) if flat else (rows, s, t), dtype=torch.int)
    for call in calls:
        left, right = (math.inf if limit is None else limit for limit in call.limits)
        assert min(left, right) >= 0  # a negative one would mean: no limit
        ends = call.borders or ((0, call.queries[1] - call.queries[0]), (0, call.keys[1] - call.keys[0]))
        longest = max(b - a for a, b in zip(ends[1], ends[1][1:], strict=False))
        left, right = (math.inf if limit >= longest else limit for limit in (left, right))  # as flash_api.cpp has it
        assert (ends[0][-1], ends[1][-1]) == (call.queries[1] - call.queries[0], call.keys[1] - call.keys[0])
        for q0, q1, k0, k1 in zip(ends[0], ends[0][1:], ends[1], ends[1][1:], strict=False):
            i, j = torch.arange(q1 - q0)[:, None] + (k1 - k0) - (q1 - q0), torch.arange(k1 - k0)
            seen = (i - left <= j) & (j <= i + right)
            rows_of = slice(None) if call.row is None else slice(call.row, call.row + 1)
            counts[rows_of, call.queries[0] + q0 : call.queries[0] + q1, call.keys[0] + k0 : call.keys[0] + k1] += seen.int()
    if flat:
        blocks = counts[0].unflatten(0, (rows, s)).unflatten(2, (rows, t))
        assert sum(int(blocks[r, :, r].sum()) for r in range(rows)) == int(counts.sum())
        return torch.stack([blocks[r, :, r] for r in range(rows)])
    return counts


@pytest.mark.parametrize("mask", MASKS, ids=lambda mask: mask.kind)
def test_flash_windows_show_each_key_once(mask: Mask) -> None:
    rng = random.Random(mask.kind)
    for _ in range(40):
        length, rows, ring = rng.randrange(5, 60), rng.choice([1, 2, 3]), rng.choice([1, 2, 3])
        documents = random_documents(rng, length, rng.choice([1, rows]))
        for own, parts in enumerate(layout(ring, length, documents)):
            at = [torch.cat([torch.arange(*piece) for piece in parts.pieces_of_ring(number)]) for number in range(ring)]
            for step, bands in enumerate(plan(parts, mask).steps):
                if bands:
                    s = len(at[own])
                    counts = documented(Flash(1.0).calls(bands, rows, s, s), rows, s, s)
                    expected = visible(parts, mask, rows)[:, at[own]][:, :, at[(own - step) % ring]]
                    assert torch.equal(counts, expected.int())


def random_band(rng: random.Random, s: int, t: int) -> tuple[Band, torch.Tensor]:
    """Return a band that keeps what bands promise: each query sees a key, and each key is seen. And what it shows."""
    while True:
        q0, q1 = sorted(rng.sample(range(s + 1), 2))
        k0, k1 = sorted(rng.sample(range(t + 1), 2))
        before, after = (rng.choice([None, rng.randrange(max(s, t))]) for _ in range(2))
        a, c = torch.arange(q1 - q0)[:, None], torch.arange(k1 - k0)
        seen = torch.ones(q1 - q0, k1 - k0, dtype=torch.bool)
        if before is not None:
            seen &= a - before <= c
        if after is not None:
            seen &= c <= a + after
        if seen.any(0).all() and seen.any(1).all():
            whole = torch.zeros(1, s, t, dtype=torch.bool)
            whole[0, q0:q1, k0:k1] = seen
            return Band(None, (q0, q1), (k0, k1), before, after), whole


def test_any_band() -> None:
    rng = random.Random(0)
    for _ in range(300):
        s, t = rng.randrange(1, 30), rng.randrange(1, 30)
        band, seen = random_band(rng, s, t)
        for bands, expected in (([band], seen), ([band._replace(row=1)], torch.cat([seen & False, seen]))):
            rows = len(expected)
            assert torch.equal(documented(Flash(1.0).calls(bands, rows, s, t), rows, s, t), expected.int())
        q, k, v, grad = (torch.randn(1, n, 1, 8, dtype=torch.float64, requires_grad=True) for n in (s, t, t, s))
        out, lse = forward(q.detach(), k.detach(), v.detach(), [band], 0.3)
        expected_out, expected_lse = reference(q, k, v, seen, 0.3, 0.0, [0])
        assert torch.allclose(out, expected_out, atol=EXACT) and torch.allclose(lse, expected_lse, atol=EXACT)
        given = [x.detach() for x in (grad, q, k, v, out, lse)]
        for got, expected in zip(backward(*given, [band], 0.3), torch.autograd.grad(expected_out, (q, k, v), grad), strict=True):
            assert torch.allclose(got, expected, atol=EXACT)


def test_bands_around_a_ring_in_zigzag_are_joined() -> None:
    triangle, wide = Band(None, (0, 4), (0, 4), None, 0), Band(None, (4, 8), (0, 4), None, None)
    second = Band(None, (4, 8), (4, 8), None, 0)
    assert kernels.joined([triangle, wide, second], bottom_right=True) == [triangle, Band(None, (4, 8), (0, 8), None, 4)]
    assert kernels.joined([triangle, wide, second]) == [triangle, wide, second]
    assert kernels.joined([wide._replace(queries=(0, 4)), wide]) == [Band(None, (0, 8), (0, 4), None, None)]
    assert kernels.joined([wide, wide._replace(keys=(4, 8))]) == [Band(None, (4, 8), (0, 8), None, None)]
    apart = [wide, wide._replace(keys=(5, 8))], [wide, wide._replace(row=1, keys=(4, 8))], [triangle, wide]
    assert all(kernels.joined(bands) == bands for bands in apart)


@pytest.mark.parametrize("documents", [[[0, 10, 11, 30]], [[0, 10, 11, 30], [0], [0, 1, 2, 3]]], ids=["alike", "different"])
@pytest.mark.parametrize("mask", [Mask(), Mask("window", 9)], ids=lambda mask: mask.kind)
def test_packed_rows_are_one_flash_call(documents: list[list[int]], mask: Mask) -> None:
    bands = plan(layout(1, 40, documents)[0], mask).steps[0]
    (call,) = Flash(1.0).calls(bands, 3, 40, 40)
    assert call.queries == call.keys == (0, 120)
    assert call.limits == (None if mask.kind == "causal" else 8, 0)


def test_one_document_is_flash_attention_of_whole_rows() -> None:
    bands = plan(layout(1, 40)[0], Mask()).steps[0]
    assert Flash(1.0).calls(bands, 3, 40, 40) == [KernelCall(None, (0, 40), (0, 40), (None, 0))]


def test_rows_end_to_end_give_what_rows_give(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run calls side by side on the CPU, border by border, in the place of the CUDA kernel."""

    class Side(Flash):
        def each(self, call: KernelCall) -> list[KernelCall]:
            spans = zip(call.borders[0], call.borders[0][1:], call.borders[1], call.borders[1][1:], strict=False)
            return [
                KernelCall(None, (a, b), (c, d), (left and left - (d - c) + (b - a), right and right + (d - c) - (b - a)))
                for a, b, c, d in spans
                for left, right in [call.limits]
            ]

        def forward(self, qkv: Any, call: KernelCall) -> Any:
            qkv = [qkv[0], *(x.repeat_interleave(2, 2) for x in qkv[1:])]
            outs = [Math(self.scale).forward(kernels._parts(qkv, part), part) for part in self.each(call)]
            return torch.cat([out for out, _ in outs], 1), torch.cat([lse for _, lse in outs], 2)

        def backward(self, grad: Any, qkv: Any, out: Any, lse: Any, call: KernelCall) -> Any:
            qkv = [qkv[0], *(x.repeat_interleave(2, 2) for x in qkv[1:])]
            dq, dk, dv = (torch.cat(shares, 1) for shares in zip(*(
                Math(self.scale).backward(
                    grad[:, slice(*part.queries)], kernels._parts(qkv, part), out[:, slice(*part.queries)],
                    lse[:, :, slice(*part.queries)], part,
                )
                for part in self.each(call)
            ), strict=True))  # fmt: skip
            return dq, *(x.unflatten(2, (2, 2)).sum(3) for x in (dk, dv))

    assert Side.calls is Flash.calls
    monkeypatch.setattr(kernels, "_kernel", lambda q, v, bands, scale, *_: Side(scale))
    torch.manual_seed(0)
    documents = [[0, 10, 11, 30], [0]]
    q, k, v, grad = (torch.randn(2, 40, h, 8, dtype=torch.float64) for h in (4, 2, 2, 4))
    parts = layout(1, 40, documents)[0]
    bands = plan(parts, Mask()).steps[0]
    out, lse = forward(q, k, v, bands, 0.3)
    grads = backward(grad, q, k, v, out, lse.contiguous(), bands, 0.3)
    of = [x.requires_grad_() for x in (q, k, v)]
    expected, expected_lse = reference(q, k, v, visible(parts, Mask(), 2), 0.3, 0.0, [0, 0, 1, 1])
    wanted = expected, expected_lse, *torch.autograd.grad(expected, of, grad)
    for got, want in zip((out, lse, *grads), wanted, strict=True):
        assert error(got, want.detach()) < EXACT


def test_bands_share_a_call_if_one_window_is_right_for_all() -> None:
    """A band without a limit has room for windows of its size, and no smaller ones."""
    limited = Band(None, (10, 40), (10, 40), 9, 4)
    free = Band(None, (0, 10), (0, 10), None, 4)
    assert [call.limits for call in side_by_side([free, limited], 40, 40)] == [(9, 4)]
    assert [call.limits for call in side_by_side([free, limited._replace(before=8)], 40, 40)] == [(None, 4), (8, 4)]
    free, limited = free._replace(before=3, after=None), limited._replace(before=3, after=9)
    assert [call.limits for call in side_by_side([free, limited], 40, 40)] == [(3, 9)]
    assert [call.limits for call in side_by_side([free, limited._replace(after=8)], 40, 40)] == [(3, None), (3, 8)]


def test_dtypes_of_gradients() -> None:
    q, k, v, grad = (torch.randn(1, 40, 2, 8, dtype=torch.bfloat16) for _ in range(4))
    band = Band(None, (0, 20), (0, 20), None, 0)
    apart, one_key = band._replace(queries=(20, 40), keys=(20, 40)), band._replace(queries=(20, 40))
    for bands, wide in (
        ([apart], ()),
        ([band, apart], ()),
        ([band, one_key], (1, 2)),
        ([band, band._replace(keys=(20, 40))], (0,)),
    ):
        out, lse = forward(q, k, v, bands, 0.3)
        grads = backward(grad, q, k, v, out, lse, bands, 0.3)
        assert (out.dtype, lse.dtype) == (torch.bfloat16, torch.float32)
        assert [x.dtype for x in grads] == [torch.float32 if i in wide else torch.bfloat16 for i in range(3)]
