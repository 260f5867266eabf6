"""How whole sequences lie on the ranks that share them. Units: tokens of the whole sequence, from 0.

A rank's part is a list of pieces. Under Ulysses alone it is one, in the order of the ranks. Around a ring it is two: chunks i and
2r - 1 - i of 2r go to ring number i (zigzag), so that causal attention is as much work on every rank.

All parts are of one length. A sequence that does not divide is followed by padding, which is a document of its own.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from ds_memo.errors import MemoError
from ds_memo.remat.layer_state import OF_LATEST, PLAIN
from ds_memo.remat.modes import inside_a_layer
from ds_memo.remat.undo import changed
from ds_memo.sequence.ranks import SequenceRanks

PARTS = "_ds_memo_parts"
"""Attribute of every module of a sequence-parallel decoder: the SequenceParts of the forward under way, or of the latest one.
None: it has whole sequences. A replay under memo puts back what its forward saw."""
Pieces = tuple[tuple[int, int], ...]
"""First token, and the one behind the last, of each piece in the order in which a rank holds them."""


class SequenceParts:
    """The parts of one forward's sequences.

    Args:
        length: of the whole sequence without padding.
        documents: for each row the first token of each document, from 0 on. One row may stand for all.
        zigzag: False: one piece to a rank, also around a ring.
    """

    def __init__(
        self, ranks: SequenceRanks, length: int, documents: Sequence[Sequence[int]] = ((0,),), zigzag: bool = True
    ) -> None:
        self.ranks = ranks
        self.unpadded = length
        self.zigzag = zigzag and ranks.ring > 1
        multiple = math.lcm(2 * ranks.ring, ranks.size) if self.zigzag else ranks.size
        self.length = -(-length // multiple) * multiple
        padding = (length,) * (self.length > length)
        self.documents = tuple((*row, *padding) for row in documents)
        self.own = self.length // ranks.size
        """Tokens of a part."""
        self.plans: dict[Any, Any] = {}
        """What attention has worked out, by its mask."""
        self.striped: dict[int, Any] = {}
        """The same sequences in tiles (ds_memo.sequence.striped), by tokens of a tile."""
        self._shortened: dict[int, SequenceParts] = {}
        self.among_others = False
        """True while forwards on other parts wait for their backwards, too."""

    def __reduce__(self) -> tuple[Any, ...]:
        """Have copies of a model run on whole sequences."""
        return type(None), ()

    @functools.cached_property
    def one_document(self) -> bool:
        """True if no row has a border between documents."""
        return all(len(row) == 1 for row in self.documents)

    def pieces_of_ring(self, number: int) -> Pieces:
        """Return the pieces of the Ulysses group with a ring number."""
        ring = self.ranks.ring
        if not self.zigzag:
            return ((self.length // ring * number, self.length // ring * (number + 1)),)
        chunk = self.length // (2 * ring)
        return tuple((chunk * i, chunk * (i + 1)) for i in (number, 2 * ring - 1 - number))

    def pieces_of(self, number: int) -> Pieces:
        """Return the pieces of a rank."""
        ring_number, ulysses_number = divmod(number, self.ranks.ulysses)
        first = self.own * ulysses_number
        return cut(self.pieces_of_ring(ring_number), first, first + self.own)

    @functools.cached_property
    def pieces(self) -> Pieces:
        """This rank's."""
        return self.pieces_of(self.ranks.number)

    @functools.cached_property
    def all_pieces(self) -> list[Pieces]:
        return [self.pieces_of(number) for number in range(self.ranks.size)]

    @functools.cached_property
    def _by_rank(self) -> list[tuple[int, int]]:
        return [piece for pieces in self.all_pieces for piece in pieces]

    @functools.cached_property
    def _by_rank_of_ring(self) -> list[tuple[int, int]]:
        """The same, of this rank's Ulysses group alone."""
        first = self.ranks.ulysses * self.ranks.ring_number
        return [piece for pieces in self.all_pieces[first : first + self.ranks.ulysses] for piece in pieces]

    def sorted(self, x: torch.Tensor, dim: int, of_ring: bool = False) -> torch.Tensor:
        """Return a tensor with all ranks' tokens, one rank after another along `dim`, in the order of the sequence.

        Args:
            of_ring: it has tokens of this rank's Ulysses group alone.
        """
        have = self._by_rank_of_ring if of_ring else self._by_rank
        return _in_order(x, dim, have, sorted(have))

    def by_rank(self, x: torch.Tensor, dim: int, of_ring: bool = False) -> torch.Tensor:
        """Undo :meth:`sorted`."""
        want = self._by_rank_of_ring if of_ring else self._by_rank
        return _in_order(x, dim, sorted(want), want)

    def own_of(self, whole: torch.Tensor, dim: int) -> torch.Tensor:
        """Return this rank's part of a tensor with all tokens in order."""
        return concatenated([whole.narrow(dim, start, stop - start) for start, stop in self.pieces], dim)

    def shortened(self, own: int) -> SequenceParts:
        """Return the first `own` tokens of each part, as a profile calls layers with. Documents go on across the cuts."""
        if own not in self._shortened:
            kept = [(start, stop) for number in range(self.ranks.size) for start, stop in cut(self.pieces_of(number), 0, own)]
            kept.sort()
            rows = []
            for row in self.documents:
                before = [sum(max(0, min(stop, border) - start) for start, stop in kept) for border in row]
                rows.append(tuple(sorted(set(before) - {own * self.ranks.size} | {0})))
            halves = own * self.ranks.ulysses % 2 == 0  # else a zigzag would be padded, and its parts longer than those asked for
            self._shortened[own] = SequenceParts(self.ranks, own * self.ranks.size, rows, self.zigzag and halves)
        return self._shortened[own]


PLAIN.add(SequenceParts)
OF_LATEST.add(PARTS)


def parts_of(module: nn.Module) -> SequenceParts | None:
    """Return what a module of a sequence-parallel decoder runs on; None: whole sequences.

    Raises:
        MemoError: a checkpoint runs it again in a backward, and which forward's parts it had cannot be told.
    """
    parts: SequenceParts | None = vars(module).get(PARTS)
    if parts is not None and parts.among_others and torch._C._current_graph_task_id() != -1 and not inside_a_layer():
        raise MemoError(
            f"{type(module).__name__} is recomputed in a backward, after forwards of other lengths or documents, and ranks that "
            "share sequences cannot tell which of them it belongs to. Run each forward's backward before the next one, or let "
            'memo recompute the layers ("memo": {"enabled": true} in place of gradient checkpointing)'
        )
    return parts


@contextmanager
def running_on(module: nn.Module, parts: SequenceParts | None) -> Iterator[None]:
    """Have a layer run on other parts inside the block; None: as it does."""
    with ExitStack() as stack:
        for inner in () if parts is None else module.modules():
            if PARTS in vars(inner):
                stack.enter_context(changed(inner, PARTS, parts))
        yield


def _in_order(x: torch.Tensor, dim: int, have: Sequence[tuple[int, int]], want: Sequence[tuple[int, int]]) -> torch.Tensor:
    """Return the pieces of a tensor in another order. No index goes to the device, for which the host would wait."""
    if have == want:
        return x
    parts = dict(zip(have, x.split([stop - start for start, stop in have], dim), strict=True))
    return torch.cat([parts[piece] for piece in want], dim)


def concatenated(tensors: Sequence[torch.Tensor], dim: int) -> torch.Tensor:
    """Return tensors one after another; of one no copy."""
    return tensors[0] if len(tensors) == 1 else torch.cat(list(tensors), dim)


def cut(pieces: Pieces, first: int, last: int) -> Pieces:
    """Return the pieces of tokens `first` to `last`, counted along `pieces`."""
    found, passed = [], 0
    for start, stop in pieces:
        a, b = max(first - passed, 0), min(last - passed, stop - start)
        if a < b:
            found.append((start + a, start + b))
        passed += stop - start
    return tuple(found)


def contiguous(lengths: Iterable[int]) -> list[Pieces]:
    """Return the pieces of ranks that hold so many tokens each, one rank after another."""
    borders = [0, *itertools.accumulate(lengths)]
    return [((start, stop),) if stop > start else () for start, stop in itertools.pairwise(borders)]


def even(length: int, ranks: int) -> list[int]:
    """Return the tokens of each rank where a caller's sequence is split: as equal as they can be, the longer ones first."""
    return [length // ranks + (number < length % ranks) for number in range(ranks)]
