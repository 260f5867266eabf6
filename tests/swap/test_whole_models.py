"""Whole models under the engine, in unusual orders: every gradient is compared with the stock model's."""

from __future__ import annotations

from contextlib import suppress

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from ds_memo.errors import MemoError
from ds_memo.runtime.handle import MemoHandle
from ds_memo.swap.streams import ThreadStreams
from tests.models import Block, Mlp, Stack, assert_same_grads, gradients
from tests.swap.ordered import OrderedStreams
from tests.swap.rig import attached
from tests.swap.schedules import layers_of

SWAP = {"alpha": 0.5, "resident_layers": 0}


def with_and_without(make, steps, config=SWAP) -> tuple[dict[str, torch.Tensor | None], dict[str, torch.Tensor | None]]:
    stock = make()
    steps(stock)
    model = make()
    checker = OrderedStreams()
    with checker, attached(model, checker, config):
        steps(model)
    checker.verify()
    return gradients(model), gradients(stock)


BATCHES = [torch.randn(2, 6, 16, generator=torch.Generator().manual_seed(seed)) for seed in range(6)]


def shared(model: nn.Module) -> None:
    """One backward through two graphs at once: autograd goes by sequence number, youngest first."""
    (model(BATCHES[0]) * 2 + model(BATCHES[1])).backward()


def chained(model: nn.Module) -> None:
    """The same layers twice in one graph."""
    x = BATCHES[0].clone().requires_grad_()
    layers = layers_of(model)
    for _ in range(2):
        for layer in layers:
            x = layer(x)
    x.square().mean().backward()


def forward_inside_backward(model: nn.Module) -> None:
    """A hook on a gradient runs the model again, forward and backward, in the middle of a backward."""
    x = BATCHES[0].clone().requires_grad_()
    done = []

    def again(grad: torch.Tensor) -> None:
        if not done:
            done.append(True)
            with torch.enable_grad():
                model(BATCHES[1]).backward()

    layers = layers_of(model)
    hook = layers[1].register_forward_hook(lambda module, args, out: out.register_hook(again) and None)
    loss = model(x)
    hook.remove()
    loss.backward()


def forward_inside_forward(model: nn.Module) -> None:
    """A hook between two layers runs the model forward and backward in the middle of a forward."""
    layers = layers_of(model)
    done = []

    def again(module: nn.Module, args: tuple) -> None:
        if not done:
            done.append(True)
            model(BATCHES[1]).backward()

    hook = layers[2].register_forward_pre_hook(again)
    loss = model(BATCHES[0])
    hook.remove()
    loss.backward()


def raise_in_backward(model: nn.Module) -> None:
    layers = layers_of(model)

    def fail(grad: torch.Tensor) -> None:
        raise ArithmeticError

    hook = layers[1].register_forward_hook(lambda module, args, out: out.register_hook(fail) and None)
    loss = model(BATCHES[0])
    hook.remove()
    with suppress(ArithmeticError):
        loss.backward()
    del loss
    model.zero_grad()
    model(BATCHES[1]).backward()


def frozen_below(model: nn.Module) -> None:
    layers = layers_of(model)
    layers[0].requires_grad_(False)
    layers[1].requires_grad_(False)
    model(BATCHES[0]).backward()
    layers[1].requires_grad_(True)
    model(BATCHES[1]).backward()


def skipped_layers(model: nn.Module) -> None:
    """Layer drop: another set of layers runs each time."""
    layers = layers_of(model)
    for batch, chosen in zip(BATCHES, [(0, 2, 3), (1,), (3, 0), (0, 1, 2, 3)], strict=False):
        x = batch
        for index in chosen:
            x = layers[index](x)
        x.square().mean().backward()


def branches(model: nn.Module) -> None:
    """Two layers read the same tensor, and their outputs are multiplied: the frames are no chain."""
    layers = layers_of(model)
    x = layers[0](BATCHES[0])
    (layers[3](layers[1](x)) * layers[2](x)).mean().backward()


STORIES = [
    shared,
    chained,
    forward_inside_backward,
    forward_inside_forward,
    raise_in_backward,
    frozen_below,
    skipped_layers,
    branches,
]


@pytest.mark.filterwarnings("ignore::ds_memo.MemoWarning")
@pytest.mark.parametrize("make, resident", [(lambda: Stack(4), 1), (Mlp, 0)], ids=["attention", "mlp"])
@pytest.mark.parametrize("story", STORIES, ids=lambda story: story.__name__)
def test_unforeseen_orders(story, make, resident):
    assert_same_grads(*with_and_without(make, story, SWAP | {"resident_layers": resident}))


@pytest.mark.filterwarnings("ignore::ds_memo.MemoWarning")
def test_gradients_of_gradients():
    def penalty(model: nn.Module) -> None:
        x = BATCHES[0].clone().requires_grad_()
        (grad,) = torch.autograd.grad(model(x), x, create_graph=True)
        grad.norm().backward()

    assert_same_grads(*with_and_without(Mlp, penalty), tolerance=1e-5)


class AsksForAGradient(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.gelu(self.up(x))
        (slope,) = torch.autograd.grad(y.sum(), y, retain_graph=True)
        (slope,) = torch.autograd.grad(y.sum(), self.up.weight, retain_graph=True)
        return x + self.down(y) + slope.mean()


@pytest.mark.filterwarnings("ignore::ds_memo.MemoWarning")
@pytest.mark.parametrize("resident", [0, 2])
def test_a_backward_inside_a_layer_is_refused_clearly(resident):
    model = Stack(2)
    model.blocks = nn.ModuleList(AsksForAGradient(16) for _ in range(2))
    with (
        attached(model, ThreadStreams(), SWAP | {"resident_layers": resident}),
        pytest.raises(MemoError, match=r"blocks\.0 runs a backward of its own"),
    ):
        model(BATCHES[0])


def test_too_little_host_memory_in_the_middle_leaves_the_rest_usable():
    model, stock = Stack(4), Stack(4)
    x = torch.randn(2, 32, 16)
    with attached(model, ThreadStreams(), SWAP) as memo:
        model(x).backward()
        memo.slab.budget.nbytes = int(memo.slab.peak_used * 1.6)
        model.zero_grad()
        first = model(x)
        with pytest.raises(MemoError, match="run fewer forwards before a backward"):
            model(x)
        first.backward()
        del first
        for _ in range(2):
            model(x).backward()
        assert memo.slab.used <= memo.slab.budget.nbytes
    for _ in range(3):
        stock(x).backward()
    assert_same_grads(gradients(model), gradients(stock))


@pytest.mark.parametrize("kinds", [(torch.bfloat16, torch.float16), (torch.bfloat16, None)])
def test_autocast_to_another_type_each_step(kinds):
    def steps(model: nn.Module) -> None:
        for kind in kinds * 2:
            with torch.autocast("cpu", dtype=kind, enabled=kind is not None):
                loss = model(BATCHES[0])
            loss.backward()

    assert_same_grads(*with_and_without(lambda: Stack(4), steps, SWAP | {"resident_layers": 1}))


class OtherHeads(Block):
    """Attention has another shape each time, between products that do not change."""

    heads = 1

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        return x + self.o(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


@pytest.mark.parametrize("resident", [0, 1, 2])
def test_attention_of_another_shape_leaves_the_recipe(resident):
    def make() -> nn.Module:
        model = Stack(2)
        torch.manual_seed(5)
        model.blocks = nn.ModuleList(OtherHeads(16) for _ in range(2))
        return model

    def steps(model: nn.Module) -> None:
        for heads in (1, 2, 1, 4):
            for block in model.blocks:
                block.heads = heads
            model(BATCHES[0]).backward()

    assert_same_grads(*with_and_without(make, steps, SWAP | {"resident_layers": resident}))


def test_detaching_while_a_layer_runs_is_refused_and_changes_nothing():
    model, stock = Stack(3), Stack(3)
    with attached(model, ThreadStreams(), SWAP) as memo:
        hook = model.blocks[1].up.register_forward_hook(lambda *_: memo.detach())
        with pytest.raises(MemoError, match="while a layer runs"):
            model(BATCHES[0])
        hook.remove()
        model(BATCHES[0]).backward()
        assert MemoHandle(memo).report()["frames"]
    stock(BATCHES[0]).backward()
    assert_same_grads(gradients(model), gradients(stock))
