"""Dropout in tiles."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.models import Batch, Block, step
from tests.tiles.rig import BATCH, attached, lora, tiled_layers, toy


def slope(model: nn.Module, batch: Batch, seed: int) -> tuple[float, float]:
    """Return the derivative of the loss along a direction: by the gradients, and by two more forwards with the same seed."""
    generator, step_size = torch.Generator().manual_seed(5), 1e-5
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    directions = [torch.randn(p.shape, generator=generator, dtype=p.dtype) for p in trained]

    def loss() -> torch.Tensor:
        torch.manual_seed(seed)
        logits = model(inputs_embeds=batch.embeds.double(), labels=batch.labels).logits
        return F.cross_entropy(logits.flatten(0, 1), batch.labels.flatten())  # models compute theirs in float32

    found = torch.autograd.grad(loss(), trained)
    by_gradients = sum(float((g * d).sum()) for g, d in zip(found, directions, strict=True))
    values = []
    for sign in (1, -1):
        with torch.no_grad():
            for parameter, direction in zip(trained, directions, strict=True):
                parameter.add_(direction, alpha=sign * step_size)
        values.append(loss().item())
        with torch.no_grad():
            for parameter, direction in zip(trained, directions, strict=True):
                parameter.add_(direction, alpha=-sign * step_size)
    return by_gradients, (values[0] - values[1]) / (2 * step_size)


DROPS = {
    "dropout": lambda: toy(lambda: Block(dropout=0.2)),
    "attention's dropout": lambda: toy(lambda: Block(attention_dropout=0.2)),
    "adapters'": lambda: lora(toy(), 0.2, ["qkv", "up", "down"]),
}


@pytest.mark.parametrize("drops, alpha", [*zip(DROPS, (0.0, 0.5, 1.0), strict=True)])
def test_a_backward_uses_the_forwards_dropout(drops: str, alpha: float) -> None:
    """Gradients are those of the very function that the forward computed: its slope says so, in float64."""
    with attached(tiled := DROPS[drops]().double(), quiet=True, alpha=alpha) as handle:
        by_gradients, by_values = slope(tiled, BATCH, seed=1)
        assert by_gradients == pytest.approx(by_values, rel=1e-5)
        whole = drops == "attention's dropout"  # on a CPU it makes a matrix of tokens × tokens
        assert tiled_layers(handle) == ([] if whole else [0, 1])


def test_dropout_differs_among_tiles_steps_and_layers_and_comes_again_with_a_seed() -> None:
    class Shows(Block):
        """Its output is the mask."""

        def feed(self, x: torch.Tensor) -> torch.Tensor:
            return self.dropout(torch.ones_like(x)) * 1e6

    tiled = toy(lambda: Shows(dropout=0.5))
    with attached(tiled) as handle:
        step(tiled, BATCH)

        def masks(seed: int) -> list[torch.Tensor]:
            torch.manual_seed(seed)
            outputs = [block(BATCH.embeds.clone().requires_grad_()) for block in tiled.blocks]
            return [half for output in outputs for half in (output > 1e3)[0, :22].chunk(2)]

        first, again, other = masks(1), masks(1), masks(2)
        assert tiled_layers(handle) == [0, 1]
    assert all(map(torch.equal, first, again))
    for a, b in itertools.combinations([*first, *other], 2):
        assert 0.4 < (a == b).float().mean() < 0.6
