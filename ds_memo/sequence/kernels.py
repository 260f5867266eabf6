"""Attention of one rank's queries and one ring number's keys: PyTorch's kernels, called for the bands of a plan.

Tensors are token-major: queries (b, s, h, d), keys (b, t, hk, d), values (b, t, hk, e). Log-sum-exp is (b, h, s) in the
*accumulator's* dtype: float64 for float64, else float32. No mask of s × t is made. Flash attention knows windows. For other
kernels a band is cut into blocks of queries, each with a mask of the keys that it can see.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ds_memo.attention_kernel import CPU, CUDNN, DOCUMENTS, EFFICIENT, FA3, FA4, FLASH, MATH, PLAIN, WINDOW
from ds_memo.remat import cudnn
from ds_memo.remat.attention_kernels import checked, described, kernel_for
from ds_memo.sequence.cache import cache_tensors
from ds_memo.sequence.exchange import index
from ds_memo.sequence.kernel_calls import Borders, Interval, KernelCall, Limits, cut, joined, side_by_side, within_windows
from ds_memo.sequence.masks import Band

aten = torch.ops.aten
BLOCK = 256
"""Queries of a block that has a mask."""
SIDE = 1024
"""Queries of a block, and its keys, where logits are tensors."""
MOST_CALLS = 8
"""Squares and triangles that are worth a call each. Flash takes more of them in one."""
CAUSAL = (None, 0)
"""Limits of a call that is_causal stands for: it counts from the first query and key."""
UNMASKED = ((None, None), CAUSAL)

Heads = tuple[int, ...] | None
Three = Sequence[Tensor]
"""Tensors for queries, keys and values."""


def forward(
    q: Tensor, k: Tensor, v: Tensor, bands: Sequence[Band], scale: float, softcap: float = 0.0, documents: bool = False
) -> tuple[Tensor, Tensor]:
    """Return output (b, s, h, e) and log-sum-exp (b, h, s) over the keys of these bands. A query without a band has 0 and -inf.

    Where a query is in several calls, their results are merged in the accumulator's dtype.

    Args:
        k, v: each head serves the same number of neighbouring query heads.
        softcap: logits are softcap · tanh(logits / softcap). 0: no cap.
        documents: True if bands are of several, with lengths that another call will not have: cuDNN would plan for each.
    """
    given = _Given(q, k, v, bands, scale, softcap, documents)
    kernel, work, qkv = given.kernel, given.work, given.qkv
    if work.one_for_queries:
        out, lse = kernel.forward(_parts(qkv, work.calls[0]), work.calls[0])
    else:
        out = qkv[0].new_zeros(*qkv[0].shape[:3], qkv[2].shape[3], dtype=q.dtype if work.queries_once else _accumulator(q))
        lse = out.new_full((out.shape[0], out.shape[2], out.shape[1]), -math.inf, dtype=_accumulator(q))
        for call in work.calls:
            into = _part(out, call.row, call.queries), _part(lse.transpose(1, 2), call.row, call.queries).transpose(1, 2)
            more = kernel.forward(_parts(qkv, call), call)
            if work.queries_once:
                into[0].copy_(more[0])
                into[1].copy_(more[1])
            else:
                merge(*into, *more)
        out = out.to(q.dtype)
    if work.flat:
        out, lse = out.reshape(*q.shape[:3], -1), lse.reshape(q.shape[2], *q.shape[:2]).transpose(0, 1)
    return out[..., : v.shape[3]].contiguous(), lse


def merge(out: Tensor, lse: Tensor, more_out: Tensor, more_lse: Tensor) -> None:
    """Add attention to other keys to `out` (b, s, h, e), which is in the accumulator's dtype, and `lse` (b, h, s), in place."""
    total = torch.logaddexp(lse, more_lse)
    finite = total.masked_fill(total == -math.inf, 0)  # -inf - -inf is NaN
    old, new = ((part - finite).exp_().transpose(1, 2)[..., None] for part in (lse, more_lse))
    out.mul_(old).addcmul_(more_out.to(out.dtype), new)
    lse.copy_(total)


def backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, bands: Sequence[Band], scale: float,
    softcap: float = 0.0, documents: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Return the gradients of q, k and v through these bands. Those of all ring steps add up to the whole's.

    A gradient that is a sum over calls or heads is in the accumulator's dtype. Any other may be in its input's.

    Args:
        out, lse: over all keys that a query sees, in all ring steps.
    """
    given = _Given(q, k, v, bands, scale, softcap, documents)
    kernel, work, qkv = given.kernel, given.work, given.qkv
    grad, out = given.laid(grad), given.laid(out)
    by_token = (lse.transpose(0, 1).flatten(1)[None] if work.flat else lse).transpose(1, 2)

    def shares(call: KernelCall) -> Three:
        of_queries = [_part(x, call.row, call.queries) for x in (grad, out, by_token)]
        return kernel.backward(of_queries[0], _parts(qkv, call), of_queries[1], of_queries[2].transpose(1, 2), call)

    if work.one_for_queries and work.one_for_keys:
        grads = shares(work.calls[0])
    else:
        once = work.queries_once, work.keys_once, work.keys_once
        grads = [torch.zeros_like(x, dtype=x.dtype if alone else _accumulator(x)) for x, alone in zip(qkv, once, strict=True)]
        for call in work.calls:
            for total, span, share in zip(grads, (call.queries, call.keys, call.keys), shares(call), strict=True):
                _part(total, call.row, span).add_(share)
    dq, dk, dv = (x.reshape(q.shape[0], -1, *x.shape[2:])[..., : of.shape[3]] for x, of in zip(grads, (q, k, v), strict=True))
    return dq, given.by_key_head(dk), given.by_key_head(dv)


class _Given:
    """Inputs as the kernel wants them."""

    def __init__(
        self, q: Tensor, k: Tensor, v: Tensor, bands: Sequence[Band], scale: float, softcap: float, documents: bool
    ) -> None:
        bands = tuple(bands)
        self.kernel = _kernel(q, v, bands, scale, softcap, documents)
        self.work = _work(self.kernel, bands, q.shape[0], q.shape[1], k.shape[1])
        heads, self._keys = q.shape[2], k.shape[2]
        repeated = heads != self._keys and not self.kernel.shares_heads
        self._key_of: Heads = tuple(head * self._keys // heads for head in range(heads)) if repeated else None
        """Key head of each query head, if heads are repeated."""
        size = max(q.shape[3], v.shape[3])
        self._size = size + -size % 8
        if self._key_of:
            k, v = (x.index_select(2, index(self._key_of, x.device)) for x in (k, v))
        self.qkv = [self.laid(x) for x in (q, k, v)]

    def laid(self, x: Tensor) -> Tensor:
        if self.kernel.one_size and x.shape[3] != self._size:
            x = F.pad(x, (0, self._size - x.shape[3]))
        return x.flatten(0, 1)[None] if self.work.flat else x

    def by_key_head(self, grad: Tensor) -> Tensor:
        """Add up the gradients of repeated heads."""
        if self._key_of is None:
            return grad
        total = grad.new_zeros(*grad.shape[:2], self._keys, grad.shape[3], dtype=_accumulator(grad))
        for head, key in enumerate(self._key_of):  # always in this order; index_add_ has none on CUDA
            total[:, :, key] += grad[:, :, head]
        return total


def _part(x: Tensor, row: int | None, tokens: Interval) -> Tensor:
    return x[slice(None) if row is None else slice(row, row + 1), slice(*tokens)]


def _parts(qkv: Three, call: KernelCall) -> Three:
    return [_part(x, call.row, span) for x, span in zip(qkv, (call.queries, call.keys, call.keys), strict=True)]


def _accumulator(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


class _Work(NamedTuple):
    """The calls for a list of bands."""

    calls: list[KernelCall]
    flat: bool
    """True if rows of the batch lie end to end."""
    one_for_queries: bool
    """True if there is one call, and it has all queries."""
    one_for_keys: bool
    queries_once: bool
    """True if no query is in two calls."""
    keys_once: bool


@functools.lru_cache(maxsize=128)
def _work(kernel: Kernel, bands: tuple[Band, ...], rows: int, s: int, t: int) -> _Work:
    calls = kernel.calls(bands, rows, s, t)
    flat = any(call.borders for call in calls)
    sides = [[(call.row, call.queries) for call in calls], [(call.row, call.keys) for call in calls]]
    wholes = [[(None, (0, length * rows if flat else length))] for length in (s, t)]
    return _Work(calls, flat, sides[0] == wholes[0], sides[1] == wholes[1], _once(sides[0]), _once(sides[1]))


def _once(spans: Sequence[tuple[int | None, Interval]]) -> bool:
    ordered = sorted((row or 0, span) for row, span in spans)
    return all(row != other or stop <= start for (row, (_, stop)), (other, (start, _)) in itertools.pairwise(ordered))


def _kernel(q: Tensor, v: Tensor, bands: tuple[Band, ...], scale: float, softcap: float, documents: bool) -> Kernel:
    if q.device.type not in ("cpu", "cuda"):
        return Math(scale, softcap)
    call = described(q, v, _mask_of(bands, documents), softcap=bool(softcap), queries_of_a_head=q.shape[0] * q.shape[1])
    return KERNELS[kernel_for(call, q.device).name](scale, softcap)


@functools.lru_cache(maxsize=128)
def _mask_of(bands: tuple[Band, ...], documents: bool) -> str:
    """Return the kind of mask that bands are. A ring in zigzag has three squares and triangles, and one of padding."""
    calls = joined(bands)
    if any(band[3:] not in UNMASKED for band in calls):
        return WINDOW
    # A triangle that is no square would leave in doubt in which corner it stands.
    corners = all(band.after is None or band.queries[1] - band.queries[0] == band.keys[1] - band.keys[0] for band in calls)
    few = not documents and len(calls) <= MOST_CALLS and all(band.row is None for band in calls)
    return PLAIN if few and corners else DOCUMENTS


@dataclass(frozen=True)
class Kernel:
    """A kernel with its settings. By default a call has a mask, but not if it is causal or its queries see all keys."""

    scale: float
    softcap: float = 0.0
    shares_heads = False
    """True if neighbouring query heads may share a key head."""
    one_size = True
    """True if heads of queries and values must be equally large, in multiples of 8."""

    def calls(self, bands: Sequence[Band], rows: int, s: int, t: int) -> list[KernelCall]:
        """Return the calls for these bands, in a batch of `rows` rows with `s` queries and `t` keys."""
        return [KernelCall(*block[:3], block[3:]) for band in joined(bands) for block in self._blocks(band)]

    def _blocks(self, band: Band) -> Iterable[Band]:
        return [band] if band[3:] in UNMASKED else cut(band, BLOCK)

    def forward(self, qkv: Three, call: KernelCall) -> tuple[Tensor, Tensor]:
        """Return output and log-sum-exp of a call, given its part of q, k and v."""
        raise NotImplementedError

    def backward(self, grad: Tensor, qkv: Three, out: Tensor, lse: Tensor, call: KernelCall) -> Three:
        """Return the gradients of the call's part, by its queries' global `out` and `lse`."""
        raise NotImplementedError


class Cpu(Kernel):
    def forward(self, qkv: Three, call: KernelCall) -> tuple[Tensor, Tensor]:
        given = *_swapped(qkv), 0.0, call.limits == CAUSAL
        out, lse = aten._scaled_dot_product_flash_attention_for_cpu(*given, attn_mask=_mask(call, qkv[0]), scale=self.scale)
        return out.transpose(1, 2), lse

    def backward(self, grad: Tensor, qkv: Three, out: Tensor, lse: Tensor, call: KernelCall) -> Three:
        given = *_swapped((grad, *qkv, out)), lse, 0.0, call.limits == CAUSAL
        mask, kernel = _mask(call, qkv[0]), aten._scaled_dot_product_flash_attention_for_cpu_backward
        return _swapped(kernel(*given, attn_mask=mask, scale=self.scale))


class Cudnn(Kernel):
    """CUDA in half precision, without masks: a call of many elements goes in groups of heads."""

    shares_heads = True
    one_size = False

    def forward(self, qkv: Three, call: KernelCall) -> tuple[Tensor, Tensor]:
        if call.keys[1] - call.keys[0] == 1:  # cuDNN takes no single key, as padding may be
            return Math(self.scale).forward(self._each_head(qkv), call)
        q, k, v = _swapped(qkv)
        out, lse = cudnn.forward(q, k, v, None, call.limits == CAUSAL, self.scale)
        return out.transpose(1, 2), lse.squeeze(-1)

    def backward(self, grad: Tensor, qkv: Three, out: Tensor, lse: Tensor, call: KernelCall) -> Three:
        if call.keys[1] - call.keys[0] == 1:
            of_queries, *others = Math(self.scale).backward(grad, self._each_head(qkv), out, lse, call)
            return of_queries, *(x.unflatten(2, (qkv[1].shape[2], -1)).sum(3) for x in others)
        grad, q, k, v, out = _swapped((grad, *qkv, out))
        return _swapped(cudnn.backward(grad, q, k, v, None, out, lse[..., None], call.limits == CAUSAL, self.scale))

    @staticmethod
    def _each_head(qkv: Three) -> Three:
        q, *others = qkv
        return q, *(x.repeat_interleave(q.shape[2] // x.shape[2], 2) for x in others)


class Efficient(Kernel):
    """CUDA, in any dtype but float64, with heads of any size."""

    def forward(self, qkv: Three, call: KernelCall) -> tuple[Tensor, Tensor]:
        given = *_swapped(qkv), self._bias(call, qkv[0]), True, 0.0, call.limits == CAUSAL
        out, lse, *_ = aten._scaled_dot_product_efficient_attention(*given, scale=self.scale)
        b, s, h, _ = qkv[0].shape
        checked(EFFICIENT, lse, (b, h, s + -s % 32))  # it has a multiple of 32
        return out.transpose(1, 2), lse[..., :s]

    def backward(self, grad: Tensor, qkv: Three, out: Tensor, lse: Tensor, call: KernelCall) -> Three:
        *given, out = _swapped((grad, *qkv, out))
        lse = F.pad(lse, (0, -lse.shape[2] % 32), value=math.inf)
        seed = torch.empty((), dtype=torch.int64, device=grad.device)  # of dropout: not read
        rest = seed, seed, 0.0, [True, True, True, False], call.limits == CAUSAL
        kernel = aten._scaled_dot_product_efficient_attention_backward
        return _swapped(kernel(*given, self._bias(call, qkv[0]), out, lse, *rest, scale=self.scale)[:3])

    @staticmethod
    def _bias(call: KernelCall, q: Tensor) -> Tensor | None:
        mask = _mask(call, q)
        return None if mask is None else mask.expand(q.shape[0], q.shape[2], -1, -1)


class Flash(Kernel):
    """CUDA in half precision: windows without masks, and bands side by side in one call.

    PyTorch's flash ops run FlashAttention-2, or 3 or 4 if that is active (ds_memo/remat/attention_kernels.py).
    """

    shares_heads = True

    def calls(self, bands: Sequence[Band], rows: int, s: int, t: int) -> list[KernelCall]:
        bands = [part for band in joined(bands, True) for part in within_windows(band)]
        if all(band.row is None for band in bands) and len(side_by_side(bands, s, t)) == len(bands):
            return [side_by_side([band], s, t)[0]._replace(borders=None) for band in bands]
        return side_by_side([band._replace(row=r) for r in range(rows) for band in bands if band.row in (None, r)], s, t)

    def forward(self, qkv: Three, call: KernelCall) -> tuple[Tensor, Tensor]:
        tensors, rest, windows = self._arguments(call, *qkv)
        out, lse, *_ = aten._flash_attention_forward(*tensors, *rest, False, **windows)
        q = tensors[0]
        checked(FLASH, lse, (q.shape[0], q.shape[2], q.shape[1]) if call.borders is None else q.shape[1::-1])
        return (out, lse) if call.borders is None else (out[None], lse[None])

    def backward(self, grad: Tensor, qkv: Three, out: Tensor, lse: Tensor, call: KernelCall) -> Three:
        tensors, rest, windows = self._arguments(call, grad, *qkv, out, lse.contiguous())
        seed = torch.empty(2, dtype=torch.uint64, device=grad.device)  # of dropout: not read
        grads = aten._flash_attention_backward(*tensors, *rest, seed, seed, **windows)
        return grads if call.borders is None else [x[None] for x in grads]

    def _arguments(self, call: KernelCall, *tensors: Tensor) -> tuple[Three, tuple[Any, ...], dict[str, Any]]:
        """Return the tensors, what follows them up to is_causal, and the named arguments."""
        causal = call.limits == CAUSAL  # told once: FlashAttention-4 refuses windows
        left, right = UNMASKED[0] if causal else call.limits
        windows = {"scale": self.scale, "window_size_left": left, "window_size_right": right}
        if call.borders is None:
            lengths = (stop - start for start, stop in (call.queries, call.keys))
            return tensors, (None, None, *lengths, 0.0, causal), windows
        sequences = _sequences(call.borders, tensors[0].device)
        return [x[0] for x in tensors], (*sequences, 0.0, causal), windows


class Math(Kernel):
    """Any device, dtype and cap: logits of a block of queries and keys, in the accumulator's dtype."""

    one_size = False

    def _blocks(self, band: Band) -> Iterable[Band]:
        return cut(band, SIDE, keys=SIDE)

    def forward(self, qkv: Three, call: KernelCall) -> tuple[Tensor, Tensor]:
        q, k, v = _swapped(qkv)
        logits, _ = self._logits(q, k, call, slopes=False)
        lse = logits.logsumexp(-1)
        out = _product(logits.sub_(lse[..., None]).exp_().to(v.dtype), v)
        return out.transpose(1, 2).to(q.dtype), lse

    def backward(self, grad: Tensor, qkv: Three, out: Tensor, lse: Tensor, call: KernelCall) -> Three:
        grad, q, k, v, out = _swapped((grad, *qkv, out))
        logits, slope = self._logits(q, k, call, slopes=True)
        shares = logits.sub_(lse[..., None]).exp_()
        dot = (grad.to(lse.dtype) * out).sum(-1, keepdim=True)
        inner = _product(grad, v.mT).sub_(dot).mul_(shares).mul_(slope).to(q.dtype)
        return _swapped((_product(inner, k), _product(inner.mT, q), _product(shares.to(grad.dtype).mT, grad)))

    def _logits(self, q: Tensor, k: Tensor, call: KernelCall, slopes: bool) -> tuple[Tensor, Tensor | float]:
        """Return logits, and if asked for their slopes by the products of queries and keys."""
        logits, slope = _product(q, k.mT), self.scale
        if self.softcap:
            logits.mul_(self.scale / self.softcap).tanh_()
            slope = (logits * logits).neg_().add_(1).mul_(self.scale) if slopes else slope
            logits.mul_(self.softcap)
        else:
            logits.mul_(self.scale)
        mask = _mask(call, logits, UNMASKED[:1])
        return logits if mask is None else logits.add_(mask), slope


KERNELS = {CPU: Cpu, CUDNN: Cudnn, FLASH: Flash, FA3: Flash, FA4: Flash, EFFICIENT: Efficient, MATH: Math}
"""Classes by name: PyTorch's flash ops run whichever flash kernel is active."""


def _product(a: Tensor, b: Tensor) -> Tensor:
    """Return a @ b in the accumulator's dtype. CUDA multiplies numbers of half precision as they are."""
    if a.device.type == "cuda" and a.dtype in (torch.float16, torch.bfloat16):
        return torch.bmm(a.flatten(0, 1), b.flatten(0, 1), out_dtype=torch.float32).unflatten(0, a.shape[:2])
    return a.to(_accumulator(a)) @ b.to(_accumulator(b))


def _swapped(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Trade the places of tokens and heads."""
    return [x.transpose(1, 2) for x in tensors]


def _mask(call: KernelCall, like: Tensor, unmasked: Sequence[Limits] = UNMASKED) -> Tensor | None:
    """Return what to add to logits (queries, keys). Rows are a multiple of 16 apart, as CUDA's kernel wants it."""
    if call.limits in unmasked:
        return None
    (q0, q1), (k0, k1), (before, after) = call.queries, call.keys, call.limits
    ahead = torch.arange(k1 - k0 + (k0 - k1) % 16, device=like.device) - torch.arange(q1 - q0, device=like.device)[:, None]
    mask = torch.zeros(ahead.shape, dtype=like.dtype, device=like.device)
    if before is not None:
        mask.masked_fill_(ahead < -before, -math.inf)
    if after is not None:
        mask.masked_fill_(ahead > after, -math.inf)
    return mask[:, : k1 - k0]


@cache_tensors(128)
def _sequences(borders: Borders, device: torch.device) -> tuple[Tensor | int, ...]:
    """Return borders on the device, and the longest sequences. Cached: no call copies them to the device."""
    tensors = [torch.tensor(side, dtype=torch.int32, device=device) for side in borders]
    return *tensors, *(max(stop - start for start, stop in itertools.pairwise(side)) for side in borders)
