"""Parameters of tiled layers: frozen, shared, of other kinds, with adapters; precision."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.models import HIDDEN, Block, Outcome, gradients
from tests.tiles.rig import BATCH, assert_was_tiled, compare, drive, lora, small, toy


def without_trained_embeddings(model: nn.Module, number: int) -> Outcome:
    """Take a step in which the first layer's input needs no gradient."""
    loss = model(inputs_embeds=BATCH.embeds, labels=BATCH.labels).loss
    loss.backward()
    return Outcome(loss.detach(), gradients(model))


@pytest.mark.parametrize("settings", [{"alpha": 0.0}, {"alpha": 1.0}, {"alpha": 1.0, "resident_layers": 3}], ids=str)
def test_layers_to_which_no_backward_comes_keep_nothing(settings: dict[str, Any]) -> None:
    """The first two are frozen, and so is what is below them."""
    model = toy(layers=3)
    trained = compare(model, without_trained_embeddings, **settings)
    model.blocks[:2].requires_grad_(False)
    frozen = compare(model, without_trained_embeddings, **settings)
    assert_was_tiled(frozen, layers=3)
    assert frozen["stored_bytes_per_layer"] == [0, 0, trained["stored_bytes_per_layer"][2]]
    assert frozen["bytes_to_host"] == (0 if "resident_layers" in settings else trained["bytes_to_host"] // 3)


def test_one_weight_under_two_names_in_a_layer() -> None:
    class Tied(Block):
        def __init__(self) -> None:
            super().__init__()
            self.down.weight = nn.Parameter(self.up.weight.detach().T.clone())
            self.up2 = nn.Linear(HIDDEN, 2 * HIDDEN)
            self.up2.weight = self.up.weight

        def feed(self, x: torch.Tensor) -> torch.Tensor:
            return self.down(F.gelu(self.up(self.norm2(x))) * self.up2(x) + F.linear(x, self.up.weight))

    assert_was_tiled(compare(toy(Tied), drive))


def test_weights_of_other_kinds() -> None:
    """A scale, an einsum, a convolution of width one and an expanded bias: no products with a transposed weight."""

    class Kinds(Block):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.randn(HIDDEN))
            self.mix = nn.Parameter(torch.randn(4, HIDDEN // 4, HIDDEN // 4) / 4)
            self.point = nn.Conv1d(HIDDEN, HIDDEN, 1)
            self.left = nn.Parameter(torch.randn(HIDDEN, HIDDEN) / 8)

        def feed(self, x: torch.Tensor) -> torch.Tensor:
            x = x * self.scale
            x = torch.einsum("bshi,hij->bshj", x.unflatten(-1, (4, -1)), self.mix).flatten(-2)
            x = x @ self.left + (self.left @ x.flatten(0, 1).T).T.view_as(x)
            return self.point(x.transpose(1, 2)).transpose(1, 2)

    assert_was_tiled(compare(toy(Kinds), drive))


def test_a_product_with_a_factor() -> None:
    class Scales(Block):
        """Adds a bias and a scaled product in one op, as adapters do."""

        def feed(self, x: torch.Tensor) -> torch.Tensor:
            flat = x.flatten(0, 1)
            return super().feed(torch.addmm(flat, flat, self.o.weight, alpha=0.5).view_as(x))

    assert_was_tiled(compare(toy(Scales), drive))


class Merges(Block):
    """Its weights are sums and products of others, as adapters merge them."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.randn(4, HIDDEN) / 8), nn.Parameter(torch.randn(HIDDEN, 4) / 8)
        self.maps = nn.Parameter(torch.randn(2, HIDDEN, HIDDEN) / 8)

    def attend(self, x: torch.Tensor) -> torch.Tensor:
        merged = (self.b @ (self.a @ torch.eye(HIDDEN))).add_(self.maps[0])
        return super().attend(F.linear(x, merged))

    def feed(self, x: torch.Tensor) -> torch.Tensor:
        return super().feed(F.linear(x, torch.bmm(self.maps, self.maps)[1] / (self.b @ self.a).norm(dim=1)))


def dora() -> nn.Module:
    peft = pytest.importorskip("peft")
    targets = ["q_proj", "v_proj", "up_proj"]
    return peft.get_peft_model(
        small("llama"), peft.LoraConfig(r=4, target_modules=targets, init_lora_weights=False, use_dora=True)
    )


@pytest.mark.parametrize("make", [lambda: toy(Merges), dora], ids=["merges", "dora"])
def test_products_of_weights_are_not_stored_for_each_tile(make: Callable[[], nn.Module]) -> None:
    model = make()
    reports = [compare(model, drive, alpha=1.0, tile=tile) for tile in (5, 12, 64, 0)]
    for report in reports[:2]:
        assert_was_tiled(report)
    *in_tiles, one_tile, whole = (report["stored_bytes_per_layer"] for report in reports)
    assert in_tiles[0] == in_tiles[1]
    assert in_tiles[0][0] < whole[0] == one_tile[0]  # a whole layer stores them once


def test_adapters_on_frozen_weights() -> None:
    assert_was_tiled(compare(lora(small("llama"), 0.0, ["q_proj", "up_proj", "down_proj"]), drive, alpha=0.5))
