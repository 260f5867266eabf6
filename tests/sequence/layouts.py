"""Random layouts of sequences, as each rank sees them. No process groups: a layout needs only the ranks' numbers."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import fields

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
