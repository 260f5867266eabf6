"""What ranks that share a sequence send each other, with its gradient. Tensors are (b, tokens, heads or channels, …).

In a replay each runs again, on all ranks alike. All collectives here are blocking in the sense of PyTorch: under NCCL the current
stream waits for an event behind the collective, so kernels issued later read what has come, and the host goes on.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from ds_memo.sequence.cache import cache_tensors
from ds_memo.sequence.parts import Pieces, SequenceParts

Owned = Sequence[Sequence[int]]
"""Numbers of the heads that each rank of a group gets. Ranks may get the same ones, such as a key head that they share."""


def blocks(heads: int, ranks: int) -> list[list[int]]:
    """Return neighbouring heads for each rank, as equal in number as they can be."""
    return [list(range(heads * rank // ranks, heads * (rank + 1) // ranks)) for rank in range(ranks)]


def shared_by(owned: Owned, heads: int, shared: int) -> list[list[int]]:
    """Return for each rank's of `heads` heads those of `shared` heads (fewer) that they use: head i uses i · shared / heads."""
    return [sorted({head * shared // heads for head in of_rank}) for of_rank in owned]


def to_heads(x: torch.Tensor, owned: Owned, group: dist.ProcessGroup) -> torch.Tensor:
    """Trade tokens for heads: (b, n, heads, …) to (b, ranks · n, own heads, …), tokens by rank."""
    if len(owned) == 1:
        return x
    counts = [len(heads) for heads in owned]
    wanted = [head for heads in owned for head in heads]
    if wanted != list(range(x.shape[2])):
        x = x.index_select(2, index(tuple(wanted), x.device))  # its gradient adds up what ranks share
    return _Exchange.apply(x, True, counts, group)


@cache_tensors(256)
def index(numbers: tuple[int, ...], device: torch.device) -> torch.Tensor:
    """Return an index tensor; the same one each time, so that no layer call copies it to the device."""
    return torch.tensor(numbers, device=device)


def to_tokens(x: torch.Tensor, counts: Sequence[int], group: dist.ProcessGroup) -> torch.Tensor:
    """Trade heads for tokens: (b, ranks · n, own heads, …) to (b, n, sum(counts), …).

    Args:
        counts: heads of each rank of the group.
    """
    return x if len(counts) == 1 else _Exchange.apply(x, False, list(counts), group)


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, heads: bool, counts: list[int], group: dist.ProcessGroup) -> torch.Tensor:
        ctx.how = heads, counts, group
        return _all_to_all(x, heads, counts, group)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        heads, counts, group = ctx.how
        return _all_to_all(gradient, not heads, counts, group), None, None, None


def _all_to_all(x: torch.Tensor, heads: bool, counts: list[int], group: dist.ProcessGroup) -> torch.Tensor:
    """Trade tokens for heads, or back. Memory: a copy of `x` in blocks, and the result; another copy for more rows than one."""
    ranks, own = len(counts), counts[dist.get_rank(group)]
    rows, tokens, rest = x.shape[0], x.shape[1], x.shape[3:]
    if heads:
        sent = [part.reshape(-1) for part in x.split(counts, 2)] if len(set(counts)) > 1 else None
        packed = torch.cat(sent) if sent else x.unflatten(2, (ranks, own)).movedim(2, 0).contiguous().view(-1)
        here, there = [packed.numel() * count // sum(counts) for count in counts], rows * tokens * own * rest.numel()
        received = x.new_empty(ranks * there)
        dist.all_to_all_single(received, packed, [there] * ranks, here, group=group)
        return received.view(ranks, rows, tokens, own, *rest).movedim(0, 1).flatten(1, 2)
    tokens //= ranks
    packed = x.unflatten(1, (ranks, tokens)).movedim(1, 0).contiguous().view(-1)
    each = rows * tokens * rest.numel()
    received = x.new_empty(each * sum(counts))
    dist.all_to_all_single(received, packed, [each * count for count in counts], [each * own] * ranks, group=group)
    if len(set(counts)) == 1:
        return received.view(ranks, rows, tokens, own, *rest).permute(1, 2, 0, *range(3, 4 + len(rest))).flatten(2, 3)
    shares = received.split([each * count for count in counts])
    return torch.cat([part.view(rows, tokens, count, *rest) for part, count in zip(shares, counts, strict=True)], 2)


def gather(x: torch.Tensor, dim: int, parts: SequenceParts) -> torch.Tensor:
    """Return all tokens, in order, on every rank, of what holds a part along `dim`. The gradient is the sum of all ranks'."""
    first = x.movedim(dim, 0)
    return parts.sorted(_Gather.apply(first, parts.ranks.group), 0).movedim(0, dim)


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        out = x.new_empty(dist.get_world_size(group) * x.shape[0], *x.shape[1:])
        dist.all_gather_into_tensor(out, x.contiguous(), group=group)  # all_gather makes a copy of all parts under NCCL
        return out

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        ranks = dist.get_world_size(ctx.group)
        sent = gradient.contiguous()
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=ctx.group)  # gloo has no reduce-scatter
        return received.unflatten(0, (ranks, -1)).sum(0), None


def move(x: torch.Tensor, have: Sequence[Pieces], want: Sequence[Pieces], group: dist.ProcessGroup) -> torch.Tensor:
    """Return the tokens (b, n, …) that this rank wants of those that all ranks have. Tokens that no rank has are zero.

    Args:
        have, want: pieces of each rank of the group.
    """
    return x if have == want else _Move.apply(x, have, want, group)


class _Move(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, have: Sequence[Pieces], want: Sequence[Pieces], group: dist.ProcessGroup
    ) -> torch.Tensor:
        ctx.how = want, have, group
        return _moved(x, have, want, group)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        return _moved(gradient, *ctx.how), None, None, None


def _moved(x: torch.Tensor, have: Sequence[Pieces], want: Sequence[Pieces], group: dist.ProcessGroup) -> torch.Tensor:
    ranks, own = range(len(have)), dist.get_rank(group)
    x = x.transpose(0, 1)  # tokens first
    sent = [[(first, size) for first, _, size in common(have[own], want[rank])] for rank in ranks]
    come = [[(at, size) for _, at, size in common(have[rank], want[own])] for rank in ranks]
    packed = [x.narrow(0, *place) for places in sent for place in places]
    here, there = ([sum(size for _, size in places) for places in of_rank] for of_rank in (sent, come))
    received = x.new_empty(sum(there), *x.shape[1:])
    dist.all_to_all_single(received, torch.cat([x[:0], *packed]).contiguous(), there, here, group=group)
    out = x.new_zeros(x.shape[1], sum(stop - start for start, stop in want[own]), *x.shape[2:])  # no view: it may be written to
    for (at, size), part in zip(
        itertools.chain(*come), received.split([size for places in come for _, size in places]), strict=True
    ):
        out.narrow(1, at, size).add_(part.transpose(0, 1))  # two ranks may want one token: its gradient is their sum
    return out


def common(have: Pieces, want: Pieces) -> list[tuple[int, int, int]]:
    """Return the tokens that are in both: where they begin along `have`, where along `want`, and how many."""
    found, passed = [], 0
    for start, stop in have:
        at = 0
        for first, last in want:
            a, b = max(start, first), min(stop, last)
            if a < b:
                found.append((passed + a - start, at + a - first, b - a))
            at += last - first
        passed += stop - start
    return found
