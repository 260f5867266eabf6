"""Attention of one rank's queries and one ring number's keys: PyTorch's kernels, called for each band of a plan.

Tensors are token-major: queries (b, s, h, d), keys (b, t, hk, d), values (b, t, hk, e). Log-sum-exp is (b, h, s) in the
*accumulator's* dtype: float64 for float64, else float32. No mask of s × t is made. Flash attention knows windows; for other
kernels a band is cut into blocks of queries, and a block's mask has the keys that it can see.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ds_memo.sequence import masks
from ds_memo.sequence.exchange import index
from ds_memo.sequence.masks import Band

aten = torch.ops.aten
BLOCK = 256
"""Queries of a block that has a mask."""
LOGITS = 2**21
"""Queries × keys of a block, per head, where logits are tensors."""

Span = tuple[int, int]
Three = tuple[Tensor, Tensor, Tensor]
"""Of queries, keys and values."""


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bands: Sequence[Band],
    scale: float,
    softcap: float = 0.0,
    shared: tuple[int, ...] | None = None,
) -> tuple[Tensor, Tensor]:
    """Return output (b, s, h, e) and log-sum-exp (b, h, s) over the keys of these bands. A query without a band has 0 and -inf.

    Args:
        softcap: logits are softcap · tanh(logits / softcap). 0: no cap.
        shared: key head of each query head. None: as many neighbours share each.
    """
    work = _work(_kernel(q, v, scale, softcap), tuple(bands), q.shape[0], q.shape[1], k.shape[1])
    shape = *q.shape[:3], v.shape[3]
    qkv = work.laid(*_repeated(work.kernel, (q, k, v), shared))
    if work.one_for_queries:
        out, lse = _forward(work.kernel, qkv, work.calls[0])
    else:
        rows, s = qkv[0].shape[:2]
        out = q.new_zeros(rows, s, *shape[2:], dtype=q.dtype if work.queries_once else _accumulator(q))
        lse = torch.full((rows, shape[2], s), -math.inf, dtype=_accumulator(q), device=q.device)
        for call in work.calls:
            parts = _part(out, call.row, call.queries), _part(lse.transpose(1, 2), call.row, call.queries).transpose(1, 2)
            if work.queries_once:
                for part, found in zip(parts, _forward(work.kernel, qkv, call), strict=True):
                    part.copy_(found)
            else:
                merge(*parts, *_forward(work.kernel, qkv, call))
    if work.flat:
        out, lse = out.reshape(shape), lse.reshape(shape[2], *shape[:2]).transpose(0, 1)
    return out.to(q.dtype), lse


def merge(out: Tensor, lse: Tensor, more_out: Tensor, more_lse: Tensor) -> None:
    """Add attention to other keys to `out` (b, s, h, e), which is in the accumulator's dtype, and `lse` (b, h, s), in place."""
    total = torch.logaddexp(lse, more_lse)
    finite = total.masked_fill(total == -math.inf, 0)  # -inf - -inf is NaN
    old, new = ((part - finite).exp_().transpose(1, 2)[..., None] for part in (lse, more_lse))
    out.mul_(old).addcmul_(more_out.to(out.dtype), new)
    lse.copy_(total)


def backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    bands: Sequence[Band],
    scale: float,
    softcap: float = 0.0,
    shared: tuple[int, ...] | None = None,
) -> Three:
    """Return the gradients of q, k and v through these bands. Those of all ring steps add up to the whole's.

    A gradient that is a sum over calls or heads is in the accumulator's dtype. Any other is in its input's.

    Args:
        out, lse: over all keys that a query sees, in all ring steps.
    """
    work = _work(_kernel(q, v, scale, softcap), tuple(bands), q.shape[0], q.shape[1], k.shape[1])
    qkv = work.laid(*_repeated(work.kernel, (q, k, v), shared))
    grad, out = work.laid(grad, out)
    if work.flat:
        lse = lse.transpose(0, 1).flatten(1)[None]
    if work.one_for_queries and work.one_for_keys:
        grads = _backward(work.kernel, grad, qkv, out, lse, work.calls[0])
    else:
        once = work.queries_once, work.keys_once, work.keys_once
        grads = [torch.zeros_like(x, dtype=None if alone else _accumulator(x)) for x, alone in zip(qkv, once, strict=True)]
        for call in work.calls:
            spans = call.queries, call.keys, call.keys
            for total, span, share in zip(grads, spans, _backward(work.kernel, grad, qkv, out, lse, call), strict=True):
                _part(total, call.row, span).add_(share)
    dq, dk, dv = (x.reshape(q.shape[0], -1, *x.shape[2:]) for x in grads)
    if _repeats(work.kernel, q, k, shared):
        dk, dv = (_by_key_head(x, k.shape[2], shared) for x in (dk, dv))
    return dq, dk, dv


def _forward(kernel: Kernel, qkv: Three, call: Call) -> tuple[Tensor, Tensor]:
    return kernel.forward(_parts(qkv, call), call)


def _backward(kernel: Kernel, grad: Tensor, qkv: Three, out: Tensor, lse: Tensor, call: Call) -> Sequence[Tensor]:
    grad, out, lse = (_part(x, call.row, call.queries) for x in (grad, out, lse.transpose(1, 2)))
    return kernel.backward(grad, _parts(qkv, call), out, lse.transpose(1, 2), call)


def _parts(qkv: Three, call: Call) -> Three:
    q, k, v = qkv
    return _part(q, call.row, call.queries), _part(k, call.row, call.keys), _part(v, call.row, call.keys)


def _part(x: Tensor, row: int | None, tokens: Span) -> Tensor:
    return x[slice(None) if row is None else slice(row, row + 1), slice(*tokens)]


def _accumulator(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


# Key heads that query heads share


def _repeats(kernel: Kernel, q: Tensor, k: Tensor, shared: tuple[int, ...] | None) -> bool:
    even = shared is None or shared == _evenly(q.shape[2], k.shape[2])
    return not even or (q.shape[2] != k.shape[2] and not kernel.shares_heads)


def _evenly(heads: int, keys: int) -> tuple[int, ...]:
    return tuple(head * keys // heads for head in range(heads))


def _repeated(kernel: Kernel, qkv: Three, shared: tuple[int, ...] | None) -> Three:
    """Repeat key heads by query head for a kernel that cannot."""
    q, k, v = qkv
    if not _repeats(kernel, q, k, shared):
        return qkv
    of_query = index(shared or _evenly(q.shape[2], k.shape[2]), q.device)
    return q, k.index_select(2, of_query), v.index_select(2, of_query)


def _by_key_head(grad: Tensor, keys: int, shared: tuple[int, ...] | None) -> Tensor:
    if shared is None:
        return grad.unflatten(2, (keys, -1)).sum(3, dtype=_accumulator(grad))
    total = grad.new_zeros(*grad.shape[:2], keys, grad.shape[3], dtype=_accumulator(grad))
    for head, key in enumerate(shared):  # always in this order; index_add_ has none on CUDA
        total[:, :, key] += grad[:, :, head]
    return total


# Calls


class Call(NamedTuple):
    """One call of a kernel, and the part of the tensors that it is given. Each of its queries sees a key."""

    row: int | None
    """None: all rows of the batch."""
    queries: Span
    keys: Span
    limits: tuple[int | None, int | None]
    """`before` and `after` of a band; flash attention's windows for :class:`Flash`."""
    borders: tuple[tuple[int, ...], tuple[int, ...]] | None = None
    """Borders along queries and keys of bands side by side, where rows of the batch lie end to end. None: it is one band."""


class Work(NamedTuple):
    """The calls for a list of bands."""

    kernel: Kernel
    calls: list[Call]
    flat: bool
    """True if rows of the batch lie end to end."""
    one_for_queries: bool
    """True if there is one call, with all queries."""
    one_for_keys: bool
    queries_once: bool
    """True if no query is in two calls."""
    keys_once: bool

    def laid(self, *tensors: Tensor) -> Any:
        return tuple(x.flatten(0, 1)[None] for x in tensors) if self.flat else tensors


@functools.lru_cache(maxsize=256)
def _work(kernel: Kernel, bands: tuple[Band, ...], rows: int, s: int, t: int) -> Work:
    calls = kernel.calls(bands, rows, s, t)
    flat = any(call.borders for call in calls)
    sides = [[(call.row, call.queries) for call in calls], [(call.row, call.keys) for call in calls]]
    wholes = [[(None, (0, length * rows if flat else length))] for length in (s, t)]
    return Work(kernel, calls, flat, sides[0] == wholes[0], sides[1] == wholes[1], _once(sides[0]), _once(sides[1]))


def _once(spans: Sequence[tuple[int | None, Span]]) -> bool:
    """Return True if no token is in two spans."""
    ordered = sorted((row or 0, span) for row, span in spans)
    return all(row != other or stop <= start for (row, (_, stop)), (other, (start, _)) in itertools.pairwise(ordered))


def joined(bands: Sequence[Band], bottom_right: bool = False) -> list[Band]:
    """Return fewer bands: of neighbours that see all keys one, as around a ring in zigzag.

    Args:
        bottom_right: join keys that all queries see to a triangle behind them, too.
    """
    found: list[Band] = []
    for band in bands:
        last = found[-1] if found else None
        if last and last.row == band.row and (last.before, last.after, band.before) == (None, None, None):
            queries, keys = (last.queries[0], band.queries[1]), (last.keys[0], band.keys[1])
            if last.queries == band.queries and last.keys[1] == band.keys[0] and (band.after is None or bottom_right):
                after = None if band.after is None else band.after + last.keys[1] - last.keys[0]
                found[-1] = Band(band.row, queries, keys, None, after)
                continue
            if last.keys == band.keys and last.queries[1] == band.queries[0] and band.after is None:
                found[-1] = Band(band.row, queries, keys, None, None)
                continue
        found.append(band)
    return found


def cut(band: Band, block: int, first: int | None = None) -> Iterator[Band]:
    """Yield a band's blocks of queries, each with the keys that it can see.

    Args:
        first: queries of the first block, if not `block`.
    """
    q0, q1 = band.queries
    moved = q0 - band.keys[0]
    before = None if band.before is None else band.before + moved
    after = None if band.after is None else band.after - moved
    borders = sorted({0, q0, q1, *range(q0 + (first or block), q1, block)})
    run = masks.Run(band.queries, band.keys, before, after)
    return masks.bands(band.row, [run], tuple(itertools.pairwise(borders)), ((0, band.keys[1]),))


def _square(band: Band) -> Iterator[Band]:
    """Cut off queries that see all keys: flash attention drops a right window of more than the keys, counted from the last."""
    n, m = (stop - start for start, stop in (band.queries, band.keys))
    return cut(band, n, None if band.after is None else min(n, m - band.after))


def side_by_side(bands: Sequence[Band], s: int, t: int) -> list[Call]:
    """Return calls of flash attention. One takes bands that follow each other, along queries and keys, and can have equal windows.

    Its query i of n sees key j of m if i + m - n - left <= j <= i + m - n + right.
    """
    calls: list[Call] = []
    spans: list[tuple[float, float]] = []
    for band in bands:
        row = band.row or 0
        queries, keys = [row * s + x for x in band.queries], [row * t + x for x in band.keys]
        n, m = queries[1] - queries[0], keys[1] - keys[0]
        # the windows that do: one, or all from the least that limits nothing
        left = (m - 1, math.inf) if band.before is None else (band.before + m - n,) * 2
        right = (n - 1, math.inf) if band.after is None else (band.after - m + n,) * 2
        both = [(max(a[0], b[0]), min(a[1], b[1])) for a, b in zip(spans, (left, right), strict=False)]
        last = calls[-1] if calls else None
        if last and (last.queries[1], last.keys[1]) == (queries[0], keys[0]) and all(low <= high for low, high in both):
            spans = both
            queries[0], keys[0] = last.queries[0], last.keys[0]
            assert last.borders
            borders = (*last.borders[0], queries[1] - queries[0]), (*last.borders[1], keys[1] - keys[0])
            calls.pop()
        else:
            spans = [left, right]
            borders = (0, n), (0, m)
        windows = tuple(None if high == math.inf else int(low) for low, high in spans)
        calls.append(Call(None, (queries[0], queries[1]), (keys[0], keys[1]), (windows[0], windows[1]), borders))
    return calls


# Kernels


def _kernel(q: Tensor, v: Tensor, scale: float, softcap: float) -> Kernel:
    if softcap:
        return Math(scale, softcap)
    if q.device.type == "cpu":
        return Cpu(scale)
    if q.device.type != "cuda" or q.dtype == torch.float64:
        return Math(scale)
    half = q.dtype.itemsize == 2 and max(q.shape[3], v.shape[3]) <= 256
    return Flash(scale) if half and torch.cuda.get_device_capability(q.device) >= (8, 0) else Efficient(scale)


@dataclass(frozen=True)
class Kernel:
    """A kernel with its settings. Calls of this one are causal if there are as many keys as queries, and else have masks."""

    scale: float
    softcap: float = 0.0
    shares_heads = False
    """True if it knows that neighbouring query heads share a key head."""
    bottom_right = False
    """True if it needs no mask for keys that all queries see before those of a triangle."""

    def calls(self, bands: Sequence[Band], rows: int, s: int, t: int) -> list[Call]:
        """Return the calls for these bands, in a batch of `rows` rows with `s` queries and `t` keys."""
        blocks = (block for band in joined(bands) for block in ([band] if _plain(band) else cut(band, BLOCK)))
        return [Call(block.row, block.queries, block.keys, (block.before, block.after)) for block in blocks]

    def forward(self, qkv: Three, call: Call) -> tuple[Tensor, Tensor]:
        """Return output and log-sum-exp of a call, given its part of q, k and v."""
        raise NotImplementedError

    def backward(self, grad: Tensor, qkv: Three, out: Tensor, lse: Tensor, call: Call) -> Sequence[Tensor]:
        """Return the gradients of the call's part, by its queries' global `out` and `lse`."""
        raise NotImplementedError


class Cpu(Kernel):
    def forward(self, qkv: Three, call: Call) -> tuple[Tensor, Tensor]:
        q, k, v = (x.transpose(1, 2) for x in _padded(_one_size(qkv), qkv))
        causal, bias = _mask(call, qkv[0])
        out, lse = aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, attn_mask=bias, scale=self.scale)
        return out.transpose(1, 2)[..., : qkv[2].shape[3]], lse

    def backward(self, grad: Tensor, qkv: Three, out: Tensor, lse: Tensor, call: Call) -> Sequence[Tensor]:
        heads = [x.contiguous().transpose(1, 2) for x in _padded(_one_size(qkv), (grad, *qkv, out))]
        causal, bias = _mask(call, qkv[0])
        lse = lse.transpose(1, 2).contiguous().transpose(1, 2)  # the kernel reads it as its forward lays it out
        grads = aten._scaled_dot_product_flash_attention_for_cpu_backward(
            *heads, lse, 0.0, causal, attn_mask=bias, scale=self.scale
        )
        return [x.transpose(1, 2)[..., : like.shape[3]] for x, like in zip(grads, qkv, strict=True)]


class Efficient(Kernel):
    """CUDA, in any dtype but float64 and with heads of any size. Sizes are multiples of 16 bytes, also a mask's."""

    def forward(self, qkv: Three, call: Call) -> tuple[Tensor, Tensor]:
        q, k, v = (x.transpose(1, 2) for x in _padded(_one_size(qkv), qkv))
        causal, bias = _mask(call, qkv[0])
        bias = None if bias is None else bias.expand(*q.shape[:3], -1)
        out, lse, *_ = aten._scaled_dot_product_efficient_attention(q, k, v, bias, True, 0.0, causal, scale=self.scale)
        return out.transpose(1, 2)[..., : qkv[2].shape[3]], lse[..., : q.shape[2]]  # it has a multiple of 32

    def backward(self, grad: Tensor, qkv: Three, out: Tensor, lse: Tensor, call: Call) -> Sequence[Tensor]:
        grad, q, k, v, out = (x.transpose(1, 2) for x in _padded(_one_size(qkv), (grad, *qkv, out)))
        causal, bias = _mask(call, qkv[0])
        bias = None if bias is None else bias.expand(*q.shape[:3], -1)
        lse = F.pad(lse, (0, -lse.shape[2] % 32), value=math.inf)
        seed = torch.empty((), dtype=torch.int64, device=q.device)  # of dropout: not read
        *grads, _ = aten._scaled_dot_product_efficient_attention_backward(
            grad, q, k, v, bias, out, lse, seed, seed, 0.0, [True, True, True, False], causal, scale=self.scale
        )
        return [x.transpose(1, 2)[..., : like.shape[3]] for x, like in zip(grads, qkv, strict=True)]


class Flash(Kernel):
    """CUDA in half precision: windows without masks, and bands side by side in one call."""

    shares_heads = bottom_right = True

    def calls(self, bands: Sequence[Band], rows: int, s: int, t: int) -> list[Call]:
        bands = [part for band in joined(bands, self.bottom_right) for part in _square(band)]
        if all(band.row is None for band in bands) and len(side_by_side(bands, s, t)) == len(bands):
            return [side_by_side([band], s, t)[0]._replace(borders=None) for band in bands]
        return side_by_side([band._replace(row=r) for r in range(rows) for band in bands if band.row in (None, r)], s, t)

    def forward(self, qkv: Three, call: Call) -> tuple[Tensor, Tensor]:
        q, k, v = _padded(_one_size(qkv), qkv)
        if call.borders is None:
            out, lse, *_ = aten._flash_attention_forward(q, k, v, *self._how(call, q, k), False, **self._windows(call))
        else:
            out, lse, *_ = aten._flash_attention_forward(q[0], k[0], v[0], *self._how(call, q, k), False, **self._windows(call))
            out, lse = out[None], lse[None]
        return out[..., : qkv[2].shape[3]], lse

    def backward(self, grad: Tensor, qkv: Three, out: Tensor, lse: Tensor, call: Call) -> Sequence[Tensor]:
        grad, q, k, v, out = _padded(_one_size(qkv), (grad, *qkv, out))
        how, seed = self._how(call, q, k), torch.empty(2, dtype=torch.uint64, device=q.device)  # of dropout: not read
        given = grad, q, k, v, out, lse.contiguous()
        if call.borders is None:
            grads = aten._flash_attention_backward(*given, *how, seed, seed, **self._windows(call))
        else:
            of_tokens = aten._flash_attention_backward(*(x[0] for x in given), *how, seed, seed, **self._windows(call))
            grads = [x[None] for x in of_tokens]
        return [x[..., : like.shape[3]] for x, like in zip(grads, qkv, strict=True)]

    def _how(self, call: Call, q: Tensor, k: Tensor) -> tuple[Any, ...]:
        """Return the arguments from borders to is_causal."""
        places = (None, None, q.shape[1], k.shape[1]) if call.borders is None else _sequences(call.borders, q.device)
        return *places, 0.0, call.limits == (None, 0)

    def _windows(self, call: Call) -> dict[str, Any]:
        return {"scale": self.scale, "window_size_left": call.limits[0], "window_size_right": call.limits[1]}


class Math(Kernel):
    """Any device, dtype and cap: logits of a block of queries, in the accumulator's dtype."""

    def calls(self, bands: Sequence[Band], rows: int, s: int, t: int) -> list[Call]:
        blocks = (block for band in bands for block in cut(band, max(16, LOGITS // (band.keys[1] - band.keys[0]))))
        return [Call(block.row, block.queries, block.keys, (block.before, block.after)) for block in blocks]

    def forward(self, qkv: Three, call: Call) -> tuple[Tensor, Tensor]:
        logits, _ = self._logits(qkv, call)
        lse = logits.logsumexp(-1)
        out = (logits - lse[..., None]).exp_() @ qkv[2].transpose(1, 2).to(logits.dtype)
        return out.transpose(1, 2).to(qkv[0].dtype), lse

    def backward(self, grad: Tensor, qkv: Three, out: Tensor, lse: Tensor, call: Call) -> Sequence[Tensor]:
        logits, slope = self._logits(qkv, call)
        shares = (logits - lse[..., None]).exp_()
        grad, q, k, v, out = (x.transpose(1, 2).to(logits.dtype) for x in (grad, *qkv, out))
        inner = shares * (grad @ v.mT - (grad * out).sum(-1, keepdim=True)) * slope
        return [x.transpose(1, 2) for x in (inner @ k, inner.mT @ q, shares.mT @ grad)]

    def _logits(self, qkv: Three, call: Call) -> tuple[Tensor, Tensor | float]:
        """Return logits, and their slopes by the products of queries and keys."""
        q, k, _ = (x.transpose(1, 2).to(_accumulator(x)) for x in qkv)
        logits, slope = q @ k.mT * self.scale, self.scale
        if self.softcap:
            tanh = (logits / self.softcap).tanh_()
            logits, slope = tanh * self.softcap, (1 - tanh * tanh) * self.scale
        bias = None if call.limits == (None, None) else _bias(call, q)
        return logits if bias is None else logits + bias, slope


def _plain(band: Band) -> bool:
    return (band.before, band.after) == (None, None) or _causal(band[-2:], band.queries, band.keys)


def _causal(limits: tuple[int | None, int | None], queries: Span, keys: Span) -> bool:
    """Return True for the triangle that is_causal means to PyTorch."""
    return limits == (None, 0) and queries[1] - queries[0] == keys[1] - keys[0]


def _mask(call: Call, like: Tensor) -> tuple[bool, Tensor | None]:
    """Return is_causal, and a mask for what it does not say."""
    causal = _causal(call.limits, call.queries, call.keys)
    return causal, None if causal or call.limits == (None, None) else _bias(call, like)


def _bias(call: Call, like: Tensor) -> Tensor:
    """Return what to add to logits (queries, keys), in steps of 16 columns as kernels want them."""
    n, m = call.queries[1] - call.queries[0], call.keys[1] - call.keys[0]
    distance = torch.arange(m + -m % 16, device=like.device) - torch.arange(n, device=like.device)[:, None]
    bias = torch.zeros(distance.shape, dtype=like.dtype, device=like.device)
    before, after = call.limits
    if before is not None:
        bias.masked_fill_(distance < -before, -math.inf)
    if after is not None:
        bias.masked_fill_(distance > after, -math.inf)
    return bias[:, :m]


def _one_size(qkv: Three) -> int:
    """Return a head size for keys and values. Kernels want a multiple of 8."""
    size = max(qkv[0].shape[3], qkv[2].shape[3])
    return size + -size % 8


def _padded(size: int, tensors: Sequence[Tensor]) -> list[Tensor]:
    return [x if x.shape[3] == size else F.pad(x, (0, size - x.shape[3])) for x in tensors]


@functools.lru_cache(maxsize=256)
def _sequences(borders: tuple[tuple[int, ...], ...], device: torch.device) -> tuple[Tensor | int, ...]:
    """Return borders on the device, and the longest sequences. Cached: no call copies them to the device."""
    tensors = [torch.tensor(side, dtype=torch.int32, device=device) for side in borders]
    return *tensors, *(max(stop - start for start, stop in itertools.pairwise(side)) for side in borders)
