"""Random layouts of sequences, as each rank sees them. No process groups: a layout needs only the ranks' numbers."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import fields

import torch

from ds_memo.sequence.masks import Mask
from ds_memo.sequence.parts import SequenceParts
from ds_memo.sequence.ranks import SequenceRanks
from ds_memo.sequence.striped import Striped

SHAPES = ((1, 1), (2, 1), (1, 2), (3, 1), (1, 3), (2, 2), (1, 4), (4, 2), (2, 4), (3, 2))
"""Ulysses ranks and ring numbers."""


def ranks(ulysses: int, ring: int, number: int) -> SequenceRanks:
    found = SequenceRanks(**dict.fromkeys(field.name for field in fields(SequenceRanks)))
    vars(found).update(size=ulysses * ring, ulysses=ulysses, ring=ring, number=number)
    return found


def of_all(
    ulysses: int, ring: int, length: int, documents: Sequence[Sequence[int]] = ((0,),), zigzag: bool = True
) -> list[SequenceParts]:
    """Return the parts as each rank has them."""
    return [SequenceParts(ranks(ulysses, ring, number), length, documents, zigzag) for number in range(ulysses * ring)]


def striped(everywhere: Sequence[SequenceParts], tile: int) -> list[SequenceParts]:
    """Return the same sequences in tiles, as each rank has them."""
    return [Striped(parts, tile) for parts in everywhere]


def random_documents(generator: random.Random, length: int, rows: int) -> tuple[tuple[int, ...], ...]:
    return tuple((0, *sorted(generator.sample(range(1, length), generator.randrange(min(4, length))))) for _ in range(rows))


def dense(mask: Mask, length: int, documents: tuple[tuple[int, ...], ...]) -> torch.Tensor:
    """(rows, queries, keys) of the sequence without padding, from the definition of each kind."""
    query, key = torch.arange(length)[:, None], torch.arange(length)[None, :]
    rows = []
    for row, starts in enumerate(documents):
        first = torch.tensor([max(start for start in starts if start <= token) for token in range(length)])
        within = first[:, None] == first[None, :]
        causal = (key <= query) & within
        if mask.kind == "both":
            rows.append(within)
        elif mask.kind == "table":
            lo, hi = (edge[row if len(mask.table[0]) > 1 else 0] for edge in mask.table)
            rows.append((key >= lo[:, None]) & (key <= hi[:, None]) & within)
        elif mask.kind == "window":
            rows.append(causal & (query - key < mask.size))
        elif mask.kind == "chunk":
            chunk = (torch.arange(length) - first) // mask.size
            rows.append(causal & (chunk[:, None] == chunk[None, :]))
        else:
            rows.append(causal)
    return torch.stack(rows)
