"""Documents packed into one sequence: where each begins, and attention that stays inside them.

DeepSpeed's Ulysses attention knows causality alone. What it runs on whole sequences has to keep documents apart by itself.
"""

from __future__ import annotations

import functools
import itertools
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from ds_memo.errors import MemoError

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

_BLOCK = 128
"""Tokens of a block, as FlexAttention has it."""


@dataclass(frozen=True, eq=False)
class Documents:
    """The documents of a batch of sequences (b, s)."""

    lengths: tuple[tuple[int, ...], ...]
    """Tokens of each document in its order, by row; each row adds up to s."""
    device: torch.device

    @functools.cached_property
    def borders(self) -> torch.Tensor:
        """Tokens before each document, rows laid end to end, and all of them last: flash attention's cu_seqlens, int32."""
        return torch.tensor([0, *itertools.accumulate(itertools.chain(*self.lengths))], dtype=torch.int32, device=self.device)

    @functools.cached_property
    def longest(self) -> int:
        return max(map(max, self.lengths))

    @functools.cached_property
    def block_mask(self) -> BlockMask:
        """FlexAttention's mask: causal within each document.

        Worked out by blocks: ``create_block_mask`` would first make a tensor of s × s.
        """
        from torch.nn.attention.flex_attention import BlockMask

        rows = [_first_tokens(lengths) for lengths in self.lengths]
        first = torch.stack(rows).to(self.device)  # (b, s): of the token's document
        length = first.shape[1]
        block = torch.arange(-(-length // _BLOCK), device=self.device)
        query, key = block[:, None], block
        earliest = first[:, block * _BLOCK, None]  # of a block of queries (b, blocks, 1)
        latest = first[:, (block * _BLOCK + _BLOCK - 1).clamp(max=length - 1), None]
        seen = (key <= query) & (earliest < (key + 1) * _BLOCK)
        whole = (key < query) & (latest <= key * _BLOCK) & ((query + 1) * _BLOCK <= length)

        def mask_mod(b: torch.Tensor, h: torch.Tensor, q: torch.Tensor, kv: torch.Tensor) -> torch.Tensor:
            return (kv <= q) & (kv >= first[b, q])

        return BlockMask.from_kv_blocks(
            *_listed(seen & ~whole), *_listed(whole), BLOCK_SIZE=_BLOCK, mask_mod=mask_mod, seq_lengths=(length, length)
        )


def find(position_ids: torch.Tensor) -> Documents | None:
    """Tell documents by position_ids: one begins where a position is not above the one before.

    Padding whose positions do not rise (0, 0, … or 1, 1, …) is a document per token, which no other token attends to.
    Synchronises with the device.

    Args:
        position_ids: of whole sequences, (b, s).

    Returns:
        None if every row is one document.

    Raises:
        MemoError: positions rise by more than one, or have more axes.
    """
    if position_ids.dim() != 2:
        raise MemoError(
            f"position_ids have the shape {tuple(position_ids.shape)}; sequence parallelism needs (rows, tokens) to tell documents "
            "apart. Give positions of one axis, or train the model without sequence_parallel_size"
        )
    steps = position_ids.diff(dim=1).clamp(0, 2).to(torch.uint8).cpu()
    if (steps == 1).all():
        return None
    if (steps == 2).any():
        row, token = (steps == 2).nonzero()[0].tolist()
        before, after = position_ids[row, token : token + 2].tolist()
        raise MemoError(
            f"position_ids of row {row} rise from {before} to {after} between tokens {token} and {token + 1}; expected steps of 1, "
            "or a fall where a document begins. Whether a gap is a border cannot be told: number each document from 0 without gaps"
        )
    return Documents(tuple(map(_lengths, steps)), position_ids.device)


def attention_within(name: str) -> Callable[..., Any] | None:
    """Choose the way to keep documents apart under an attention implementation of Transformers.

    Returns:
        A function of the documents, the implementation, and the implementation's own arguments for whole sequences. None: there
        is no way that is known to be right.
    """
    if name == "sdpa":
        return _one_by_one
    if name == "flex_attention":
        return _masked
    if "flash" in name and "|" not in name:  # also flash-attn kernels from the Hub; "paged|…" is for generation
        return _varlen
    return None


def _one_by_one(
    documents: Documents,
    attend: Callable[..., Any],
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: Any,
    *rest: Any,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attend within one document after the other; those of equal length (padding, above all) go in one call.

    Args:
        query: (b, heads, s, head size).

    Returns:
        The output (b, s, heads, head size), and None for the weights.
    """
    batch, _, length, _ = query.shape
    pieces = [
        [piece for row, lengths in zip(x.split(1), documents.lengths, strict=True) for piece in row.split(lengths, dim=2)]
        for x in (query, key, value)
    ]
    alike = defaultdict(list)
    for index, size in enumerate(itertools.chain(*documents.lengths)):
        alike[size].append(index)
    out: dict[int, torch.Tensor] = {}
    for indices in alike.values():
        inputs = (torch.cat([x[i] for i in indices]) if len(indices) > 1 else x[indices[0]] for x in pieces)
        attended = attend(module, *inputs, None, *rest, **kwargs)[0]  # (documents, tokens, heads, head size)
        out.update(zip(indices, attended.split(1), strict=True))
    joined = torch.cat([out[index] for index in range(len(out))], dim=1)
    return joined.view(batch, length, *joined.shape[2:]), None


def _masked(
    documents: Documents,
    attend: Callable[..., Any],
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: Any,
    *rest: Any,
    **kwargs: Any,
) -> Any:
    return attend(module, query, key, value, documents.block_mask, *rest, **kwargs)


def _varlen(documents: Documents, attend: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Say it by cu_seqlens: Transformers looks at position_ids in batches of one row alone."""
    borders, longest = documents.borders, documents.longest
    said = {"cu_seq_lens_q": borders, "cu_seq_lens_k": borders, "max_length_q": longest, "max_length_k": longest}
    return attend(*args, **{**kwargs, **said})


def _lengths(steps: torch.Tensor) -> tuple[int, ...]:
    """Tokens of each document of a row, from its steps (s - 1)."""
    begins = (steps != 1).nonzero().flatten() + 1
    return tuple(torch.diff(torch.tensor([0, *begins.tolist(), len(steps) + 1])).tolist())


def _first_tokens(lengths: tuple[int, ...]) -> torch.Tensor:
    """For each token of a row, the index of its document's first (s)."""
    sizes = torch.tensor(lengths)
    return torch.repeat_interleave(sizes.cumsum(0) - sizes, sizes)


def _listed(blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """How many blocks each row of blocks (b, n, n) has, and which: theirs first, then the others, as BlockMask wants them."""
    blocks = blocks[:, None].int()  # the same for all heads
    return blocks.sum(-1, dtype=torch.int32), blocks.argsort(dim=-1, descending=True, stable=True).int()
