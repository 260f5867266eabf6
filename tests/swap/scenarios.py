"""Short training stories, each of which needs some wait of the engine. A story returns its results."""

from __future__ import annotations

import gc
from collections.abc import Callable
from contextlib import suppress
from typing import Any
from unittest import mock

import torch
from torch.nn import functional as F

from ds_memo.runtime.session import Session
from ds_memo.tiles.layer import TiledCall
from tests.models import Block, Stack
from tests.swap.rig import gradients

Story = Callable[[Session, torch.nn.Module, list[torch.Tensor]], dict[str, torch.Tensor]]
LENGTH, HIDDEN = 24, 16
TILES = 4
"""In a batch; each has 16 tokens at most."""


def batches() -> list[torch.Tensor]:
    made = torch.Generator().manual_seed(0)
    return [torch.randn(2, LENGTH, HIDDEN, generator=made) for _ in range(6)]


def train(memo: Session, model: torch.nn.Module, x: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    for batch in x[:3]:
        model(batch).backward()
    return gradients(model)


def raise_in_a_layer(memo: Session, model: torch.nn.Module, x: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    """A layer raises when its first copies are under way; training goes on."""
    model(x[0]).backward()

    def fail(*_: Any) -> None:
        raise ArithmeticError

    hook = model.blocks[-1].down.register_forward_pre_hook(fail)
    with suppress(ArithmeticError):
        model(x[1])
    hook.remove()
    model(x[2]).backward()
    return gradients(model)


def drop_on_the_way_out(memo: Session, model: torch.nn.Module, x: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    """A graph dies right after its forward; the next one gets its host blocks."""
    model(x[0]).backward()
    model(x[1])
    model(x[2]).backward()
    return gradients(model)


def drop_on_the_way_back(memo: Session, model: torch.nn.Module, x: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    """A graph dies with a reload issued ahead; the next one gets its host blocks."""
    model(x[0]).backward()
    loss = model(x[1])
    torch.autograd.grad(loss, model.blocks[-1].up.weight)
    del loss
    gc.collect()
    model(x[2]).backward()
    return gradients(model)


def change_in_place(memo: Session, model: torch.nn.Module, x: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    """A layer, and then its caller, write to kept tensors whose copies may be under way."""
    for batch in x[:3]:
        total = torch.zeros(())
        for block in model.blocks:
            batch, extra = block(batch)
            batch.add_(1.0)
            total = total + extra
        (total + batch.square().mean()).backward()
    return gradients(model)


def detach_with_copies_under_way(memo: Session, model: torch.nn.Module, x: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    model(x[0]).backward()
    loss = model(x[1])
    memo.detach()
    del loss
    return gradients(model)


def detach_with_a_reload_under_way(memo: Session, model: torch.nn.Module, x: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    model(x[0]).backward()
    loss = model(x[1])
    torch.autograd.grad(loss, model.blocks[-1].up.weight)
    memo.detach()
    del loss
    return gradients(model)


def abandon_reloads(memo: Session, model: torch.nn.Module, x: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    """Backward goes one step into each of several graphs: the frames reloaded ahead are not the ones wanted next."""
    losses = [model(batch) for batch in x[:3]]
    for loss in losses:
        torch.autograd.grad(loss, model.blocks[-1].up.weight, retain_graph=True)
    for loss in losses:
        loss.backward()
    return gradients(model)


def raise_while_inputs_are_computed(memo: Session, model: torch.nn.Module, x: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    """A backward of the group's last layer raises behind the first tile of an input that it has stored: of the group's second
    layer, then of its third. A backward of all runs then. Another graph dies instead."""
    take_hidden, outputs = TiledCall.take_hidden, []
    hook = model.blocks[3].register_forward_hook(lambda module, args, output: outputs.append(output))

    def fail(*args: Any) -> None:
        nonlocal left
        take_hidden(*args)
        left -= 1
        if left == 0:
            raise ArithmeticError

    for inputs, again in ((1, True), (TILES + 1, True), (1, False)):
        loss, left = model(x[0]), inputs
        with mock.patch.object(TiledCall, "take_hidden", fail), suppress(ArithmeticError):
            torch.autograd.grad(outputs.pop().sum(), model.blocks[3].up.weight, retain_graph=True)
        if again:
            loss.backward()
        del loss
        model(x[1]).backward()
        outputs.clear()
    hook.remove()
    return gradients(model)


class WritesInPlace(Block):
    """Autograd saves neither `wide` nor `out`, so changing them is allowed. But what it saves depends on them."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        wide = self.up(x)
        doubled = wide * 2
        other = self.o(x)
        wide.add_(1.0)
        out = self.down(F.gelu(doubled) + wide) + 0 * other.sigmoid()
        out = self.o(out)
        return out, F.gelu(out * 2).mean()


def stack(story: Story) -> torch.nn.Module:
    model = Stack(5, HIDDEN)
    if story is change_in_place:
        torch.manual_seed(4)
        model.blocks = torch.nn.ModuleList(WritesInPlace(HIDDEN) for _ in range(4))
    return model


RESIDENTS = {abandon_reloads: 2}
"""Resident layers of a story; the others have none."""

STORIES: list[Story] = [
    train,
    raise_in_a_layer,
    drop_on_the_way_out,
    drop_on_the_way_back,
    change_in_place,
    detach_with_copies_under_way,
    detach_with_a_reload_under_way,
    abandon_reloads,
    raise_while_inputs_are_computed,
]
