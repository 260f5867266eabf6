"""Layers that read a tensor that needs a gradient and is neither their argument nor a parameter of theirs.

Such a gradient would end at a tile. A layer that holds one runs whole, from the first call on that reads it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import ds_memo
from ds_memo.autotune.policy import PlacementPolicy
from ds_memo.placement import Placement, PlacementKind, Tiles
from ds_memo.remat import follower, layer_state
from ds_memo.remat.layer_call import CannotTile
from ds_memo.tiles import attention, layer
from ds_memo.tiles.attention_call import UNDER_A_CHECKPOINT
from ds_memo.tiles.check import probe
from ds_memo.tiles.graph import refuse_other_gradients
from tests.models import CONFIGS, HIDDEN, Block, Different, Outcome, Toy, compare_with_stock, gradients, step
from tests.tiles.rig import BATCH, LAYERS, assert_was_tiled, attached, compare, small, tiled_layers

WHY = "a tensor that is neither its argument nor its parameter needs a gradient"


@dataclasses.dataclass
class Box:
    held: torch.Tensor | None


LOOSE: list[Any] = [None]
Get, Set = Callable[[Any], Any], Callable[[Any, Any], Any]
HOLDERS: dict[str, tuple[Get, Set]] = {
    "attribute": (lambda block: block.held, lambda block, held: setattr(block, "held", held)),
    "attribute of a part": (lambda block: block.up.held, lambda block, held: setattr(block.up, "held", held)),
    "buffer": (lambda block: block._buffers["held"], lambda block, held: block._buffers.update(held=held)),
    "list": (lambda block: block.held[0], lambda block, held: setattr(block, "held", [held])),
    "list in a dict": (lambda block: block.held["a"][0], lambda block, held: setattr(block, "held", {"a": [held]})),
    "dataclass": (lambda block: block.held.held, lambda block, held: setattr(block, "held", Box(held))),
    "global": (lambda block: LOOSE[0], lambda block, held: LOOSE.__setitem__(0, held)),
}


class Reads(Block):
    """Multiplies its tokens by what it holds, behind attention."""

    how = "attribute"

    def held_now(self, x: torch.Tensor) -> torch.Tensor:
        held = HOLDERS[self.how][0](self)
        return x if held is None else x * (1 + held)

    def feed(self, x: torch.Tensor) -> torch.Tensor:
        return super().feed(self.held_now(x))


class ReadsBefore(Reads):
    """Multiplies them before attention."""

    feed = Block.feed

    def attend(self, x: torch.Tensor) -> torch.Tensor:
        return super().attend(self.held_now(x))


class ReadsWithoutAttention(Reads):
    """It calls no attention: its tiles are a chain."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.feed(x)


class Steers(Toy):
    """Gives its blocks a tensor from a vector that is trained, in some steps."""

    def __init__(self, block: Any, how: str) -> None:
        torch.manual_seed(0)
        super().__init__(block, layers=LAYERS)
        self.vector, self.how = nn.Parameter(torch.full((HIDDEN,), 0.1)), how
        for each in self.blocks:
            each.how = how
        self.give(False)

    def give(self, gives: bool) -> None:
        for block in self.blocks:
            HOLDERS[self.how][1](block, self.vector * 2 if gives else None)


def steered(first: int) -> Callable[[nn.Module, int], Outcome]:
    """Return a drive that gives blocks the tensor from step `first` on."""

    def drive(model: Any, number: int) -> Outcome:
        model.give(number >= first)
        return step(model, BATCH)

    return drive


def check(how: str, first: int, block: Any = Reads, alpha: float = 0.5) -> None:
    report = compare(Steers(block, how), steered(first), steps=3, quiet=True, alpha=alpha)
    assert set(report["tiles"]["not_tiled"].values()) == {WHY} and len(report["tiles"]["not_tiled"]) == LAYERS
    assert len([text for text in report["warnings"] if WHY in text]) == 1


@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize("how", HOLDERS)
def test_a_tensor_that_a_layer_holds(how: str, first: int) -> None:
    check(how, first)


@pytest.mark.parametrize("alpha", [0.0, 0.5])
@pytest.mark.parametrize("block", [ReadsBefore, ReadsWithoutAttention])
def test_wherever_the_layer_reads_it(block: Any, alpha: float) -> None:
    check("list", 1, block, alpha)


@pytest.mark.parametrize("config", CONFIGS[:2])
def test_whole_layers(config: dict[str, Any]) -> None:
    for how in HOLDERS:
        compare_with_stock(Steers(Reads, how), steered(1), config)


def test_a_frozen_layer() -> None:
    """Nothing that it gets or has needs a gradient, until it holds such a tensor."""

    def drive(model: Any, number: int) -> Outcome:
        for block in model.blocks:
            block.requires_grad_(False)
        model.give(number > 0)
        loss = model(inputs_embeds=BATCH.embeds, labels=BATCH.labels).loss
        loss.backward()
        return Outcome(loss.detach(), gradients(model))

    report = compare(Steers(Reads, "attribute"), drive, steps=3, quiet=True)
    assert set(report["tiles"]["not_tiled"].values()) == {WHY}


class CountsBesides(Reads):
    """It writes to a buffer, so its replay gets copies of what it holds."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(1))

    def feed(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return super().feed(x) * (1 + self.calls)


@pytest.mark.parametrize("how", ["attribute", "list", "list in a dict"])
def test_a_whole_layer_that_writes_besides(how: str) -> None:
    compare_with_stock(Steers(CountsBesides, how), steered(0), CONFIGS[0])


# ---- attention functions


def warm(module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: Any, **_: Any) -> tuple[Any, None]:
    """Attend with a temperature that is no argument."""
    if module.warmth is not None:
        query = query * module.warmth
    return F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True).transpose(1, 2).contiguous(), None


def warmed(first: int) -> Callable[[nn.Module, int], Outcome]:
    def drive(model: Any, number: int) -> Outcome:
        for block in model.model.layers:
            block.self_attn.warmth = block.self_attn.temperature if number >= first else None
        return step(model, BATCH)

    return drive


def with_temperature() -> Any:
    from transformers import AttentionInterface

    AttentionInterface.register("warm", warm)
    model: Any = small("llama")
    model.config._attn_implementation = "warm"
    for block in model.model.layers:
        block.self_attn.register_parameter("temperature", nn.Parameter(torch.tensor(1.5)))
    return model


@pytest.mark.parametrize("first", [0, 1])
def test_a_parameter_that_an_attention_function_reads(first: int) -> None:
    report = compare(with_temperature(), warmed(first), steps=3, quiet=True)
    assert set(report["tiles"]["not_tiled"].values()) == {WHY}


def test_one_that_is_seen_in_a_backward_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention of a fully recomputed layer builds no graph in the forward, so only its backward can see what it reads."""
    placement = Placement(PlacementKind.FULL_RECOMPUTE, 0.0, tiles=Tiles(16, 1))
    monkeypatch.setattr(PlacementPolicy, "placement", lambda self, layer: placement)
    with attached(model := with_temperature()) as handle:
        warmed(1)(model, 0)
        with pytest.raises(ds_memo.MemoError, match=f"layer model.layers.1 ran in tiles, and its backward cannot: {WHY}"):
            warmed(1)(model, 1)
        assert tiled_layers(handle) == [0, 1]


def _reentrant(x: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    return checkpoint(torch.sin, x, use_reentrant=True)


GRAPHS: dict[str, tuple[Callable[[torch.Tensor, torch.Tensor], torch.Tensor], str]] = {
    "the leaf": (lambda x, other: x, ""),
    "the leaf's graph": (lambda x, other: torch.sin(x) + x, ""),
    "no graph": (lambda x, other: other.detach() * 2, ""),
    "another leaf": (lambda x, other: other, WHY),
    "the graph of both": (lambda x, other: torch.sin(x * torch.cos(other)), WHY),
    "a reentrant checkpoint": (_reentrant, UNDER_A_CHECKPOINT),
}


@pytest.mark.parametrize("way", [nullcontext, follower.in_python])
@pytest.mark.parametrize("name", GRAPHS)
def test_where_a_graph_leads_to(name: str, way: Callable[[], AbstractContextManager[None]]) -> None:
    x, other = (torch.ones(2, requires_grad=True) for _ in range(2))
    make, why = GRAPHS[name]
    with way(), pytest.raises(CannotTile, match=why) if why else nullcontext():
        refuse_other_gradients([torch.sin(x), make(x, other)], [x])


# ---- controls


def test_layers_that_hold_nothing_are_tiled() -> None:
    assert_was_tiled(compare(Steers(Reads, "list"), steered(9)))


@pytest.mark.parametrize("first, owner", [(0, probe), (1, layer)])
def test_nothing_else_refuses_them(first: int, owner: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in {probe, layer} if first == 0 else {owner}:
        monkeypatch.setattr(module, "refuse_other_gradients", lambda *_: None)
    with pytest.raises(Different, match="vector: none, stock has one"):
        check("list", first)


def test_nothing_else_refuses_what_attention_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "refuse_other_gradients", lambda *_: None)
    with pytest.raises(Different, match="temperature: none, stock has one"):
        test_a_parameter_that_an_attention_function_reads(0)


def test_a_copy_without_a_graph_hides_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layer_state, "_own", lambda tensor: tensor.detach().clone())
    monkeypatch.setattr(layer, "refuse_other_gradients", lambda *_: None)
    with pytest.raises(Different, match="vector: none, stock has one"):
        check("list", 0)
