"""What a tiled layer is called with: packed documents, padding, lengths that vary."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.models import Batch, Outcome, build, step
from tests.tiles.rig import (
    BATCH,
    LAYERS,
    assert_was_tiled,
    compare,
    small,
)


def test_packed_documents() -> None:
    positions = torch.cat([torch.arange(9), torch.arange(17), torch.arange(7)])[None]

    def packed(model: nn.Module, number: int) -> Outcome:
        return step(model, Batch.random(1, 33), position_ids=positions, use_cache=False)  # a cache hides the documents

    attends_to_all = step(small("llama"), Batch.random(1, 33), position_ids=positions)
    assert not torch.equal(packed(small("llama"), 0).loss, attends_to_all.loss)
    assert_was_tiled(compare(small("llama"), packed, groups=2))


def test_padded_sequences() -> None:
    mask = torch.ones(2, 23, dtype=torch.long)
    mask[1, 15:] = 0

    def padded(model: nn.Module, number: int) -> Outcome:
        return step(model, BATCH, **({"attention_mask": mask} if number % 2 else {}))

    assert_was_tiled(compare(small("llama"), padded, steps=3, groups=2))


def test_batches_of_many_shapes() -> None:
    shapes = [(1, 33), (2, 17), (1, 6), (3, 5), (2, 4), (1, 41), (4, 2), (1, 5), (5, 14)]

    def varied(model: nn.Module, number: int) -> Outcome:
        return step(model, Batch.random(*shapes[number], seed=number))

    assert_was_tiled(compare(small("plain"), varied, steps=len(shapes), tile=9))


@pytest.mark.parametrize("length, head_dim", [(16, 16), (127, 112)], ids=str)
def test_a_length_that_is_also_the_size_of_a_head(length: int, head_dim: int) -> None:
    """The probe runs 112 tokens of a long sequence."""
    model = build("llama", num_hidden_layers=LAYERS, head_dim=head_dim)
    assert_was_tiled(compare(model, lambda model, number: step(model, Batch.random(1, length)), tile=length // 2, quiet=True))


def test_a_later_length_that_is_also_the_size_of_a_head() -> None:
    lengths = (33, 16)
    compare(small("llama"), lambda model, number: step(model, Batch.random(1, lengths[number])), tile=5)


def test_a_short_first_batch_does_not_switch_tiles_off() -> None:
    shapes = [(8, 4), (1, 33)]
    assert_was_tiled(compare(small("llama"), lambda model, n: step(model, Batch.random(*shapes[n])), tile=5, quiet=True))
