"""Backwards of tiled layers in other ways: twice, in another order, one inside another, of some inputs only."""

from __future__ import annotations

import weakref

import pytest
import torch
from torch import nn

from ds_memo.errors import MemoError
from ds_memo.swap.engine import SwapEngine
from ds_memo.swap.frame import Frame
from tests.models import Batch, Outcome, Toy, gradients, step
from tests.tiles.rig import (
    BATCH,
    assert_step,
    assert_was_tiled,
    assert_within,
    attached,
    compare,
    drive,
    model_of,
    toy,
)


def test_a_graph_runs_backward_twice() -> None:
    def twice(model: nn.Module, number: int) -> Outcome:
        x = BATCH.embeds.clone().requires_grad_()
        loss = model(inputs_embeds=x, labels=BATCH.labels).loss
        loss.backward(retain_graph=True)
        first = {**gradients(model), "x": x.grad}
        x.grad = None
        loss.backward()
        second = {**gradients(model), "x": x.grad}
        assert_within(second, first, 0.0)
        return Outcome(loss.detach(), second)

    assert_was_tiled(compare(toy(), twice, alpha=0.5, groups=2))


def test_a_graph_that_was_freed_is_refused() -> None:
    with attached(tiled := toy()):
        loss = tiled(BATCH.embeds, BATCH.labels).loss
        loss.backward()
        with pytest.raises(RuntimeError, match="second time"):
            loss.backward()


def test_several_forwards_before_a_backward() -> None:
    batches = [BATCH, Batch.random(1, 71, seed=2), Batch.random(1, 9, seed=3)]

    def several(model: nn.Module, number: int) -> Outcome:
        losses = [model(inputs_embeds=batch.embeds, labels=batch.labels).loss for batch in batches]
        for index in (1, 2, 0):
            losses[index].backward()
        return Outcome(sum(losses).detach(), gradients(model))

    assert_was_tiled(compare(toy(), several, alpha=0.5))


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


@pytest.mark.slow
def test_anomaly_mode() -> None:
    def watched(model: nn.Module, number: int) -> Outcome:
        with torch.autograd.set_detect_anomaly(True, check_nan=False):
            return step(model, BATCH)

    stock, tiled = toy(), toy()
    with attached(tiled) as handle:
        for number in range(2):
            assert_step(watched(tiled, number), step(stock, BATCH))
        assert_was_tiled(handle.report())


@pytest.mark.slow
def test_evaluation_between_training_steps() -> None:
    def evaluate(model: nn.Module, number: int) -> Outcome:
        with torch.no_grad():
            before = model(inputs_embeds=BATCH.embeds, labels=BATCH.labels).loss
        outcome = step(model, BATCH)
        model.eval()
        with torch.no_grad():
            model(inputs_embeds=BATCH.embeds, labels=BATCH.labels)
        evaluated = step(model, BATCH)  # a backward in eval mode
        model.train()
        return Outcome(before, {**outcome.grads, **{f"eval {name}": g for name, g in evaluated.grads.items()}})

    assert_was_tiled(compare(toy(), evaluate))


def test_a_training_step_with_an_optimizer() -> None:
    optimizers: dict[int, torch.optim.Optimizer] = {}

    def train(model: nn.Module, number: int) -> Outcome:
        optimizer = optimizers.setdefault(id(model), torch.optim.SGD(model.parameters(), lr=0.1))
        loss = model(inputs_embeds=BATCH.embeds, labels=BATCH.labels).loss
        loss.backward()
        optimizer.step()
        return Outcome(loss.detach(), gradients(model))

    assert_was_tiled(compare(toy(), train, steps=4, tolerance=1e-5))


def test_two_tiles_are_back_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The one that runs, and the next."""
    counts: list[int] = []
    reload, buffers = SwapEngine._reload, []

    def counting(engine: SwapEngine, frame: Frame) -> None:
        reload(engine, frame)
        if "tile" in frame.name:
            buffers.append(weakref.ref(next(iter(frame.slots.values())).untyped_storage()))
            counts.append(sum(buffer() is not None for buffer in buffers))

    monkeypatch.setattr(SwapEngine, "_reload", counting)
    with attached(tiled := toy(), alpha=0.0, groups=2):
        for _ in range(2):
            drive(tiled, 0)
    assert max(counts) == 2
