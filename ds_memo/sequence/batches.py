"""Batches and the loss of ranks that share sequences."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_flatten, tree_unflatten

from ds_memo.distributed.lost_ranks import naming_lost_ranks
from ds_memo.errors import MemoError, quoted
from ds_memo.sequence.parts import contiguous, even

IGNORE = -100
"""Label of a token that does not count."""


def split(
    batches: Iterable[dict[str, Any]], group: dist.ProcessGroup, device: torch.device, whole: bool = False
) -> Iterator[dict[str, Any]]:
    """Yield this rank's part of every sequence that a rank of the group reads. See SharedSequences.split."""
    for batch in _as_long_as_all(batches, group):
        for rank in dist.get_process_group_ranks(group):
            yield _cut(_sent(dict(batch) if rank == dist.get_rank() else None, rank, group, device), group, whole)


def part(batch: dict[str, Any], group: dist.ProcessGroup, on_host: dist.ProcessGroup, whole: bool = False) -> dict[str, Any]:
    """Return this rank's part of a batch that all ranks of the group have read. See SharedSequences.part.

    Args:
        on_host: the same ranks, for what lies on the host.
    """
    tokens = _labels_of(batch)
    read = zlib.crc32(tokens.contiguous().cpu().numpy().tobytes()), tuple(tokens.shape)
    by_rank: list[Any] = [None] * dist.get_world_size(group)
    with naming_lost_ranks("the split of a batch"):
        dist.all_gather_object(by_rank, read, group=on_host)
    if len(set(by_rank)) > 1:
        raise MemoError(
            f"the ranks {dist.get_process_group_ranks(group)} of a sequence read batches of their own (labels differ; shapes: "
            f"{', '.join(str(shape) for _, shape in by_rank)}), and part() expects the same one on each. Use split(), which has "
            "them take turns, or give the loader the number of the group in place of the rank's"
        )
    return _cut(batch, group, whole)


def _labels_of(batch: Any) -> torch.Tensor:
    """Return the labels of a batch.

    Raises:
        MemoError: it has none.
    """
    labels = batch.get("labels") if isinstance(batch, dict) else None
    if not isinstance(labels, torch.Tensor) or labels.dim() != 2:
        seen = f"labels of {type(labels).__name__}" if isinstance(batch, dict) else quoted(batch)
        if isinstance(labels, torch.Tensor):
            seen = f"labels of shape {tuple(labels.shape)}"
        raise MemoError(
            f"a batch of ranks that share a sequence: got {seen}; expected a dict with the tensors input_ids, position_ids and "
            "labels, each (b, s), where labels[i] is the token after input_ids[i], or -100"
        )
    return labels


def _cut(full: dict[str, Any], group: dist.ProcessGroup, whole: bool) -> dict[str, Any]:
    length = _labels_of(full).shape[1]
    pieces = contiguous(even(length, dist.get_world_size(group)))[dist.get_rank(group)]
    start, stop = pieces[0] if pieces else (length, length)

    def own(value: Any) -> Any:
        is_cut = isinstance(value, torch.Tensor) and value.dim() > 1 and value.shape[1] == length
        return value[:, start:stop].contiguous() if is_cut else value

    return {name: own(value) if name == "labels" or not whole else value for name, value in full.items()}


@naming_lost_ranks("the split of a batch")
def _sent(batch: dict[str, Any] | None, rank: int, group: dist.ProcessGroup, device: torch.device) -> dict[str, Any]:
    """Return a rank's batch on all ranks of a group; the others pass None."""
    own, spec = tree_flatten(batch)
    sent: list[Any] = [(list(map(_described, own)), spec)]
    dist.broadcast_object_list(sent, rank, group=group, device=device)
    leaves, spec = sent[0]
    for number, meta in enumerate(leaves):
        if isinstance(meta, torch.Tensor):
            leaves[number] = torch.empty_like(meta, device=device) if batch is None else own[number].to(device).contiguous()
            dist.broadcast(leaves[number], rank, group=group)
    found: dict[str, Any] = tree_unflatten(leaves, spec)
    return found


def _as_long_as_all(batches: Iterable[dict[str, Any]], group: dist.ProcessGroup) -> Iterator[dict[str, Any]]:
    """Yield batches as long as each rank of the group has one."""
    source = iter(batches)
    while True:
        batch = next(source, None)
        have: list[Any] = [None] * dist.get_world_size(group)
        with naming_lost_ranks("the split of a batch"):
            dist.all_gather_object(have, batch is not None, group=group)
        if batch is None or not all(have):
            return
        yield batch


def _described(value: Any) -> Any:
    """Return what stands for a value while ranks agree on shapes: a tensor without memory."""
    is_tensor = isinstance(value, torch.Tensor)
    return torch.empty_like(value, device="meta", memory_format=torch.contiguous_format) if is_tensor else value


@naming_lost_ranks("the mean over a sequence's ranks")
def mean_over_ranks(loss: torch.Tensor, labels: torch.Tensor, group: dist.ProcessGroup, scale: float) -> torch.Tensor:
    """Return the mean loss over whole sequences, from every rank's mean over its part, weighted by the labels that count.

    Args:
        loss: scalar, the mean over those of `labels` that are not -100.
        labels: this rank's part, each the token to predict at that position.
        scale: factor of this rank's gradient. The gradients of all ranks of the group, with a factor of 1, add up to the mean's.

    Raises:
        MemoError: the loss is no scalar.
    """
    if loss.dim():
        raise MemoError(
            f"a loss of ranks that share a sequence: got a tensor of shape {tuple(loss.shape)}; expected a scalar, the mean over "
            "the labels of this rank's part that count"
        )
    count = (labels != IGNORE).sum()
    total = count.clone()
    dist.all_reduce(total, group=group)
    share = torch.where(count > 0, loss, torch.zeros_like(loss)) * (count / total.clamp(min=1))
    return _SumOverRanks.apply(share, group, scale)


class _SumOverRanks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, share: torch.Tensor, group: dist.ProcessGroup, scale: float) -> torch.Tensor:
        ctx.scale = scale
        total = share.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return grad * ctx.scale, None, None
