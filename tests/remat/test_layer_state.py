"""A replay finds its layer as the forward did, and leaves it as it was: counts, statistics, generators, hooks, flags."""

from __future__ import annotations

import copy
import random
import re
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import ds_memo
from ds_memo.profile import caught_call as profile_call
from ds_memo.remat.layer_state import Before
from tests.models import HIDDEN, Batch, Block, Different, assert_same_grads, gradients, poisoned_memory
from tests.remat.situations import toy
from tests.tiles.rig import strict

SHARED = torch.Generator()
"""A generator that no attribute holds."""


# ---- what layers write and draw


class Counts(Block):
    """Tokens counted in a buffer, and a bias moved by them, as in routers without an auxiliary loss."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("tokens", torch.zeros(HIDDEN))

    def feed(self, x: torch.Tensor) -> torch.Tensor:
        self.tokens += (x > 0).sum((0, 1))
        return super().feed(x)


class CountsFromNone(Block):
    """A load that the training loop takes away after each step."""

    def __init__(self) -> None:
        super().__init__()
        self.load = None

    def feed(self, x: torch.Tensor) -> torch.Tensor:
        seen = (x > 0).sum((0, 1))
        self.load = seen if self.load is None else self.load.add_(seen)
        return super().feed(x)


class Normed(Block):
    """PyTorch does not tell of what its batch norm writes: no version changes."""

    def __init__(self) -> None:
        super().__init__()
        self.norm2 = nn.BatchNorm1d(HIDDEN)

    def feed(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.tanh(self.up(self.norm2(x.transpose(1, 2)).transpose(1, 2))))


class ReadsAndWrites(Block):
    """A running mean that the layer's output depends on: the replay must see the forward's."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(HIDDEN))

    def feed(self, x: torch.Tensor) -> torch.Tensor:
        y = super().feed(x * (1 + self.mean))
        with torch.no_grad():
            self.mean.mul_(0.9).add_(x.mean((0, 1)))
        return y


class CountsInPython(Block):
    def __init__(self) -> None:
        super().__init__()
        self.calls, self.lengths, self.losses = 0, Counter(), []

    def feed(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.lengths[x.shape[1]] += 1
        self.losses.append(x.detach().mean())
        return super().feed(x) * (1 + self.calls % 3)


class Draws(Block):
    """Random numbers that are not PyTorch's own generator's."""

    draw: Callable[[Draws], float]

    def __init__(self) -> None:
        super().__init__()
        self.own = torch.Generator().manual_seed(3)
        self.numpys = np.random.default_rng(4)

    def feed(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(super().feed(x) * self.draw())


class Python(Draws):
    draw = lambda self: random.uniform(0.5, 2)  # noqa: E731


class Numpy(Draws):
    draw = lambda self: np.random.uniform(0.5, 2)  # noqa: E731


class Own(Draws):
    draw = lambda self: torch.rand((), generator=self.own) + self.numpys.uniform(0.5, 2)  # noqa: E731


class Given(Draws):
    draw = lambda self: torch.rand((), generator=SHARED)  # noqa: E731


WRITES = (Counts, CountsFromNone, Normed, ReadsAndWrites, CountsInPython)
DRAWS = (Python, Numpy, Own, Given)


def held(model: nn.Module) -> list[Any]:
    """Return copies of all that the blocks hold and write."""
    names = ("calls", "lengths", "losses", "load")
    attributes = [copy.deepcopy(vars(block).get(name)) for block in model.blocks for name in names]
    own = [block.own.get_state() for block in model.blocks if hasattr(block, "own")]
    return [*(buffer.clone() for buffer in model.buffers()), *attributes, *own]


def drive(model: nn.Module, number: int, forwards: int = 1, **calls: Any) -> tuple[dict, list[Any]]:
    """Run some forwards and one backward; return the gradients and what the blocks hold."""
    torch.manual_seed(number), random.seed(number), np.random.seed(number), SHARED.manual_seed(number)
    loss = 0.0
    for i in range(forwards):
        batch = Batch.random(2, 17 + i, seed=10 * number + i)
        loss = loss + model(inputs_embeds=batch.embeds, labels=batch.labels).loss
    loss.backward()
    found = held(model)
    for block in model.blocks:
        if hasattr(block, "load"):
            block.load = None
    drawn = [torch.tensor([random.random(), np.random.random()]), SHARED.get_state()]
    return gradients(model), [*found, *drawn]


def compare(block: type, config: dict, forwards: int = 1, steps: int = 3, quiet: bool = False) -> None:
    stock = toy(block)
    model = copy.deepcopy(stock)
    for copied, own in zip(model.blocks, stock.blocks, strict=True):
        if hasattr(own, "own"):
            copied.own.set_state(own.own.get_state())
    handle = ds_memo.attach(model, config)
    try:
        for number in range(steps):
            want = drive(stock, number, forwards)
            with poisoned_memory(), strict(quiet):
                got = drive(model, number, forwards)
            for a, b in zip(got[1], want[1], strict=True):
                if not (torch.equal(a, b) if isinstance(b, torch.Tensor) else a == b):
                    raise Different(f"step {number}: {a}, stock has {b}")
            assert_same_grads(got[0], want[0])
    finally:
        handle.detach()


SOME = {"alpha": 0.5, "resident_layers": 1}
pytestmark = pytest.mark.filterwarnings("ignore::ds_memo.errors.MemoWarning")


@pytest.mark.parametrize("block", [*WRITES, *DRAWS])
def test_written_once_and_drawn_alike(block: type) -> None:
    compare(block, SOME)


@pytest.mark.parametrize("block", [Counts, ReadsAndWrites, CountsInPython, Own])
def test_two_forwards_before_a_backward(block: type) -> None:
    compare(block, {"alpha": 0.0, "resident_layers": 0}, forwards=2)


@pytest.mark.parametrize("block", [*WRITES, Own, Given])
def test_probe_and_profile_leave_no_trace(block: type, tmp_path: Path) -> None:
    compare(block, {"device_memory_gib": 0.001, "plan": {"enabled": False}, "cache_dir": str(tmp_path)}, steps=1, quiet=True)


@pytest.mark.parametrize("block", [Counts, Normed, ReadsAndWrites, CountsInPython, Python, Given])
def test_it_shows_if_the_replay_finds_what_is_there(block: type, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Before, "put_in", lambda self: nullcontext())
    with pytest.raises(Different):
        compare(block, SOME, quiet=True)


@pytest.mark.parametrize("block", [Counts, Normed, CountsInPython])
def test_it_shows_if_the_profile_is_not_undone(block: type, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(profile_call, "unchanged", lambda module: nullcontext())
    with pytest.raises(Different):
        compare(block, {"device_memory_gib": 0.001, "plan": {"enabled": False}, "cache_dir": str(tmp_path)}, steps=1, quiet=True)


# ---- what is changed between a forward and its backward


def forward(model: nn.Module, seed: int = 0) -> torch.Tensor:
    """Return the loss of a batch."""
    batch = Batch.random(2, 17, seed=seed)
    return model(inputs_embeds=batch.embeds, labels=batch.labels).loss


def switched(change: Callable[[Any], Any], block: Any = Block, prepare: Callable[[nn.Module], Any] = lambda model: model) -> None:
    """Change a model between a forward and its backward; compare with stock, where the backward does not see that.

    Args:
        change: gets what `prepare` returned before the forward.
    """
    outcomes = []
    for config in (None, SOME, {"alpha": 0.0, "resident_layers": 0}):
        model = toy(block)
        handle = ds_memo.attach(model, config) if config else None
        for number in range(2):
            prepared = prepare(model)
            loss = forward(model, number)
            change(prepared)
            flags = [part.training for part in model.modules()]
            loss.backward()
            assert flags == [part.training for part in model.modules()]
            model.train()
        outcomes.append(gradients(model))
        if handle:
            assert_same_grads(outcomes[-1], outcomes[0])
            handle.detach()


def test_hooks_that_are_removed() -> None:
    def prepare(model: nn.Module) -> Any:
        return model.blocks[1].up.register_forward_hook(lambda module, args, out: out.sigmoid())

    switched(lambda hook: hook.remove(), prepare=prepare)


def test_hooks_that_are_added() -> None:
    hooks = []
    switched(lambda model: hooks.append(model.blocks[1].up.register_forward_hook(lambda *_: hooks[0].remove())))


def test_evaluation_mode() -> None:
    switched(lambda model: model.eval(), lambda: Block(dropout=0.3, attention_dropout=0.0))


def test_a_patched_forward() -> None:
    def change(model: nn.Module) -> None:
        model.blocks[1].up.forward = lambda x: x.new_zeros(*x.shape[:-1], 2 * HIDDEN)
        model.blocks[1].scale = 3.0

    class Scales(Block):
        scale = 1.0

        def feed(self, x: torch.Tensor) -> torch.Tensor:
            return super().feed(x * self.scale)

    def prepare(model: nn.Module) -> nn.Module:
        vars(model.blocks[1].up).pop("forward", None)
        model.blocks[1].scale = 1.0
        return model

    switched(change, Scales, prepare=prepare)


SWITCH = {"weight": "a"}


class Adapted(Block):
    """Two weights, of which a global names the active one."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = (nn.Linear(HIDDEN, HIDDEN, bias=False) for _ in range(2))

    def feed(self, x: torch.Tensor) -> torch.Tensor:
        return super().feed(torch.tanh(getattr(self, SWITCH["weight"])(x)))


@pytest.mark.parametrize("config", [SOME, {"alpha": 1.0, "resident_layers": 4}])
def test_another_weight_is_refused(config: dict, monkeypatch: pytest.MonkeyPatch) -> None:
    model = toy(Adapted)
    ds_memo.attach(model, config)
    for _ in range(2):  # analysed, then by its recipe
        monkeypatch.setitem(SWITCH, "weight", "a")
        loss = forward(model)
        monkeypatch.setitem(SWITCH, "weight", "b")
        with pytest.raises(ds_memo.MemoError, match=re.escape("multiplied by a.weight, now by b.weight")):
            loss.backward()


def test_a_product_of_another_shape_is_refused() -> None:
    class Narrows(Block):
        def feed(self, x: torch.Tensor) -> torch.Tensor:
            return super().feed(x[:, : SWITCH.get("tokens", x.shape[1])]).sum(1, keepdim=True)

    model = toy(Narrows)
    ds_memo.attach(model, SOME)
    loss = forward(model)
    SWITCH["tokens"] = 5
    try:
        with pytest.raises(ds_memo.MemoError, match=r"did not repeat its forward: op .* made a tensor of shape"):
            loss.backward()
    finally:
        del SWITCH["tokens"]


class DrawsUnseen(Block):
    generator = random.Random(1)  # of the class: no attribute of the layer

    def feed(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(super().feed(x) * self.generator.uniform(0.5, 2))


def test_what_cannot_be_replayed_is_warned_of() -> None:
    model = toy(DrawsUnseen)
    handle = ds_memo.attach(model, SOME)
    loss = forward(model)
    with pytest.warns(ds_memo.MemoWarning, match="its replay computes other values than its forward did"):
        loss.backward()
    assert sum("other values" in warning for warning in handle.report()["warnings"]) == 1


class Seeded(torch.autograd.Function):
    """It saves a seed that it draws nothing with and never writes, as cuDNN's attention does without dropout."""

    unwritten = iter(range(1000))

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(torch.tensor(next(Seeded.unwritten)))
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient


class SavesASeed(Block):
    def feed(self, x: torch.Tensor) -> torch.Tensor:
        return Seeded.apply(super().feed(x))


def test_an_unwritten_seed_is_no_other_value() -> None:
    model = toy(SavesASeed)
    handle = ds_memo.attach(model, SOME)
    forward(model).backward()
    assert not handle.report()["warnings"]
