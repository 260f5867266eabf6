"""Which keys each query sees, and what that makes of the work of one rank.

Every mask of Transformers' decoders is an interval of keys for each query: causal, a window, chunks, documents, blocks of image
tokens, both directions. So no mask of tokens × tokens is made. A whole sequence is cut into *runs*: neighbouring queries whose
interval moves with them, or stays. A *band* is a part of a run with one rank's queries and one ring number's keys: the work of
one kernel call.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from ds_memo.sequence.parts import Pieces, SequenceParts
from ds_memo.sequence.ranks import SequenceRanks


@dataclass(frozen=True)
class Mask:
    """A mask of whole sequences, in the place of a tensor (b, 1, s, s).

    Args:
        kind: "causal"; "window", the last `size` tokens; "chunk", those of the same `size` tokens, counted from the document's
            first; "both", all tokens of the document; "table".
        table: first and last key of each query (rows, s), on the host; for "table" alone. Documents limit it, too.
        plans: of a table, by SequenceParts: they end with it.
        parts: whole sequences on one rank; None: those of the module that attends.
        dense: returns the tensor, if `parts` are there.
    """

    kind: str = "causal"
    size: int = 0
    table: tuple[torch.Tensor, torch.Tensor] | None = field(default=None, compare=False)
    plans: dict[SequenceParts, AttentionPlan] | None = field(default=None, compare=False)
    parts: SequenceParts | None = field(default=None, compare=False)
    dense: Callable[[], torch.Tensor] | None = field(default=None, compare=False, repr=False)

    # As a tensor's, because models look.
    ndim = 4
    shape = (1, 1, 1, 1)

    def dim(self) -> int:
        return self.ndim


class MaskRun(NamedTuple):
    """Neighbouring queries, and the keys that they see. None: as far as `keys` reach."""

    queries: tuple[int, int]
    keys: tuple[int, int]
    before: int | None
    """Query i sees no key below i - before."""
    after: int | None
    """Query i sees no key above i + after."""


class Band(NamedTuple):
    """Work of one kernel call: query a of `queries` sees key c of `keys`, both counted from the band's first, where
    a - before <= c <= a + after. None: no limit. Either may be negative. Each query sees a key, and each key is seen."""

    row: int | None
    """None: all rows of the batch."""
    queries: tuple[int, int]
    """First token and the one behind the last, counted along the rank's queries."""
    keys: tuple[int, int]
    """The same along the keys of one ring number."""
    before: int | None
    after: int | None


@dataclass(eq=False)
class AttentionPlan:
    """What attention of one kind computes on this rank.

    Args:
        steps: bands by step of the ring: at step t a rank has the keys of ring number (own - t) mod ring.
        documents: True if a row has several, whose lengths are others in each step of a run. Padding is none.
    """

    ranks: SequenceRanks
    steps: list[list[Band]]
    documents: bool = False


def plan(parts: SequenceParts, mask: Mask) -> AttentionPlan:
    """Return the plan of a mask, worked out once for a forward."""
    known: dict[Any, AttentionPlan] = parts.plans if mask.plans is None else mask.plans
    key = (mask.kind, mask.size) if mask.plans is None else parts  # not the mask, whose `dense` holds tensors of a forward
    found = known.get(key)
    if found is None:
        found = known[key] = _plan(parts, mask)
    return found


def _plan(parts: SequenceParts, mask: Mask) -> AttentionPlan:
    ring, own = parts.ranks.ring, parts.ranks.ring_number
    rows = list(runs(parts, mask))
    alike = len(rows) == 1 or all(row == rows[0] for row in rows)
    numbered: list[tuple[int | None, list[MaskRun]]] = [(None, rows[0])] if alike else list(enumerate(rows))
    queries = parts.pieces_of_ring(own)
    return AttentionPlan(
        parts.ranks,
        [
            [band for row, of_row in numbered for band in bands(row, of_row, queries, parts.pieces_of_ring((own - step) % ring))]
            for step in range(ring)
        ],
        any(sum(start < parts.unpadded for start in starts) > 1 for starts in parts.documents),
    )


def runs(parts: SequenceParts, mask: Mask) -> Iterator[list[MaskRun]]:
    """Yield each row's runs."""
    if mask.table is not None:
        for row in range(max(len(mask.table[0]), len(parts.documents))):
            lo, hi = (edge[row % len(edge)] for edge in mask.table)
            yield _runs_of_table(lo, hi, parts.documents[row % len(parts.documents)], parts)
        return
    for starts in parts.documents:
        found = []
        for start, stop in itertools.pairwise((*starts, parts.length)):
            edges = [*range(start, stop, mask.size), stop] if mask.kind == "chunk" else [start, stop]
            before = mask.size - 1 if mask.kind == "window" else None
            after = None if mask.kind == "both" else 0
            found += [MaskRun(edge, edge, before, after) for edge in itertools.pairwise(edges)]
        yield found


def _runs_of_table(lo: torch.Tensor, hi: torch.Tensor, starts: Sequence[int], parts: SequenceParts) -> list[MaskRun]:
    """Cut queries where their first or last key neither stays nor moves by one, and where what it does changes."""
    borders = torch.tensor((*starts, parts.length))
    document = torch.bucketize(torch.arange(len(lo)), borders, right=True)
    edges = lo.maximum(borders[document - 1]), hi.minimum(borders[document] - 1)
    steps = torch.stack([edge.diff() for edge in edges])
    moves = torch.where(((steps == 0) | (steps == 1)).all(0), steps[0] + 2 * steps[1], -1)
    is_first = torch.ones(len(lo), dtype=torch.bool)
    is_first[1:] = moves < 0
    is_first[2:] |= (moves[:-1] >= 0) & (moves[1:] != moves[:-1])
    first = is_first.nonzero().flatten()
    last = torch.cat([first[1:], torch.tensor([len(lo)])]) - 1
    move = torch.cat([moves, torch.tensor([0])])[first].where(last > first, 0)
    found = []
    for query, until, from_key, to_key, moving in torch.stack([first, last, edges[0][first], edges[1][last], move], 1).tolist():
        before = query - from_key if moving & 1 else None
        after = to_key - until if moving & 2 else None
        found.append(MaskRun((query, until + 1), (from_key, to_key + 1), before, after))
    if parts.length > parts.unpadded:
        found.append(MaskRun((parts.unpadded, parts.length), (parts.unpadded, parts.length), None, 0))
    return found


def bands(row: int | None, of_row: Sequence[MaskRun], queries: Pieces, keys: Pieces) -> Iterator[Band]:
    """Yield the bands of the runs that meet these queries and keys."""
    query_at = 0
    for first, last in queries:
        key_at = 0
        met = [run for run in of_row if run.queries[0] < last and first < run.queries[1]]
        for key_first, key_last in keys:
            for run in met:
                band = _met(run, (first, last), (key_first, key_last))
                if band is not None:
                    (q0, q1), (k0, k1), before, after = band
                    yield Band(
                        row,
                        (query_at + q0 - first, query_at + q1 - first),
                        (key_at + k0 - key_first, key_at + k1 - key_first),
                        before,
                        after,
                    )
            key_at += key_last - key_first
        query_at += last - first


def _met(run: MaskRun, queries: tuple[int, int], keys: tuple[int, int]) -> MaskRun | None:
    """Return the part of a run with these queries and keys, and its limits counted from the part's first; None: there is none."""
    q0, q1 = max(run.queries[0], queries[0]), min(run.queries[1], queries[1])
    k0, k1 = max(run.keys[0], keys[0]), min(run.keys[1], keys[1])
    if q0 >= q1 or k0 >= k1:
        return None
    if run.after is not None:  # the last query sees most to the right
        k1 = min(k1, q1 + run.after)
        q0 = max(q0, k0 - run.after)
    if run.before is not None:
        k0 = max(k0, q0 - run.before)
        q1 = min(q1, k1 + run.before)
    if q0 >= q1 or k0 >= k1:
        return None
    before = None if run.before is None else run.before - (q0 - k0)
    after = None if run.after is None else run.after + (q0 - k0)
    if before is not None and before >= q1 - q0 - 1:
        before = None
    if after is not None and after >= k1 - k0 - 1:
        after = None
    return MaskRun((q0, q1), (k0, k1), before, after)
