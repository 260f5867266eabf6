"""An exception of a layer, its backward or its replay reaches the user; nothing leaks, and the next step is stock's."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

import ds_memo
from tests.everyday import everyday
from tests.models import LAYERS, Batch, Block, Outcome, gradients, poisoned_memory, step
from tests.remat.situations import BATCH, WAYS, assert_in_way, assert_nothing_leaked, compare, every_way, toy
from tests.tiles.rig import assert_was_tiled

pytestmark = pytest.mark.filterwarnings("ignore::ds_memo.errors.MemoWarning")


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
        Stumbles.pass_here("pre")
        return super().attend(Trips.apply(x))

    def feed(self, x: torch.Tensor) -> torch.Tensor:
        Stumbles.pass_here("post")
        return super().feed(Trips.apply(x))


@contextmanager
def stumbling(where: str, passes: int) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch, pytest.raises(ZeroDivisionError):
        patch.setattr(Stumbles, "where", where)
        patch.setattr(Stumbles, "left", passes)
        yield


PLACES = {
    "tiles": [("pre", 1), ("pre", 7), ("post", 5), ("backward", 0), ("backward", 9)],
    "mixed": [("pre", 1), ("post", 3), ("backward", 0), ("backward", 3), ("loss", 0)],
}
"""Two layers in tiles pass 16 pres and 8 posts in a forward, as many again in a backward; the first step analyses besides. Whole
layers pass each once, and once more in a replay."""
CASES = [(way, *place, first) for way, places in PLACES.items() for place, first in itertools.product(places, (True, False))]


@pytest.mark.parametrize("way, where, passes, first", everyday(CASES, [CASES[0], CASES[7], *CASES[10:]]))
def test_an_exception_and_a_clean_next_step(way: str, where: str, passes: int, first: bool, frames: Any) -> None:
    stock, model = toy(Stumbles, layers=2), toy(Stumbles, layers=2)
    model.head.register_forward_pre_hook(lambda *_: Stumbles.pass_here("loss"))
    handle = ds_memo.attach(model, WAYS[way])
    if not first:
        step(model, BATCH)
    with stumbling(where, passes):
        step(model, BATCH)
    gradients(model)
    assert_nothing_leaked(handle, frames)
    for _ in range(2):
        with poisoned_memory():
            assert_in_way(way, step(model, BATCH), step(stock, BATCH))
    assert_nothing_leaked(handle, frames)
    if way == "tiles" and not first:
        assert_was_tiled(handle.report())


@every_way("compiled", "tiles", "groups")
def test_another_try_while_the_exception_is_held(way: str) -> None:
    """Code that runs out of memory may go on with a smaller batch inside its except block."""
    model, stock = toy(Stumbles), toy(Stumbles)
    handle = ds_memo.attach(model, WAYS[way])
    for _ in range(2):
        frames = handle.report()["frames"]
        Stumbles.where, Stumbles.left = "pre", 1
        try:
            step(model, BATCH)
        except ZeroDivisionError as error:
            Stumbles.where = None
            with poisoned_memory():
                assert_in_way(way, step(model, Batch.random(1, 17)), step(stock, Batch.random(1, 17)))
            assert handle.report()["frames"] == frames + 2 + LAYERS
            assert error.__traceback__ is not None
        else:
            pytest.fail("nothing was raised")
        gradients(model)


@every_way("compiled")
def test_backward_again_after_one_that_failed(way: str) -> None:
    def twice(model: torch.nn.Module, number: int) -> Outcome:
        x = BATCH.embeds.clone().requires_grad_()
        loss = model(x, BATCH.labels).loss
        with stumbling("backward", 1):
            loss.backward(retain_graph=True)
        gradients(model)
        x.grad = None
        loss.backward()
        return Outcome(loss.detach(), {**gradients(model), "x": x.grad})

    compare(toy(Stumbles), twice, way)
