"""Backwards of tiled layers in other ways: twice, in another order, one inside another, of some inputs only."""

from __future__ import annotations

import weakref

import pytest
import torch

from ds_memo.errors import MemoError
from ds_memo.swap.engine import SwapEngine
from ds_memo.swap.frame import Frame
from tests.models import Batch, Toy, build, gradients, step
from tests.tiles.rig import BATCH, LAYERS, assert_step, assert_was_tiled, attached, compare, drive, model_of, small, toy


def test_a_graph_that_was_freed_is_refused() -> None:
    with attached(tiled := toy()):
        loss = tiled(BATCH.embeds, BATCH.labels).loss
        loss.backward()
        with pytest.raises(RuntimeError, match="second time"):
            loss.backward()


@pytest.mark.slow
def test_a_layer_that_is_called_twice_in_one_graph() -> None:
    class Twice(Toy):
        def run_blocks(self, x: torch.Tensor) -> torch.Tensor:
            return super().run_blocks(super().run_blocks(x))

    assert_was_tiled(compare(model_of(Twice), drive))


def test_a_gradient_of_a_gradient_is_refused() -> None:
    with attached(tiled := toy()):
        x = BATCH.embeds.clone().requires_grad_()
        with pytest.raises(MemoError, match=r"create_graph.*memo\.tile_tokens"):
            torch.autograd.grad(tiled(x, BATCH.labels).loss, x, create_graph=True)
        gradients(tiled)
        assert_step(step(tiled, BATCH), step(toy(), BATCH))


@pytest.mark.parametrize("layers, every", [(LAYERS, 1), (4, 3)])
def test_two_large_tiles_are_back_at_once(layers: int, every: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The one that runs and the next, or as many small ones as take no more bytes."""
    alive: list[list[int]] = []
    reload, buffers = SwapEngine._reload, []

    def counting(engine: SwapEngine, frame: Frame) -> None:
        reload(engine, frame)
        if "tile" in frame.name:
            buffers.append(weakref.ref(next(iter(frame.slots.values())).untyped_storage()))
            alive.append([storage.nbytes() for buffer in buffers if (storage := buffer()) is not None])

    monkeypatch.setattr(SwapEngine, "_reload", counting)
    with attached(tiled := toy(layers=layers), alpha=0.0, groups=2, input_every=every):
        for _ in range(2):
            drive(tiled, 0)
    large = max(map(max, alive))
    assert max(map(len, alive)) > 1 and max(map(sum, alive)) <= 2 * large


# ---- lengths that are sizes of other things


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
