"""Layers that write into the lists and dicts they are given: each replay gets the contents from before the forward."""

from __future__ import annotations

import types
from typing import Any

import pytest
import torch
import torch.nn.functional as F
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

    def forward(self, inputs_embeds: torch.Tensor, labels: torch.Tensor) -> Any:
        states = {"inner": {"hidden": inputs_embeds}}
        for block in self.blocks:
            states = block(states=states) if self.keyword else block(states)
        logits = self.head(states["inner"]["hidden"])
        return types.SimpleNamespace(loss=F.cross_entropy(logits.flatten(0, 1), labels.flatten()))


class Skips(Block):
    """A U-Net's layer: the first half puts tensors into a list, and the second half takes them out."""

    def forward(self, x: torch.Tensor, skips: list[torch.Tensor], down: bool) -> torch.Tensor:
        x = super().forward(x if down else x + skips.pop())
        if down:
            skips.append(x)
        return x


class UNet(Toy):
    keyword = False

    def forward(self, inputs_embeds: torch.Tensor, labels: torch.Tensor) -> Any:
        x, skips = inputs_embeds, []
        for number, block in enumerate(self.blocks):
            down = number < LAYERS // 2
            x = block(x, skips=skips, down=down) if self.keyword else block(x, skips, down)
        assert not skips
        return types.SimpleNamespace(loss=F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten()))


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
