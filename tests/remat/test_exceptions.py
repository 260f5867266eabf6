"""An exception of a layer, its backward or its replay reaches the user; nothing leaks, and the next step is stock's."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import ds_memo
from tests.models import (
    LAYERS,
    Batch,
    Block,
    Outcome,
    assert_same,
    compare_with_stock,
    every_config,
    gradients,
    poisoned_memory,
    step,
)
from tests.remat.situations import BATCH, assert_nothing_leaked, toy

pytestmark = pytest.mark.filterwarnings("ignore::ds_memo.errors.MemoWarning")


class Stumbles(Block):
    """Raises in its forward or, through an autograd function, in its backward, as `where` says."""

    where: str | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = super().forward(x)
        if type(self).where == "forward" and self.weak:
            raise ZeroDivisionError("in the middle of forward")
        return Trips.apply(x, self.weak)

    weak = False


class Trips(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weak: bool) -> torch.Tensor:
        ctx.weak = weak
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple:
        if Stumbles.where == "backward" and ctx.weak:
            raise ZeroDivisionError("in the middle of backward")
        return grad, None


@every_config
@pytest.mark.parametrize("first", [True, False], ids=["first-step", "later-step"])
@pytest.mark.parametrize("where", ["forward", "backward", "replay", "head"])
def test_an_exception_and_a_clean_next_step(
    config: dict, where: str, first: bool, frames: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = toy(Stumbles)
    model.blocks[1].weak = True
    stock = copy.deepcopy(model)
    handle = ds_memo.attach(model, config)
    if not first:
        step(model, BATCH)
    with monkeypatch.context() as patch:
        if where == "replay":  # the layer's second run, not its first
            runs = itertools.count()
            gelu = F.gelu

            def breaks(x: torch.Tensor) -> torch.Tensor:
                if next(runs) == LAYERS + 1:
                    raise ZeroDivisionError("in the middle of a replay")
                return gelu(x)

            patch.setattr(F, "gelu", breaks)
        elif where == "head":
            patch.setattr(model.head, "forward", lambda x: x / 0 if 1 // 0 else x)
        else:
            patch.setattr(Stumbles, "where", where)
        with pytest.raises(ZeroDivisionError):
            step(model, BATCH)
    gradients(model)
    assert_nothing_leaked(handle, frames)
    for _ in range(2):
        with poisoned_memory():
            assert_same(step(model, BATCH), step(stock, BATCH))
    assert_nothing_leaked(handle, frames)
    handle.detach()


@every_config
def test_another_try_while_the_exception_is_held(config: dict, monkeypatch: pytest.MonkeyPatch) -> None:
    """Code that runs out of memory may go on with a smaller batch inside its except block."""
    model = toy(Stumbles)
    model.blocks[1].weak = True
    stock = copy.deepcopy(model)
    handle = ds_memo.attach(model, config)
    for _ in range(2):
        frames = handle.report()["frames"]
        try:
            with monkeypatch.context() as patch:
                patch.setattr(Stumbles, "where", "forward")
                step(model, BATCH)
        except ZeroDivisionError as error:
            with poisoned_memory():
                assert_same(step(model, Batch.random(1, 17)), step(stock, Batch.random(1, 17)))
            assert handle.report()["frames"] == frames + 2 + LAYERS
            assert error.__traceback__ is not None
        gradients(model)
    handle.detach()


@every_config
def test_backward_again_after_one_that_failed(config: dict, monkeypatch: pytest.MonkeyPatch) -> None:
    def twice(model: nn.Module, number: int) -> Outcome:
        model.blocks[1].weak = True
        x = BATCH.embeds.clone().requires_grad_()
        loss = model(x, BATCH.labels).loss
        with monkeypatch.context() as patch:
            patch.setattr(Stumbles, "where", "backward")
            with pytest.raises(ZeroDivisionError):
                loss.backward(retain_graph=True)
        gradients(model)
        x.grad = None
        loss.backward()
        return Outcome(loss.detach(), {**gradients(model), "x": x.grad})

    compare_with_stock(toy(Stumbles), twice, config)
