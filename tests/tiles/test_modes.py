"""Where the modes of tiles are on the stack, layers that do something else in another call, and models in two threads."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils import _python_dispatch
from torch.utils._python_dispatch import TorchDispatchMode

from ds_memo.remat.modes import inside_a_layer
from ds_memo.tiles.modes import RecordPost
from tests.models import HEADS, HIDDEN, Batch, Block, Different, Outcome, step
from tests.remat.products import compare_counts
from tests.tiles.rig import BATCH, assert_step, assert_was_tiled, attached, compare, config, drive, toy

Patch = pytest.MonkeyPatch


class Changes(Block):
    """Does one thing more in every second step."""

    extra = False

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Parameter(torch.randn(HIDDEN, HIDDEN) / 8)


class ReadsItsQueries(Changes):
    """What follows attention reads a product of the pre that recipes leave out there."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate = torch.tanh(self.qkv(self.norm1(x))[..., :HIDDEN]) if self.extra else 0
        return super().forward(x) + gate


class ProductBeforeAttention(Changes):
    """Another product comes before attention, outside F.linear, and what follows attention reads it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate = self.qkv(self.norm1(x))[..., :HIDDEN] @ self.gate if self.extra else 0
        return super().forward(x) + gate


class LinearBeforeAttention(Changes):
    """F.linear runs once more before attention."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x + nn.functional.linear(x, self.gate) if self.extra else x)


class SavesTheLastProduct(Changes):
    """Autograd saves the layer's last product, which recipes leave out."""

    def feed(self, x: torch.Tensor) -> torch.Tensor:
        out = super().feed(x)
        return out * torch.tanh(out) if self.extra else out


class ProductBehindAttention(Changes):
    def feed(self, x: torch.Tensor) -> torch.Tensor:
        return super().feed(x @ self.gate if self.extra else x)


class OneMoreLikeTheNext(Changes):
    """The pre ends with one more product, which looks like the post's first."""

    turns = True

    def heads(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        q, k, v = super().heads(x)
        if self.extra is not self.turns:
            return q, k, v
        turned = F.linear(q.transpose(1, 2).flatten(2), self.gate, self.o.bias)
        return turned.unflatten(2, (HEADS, -1)).transpose(1, 2), k, v


class OneLess(OneMoreLikeTheNext):
    """The pre lacks its last product."""

    turns = False


CHANGES = [
    *(ReadsItsQueries, ProductBeforeAttention, LinearBeforeAttention, SavesTheLastProduct, ProductBehindAttention),
    *(OneMoreLikeTheNext, OneLess),
]


def drive_changing(model: nn.Module, number: int) -> Outcome:
    Changes.extra = number % 2 == 1
    try:
        return step(model, Batch.random(2, 23, seed=number))
    finally:
        Changes.extra = False


@pytest.mark.parametrize("block", CHANGES)
@pytest.mark.parametrize("alpha", [0.0, 0.5])
def test_a_call_that_does_other_work_than_the_recipe(block: type[Block], alpha: float) -> None:
    report = compare(toy(block), drive_changing, steps=3, alpha=alpha)
    assert report["tiles"]["not_tiled"] == {}


def test_a_departure_that_is_not_noticed(monkeypatch: Patch) -> None:
    """What autograd saves is not counted."""
    monkeypatch.setattr(
        RecordPost, "packs", property(lambda self: self.call.recipe.packs, lambda self, value: None), raising=False
    )
    with pytest.raises(Different):
        compare(toy(SavesTheLastProduct), drive_changing, steps=3, alpha=0.0)


@pytest.mark.parametrize("alpha", [0.0, 0.5, 1.0])
def test_the_reported_share_is_what_ran(alpha: float) -> None:
    """Modes of tiles see few ops, and count the products that they do not see."""
    share, memo, stock = compare_counts(toy(), config(alpha=alpha, groups=2))
    assert (share, stock) == (pytest.approx(memo), 0) and (share == 0) == (alpha == 1)


# ---- modes of a layer's own


class Counts(TorchDispatchMode):
    ops = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        Counts.ops += 1
        return func(*args, **(kwargs or {}))


class HasAMode(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with Counts():
            x = x + self.attend(x)
        return x + self.feed(x)


@pytest.mark.parametrize("alpha", [0.0, 0.5])
def test_a_mode_of_the_layer_is_on_where_the_layer_has_it(alpha: float, monkeypatch: Patch) -> None:
    monkeypatch.setattr(Counts, "ops", 0)
    assert_was_tiled(compare(toy(HasAMode), drive, alpha=alpha))
    assert Counts.ops > 0 and not inside_a_layer()


# ---- checkpoints inside a layer


class Asks(Block):
    """Notes whether a checkpoint inside it would be a direct call."""

    inside: list[bool]

    def attend(self, x: torch.Tensor) -> torch.Tensor:
        self.inside.append(inside_a_layer())
        return super().attend(x)

    def feed(self, x: torch.Tensor) -> torch.Tensor:
        self.inside.append(inside_a_layer())
        return super().feed(x)


def test_a_checkpoint_inside_a_layer_is_a_direct_call(monkeypatch: Patch) -> None:
    monkeypatch.setattr(Asks, "inside", [], raising=False)
    model = toy(Asks)
    with attached(model, alpha=0.0) as handle:
        step(model, BATCH)
        Asks.inside.clear()
        step(model, BATCH)
        assert_was_tiled(handle.report())
    runs = 4 + 2  # for each tile of each layer: the pre four times, the post twice
    assert Asks.inside == [True] * runs * 4 * 2


# ---- models that train in two threads at once


LIMIT_S = 60


class Meets(Block):
    """Calls `then` in one forward and its replay, where its attention begins."""

    then: Callable[[], Any] | None = None

    def attend(self, x: torch.Tensor) -> torch.Tensor:
        then, self.then = self.then, None
        if then is not None:
            then()
        return super().attend(x)


@pytest.mark.parametrize("other", ["stock", "in tiles"])
def test_two_threads(other: str) -> None:
    """The other's step begins inside a layer of the first, and ends when the first's is over."""
    linear, first, second = F.linear, toy(Meets), toy(Meets)
    want = step(toy(), BATCH)
    inside, both, over = threading.Event(), threading.Event(), threading.Event()
    found: list[Outcome] = []
    seen: list[Any] = []

    def train_second() -> None:
        assert inside.wait(LIMIT_S)
        second.blocks[0].then = lambda: (seen.append(F.linear), both.set(), over.wait(LIMIT_S), seen.append(F.linear))
        found.append(step(second, BATCH))

    with (
        attached(first, host_memory_gib=0.01) as handle,
        attached(second, host_memory_gib=0.02) if other == "in tiles" else nullcontext(),
    ):
        for model in (first, second):
            step(model, BATCH)  # it is analysed
        thread = threading.Thread(target=train_second, daemon=True)
        thread.start()
        first.blocks[0].then = lambda: (inside.set(), both.wait(LIMIT_S))
        assert_step(step(first, BATCH), want)
        over.set()
        thread.join(LIMIT_S)
        assert_step(*found, want)
        assert_was_tiled(handle.report())
    assert set(seen) == {linear} and F.linear is linear
    assert not _python_dispatch.is_in_torch_dispatch_mode()
