"""Arguments of layers: a replay gets one tensor where the forward did, and lists and dicts as they were before the forward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from tests.models import HEADS, HIDDEN, LAYERS, Block, Outcome, Toy, compare_with_stock, every_config, gradients
from tests.remat.situations import BATCH, drive, toy

pytestmark = pytest.mark.filterwarnings("ignore::ds_memo.errors.MemoWarning")

# ---- lists and dicts


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


# ---- one tensor several times


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
