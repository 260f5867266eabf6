"""Tiles of layers that write to what they hold, draw numbers that tiles cannot share, or are changed before their backward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import ds_memo
from ds_memo.tiles.check import probe
from tests.models import HIDDEN, Batch, Block, assert_same_grads, gradients, step
from tests.remat.test_layer_state import (
    Counts,
    CountsFromNone,
    CountsInPython,
    DrawsUnseen,
    Given,
    Normed,
    Numpy,
    Own,
    Python,
    ReadsAndWrites,
    compare,
)
from tests.tiles.rig import BATCH, attached, config, layers_of, lora, reasons, tiled_layers, toy

pytestmark = pytest.mark.filterwarnings("ignore::ds_memo.errors.MemoWarning")


class DropsSequences(Block):
    """Stochastic depth: a sequence keeps its branch, or loses it."""

    def feed(self, x: torch.Tensor) -> torch.Tensor:
        return super().feed(x) * (torch.rand(x.shape[0], 1, 1) > 0.5 * self.training)


class DropsFeatures(Block):
    def feed(self, x: torch.Tensor) -> torch.Tensor:
        return super().feed(x) * torch.empty(HIDDEN).bernoulli_(0.5)


class CountsWithDropout(Normed):
    """Dropout is off in the comparison of tiles with the whole, and so is what the batch norm writes."""

    def __init__(self) -> None:
        super().__init__()
        self.dropout = nn.Dropout(0.1)


REFUSED: dict[type, str] = {
    Counts: "it writes to its tokens, which tiles would do each",
    CountsFromNone: "it writes to its load,",
    Normed: "it writes to its norm2.running_mean,",
    CountsWithDropout: "it writes to its norm2.running_mean,",
    ReadsAndWrites: "it writes to its mean,",
    CountsInPython: "it writes to its calls,",
    Python: "it draws random numbers from Python's random, which tiles would draw anew",
    Numpy: "it draws random numbers from NumPy's random,",
    Own: "it draws random numbers from a generator of its own,",
    Given: "it draws random numbers from a generator of its own,",
    DrawsUnseen: "two runs of it from the same random states differ",
    DropsSequences: "it draws random numbers of the shape (1, 1, 1) whatever its tokens are (stochastic depth)",
    DropsFeatures: f"it draws random numbers of the shape ({HIDDEN},) whatever its tokens are",
}


@pytest.mark.parametrize("block", REFUSED)
def test_refused_by_name(block: type) -> None:
    with attached(model := toy(block), quiet=True) as handle:
        step(model, BATCH)
        (why,) = reasons(handle)
        assert why.startswith(REFUSED[block]) and not tiled_layers(handle)


@pytest.mark.parametrize("block", [Counts, CountsFromNone, Normed, CountsInPython, Own, Given])
def test_the_probe_leaves_no_trace(block: type) -> None:
    compare(block, config(tile=8), quiet=True)


@pytest.mark.parametrize("block, check", [(Counts, "refuse_writes"), (DropsSequences, "refuse_draws_of_sequences")])
def test_nothing_else_refuses_them(block: type, check: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, check, lambda *_: None)
    with attached(model := toy(block), quiet=True) as handle:
        step(model, BATCH)
        assert tiled_layers(handle) == [0, 1]


def test_other_devices_are_not_seeded(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(seed: int) -> None:
        raise AssertionError("all devices were seeded")

    with attached(model := toy(lambda: Block(dropout=0.2))) as handle:
        torch.manual_seed(7)
        loss = model(inputs_embeds=BATCH.embeds, labels=BATCH.labels).loss
        monkeypatch.setattr(torch.cuda, "manual_seed_all", refuse)
        loss = loss + model(inputs_embeds=BATCH.embeds, labels=BATCH.labels).loss
        loss.backward()
        assert tiled_layers(handle)


# ---- changes before the backward


def train_all(model: nn.Module) -> None:
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("lora_" in name)


def adapters(model: nn.Module, number: int) -> dict[str, Any]:
    """Switch adapters between two forwards of one backward."""
    loss: Any = 0.0
    for name in ("default", "other"):
        model.base_model.set_adapter(name)
        train_all(model)
        batch = Batch.random(2, 23, seed=number)
        loss = loss + model(inputs_embeds=batch.embeds, labels=batch.labels).loss
    loss.backward()
    return gradients(model)


def disabled(model: nn.Module, number: int) -> dict[str, Any]:
    """Disable the adapters around the backward."""
    train_all(model)
    batch = Batch.random(2, 23, seed=number)
    loss = model(inputs_embeds=batch.embeds, labels=batch.labels).loss
    with model.disable_adapter():
        train_all(model)
        loss.backward()
        assert all(layer.disable_adapters for layer in model.modules() if hasattr(layer, "merged_adapters"))
    return gradients(model)


def two_adapters() -> nn.Module:
    model: Any = lora(toy(), 0.0, ["qkv", "up"])
    model.add_adapter("other", model.peft_config["default"])
    torch.manual_seed(2)
    for name, parameter in model.named_parameters():
        if ".other." in name:
            nn.init.normal_(parameter, std=0.1)
    return model.train()


@pytest.mark.parametrize("tile", [0, 8])
@pytest.mark.parametrize("drive", [adapters, disabled])
def test_adapters_that_are_switched(drive: Callable[[nn.Module, int], dict], tile: int) -> None:
    stock, model = two_adapters(), two_adapters()
    with attached(model, quiet=True, tile=tile, layers=None) as handle:
        for number in range(2):
            assert_same_grads(drive(model, number), drive(stock, number))
        assert not tile or tiled_layers(handle) == [0, 1]


@pytest.mark.parametrize("tile", [0, 8])
def test_adapters_that_are_merged_are_refused(tile: int) -> None:
    with attached(model := two_adapters(), tile=tile):
        loss = model(inputs_embeds=BATCH.embeds, labels=BATCH.labels).loss
        model.merge_adapter()
        with pytest.raises(ds_memo.MemoError, match=r"merged into its (qkv|up) were \[\] in the forward and are \['default'\]"):
            loss.backward()


def test_hooks_and_attributes_of_adapters_are_as_before() -> None:
    """Adapters with invocation tokens hang hooks into layers, which refuse a second forward before the backward."""
    peft, transformers = pytest.importorskip("peft"), pytest.importorskip("transformers")
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 96}

    def build() -> nn.Module:
        torch.manual_seed(1)
        wanted = {"r": 4, "target_modules": ["q_proj", "v_proj"], "init_lora_weights": False, "alora_invocation_tokens": [5, 6]}
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, num_key_value_heads=2))
        return peft.get_peft_model(model, peft.LoraConfig(task_type="CAUSAL_LM", **wanted)).train()

    ids = torch.randint(10, 90, (2, 24), generator=torch.Generator().manual_seed(3))
    ids[:, 8:10] = torch.tensor([5, 6])

    def drive(model: nn.Module) -> dict[str, Any]:
        model(input_ids=ids, labels=ids).loss.backward()
        return gradients(model)

    stock, model = build(), build()
    handle = ds_memo.attach(model, {"plan": {"enabled": False}})  # solved: probed and profiled
    for _ in range(2):
        assert_same_grads(drive(model), drive(stock))
    assert handle.report()["profile"] is not None
    handle.detach()
    assert not any(part._forward_pre_hooks or part._backward_hooks for part in layers_of(model).modules())
