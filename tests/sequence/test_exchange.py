"""What ranks send each other, against plain indexing of the whole tensor on one rank, with gradients."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from typing import ClassVar

import pytest
import torch
import torch.distributed as dist

from ds_memo.sequence.exchange import blocks, common, gather, move, shared_by, to_heads, to_tokens
from ds_memo.sequence.parts import SequenceParts, contiguous, cut, even
from ds_memo.sequence.ranks import ranks_of
from tests.distributed_harness.common import DistributedTest

SHARED = [(6, 6), (6, 3), (6, 1), (4, 2), (8, 8), (5, 5), (2, 2), (1, 1)]
"""Heads, and heads of keys; with fewer heads than ranks some rank has none."""


def random_tensor(*shape: int, seed: int) -> torch.Tensor:
    """The same on every rank."""
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def assert_as_whole(
    own: torch.Tensor,
    exchange: Callable[[torch.Tensor], torch.Tensor],
    wholes: list[torch.Tensor],
    plain: Callable[[list[torch.Tensor]], list[torch.Tensor]],
) -> None:
    """Compare an exchange and its gradient with what one rank makes of all ranks' inputs.

    Args:
        own: this rank's input.
        wholes: the inputs of all ranks.
        plain: from those to the outputs of all ranks.
    """
    rank = dist.get_rank()
    own = own.clone().requires_grad_()
    got = exchange(own)
    wholes = [whole.clone().requires_grad_() for whole in wholes]
    wants = plain(wholes)
    assert torch.equal(got, wants[rank])
    weights = [random_tensor(*want.shape, seed=number) for number, want in enumerate(wants)]
    got.backward(weights[rank])
    gradients = torch.autograd.grad(wants, wholes, weights, allow_unused=True, materialize_grads=True)
    torch.testing.assert_close(own.grad, gradients[rank], rtol=1e-14, atol=1e-14)


class TestExchange(DistributedTest):
    world_size: ClassVar[list[int]] = [2, 3, 4]

    def test_heads_and_tokens(self):
        """Uneven heads, heads that ranks share, ranks without any; several rows, further dimensions, views."""
        ranks, rank, group = dist.get_world_size(), dist.get_rank(), dist.group.WORLD
        for (heads, shared), rows, tokens, rest in itertools.product(SHARED, (1, 3), (5,), ((), (2, 3))):
            owned = blocks(heads, ranks)
            keys = shared_by(owned, heads, shared)
            for number, of_ranks in ((heads, owned), (shared, keys)):
                inputs = [random_tensor(rows, tokens, number, *rest, seed=10 + rank) for rank in range(ranks)]
                assert_as_whole(
                    inputs[rank],
                    lambda x, of_ranks=of_ranks: to_heads(x, of_ranks, group),
                    inputs,
                    lambda xs, of_ranks=of_ranks: [torch.cat(xs, 1)[:, :, of_rank] for of_rank in of_ranks],
                )
            counts = [len(of_rank) for of_rank in owned]
            inputs = [random_tensor(rows, ranks * tokens, count, *rest, seed=20 + rank) for rank, count in enumerate(counts)]
            assert_as_whole(
                inputs[rank],
                lambda x, counts=counts: to_tokens(x, counts, group),
                inputs,
                lambda xs: list(torch.cat(xs, 2).chunk(ranks, 1)),
            )
        transposed = random_tensor(2, 6, 5, 7, seed=rank).transpose(1, 2)  # as attention functions get them
        assert torch.equal(
            to_heads(transposed, blocks(6, ranks), group), to_heads(transposed.contiguous(), blocks(6, ranks), group)
        )

    def test_gather(self):
        """Everything in order, also of zigzag parts, along any dimension."""
        ranks, rank = dist.get_world_size(), dist.get_rank()
        for ulysses in (size for size in (1, 2, 3, 4) if ranks % size == 0):
            parts = SequenceParts(ranks_of(dist.group.WORLD, ulysses), 41)
            for dim, shape in (
                (0, (parts.length, 3)),
                (1, (2, parts.length)),
                (1, (2, parts.length, 4)),
                (2, (3, 2, parts.length)),
            ):
                whole = random_tensor(*shape, seed=1)

                def of_rank(number, x, parts=parts, dim=dim):
                    return torch.cat([x.narrow(dim, start, stop - start) for start, stop in parts.all_pieces[number]], dim)

                def ordered(xs, parts=parts, dim=dim):
                    return [parts.sorted(torch.cat(xs, dim), dim)] * ranks

                inputs = [of_rank(number, whole) for number in range(ranks)]
                assert torch.equal(inputs[rank], parts.own_of(whole, dim))
                assert torch.equal(ordered(inputs)[0], whole)
                assert_as_whole(inputs[rank], lambda x, dim=dim, parts=parts: gather(x, dim, parts), inputs, ordered)

    def test_move(self):
        """Between a caller's parts of any lengths, some empty, zigzag parts, and random ones. Tokens of no rank are zero."""
        ranks, rank, group = dist.get_world_size(), dist.get_rank(), dist.group.WORLD
        generator = random.Random(ranks)
        layouts = []
        for length in (1, 3, 41, 45):
            of_ulysses = [SequenceParts(ranks_of(group, ulysses), length) for ulysses in (1, ranks)]
            layouts += [contiguous(even(length, ranks)), contiguous([length] + [0] * (ranks - 1))]
            layouts += [parts.all_pieces for parts in of_ulysses] + [random_pieces(generator, length, ranks) for _ in range(3)]
        longest = max(stop for pieces in itertools.chain(*layouts) for _, stop in pieces)
        for have, want in generator.sample(list(itertools.permutations(layouts, 2)), 100):
            whole = random_tensor(2, longest, 3, seed=3)
            inputs = [whole[:, tokens_of(pieces)] for pieces in have]

            def moved(xs, have=have, want=want, whole=whole):
                every = torch.zeros_like(whole)
                for pieces, x in zip(have, xs, strict=True):
                    every = every.index_copy(1, tokens_of(pieces), x)
                return [every[:, tokens_of(pieces)] for pieces in want]

            assert_as_whole(inputs[rank], lambda x, have=have, want=want: move(x, have, want, group), inputs, moved)
        assert move(whole, layouts[0], layouts[0], group) is whole
        one_row = random_tensor(1, 45 // ranks, 3, seed=3).requires_grad_()
        ends = contiguous([one_row.shape[1]] * ranks)
        move(one_row, ends, ends[::-1], group).mul_(2).sum().backward()  # layers may change what they are given in place
        assert one_row.grad.eq(2).all()

    def test_integers(self):
        """Tokens' ids and positions have no gradients."""
        ranks, rank, group = dist.get_world_size(), dist.get_rank(), dist.group.WORLD
        have, want = contiguous(even(41, ranks)), SequenceParts(ranks_of(group, 1), 41).all_pieces
        ids = torch.arange(1, 42).expand(2, -1)
        got = move(ids[:, tokens_of(have[rank])], have, want, group)
        wanted = tokens_of(want[rank])
        assert torch.equal(got, torch.where(wanted < 41, wanted + 1, 0).expand(2, -1))


def tokens_of(pieces) -> torch.Tensor:
    return torch.cat([torch.arange(0), *(torch.arange(*piece) for piece in pieces)])


def random_pieces(generator: random.Random, length: int, ranks: int) -> list:
    """Return pieces of a sequence in any order on any rank."""
    borders = [0, *sorted(generator.sample(range(1, length), min(length - 1, 5))), length]
    found: list[list[tuple[int, int]]] = [[] for _ in range(ranks)]
    pieces = list(itertools.pairwise(borders))
    generator.shuffle(pieces)
    for piece in pieces:
        generator.choice(found).append(piece)
    return [tuple(pieces) for pieces in found]


def test_heads_of_ranks():
    assert blocks(6, 4) == [[0], [1, 2], [3], [4, 5]] and blocks(4, 4) == [[0], [1], [2], [3]] and blocks(1, 2) == [[], [0]]
    assert shared_by(blocks(6, 4), 6, 3) == [[0], [0, 1], [1], [2]] and shared_by(blocks(4, 4), 4, 1) == [[0]] * 4
    for heads, ranks in itertools.product(range(1, 20), range(1, 9)):
        owned = blocks(heads, ranks)
        sizes = [len(of_rank) for of_rank in owned]
        assert list(itertools.chain(*owned)) == list(range(heads)) and max(sizes) - min(sizes) <= 1
        for shared in (size for size in range(1, heads + 1) if heads % size == 0):
            groups = shared_by(owned, heads, shared)
            assert all({head // (heads // shared) for head in mine} == {*of} for mine, of in zip(owned, groups, strict=True))


@pytest.mark.parametrize("seed", range(5))
def test_common_tokens(seed):
    generator = random.Random(seed)
    have, want = (random_pieces(generator, 30, 3) for _ in range(2))
    for mine, theirs in itertools.product(have, want):
        found = [(cut(mine, at, at + size), cut(theirs, there, there + size)) for at, there, size in common(mine, theirs)]
        assert all(one == other and len(one) == 1 for one, other in found)
        both = {*tokens_of(mine).tolist()} & {*tokens_of(theirs).tolist()}
        assert sorted(token for one, _ in found for token in tokens_of(one).tolist()) == sorted(both)
