"""Exceptions, graphs that are dropped, and what is left of tiles after detach."""

from __future__ import annotations

import gc
import itertools
from contextlib import suppress
from typing import Any

import pytest
import torch
from torch import nn

import ds_memo
from tests.everyday import everyday
from tests.models import Block, Outcome, Toy, gradients, poisoned_memory, step
from tests.remat.situations import assert_nothing_leaked
from tests.tiles.rig import (
    BATCH,
    assert_step,
    assert_was_tiled,
    assert_within,
    attached,
    compare,
    layers_of,
    model_of,
    reasons,
    tiled_layers,
    toy,
)

# ---- exceptions, and graphs that are dropped


class Trips(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        Stumbles.pass_here("backward")
        return gradient


class Stumbles(Block):
    """Raises where and when it is told to: at the n-th time that a run passes there."""

    where: str | None = None
    left = 0

    @staticmethod
    def pass_here(where: str) -> None:
        if Stumbles.where == where:
            Stumbles.left -= 1
            if Stumbles.left < 0:
                raise ZeroDivisionError(f"in the middle of {where}")

    def attend(self, x: torch.Tensor) -> torch.Tensor:
        Stumbles.pass_here("head")
        return super().attend(Trips.apply(x))

    def feed(self, x: torch.Tensor) -> torch.Tensor:
        Stumbles.pass_here("tail")
        return super().feed(Trips.apply(x))


PLACES = [("head", 1), ("head", 3), ("head", 7), ("head", 9), ("tail", 2), ("tail", 5), ("backward", 0), ("backward", 9)]


@pytest.mark.parametrize(
    "place, first", everyday([*itertools.product(PLACES, (True, False))], [*zip(PLACES[::2], (True, False) * 2, strict=True)])
)
def test_an_exception_and_a_clean_next_step(
    place: tuple[str, int], first: bool, frames: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A forward of two layers passes 16 heads and 8 tails, a backward as many again; the first step analyses besides."""
    where, passes = place
    stock, tiled = toy(Stumbles), toy(Stumbles)
    with attached(tiled, quiet=first) as handle:
        if not first:
            step(tiled, BATCH)
        with monkeypatch.context() as patch:
            patch.setattr(Stumbles, "where", where)
            patch.setattr(Stumbles, "left", passes)
            with suppress(ZeroDivisionError):
                step(tiled, BATCH)
            raised = Stumbles.left < 0
        assert raised
        gradients(tiled)
        assert_nothing_leaked(handle, frames)
        for _ in range(2):
            with poisoned_memory():
                assert_step(step(tiled, BATCH), step(stock, BATCH))
        assert_nothing_leaked(handle, frames)
        if not first:
            assert_was_tiled(handle.report())


def test_a_parameter_is_the_layers_own_again_after_an_exception(monkeypatch: pytest.MonkeyPatch) -> None:
    with attached(tiled := toy(Stumbles)):
        before = list(tiled.parameters())
        step(tiled, BATCH)
        for where, passes in (("head", 1), ("tail", 1), ("backward", 1)):
            with monkeypatch.context() as patch:
                patch.setattr(Stumbles, "where", where)
                patch.setattr(Stumbles, "left", passes)
                with pytest.raises(ZeroDivisionError):
                    step(tiled, BATCH)
            assert all(a is b for a, b in zip(before, tiled.parameters(), strict=True))
            assert "forward" not in vars(tiled.blocks[0]) or callable(tiled.blocks[0].forward)


def test_backward_again_after_one_that_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    def twice(model: nn.Module, number: int) -> Outcome:
        x = BATCH.embeds.clone().requires_grad_()
        loss = model(x, BATCH.labels).loss
        with monkeypatch.context() as patch:
            patch.setattr(Stumbles, "where", "backward")
            patch.setattr(Stumbles, "left", 1)
            with pytest.raises(ZeroDivisionError):
                loss.backward(retain_graph=True)
        gradients(model)
        x.grad = None
        loss.backward()
        return Outcome(loss.detach(), {**gradients(model), "x": x.grad})

    assert_was_tiled(compare(toy(Stumbles), twice))


def test_graphs_that_are_dropped(frames: Any) -> None:
    stock, tiled = toy(), toy()
    with attached(tiled) as handle:
        for _ in range(3):
            tiled(inputs_embeds=BATCH.embeds, labels=BATCH.labels)
        assert_nothing_leaked(handle, frames)
        loss = tiled(inputs_embeds=BATCH.embeds, labels=BATCH.labels).loss
        torch.autograd.grad(loss, next(layers_of(tiled)[1].parameters()))
        del loss
        assert_nothing_leaked(handle, frames)
        assert_step(step(tiled, BATCH), step(stock, BATCH))
        assert_nothing_leaked(handle, frames)


def test_nothing_waits_for_the_garbage_collector(frames: Any) -> None:
    with attached(tiled := toy()) as handle:
        step(tiled, BATCH)
        gc.collect()
        gc.disable()
        try:
            for _ in range(2):
                step(tiled, BATCH)
                assert not frames
                handle._session.engine.drain()
                assert handle._session.slab.used == 0
        finally:
            gc.enable()


# ---- the model is given back


def test_detaching_gives_the_model_back() -> None:
    tiled, stock = toy(), toy()
    with attached(tiled):
        step(tiled, BATCH)
    got, want = step(tiled, BATCH), step(stock, BATCH)
    assert torch.equal(got.loss, want.loss)
    assert_within(got.grads, want.grads, 0.0)


def test_calls_of_ds_memo_checkpoint() -> None:
    """A model that hands its layers to memo itself."""

    class Checkpoints(Toy):
        def run_blocks(self, x: torch.Tensor) -> torch.Tensor:
            for block in self.blocks:
                x = ds_memo.checkpoint(block, x) if self.ours else block(x)
            return x

        ours = False

    stock, tiled = model_of(Checkpoints), model_of(Checkpoints)
    tiled.ours = True
    with attached(tiled) as handle:
        for _ in range(2):
            assert_step(step(tiled, BATCH), step(stock, BATCH))
        assert tiled_layers(handle) == [0, 1], reasons(handle)
