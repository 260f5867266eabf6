"""Documents packed into one sequence: where each begins, and attention that stays inside them.

DeepSpeed's Ulysses attention knows causality alone. What it runs on whole sequences has to keep documents apart by itself.
"""

from __future__ import annotations

import functools
import itertools
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from ds_memo.errors import MemoError

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

_BLOCK = 128
"""Tokens of a block, as FlexAttention has it."""

Lengths = Sequence[Sequence[int]]
"""Tokens of each document in its order, by row; each row adds up to s."""
Attention = Callable[..., tuple[torch.Tensor, Any]]
"""Transformers' attention interface: module, query, key, value (b, heads, s, head size), mask, …; returns the output
(b, s, heads, head size) and weights or None."""


def attention_within(name: str, attend: Attention, position_ids: torch.Tensor) -> Attention:
    """Keep `attend`, the causal attention that Transformers calls `name`, inside the documents of a batch of sequences.

    Copies one byte per token to the host and waits for it; the function that it returns waits for nothing.

    Args:
        position_ids: of whole sequences, (b, s). A document begins where a position is not above the one before. So padding
            whose positions do not rise (0, 0, … or 1, 1, …) is a document per token, which no other token attends to.

    Returns:
        `attend` itself if every row is one document, except for FlexAttention: its causal mask, too, is made here.

    Raises:
        MemoError: position_ids do not tell documents, or how to keep them apart under `name` is not known.
    """
    lengths = document_lengths(position_ids)
    if name == "flex_attention":
        return functools.partial(_masked, attend, block_mask(lengths, position_ids.device))
    if all(len(row) == 1 for row in lengths):
        return attend
    if name == "sdpa":
        return functools.partial(_one_by_one, attend, lengths)
    if "flash" in name and "|" not in name:  # also kernels from the Hub; "paged|…" is for generation
        return functools.partial(_varlen, attend, _varlen_arguments(lengths, position_ids.device))
    row = next(index for index, row in enumerate(lengths) if len(row) > 1)
    raise MemoError(
        f"position_ids of row {row} start again at token {lengths[row][0]}, where another document begins, and how "
        f'attn_implementation="{name}" would keep them apart is not known. Use "flash_attention_2", "flex_attention" or "sdpa"'
    )


def document_lengths(position_ids: torch.Tensor) -> Lengths:
    """Find the documents of sequences, as :func:`attention_within` tells them.

    Raises:
        MemoError: positions rise by more than one.
    """
    steps = position_ids.diff(dim=1).clamp(0, 2).to(torch.uint8).cpu()
    if (steps == 2).any():
        row, token = (steps == 2).nonzero()[0].tolist()
        before, after = position_ids[row, token : token + 2].tolist()
        raise MemoError(
            f"position_ids of row {row} rise from {before} to {after} at token {token + 1}; expected steps of 1, or a fall where "
            "a document begins. Whether a gap is a border cannot be told: number each document without gaps"
        )
    return [_between([0, *((row != 1).nonzero().flatten() + 1).tolist(), position_ids.shape[1]]) for row in steps]


def without_gaps(position_ids: torch.Tensor) -> torch.Tensor:
    """Number on from the token before wherever positions (b, s) rise by more than one, as where ranks' parts lost their ends."""
    gaps = (position_ids.diff(dim=1) - 1).clamp(min=0).cumsum(dim=1)
    return torch.cat([position_ids[:, :1], position_ids[:, 1:] - gaps], dim=1)


def block_mask(lengths: Lengths, device: torch.device) -> BlockMask:
    """Make FlexAttention's mask, causal within each document.

    It is worked out by blocks: ``create_block_mask`` would first make a tensor of s × s.
    """
    from torch.nn.attention.flex_attention import BlockMask

    first = torch.stack([_first_tokens(row) for row in lengths]).to(device)  # (b, s): of the token's document
    length = first.shape[1]
    block = torch.arange(-(-length // _BLOCK), device=device)
    query, key = block[:, None], block
    earliest = first[:, block * _BLOCK, None]  # of a block of queries (b, blocks, 1)
    latest = first[:, (block * _BLOCK + _BLOCK - 1).clamp(max=length - 1), None]
    seen = (key <= query) & (earliest < (key + 1) * _BLOCK)
    full = (key < query) & (latest <= key * _BLOCK) & ((query + 1) * _BLOCK <= length)

    def mask_mod(b: torch.Tensor, h: torch.Tensor, q: torch.Tensor, kv: torch.Tensor) -> torch.Tensor:
        return (kv <= q) & (kv >= first[b, q])

    return BlockMask.from_kv_blocks(
        *_listed(seen & ~full), *_listed(full), BLOCK_SIZE=_BLOCK, mask_mod=mask_mod, seq_lengths=(length, length)
    )


def _one_by_one(
    attend: Attention,
    lengths: Lengths,
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: None,
    *rest: Any,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attend within one document after the other; those of equal length (padding, above all) go in one call."""
    pieces = [
        [piece for row, parts in zip(x.split(1), lengths, strict=True) for piece in row.split(parts, dim=2)]
        for x in (query, key, value)
    ]
    alike = defaultdict(list)
    for index, size in enumerate(itertools.chain(*lengths)):
        alike[size].append(index)
    out: dict[int, torch.Tensor] = {}
    for indices in alike.values():
        inputs = [torch.cat([x[i] for i in indices]) if len(indices) > 1 else x[indices[0]] for x in pieces]
        attended, _ = attend(module, *inputs, None, *rest, **kwargs)  # (documents, tokens, heads, head size)
        out.update(zip(indices, attended.split(1), strict=True))
    joined = torch.cat([out[index] for index in range(len(out))], dim=1)
    return joined.view(len(query), query.shape[2], *joined.shape[2:]), None


def _masked(
    attend: Attention,
    blocks: BlockMask,
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: None,
    *rest: Any,
    **kwargs: Any,
) -> tuple[torch.Tensor, Any]:
    return attend(module, query, key, value, blocks, *rest, **kwargs)


def _varlen(attend: Attention, said: dict[str, Any], *args: Any, **kwargs: Any) -> tuple[torch.Tensor, Any]:
    return attend(*args, **{**kwargs, **said})


def _varlen_arguments(lengths: Lengths, device: torch.device) -> dict[str, Any]:
    """Flash attention's cu_seqlens, rows laid end to end. From position_ids Transformers makes them for a single row only."""
    sizes = list(itertools.chain(*lengths))
    borders = torch.tensor([0, *itertools.accumulate(sizes)], dtype=torch.int32, device=device)
    return {"cu_seq_lens_q": borders, "cu_seq_lens_k": borders, "max_length_q": max(sizes), "max_length_k": max(sizes)}


def _between(borders: list[int]) -> list[int]:
    return [end - start for start, end in itertools.pairwise(borders)]


def _first_tokens(lengths: Sequence[int]) -> torch.Tensor:
    """The index of its document's first token, for each token of a row (s)."""
    sizes = torch.tensor(lengths)
    return torch.repeat_interleave(sizes.cumsum(0) - sizes, sizes)


def _listed(blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The number of blocks in each row of `blocks` (b, n, n), and their indices, followed by the others', for BlockMask."""
    blocks = blocks[:, None].int()  # the same for all heads
    return blocks.sum(-1, dtype=torch.int32), blocks.argsort(dim=-1, descending=True, stable=True).int()
