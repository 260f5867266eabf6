"""Layers that get one tensor several times and test its identity: each replay must pass one tensor too."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from tests.models import HEADS, HIDDEN, LAYERS, Toy, compare_with_stock, every_config
from tests.remat.situations import BATCH, drive, toy

pytestmark = pytest.mark.filterwarnings("ignore::ds_memo.errors.MemoWarning")


class Attention(nn.MultiheadAttention):
    """PyTorch computes one product if queries, keys and values are one tensor, else two or three."""

    def __init__(self) -> None:
        super().__init__(HIDDEN, HEADS, batch_first=True)


WAYS: dict[str, Callable[[nn.Module, torch.Tensor], Any]] = {
    "positional": lambda layer, x: layer(x, x, x, None, False),
    "by keyword": lambda layer, x: layer(x, key=x, value=x, need_weights=False),
    "two of three": lambda layer, x: layer(x.sin(), x, value=x, need_weights=False),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("needs_gradient", (True, False))
@every_config
def test_attention_of_one_tensor(config: dict, needs_gradient: bool, way: str) -> None:
    class Attends(Attention):
        def __call__(self, x: torch.Tensor) -> torch.Tensor:
            x = x if needs_gradient else x.detach()
            return x + WAYS[way](super().__call__, x)[0]

    compare_with_stock(toy(Attends), drive, config)


def test_it_is_stored_once() -> None:
    class Gates(nn.Linear):
        def __init__(self) -> None:
            super().__init__(HIDDEN, HIDDEN)

        def forward(self, x: torch.Tensor, *others: torch.Tensor) -> torch.Tensor:
            return super().forward(x).sigmoid() * sum(others, x)

    class Twice(Toy):
        def forward(self, inputs_embeds: torch.Tensor, labels: torch.Tensor) -> Any:
            for block in self.blocks:
                block.register_forward_pre_hook(lambda block, args: (args[0], args[0], args[0]))
            return super().forward(inputs_embeds, labels)

    once, twice = (
        compare_with_stock(model(Gates), drive, {"alpha": 0.0, "resident_layers": 0}, steps=1) for model in (Toy, Twice)
    )
    assert once["bytes_to_host"] == twice["bytes_to_host"] == LAYERS * BATCH.embeds.nbytes
