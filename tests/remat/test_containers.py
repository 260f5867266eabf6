"""Layers that write into the lists and dicts they are given: each replay gets the contents from before the forward."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from tests.models import LAYERS, Block, Outcome, Toy, compare_with_stock, every_config, gradients
from tests.remat.situations import BATCH, drive

pytestmark = pytest.mark.filterwarnings("ignore::ds_memo.errors.MemoWarning")


class Carries(Block):
    """A layer whose hidden states come and go in a dict."""

    def forward(self, states: dict[str, Any]) -> dict[str, Any]:
        states["inner"]["hidden"] = super().forward(states["inner"]["hidden"])
        return states


class InDicts(Toy):
    keyword = False

    def run_blocks(self, x: torch.Tensor) -> torch.Tensor:
        states = {"inner": {"hidden": x}}
        for block in self.blocks:
            states = block(states=states) if self.keyword else block(states)
        return states["inner"]["hidden"]


class Skips(Block):
    """A U-Net's layer: the first half puts tensors into a list, and the second half takes them out."""

    def forward(self, x: torch.Tensor, skips: list[torch.Tensor], down: bool) -> torch.Tensor:
        x = super().forward(x if down else x + skips.pop())
        if down:
            skips.append(x)
        return x


class UNet(Toy):
    keyword = False

    def run_blocks(self, x: torch.Tensor) -> torch.Tensor:
        skips = []
        for number, block in enumerate(self.blocks):
            down = number < LAYERS // 2
            x = block(x, skips=skips, down=down) if self.keyword else block(x, skips, down)
        assert not skips
        return x


@every_config
@pytest.mark.parametrize("keyword", [False, True])
@pytest.mark.parametrize("model, block", [(InDicts, Carries), (UNet, Skips)], ids=["dict", "list"])
def test_containers_that_layers_write_to(model: type[Toy], block: type[Block], keyword: bool, config: dict) -> None:
    torch.manual_seed(0)
    net = model(block)
    net.keyword = keyword
    compare_with_stock(net, drive, config)


@pytest.mark.parametrize("model, block", [(InDicts, Carries), (UNet, Skips)], ids=["dict", "list"])
def test_a_second_backward(model: type[Toy], block: type[Block]) -> None:
    """The first replay wrote into copies of its own."""

    def twice(net: nn.Module, number: int) -> Outcome:
        inputs = BATCH.embeds.clone().requires_grad_()
        loss = net(inputs, BATCH.labels).loss
        loss.backward(retain_graph=True)
        loss.backward()
        return Outcome(loss.detach(), {**gradients(net), "the input": inputs.grad})

    torch.manual_seed(0)
    compare_with_stock(model(block), twice, {"alpha": 0.5, "resident_layers": 1})
