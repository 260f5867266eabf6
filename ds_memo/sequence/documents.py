"""What a rank tells the others of its part of a batch, and the documents of whole sequences that follow from it."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F

from ds_memo.errors import MemoError

_IN_ORDER = "Give each rank its part in the order of the ranks, and no token twice (ds_memo's split does)"


class RankPart(NamedTuple):
    """What a rank tells the others of its part of a batch."""

    rows: int
    length: int
    borders: tuple[tuple[int, ...], ...]
    """By row, tokens whose position is not the one before plus 1."""
    ends: tuple[tuple[int, int], ...]
    """By row, the first and last position."""
    longest: int
    """Largest position plus 1."""
    gap: tuple[int, int, int, int] | None
    """Where positions rise by more than 1: row, token, the position before it and its own."""
    flips: tuple[tuple[int, ...], ...] = ((),)
    """By row, tokens where padding begins or ends. Text goes before the part."""


def describe_part(rows: int, length: int, positions: torch.Tensor | None, padding: torch.Tensor | None = None) -> RankPart:
    """Read a part's positions (rows or 1, n) and its mask of padding (rows, n). Waits for a byte per token."""
    if not length or (positions is None and padding is None):
        return RankPart(rows, length, ((),), ((-1, -1),), 0, None)
    codes = torch.ones(1, length, dtype=torch.uint8)
    if positions is not None:
        codes = F.pad(positions.diff(dim=1).clamp(0, 2).to(torch.uint8), (1, 0), value=1)
    if padding is not None:
        codes = codes.to(padding.device) + 4 * (padding == 0).to(torch.uint8)
    codes = codes.cpu()
    steps, padded = codes % 4, codes > 3
    before = F.pad(padded, (1, 0))[:, :-1]
    flips = _listed(padded != before) if padded.any() else ((),)
    if positions is None:
        return RankPart(rows, length, ((),), ((-1, -1),), 0, None, flips)
    gap = None
    leaps = ((steps == 2) & ~padded & ~before).nonzero()
    if len(leaps):
        row, token = leaps[0].tolist()
        first, second = positions[row % len(positions), token - 1 : token + 1].tolist()
        gap = row, token, first, second
    borders = _listed(steps[: len(positions)] != 1 if flips == ((),) else steps != 1)
    ends = tuple(map(tuple, positions[:, [0, -1]].tolist()))
    return RankPart(rows, length, borders, ends, int(positions.max()) + 1, gap, flips)  # type: ignore[arg-type]


def _listed(found: torch.Tensor) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(row.nonzero().flatten().tolist()) for row in found)


def documents_of(by_rank: Sequence[RankPart]) -> tuple[tuple[int, ...], ...]:
    """Return for each row of whole sequences the first token of each document. Without positions a row is one document.

    Raises:
        MemoError: a part neither goes on with a document of the part before nor begins one, or padding is inside a document.
    """
    for rank, one in enumerate(by_rank):
        if one.gap is not None:
            row, token, before, after = one.gap
            raise MemoError(
                f"position_ids of row {row} rise from {before} to {after} at token {token} of rank {rank}'s part; expected steps "
                "of 1, or a fall where a document begins. Whether a gap is a border cannot be told: number documents without gaps"
            )
    rows = max(max(len(one.borders), len(one.flips)) for one in by_rank)
    length = sum(one.length for one in by_rank)
    documents = []
    for row in range(rows):
        found, flips, passed, before = {0}, set[int](), 0, None
        for rank, one in enumerate(by_rank):
            if not one.length:
                continue
            (first, last), borders, turns = (of_rows[row % len(of_rows)] for of_rows in (one.ends, one.borders, one.flips))
            was_padding = len(flips) % 2 == 1
            flips ^= {passed + turn for turn in turns} ^ {passed} if was_padding else {passed + turn for turn in turns}
            if before is None:
                begin, padded = first, 0 in flips
            elif first != before + 1:
                repeats = first == before and (passed - 1 in found or 1 in borders)  # as padding may be numbered
                if not (first in (0, begin) or repeats or was_padding or passed in flips):
                    raise MemoError(
                        f"position_ids of row {row} go from {before} to {first} between the parts of ranks {rank - 1} and "
                        f"{rank}; expected {before + 1}, or 0 where a document begins. {_IN_ORDER}"
                    )
                found.add(passed)
            found.update(passed + border for border in borders)
            passed, before = passed + one.length, last if one.ends != ((-1, -1),) else None
        if before is not None and before + 1 == begin and not padded and sum(one.length > 0 for one in by_rank) > 1:
            raise MemoError(
                f"position_ids of row {row} begin with {begin} on the first rank, which follows {before}, with which they end on "
                f"the last: the parts' order is not that of the ranks. {_IN_ORDER}"
            )
        _refuse_holes(row, sorted(flips), found, length)
        documents.append(tuple(sorted(found | flips)))
    return tuple(documents)


def _refuse_holes(row: int, flips: Sequence[int], borders: set[int], length: int) -> None:
    """Refuse padding with text of one document on both sides: the text behind it would see the text before it."""
    for first, stop in itertools.zip_longest(flips[::2], flips[1::2], fillvalue=length):
        if first > 0 and stop < length and not any(first <= border <= stop for border in borders):
            raise MemoError(
                f"attention_mask of row {row} is 0 at tokens {first} to {stop - 1} and 1 on both sides, which position_ids count "
                f'as one document. Pad sequences at their ends, or use "sequence_parallel_size": 1'
            )
