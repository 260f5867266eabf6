"""C++ follows recipes to the bit as Python does, which the tests of gradients compare with stock."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from deepspeed.runtime.zero.linear import zero3_linear_wrap
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor

import ds_memo
from ds_memo.remat import follower
from ds_memo.remat.layer import Layer
from ds_memo.remat.layer_host import Work
from ds_memo.swap.engine import SwapEngine
from ds_memo.swap.frame import Frame, Kept
from tests.everyday import everyday
from tests.faults import put_in
from tests.inside import inside
from tests.models import MODELS, Batch, Block, Outcome, assert_same, build, gradients, poisoned_memory, step
from tests.remat.situations import WAYS, Lines, toy
from tests.remat.test_inside_layers import LAYERS as BLOCKS

pytestmark = [pytest.mark.filterwarnings("ignore::ds_memo.errors.MemoWarning"), pytest.mark.usefixtures("library")]


@pytest.fixture(scope="module")
def library() -> Any:
    found = follower.library(lambda _: None)
    return found or pytest.skip(str(follower._Followed.why))


@dataclass
class Log:
    """All that a way of following may change."""

    outcomes: list[Outcome] = field(default_factory=list)
    kept: list[tuple[Kept, torch.Tensor, int]] = field(default_factory=list)
    """Place, values and version of each tensor in a frame: of resident frames at the end of the layer."""
    recipes_left: int = 0
    work: Work = field(default_factory=Work)
    report: dict[str, Any] = field(default_factory=dict)
    in_cpp: int = 0
    """Ops that C++ has run."""


def ops_in_cpp() -> int:
    return follower._Followed.library.counts()[0]


def logged(model: nn.Module, drive: Callable[[nn.Module, int], Outcome], config: dict[str, Any], steps: int) -> Log:
    """Run steps of an attached copy of a model."""
    log, model = Log(), copy.deepcopy(model)

    def note(frame: Frame, index: int) -> None:
        log.kept.append((frame.layout.kept[index], frame.device[index].clone(), frame.versions[index]))

    def keep(right: Any, engine: SwapEngine, frame: Frame, kept: Kept, tensor: torch.Tensor) -> None:
        right(engine, frame, kept, tensor)
        if not frame.resident:
            note(frame, kept.index)

    def end(right: Any, engine: SwapEngine, frame: Frame) -> None:
        for index in frame.device if frame.resident else ():
            note(frame, index)
        right(engine, frame)

    def left_recipe(right: Any, layer: Layer) -> None:
        log.recipes_left += 1
        right(layer)

    before = ops_in_cpp()
    with pytest.MonkeyPatch.context() as patch:
        put_in(patch, SwapEngine, "keep", keep)
        put_in(patch, SwapEngine, "end", end)
        put_in(patch, Layer, "left_recipe", left_recipe)
        handle = ds_memo.attach(model, config)
        for number in range(steps):
            with poisoned_memory():
                log.outcomes.append(drive(model, number))
        log.work, log.report = inside(handle).remat.work, handle.report()
        handle.detach()
    log.in_cpp = ops_in_cpp() - before
    return log


REPORTED = ("frames", "bytes_to_host", "bytes_from_host", "warnings")


def assert_alike(got: Log, want: Log) -> None:
    for number, (a, b) in enumerate(zip(got.outcomes, want.outcomes, strict=True)):
        off = [name for name, value in b.grads.items() if not same(a.grads[name], value)]
        assert not off and same(a.loss, b.loss) and same(a.generator, b.generator), (number, off)
    assert [(kept, version) for kept, _, version in got.kept] == [(kept, version) for kept, _, version in want.kept]
    assert [i for i, (a, b) in enumerate(zip(got.kept, want.kept, strict=True)) if not same(a[1], b[1])] == []
    assert got.recipes_left == want.recipes_left
    assert got.work == want.work
    assert {name: got.report[name] for name in REPORTED} == {name: want.report[name] for name in REPORTED}


def same(a: torch.Tensor | None, b: torch.Tensor | None) -> bool:
    """Compare the bits, with NaNs of products that are left out."""
    return a is b or bool((a == b).logical_or(a.isnan() & b.isnan()).all())


def compare_ways(model: nn.Module, drive: Callable[[nn.Module, int], Outcome], config: dict[str, Any], steps: int = 3) -> Log:
    """Run the same steps by C++ and by Python, and compare all that they log. Return C++'s."""
    got = logged(model, drive, config, steps)
    with follower.in_python():
        want = logged(model, drive, config, steps)
    assert_alike(got, want)
    assert want.in_cpp == 0 < got.in_cpp
    return got


def drive(model: nn.Module, number: int) -> Outcome:
    """Run a step whose batch differs from the one before. The last is shorter, and analysed anew."""
    return step(model, Batch.random(2, 17 if number < 3 else 9, seed=number), seed=number)


FAMILIES = [name for name in MODELS if name != "gemma2"]  # the first call of a process keeps more of its eager attention
CASES = [(name, way) for name in FAMILIES for way in ("mixed", "recomputed", "tiles")]


@pytest.mark.parametrize("name, way", everyday(CASES, [(name, way) for name in ("llama", "qwen3_moe") for _, way in CASES[:3]]))
def test_families(name: str, way: str) -> None:
    compare_ways(build(name), drive, WAYS[way], steps=4)


# ---- what layers do inside


class Biased(Lines):
    """DeepSpeed's linears under ZeRO-3 add their bias in place."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        lines = [functools.partial(zero3_linear_wrap, weight=line.weight, bias=line.bias) for line in (self.a, self.b, self.c)]
        return x + lines[2](F.gelu(lines[1](F.silu(lines[0](self.norm(x))))))


class Draws(Block):
    """Dropout by the generator, dropout inside attention, and a generator that the layer forks itself."""

    def __init__(self) -> None:
        super().__init__(attention_dropout=0.2, dropout=0.1)

    def feed(self, x: torch.Tensor) -> torch.Tensor:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(3)
            x = x * torch.rand_like(x)
        return super().feed(x) * torch.rand(())


class KeptWhole(Block):
    """Attention by a function that is kept whole."""

    def sdpa(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return ds_memo.keep_whole(super().sdpa)(q, k, v)


class Leaves(Lines):
    """Every third call departs from its recipe, in the middle."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.b(F.gelu(self.a(self.norm(x))))
        self.calls = getattr(self, "calls", -1) + 1
        return x + (self.c(y.tanh()) if self.calls // 2 % 3 else self.a(self.c(y).sigmoid()))


MORE = [Block, Biased, Draws, KeptWhole, Leaves]


@pytest.mark.parametrize("way", ["mixed", "recomputed"])
@pytest.mark.parametrize("block", [*MORE, *BLOCKS])
def test_layers(block: type, way: str) -> None:
    log = compare_ways(toy(block, layers=2), drive, {**WAYS[way], "resident_layers": int(way == "mixed")}, steps=6)
    assert (log.recipes_left > 0) >= (block is Leaves)


# ---- what training does around them


def in_autocast(model: nn.Module, number: int) -> Outcome:
    """The backward runs outside of it."""
    x, batch = input_of(number)
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(x, batch.labels).loss
    loss.backward()
    return Outcome(loss.detach(), {**gradients(model), "x": x.grad})


def backward_in_autocast(model: nn.Module, number: int) -> Outcome:
    x, batch = input_of(number)
    loss = model(x, batch.labels).loss
    with torch.autocast("cpu", torch.bfloat16):
        loss.backward()
    return Outcome(loss.detach(), {**gradients(model), "x": x.grad})


def three_backwards(model: nn.Module, number: int) -> Outcome:
    x, batch = input_of(number)
    loss = model(x, batch.labels).loss
    for left in (2, 1, 0):
        loss.backward(retain_graph=bool(left))
    return Outcome(loss.detach(), {**gradients(model), "x": x.grad})


def from_the_middle(model: nn.Module, number: int) -> Outcome:
    """A backward that ends between layers, one of a part of a layer, and the rest."""
    x, batch = input_of(number)
    middle = []
    hook = model.blocks[1].register_forward_pre_hook(lambda module, args: middle.append(args[0]))
    loss = model(x, batch.labels).loss
    hook.remove()
    (first,) = torch.autograd.grad(loss, middle, retain_graph=True)
    (second,) = torch.autograd.grad(loss, [next(model.blocks[-1].parameters())], retain_graph=True)
    loss.backward()
    return Outcome(loss.detach(), {**gradients(model), "x": x.grad, "first": first, "second": second})


def two_forwards(model: nn.Module, number: int) -> Outcome:
    (x, batch), (y, other) = input_of(number), input_of(number + 10)
    losses = [model(x, batch.labels).loss, model(y, other.labels).loss]
    for loss in losses:
        loss.backward()
    return Outcome(sum(losses).detach(), {**gradients(model), "x": x.grad, "y": y.grad})


def input_of(number: int) -> tuple[torch.Tensor, Batch]:
    batch = Batch.random(2, 17, seed=number)
    torch.manual_seed(number)
    return batch.embeds.clone().requires_grad_(), batch


@pytest.mark.parametrize("block", [Block, Draws])
@pytest.mark.parametrize("way", ["mixed", "recomputed", "tiles"])
@pytest.mark.parametrize("steps", [in_autocast, backward_in_autocast, three_backwards, from_the_middle, two_forwards])
def test_steps(steps: Callable[[nn.Module, int], Outcome], way: str, block: type) -> None:
    compare_ways(toy(block, layers=2), steps, {**WAYS[way], "resident_layers": int(way == "mixed")})


@pytest.mark.parametrize("way", ["mixed", "recomputed", "tiles"])
def test_bf16(way: str) -> None:
    model = build("llama", torch.bfloat16)
    compare_ways(model, lambda model, number: step(model, Batch.random(2, 17, torch.bfloat16, seed=number)), WAYS[way])


# ---- what C++ must leave to Python, or notice


HALF = {"alpha": 0.5, "resident_layers": 0}


def test_a_bias_that_depends_on_a_product_left_out() -> None:
    """In the third step. The replay would add what was never computed to the rows that it computes."""

    class Bends(Lines):
        def forward(self, x: torch.Tensor, bends: bool) -> torch.Tensor:
            y = self.a(x)  # nothing saves it
            bias = y.detach().mean((0, 1)) if bends else self.b.bias
            z = x.flatten(0, 1) @ self.b.weight.t()
            z.add_(bias)
            return x + y + self.c(F.gelu(z)).view_as(x)

    def bend(model: nn.Module, number: int) -> Outcome:
        return step(model, Batch.random(2, 17, seed=number), bends=number == 2)

    model = toy(Bends, layers=2)
    log = compare_ways(model, bend, HALF)
    for number, got in enumerate(log.outcomes):
        assert_same(got, bend(model, number))
    assert log.recipes_left == 2


def test_an_op_that_is_registered_anew() -> None:
    """Another op of its name writes to its operand. A notebook does so where a cell runs again."""

    def compare(schema: str, scaled: Callable[[torch.Tensor], Any], kernel: Callable[[torch.Tensor], Any]) -> None:
        class Scales(Lines):
            def forward(self, x: torch.Tensor) -> torch.Tensor:
                y = self.a(x)
                with torch.no_grad():
                    z = scaled(y)
                return x + self.b(F.gelu(self.c(x)) * z)

        library = torch.library.Library("ds_memo_tests_anew", "DEF")
        library.define(schema)
        library.impl("scale", kernel, "CompositeExplicitAutograd")
        model = toy(Scales, layers=2)
        for number, got in enumerate(compare_ways(model, drive, HALF).outcomes):
            assert_same(got, drive(model, number))
        library._destroy()

    def in_place(y: torch.Tensor) -> torch.Tensor:
        torch.ops.ds_memo_tests_anew.scale(y)
        return y.clone()

    compare("scale(Tensor x) -> Tensor", lambda y: torch.ops.ds_memo_tests_anew.scale(y), lambda x: x * 2)
    compare("scale(Tensor(a!) x) -> ()", in_place, lambda x: (x.mul_(2), None)[1])


def test_tensors_of_a_subclass() -> None:
    """They detach what is inside them, in the forward and in a replay."""
    batch = Batch.random(2, 17)

    def doubled(model: nn.Module, number: int) -> Outcome:
        x = TwoTensor(batch.embeds.clone(), batch.embeds * 2).requires_grad_()
        loss = model(x, batch.labels).loss
        loss.backward()
        found = {**gradients(model), "x": x.grad}
        halves = {f"{name}.{half}": getattr(gradient, half) for name, gradient in found.items() for half in ("a", "b")}
        return Outcome(loss.detach().a, halves)

    model = toy(layers=2)
    for number, got in enumerate(compare_ways(model, doubled, WAYS["mixed"] | {"alpha": 1.0, "resident_layers": 2}).outcomes):
        assert_same(got, doubled(model, number))
