"""Attention over whole sequences whose tokens lie on several ranks.

The ranks of an Ulysses group trade tokens for heads, then keys and values travel around the ring. All that the ring computes is
one op, whose outputs are the result for this rank's heads and its log-sum-exp over all keys. Its backward needs these and q, k, v
alone. So memo keeps them like those of any attention kernel, and a replay trades heads again but runs no ring.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ds_memo.errors import MemoError
from ds_memo.remat.autocast import cast, without_autocast
from ds_memo.sequence import kernels
from ds_memo.sequence.exchange import blocks, shared_by, to_heads, to_tokens
from ds_memo.sequence.masks import AttentionPlan, Mask, plan
from ds_memo.sequence.parts import SequenceParts
from ds_memo.sequence.ranks import SequenceRanks

HARMLESS = ("position_ids", "num_items_in_batch", "shift_labels")
"""Tensors that models hand their attention function and that change nothing in it."""

_plans: weakref.WeakValueDictionary[int, AttentionPlan] = weakref.WeakValueDictionary()
"""Plans by number: an op takes no objects."""


def attend(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Any,
    parts: SequenceParts,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    is_causal: bool | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """Attend, by Transformers' attention interface.

    Args:
        query: of this rank's tokens (b, heads, n, d); key and value alike, of as many heads or fewer.
        attention_mask: a :class:`Mask`; None is causal.
        s_aux: a sink for each head: the logarithm of what it adds to the sum over keys (gpt-oss).

    Returns:
        (b, n, heads, d of the values) and None.

    Raises:
        MemoError: an argument that would change the result is not known here.
    """
    mask = _mask(module, attention_mask, sliding_window, is_causal)
    _refuse(module, dropout, others)
    if query.shape[2] != parts.own:
        parts = parts.shortened(query.shape[2])
        mask = mask if mask.table is None else Mask()  # layers of a profile need the work alone
    ranks = parts.ranks
    query, key, value = cast(query, key, value)
    owned, keys = _shares(query.shape[1], key.shape[1], ranks.ulysses)
    of_each = (query, owned), (key, keys), (value, keys)
    q, k, v = (parts.sorted(to_heads(x.transpose(1, 2), heads, ranks.ulysses_group), 1, of_ring=True) for x, heads in of_each)
    if s_aux is not None and ranks.ulysses > 1:
        own = owned[ranks.ulysses_number]
        s_aux = s_aux[own[0] : own[-1] + 1]
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    out = _Attention.apply(q, k, v, s_aux, plan(parts, mask), scale, softcap or 0.0)
    return to_tokens(parts.by_rank(out, 1, of_ring=True), [len(of_rank) for of_rank in owned], ranks.ulysses_group), None


@functools.lru_cache(maxsize=64)
def _shares(heads: int, key_heads: int, ranks: int) -> tuple[list[list[int]], list[list[int]]]:
    """Return the heads of each rank and their key heads: each once, or once for each head where not all serve as many."""
    owned = blocks(heads, ranks)
    keys = shared_by(owned, heads, key_heads)
    each = [[head * key_heads // heads for head in of_rank] for of_rank in owned]
    even = all(
        len(of_rank) % len(own) == 0 and [own[i * len(own) // len(of_rank)] for i in range(len(of_rank))] == of_rank
        for of_rank, own in zip(each, keys, strict=True)
    )
    return owned, keys if even else each


def _mask(module: nn.Module, mask: Any, window: int | None, is_causal: bool | None) -> Mask:
    if mask is None:
        causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
        if not causal:
            return Mask("both")
        return Mask("window", window) if window else Mask()
    if isinstance(mask, Mask):
        return mask
    raise MemoError(
        f"{type(module).__name__} hands its attention function a mask of its own (a {type(mask).__name__} of shape "
        f"{tuple(getattr(mask, 'shape', ()))}), which is of this rank's part alone. Let the model make its mask by Transformers' "
        'masking_utils, pass documents by position_ids, or use "sequence_parallel_size": 1'
    )


def _refuse(module: nn.Module, dropout: float, others: dict[str, Any]) -> None:
    name = type(module).__name__
    if dropout and module.training:
        raise MemoError(
            f"{name} drops {dropout:.0%} of attention's weights; ranks that share a sequence cannot draw alike. Set the model's "
            'attention_dropout (attn_pdrop) to 0, or "sequence_parallel_size" to 1'
        )
    for argument, given in others.items():
        if isinstance(given, torch.Tensor) and argument not in HARMLESS:
            raise MemoError(
                f"{name} hands its attention function {argument}, a tensor of shape {tuple(given.shape)}, which attention in "
                'parts does not know and would leave out. Use "sequence_parallel_size": 1'
            )


class _Attention(torch.autograd.Function):
    """q (b, s, h, d), k (b, s, k, d), v (b, s, k, e) of all tokens of a ring number -> (b, s, h, e)."""

    @staticmethod
    def forward(
        ctx: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        sinks: torch.Tensor | None,
        plan: AttentionPlan,
        scale: float,
        softcap: float,
    ) -> torch.Tensor:
        _plans[id(plan)] = plan
        with without_autocast():
            out, lse = torch.ops.ds_memo.sequence_attention(q, k, v, sinks, id(plan), scale, softcap)
        ctx.save_for_backward(q, k, v, out, lse, sinks)
        ctx.how = plan, scale, softcap
        return out

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        q, k, v, out, lse, sinks = ctx.saved_tensors
        plan, scale, softcap = ctx.how
        with without_autocast():
            found = _backward(gradient, q, k, v, out, lse, plan, scale, softcap)
        of_sinks = None
        if sinks is not None:
            share = (sinks.to(lse.dtype)[:, None] - lse).exp()
            dot = (gradient * out).sum(-1, dtype=lse.dtype).transpose(1, 2)
            of_sinks = -(share * dot).sum((0, 2)).to(sinks.dtype)
        return *found, of_sinks, None, None, None


def _forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: torch.Tensor | None, number: int, scale: float, softcap: float
) -> tuple[torch.Tensor, torch.Tensor]:
    plan = _plans[number]
    whole: tuple[torch.Tensor, torch.Tensor] | None = None
    for step, (keys, values) in enumerate(_around(plan.ranks, k, v)):
        if whole is None:
            out, lse = kernels.forward(q, keys, values, plan.steps[step], scale, softcap, plan.documents)
            whole = (out.to(lse.dtype), lse) if len(plan.steps) > 1 else (out, lse)
        elif plan.steps[step]:
            kernels.merge(*whole, *kernels.forward(q, keys, values, plan.steps[step], scale, softcap, plan.documents))
        del keys, values  # before room is made for the next but one
    assert whole is not None
    out, lse = whole
    if sinks is not None:  # one more key, whose value is zero: it only adds to the sum
        total = torch.logaddexp(lse, sinks.to(lse.dtype)[:, None])
        out, lse = out * (lse - total).exp().transpose(1, 2)[..., None].to(out.dtype), total
    return out.to(q.dtype), lse


def _backward(
    gradient: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    plan: AttentionPlan,
    scale: float,
    softcap: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    if len(plan.steps) == 1:
        found = kernels.backward(gradient, q, k, v, out, lse, plan.steps[0], scale, softcap, plan.documents)
        return tuple(x.to(of.dtype) for x, of in zip(found, (q, k, v), strict=True))  # type: ignore[return-value]
    of_queries = torch.zeros_like(q, dtype=lse.dtype)
    sums = [torch.zeros_like(x, dtype=lse.dtype) for x in (k, v)]
    travelling: _Sent | None = None
    for step, (keys, values) in enumerate(_around(plan.ranks, k, v)):
        found = None
        if plan.steps[step]:
            found = kernels.backward(gradient, q, keys, values, out, lse, plan.steps[step], scale, softcap, plan.documents)
            of_queries += found[0]
        del keys, values
        if travelling is not None:  # the sums for these keys, of the ranks that had them before: the kernel above hid their way
            sums = travelling.wait()
        if found is not None:
            sums[0] += found[1]
            sums[1] += found[2]
        if step + 1 == len(plan.steps):  # complete: they come home rounded
            sums = [x.to(k.dtype) for x in sums]
        travelling = _Sent(plan.ranks, sums)
    assert travelling is not None
    of_keys, of_values = travelling.wait()
    return of_queries.to(q.dtype), of_keys, of_values


def _around(ranks: SequenceRanks, *tensors: torch.Tensor) -> Any:
    """Yield the tensors of every ring number, this rank's first, then those of the ranks before it.

    The next ones are on their way while a caller uses these: beside this rank's own, two of each are alive.
    """
    here = list(tensors)
    for _ in range(ranks.ring - 1):
        coming = _Sent(ranks, here)
        yield here
        here.clear()  # enumerate() still has the list
        here = coming.wait()
    yield here


class _Sent:
    """Tensors on their way to the next rank of the ring, while those of the rank before come."""

    def __init__(self, ranks: SequenceRanks, tensors: Sequence[torch.Tensor]) -> None:
        group, number = ranks.ring_group, ranks.ring_number
        onward, back = (dist.get_global_rank(group, (number + step) % ranks.ring) for step in (1, -1))
        self._sent = [x.contiguous() for x in tensors]
        self._come = [torch.empty_like(x) for x in self._sent]
        pairs = zip(self._sent, self._come, strict=True)
        ops = [
            dist.P2POp(do, x, peer, group) for a, b in pairs for do, x, peer in ((dist.isend, a, onward), (dist.irecv, b, back))
        ]
        self._works = dist.batch_isend_irecv(ops)

    def wait(self) -> list[torch.Tensor]:
        """Return what has come."""
        # NCCL sends and receives on a stream of its own. wait() puts an event behind both into the current stream, not the host:
        # kernels read what came, and the allocator hands out what was sent, only behind it.
        for work in self._works:
            work.wait()
        self._sent = []
        return self._come


_library = torch.library.Library("ds_memo", "FRAGMENT")
_library.define(
    "sequence_attention(Tensor q, Tensor k, Tensor v, Tensor? sinks, int plan, float scale, float softcap) -> (Tensor, Tensor)"
)
_library.impl("sequence_attention", _forward, "CompositeExplicitAutograd")
