"""How whole sequences lie on ranks: each token once, parts of one length, and the way there and back."""

from __future__ import annotations

import itertools

import pytest
import torch

from ds_memo.sequence.parts import contiguous, cut, even
from ds_memo.sequence.striped import Striped
from ds_memo.spans import spans
from tests.sequence.layouts import SHAPES, of_all, striped

LENGTHS = (1, 5, 41, 45, 64, 67, 64 * 3 + 5)
both_ways = pytest.mark.parametrize("zigzag", [True, False])
every_shape = pytest.mark.parametrize("ulysses, ring", SHAPES)


def tokens_of(pieces):
    return [token for piece in pieces for token in range(*piece)]


@every_shape
@both_ways
def test_each_token_is_on_one_rank(ulysses, ring, zigzag):
    for length in LENGTHS:
        everywhere = of_all(ulysses, ring, length, zigzag=zigzag)
        for number, parts in enumerate(everywhere):
            assert parts.all_pieces == everywhere[0].all_pieces and parts.pieces == parts.all_pieces[number]
            assert len(tokens_of(parts.pieces)) == parts.own and len(parts.pieces) <= 2
        flat = [tokens_of(pieces) for pieces in everywhere[0].all_pieces]
        assert sorted(itertools.chain(*flat)) == list(range(parts.length)) and parts.length >= length
        for number in range(ring):  # ranks that trade heads hold what the ring sends around, one after another
            of_group = itertools.chain(*flat[number * ulysses : (number + 1) * ulysses])
            assert list(of_group) == tokens_of(parts.pieces_of_ring(number))


@every_shape
@both_ways
def test_little_padding_which_is_a_document_of_its_own(ulysses, ring, zigzag):
    for length in LENGTHS:
        parts = of_all(ulysses, ring, length, ((0,), (0, length // 2 + 1))[: 1 + (length > 2)], zigzag)[0]
        chunks = 2 * ring if zigzag and ring > 1 else 1
        assert parts.length - length < chunks * ulysses * ring
        padded = parts.length > length
        assert parts.documents[0] == ((0, length) if padded else (0,))
        assert parts.one_document == (not padded and length <= 2)


def test_a_ring_shares_causal_work_equally():
    """By zigzag; without it the last rank has almost twice the mean."""
    for zigzag, most in ((True, 1.02), (False, 1.7)):
        seen = [sum(token + 1 for token in tokens_of(parts.pieces)) for parts in of_all(1, 4, 256, zigzag=zigzag)]
        worst = max(seen) / (sum(seen) / 4)
        assert worst <= most if zigzag else worst > most


@every_shape
@both_ways
def test_order_and_back(ulysses, ring, zigzag):
    everywhere = of_all(ulysses, ring, 67, zigzag=zigzag)
    whole = torch.randn(2, everywhere[0].length, 3)
    own = [parts.own_of(whole, 1) for parts in everywhere]
    by_rank = torch.cat(own, 1)
    for parts, part in zip(everywhere, own, strict=True):
        assert torch.equal(part, whole[:, tokens_of(parts.pieces)])
        assert torch.equal(parts.sorted(by_rank, 1), whole) and torch.equal(parts.by_rank(whole, 1), by_rank)


@every_shape
@pytest.mark.parametrize("tile", [3, 5, 64])
def test_tiles_of_one_number_are_a_stretch(ulysses, ring, tile):
    """Ranks that trade heads sort what they have of all stretches, and get the pieces that a ring sends around."""
    parts = of_all(ulysses, ring, 67)
    cut_at = [span.tokens for span in spans(1, parts[0].own, tile)]
    everywhere = striped(parts, cut_at[0].stop)
    flat = [tokens_of(pieces) for pieces in everywhere[0].all_pieces]
    assert list(itertools.chain(*(own[tokens] for tokens in cut_at for own in flat))) == list(range(everywhere[0].length))
    for number in range(ring):
        of_group = torch.tensor([*itertools.chain(*flat[number * ulysses : (number + 1) * ulysses])])[None]
        parts = everywhere[number * ulysses]
        in_order = parts.sorted(of_group, 1, of_ring=True)
        assert in_order[0].tolist() == tokens_of(parts.pieces_of_ring(number))
        assert torch.equal(parts.by_rank(in_order, 1, of_ring=True), of_group)


@every_shape
@both_ways
def test_shortened(ulysses, ring, zigzag):
    """What layers are called with in a profile: parts of the length asked for, and documents that go on across the cuts."""
    for parts in of_all(ulysses, ring, 96, ((0, 40), (0,)), zigzag):
        for own in (1, 3, 4, parts.own // 2, parts.own):
            short = parts.shortened(own)
            assert short.own == own and short is parts.shortened(own)
            assert all(row == tuple(sorted({*row})) and row[0] == 0 and row[-1] < short.length for row in short.documents)
        assert short.documents == parts.documents and short.pieces == parts.pieces


def test_cut_even_and_contiguous():
    pieces = ((3, 7), (20, 26))
    for first, last in itertools.combinations(range(11), 2):
        assert tokens_of(cut(pieces, first, last)) == tokens_of(pieces)[first:last]
    for length, ranks in itertools.product(LENGTHS, (1, 2, 3, 4, 8)):
        lengths = even(length, ranks)
        assert sum(lengths) == length and max(lengths) - min(lengths) <= 1 and lengths == sorted(lengths, reverse=True)
        assert [tokens_of(one) for one in contiguous(lengths)] == [part.tolist() for part in torch.arange(length).split(lengths)]


def test_arguments_move_once_but_for_trained_leaves(monkeypatch):
    moved = []
    monkeypatch.setattr(Striped, "enter", lambda order, x: moved.append(x) or x * 1)
    (order,) = striped(of_all(1, 1, 8), 2)
    leaf = torch.ones(1, 8, 3, requires_grad=True)
    for _ in range(2):  # two steps: the first's graph is gone in the second
        of_step, positions = leaf * 2, torch.arange(8)[None]
        found = [order.argument(x, 1) for _ in range(2) for x in (leaf, of_step, positions)]
        sum(x.sum() for x in found).backward()
    assert len(moved) == 2 * 4 and torch.equal(leaf.grad, torch.full_like(leaf, 2 * (2 + 4)))
    del found, of_step, positions, moved[:]
    assert not len(order._arguments)
