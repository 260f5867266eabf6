"""Tiles cover all tokens once, and arguments are cut where their tokens lie."""

from __future__ import annotations

import itertools
import random

import pytest
import torch

from ds_memo.spans import EVEN, Span, longest, number_of_spans, spans
from ds_memo.tiles.check.token_dims import token_dims
from ds_memo.tiles.slices import Arguments, new_whole, part


@pytest.mark.parametrize("batch", [1, 2, 5])
def test_tiles_cover_every_token_once(batch: int) -> None:
    draw = random.Random(batch)
    lengths = [*range(1, 9), 33, 71, 127, 128, 129, 256, *(draw.randrange(1, 1000) for _ in range(2))]
    tiles = [*range(1, 9), 16, 23, 64, 127, 128, 129, 256, 640, *(draw.randrange(1, 1000) for _ in range(4))]
    for length, tile in itertools.product(lengths, tiles):
        seen = torch.zeros(batch, length, dtype=torch.int8)
        found = spans(batch, length, tile)
        for span in found:
            part(seen, span, 1).add_(1)
            assert 0 < span.size[0] * span.size[1] <= tile
            assert span.size[0] == 1 or span.size[1] == length  # its memory has no gaps
        assert seen.min() == seen.max() == 1
        assert found == sorted(found, key=lambda span: (span.rows.start, span.tokens.start))
        assert len(found) == number_of_spans(batch, length, tile)
        assert found[0].size == longest(batch, length, tile) == max(span.size for span in found)


def test_tiles_have_two_lengths_at_most_and_long_ones_are_even() -> None:
    for length, tile in itertools.product([1000, 4096, 5000, 131072, 131073], [128, 200, 512, 1000, 4096]):
        sizes = [span.size[1] for span in spans(1, length, tile)]
        assert len(set(sizes)) <= 2 and len(set(sizes[:-1])) <= 1
        if len(sizes) > 1 and tile % EVEN == 0:
            assert sizes[0] % EVEN == 0 or sizes[0] < EVEN
        assert len(sizes) <= -(-length // tile) + 1


BATCH, LENGTH = 2, 7
HIDDEN = torch.randn(BATCH, LENGTH, 5)


def cut(span: Span, *args: torch.Tensor, **kwargs: torch.Tensor) -> tuple[tuple, dict, dict]:
    arguments = Arguments((HIDDEN, *args), kwargs)
    return arguments.tile(part(HIDDEN, span, 1), span)


@pytest.mark.parametrize(
    "tensor, want",
    [
        (torch.randn(BATCH, LENGTH, 3), lambda t: t[1:2, 3:5]),
        (torch.randn(1, LENGTH, 3), lambda t: t[:, 3:5]),
        (torch.arange(LENGTH), lambda t: t[3:5]),
        (torch.arange(LENGTH)[None], lambda t: t[:, 3:5]),
        (torch.arange(BATCH * LENGTH).view(BATCH, LENGTH), lambda t: t[1:2, 3:5]),
        (torch.randn(3, BATCH, LENGTH), lambda t: t[:, 1:2, 3:5]),  # Qwen-VL's positions
        (torch.randn(3, 1, LENGTH, 2), lambda t: t[:, :, 3:5]),
        (torch.randn(LENGTH, 4), lambda t: t[3:5]),
        (torch.randn(BATCH, 1, LENGTH, LENGTH), lambda t: t),  # a mask
        (torch.tensor(3.0), lambda t: t),
        (torch.tensor([0, 3, 7]), lambda t: t),  # cu_seqlens
        (torch.randn(BATCH, 4), lambda t: t),
        (torch.randn(9, 4), lambda t: t),
    ],
    ids=lambda value: str(tuple(value.shape)) if isinstance(value, torch.Tensor) else "",
)
def test_an_argument_is_cut_along_its_tokens(tensor: torch.Tensor, want) -> None:
    span = Span(slice(1, 2), slice(3, 5))
    args, kwargs, wholes = cut(span, tensor, named=(tensor, None, "text"))
    for got in (args[1], kwargs["named"][0]):
        assert torch.equal(got, want(tensor))
        assert wholes.get(id(got), got) is tensor
    assert kwargs["named"][1:] == (None, "text")
    assert torch.equal(args[0], HIDDEN[1:2, 3:5])


def test_the_first_tokens_of_a_mask() -> None:
    mask = torch.arange(BATCH * LENGTH * LENGTH).view(BATCH, 1, LENGTH, LENGTH)
    args, _ = Arguments((HIDDEN, mask), {}).first(HIDDEN[:1, :4])
    assert torch.equal(args[1], mask[:1, :, :4, :4])


# ---- putting together


@pytest.mark.parametrize(
    "shape, dim, order", [((2, 3, 7, 4), 2, (0, 2, 1, 3)), ((2, 7, 5), 1, (0, 1, 2)), ((7, 5), 0, (0, 1))], ids=str
)
def test_a_whole_has_the_order_of_its_tiles(shape: tuple[int, ...], dim: int, order: tuple[int, ...]) -> None:
    """Attention kernels of (b, heads, s, d) read memory that is (b, s, heads, d)."""
    inverse = [order.index(d) for d in range(len(order))]
    want = torch.randn([shape[d] for d in order]).permute(inverse)
    batch = shape[0] if dim else 1
    found = None
    for span in spans(batch, shape[dim], 4):
        tile = part(want, span, dim).contiguous(memory_format=torch.contiguous_format)
        tile = torch.empty([tile.shape[d] for d in order]).permute(inverse).copy_(tile)
        if found is None:
            found = new_whole(tile, batch, shape[dim], dim)
        part(found, span, dim).copy_(tile)
    assert torch.equal(found, want)
    assert found.stride() == want.stride()


@pytest.mark.parametrize(
    "short, long",
    [
        (torch.zeros(9), torch.zeros(6)),  # grows otherwise
        (torch.zeros(9, 9), torch.zeros(5, 5)),  # a mask that the layer makes
        (torch.zeros(9), torch.zeros(5, 1)),
        (torch.zeros(3), torch.ones(3)),  # another value: statistics of the tile
        (torch.zeros(3, requires_grad=True), torch.zeros(3, requires_grad=True)),
        (1 / 9, 1 / 5),  # a scale by length
        (9, 5),  # max_seqlen
        (None, torch.zeros(5)),
        (9, 9.0),
    ],
    ids=str,
)
def test_what_depends_on_the_tile_in_another_way_is_refused(short, long) -> None:
    with pytest.raises(ValueError, match=r"in a tile of 9 tokens"):
        token_dims([short], [long], (9, 5))


def test_another_number_of_values_is_refused() -> None:
    with pytest.raises(ValueError, match=r"2 values in a tile of 9 tokens, 1 in one of 5"):
        token_dims([1, 2], [1], (9, 5))
