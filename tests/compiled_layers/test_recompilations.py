"""How often code is compiled again: never for alpha, and for lengths as often as stock."""

from __future__ import annotations

import copy
import types
from collections.abc import Iterable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from transformers import Trainer, TrainingArguments

import ds_memo
from ds_memo.compiled_layers.layers import Compilers
from ds_memo.placement import Placement, PlacementKind
from tests.compiled_layers.rig import TOLERANCE, compiled, recompilations, run, worst
from tests.everyday import everyday
from tests.inside import inside, kinds_of_recipes
from tests.models import HIDDEN, VOCAB, Batch, Block, build

STEPS = ((0.1, 40), (0.3, 24), (0.7, 40), (0.9, 56), (1.0, 24), (0.0, 33))
"""Alpha and length of each step."""


class Trunk(nn.Module):
    """Layers between two norms, each of which is a function that dynamo compiles."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(2))
        self.weight = nn.Parameter(torch.ones(HIDDEN))

    def norm(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(x)
        for layer in self.layers:
            x = layer(x)
        return self.norm(x)


class Headed(nn.Module):
    """A trunk, a head and a loss, in frames of their own as in Transformers."""

    def __init__(self) -> None:
        super().__init__()
        self.model, self.head = Trunk(), nn.Linear(HIDDEN, VOCAB)

    def forward(self, inputs_embeds: torch.Tensor, labels: torch.Tensor) -> Any:
        logits = self.head(self.model(inputs_embeds))
        return types.SimpleNamespace(loss=F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten()))


def pair(name: str, how: str, **options: Any) -> tuple[nn.Module, nn.Module]:
    """Return a model and its copy for stock, both compiled."""
    torch.manual_seed(0)
    model = Headed() if name == "headed" else build(name, **({"layers": 2} if name == "plain" else {}))
    return tuple(compiled(each, how, **{"backend": "aot_eager", **options}) for each in (model, copy.deepcopy(model)))


def drive(model: nn.Module, steps: Iterable[tuple[float, int]] = STEPS, resident: bool = True) -> None:
    """Run steps with memo.

    Args:
        resident: keep the last layer on the device.
    """
    handle = ds_memo.attach(model, {"alpha": 0.5, "resident_layers": int(resident)})
    policy, last = inside(handle).policy, len(inside(handle).layers) - 1
    stored = set()
    for alpha, length in steps:
        swapped = Placement(PlacementKind.SWAPPED, alpha)
        policy.placement = lambda layer, p=swapped: Placement(PlacementKind.ON_DEVICE) if resident and layer.index == last else p
        run(model, Batch.random(2, length))
        stored.add(handle.report()["stored_bytes_per_layer"][0])
    assert len(stored) == len(steps)  # alpha and length had an effect
    assert set(kinds_of_recipes(handle)) == {"CompiledRecipe"}
    handle.detach()


def drive_stock(model: nn.Module) -> None:
    for _, length in STEPS:
        run(model, Batch.random(2, length))


CASES = [
    ("plain", "layer", 2),
    ("headed", "model", 1),
    ("headed", "around", 2),
    ("llama", "layer", 2),
    ("llama", "model", 1),
    ("gemma3", "layer", 1),
]


@pytest.mark.parametrize("name, how, placements", everyday(CASES, CASES[:1]))
def test_no_more_than_stock(name: str, how: str, placements: int) -> None:
    """Layers on the device have graphs of their own, beside those of swapped layers."""
    model, stock = pair(name, how)
    of_stock = recompilations(lambda: drive_stock(stock))
    of_memo = recompilations(lambda: drive(model, resident=placements == 2))
    assert of_stock and of_memo
    assert max(of_memo.values()) <= max(of_stock.values())
    assert of_memo.total() <= placements * of_stock.total()


@pytest.mark.slow
def test_pieces_of_a_fixed_length() -> None:
    """The control: dynamo by itself compiles each piece for the first length, and once more for others."""
    model, stock = pair("headed", "model")
    of_stock = recompilations(lambda: drive_stock(stock))
    with mock.patch.object(Compilers, "between", staticmethod(lambda callback: callback)):
        of_memo = recompilations(lambda: drive(model, resident=False))
    assert max(of_memo.values()) <= max(of_stock.values())
    assert of_memo.total() > 2 * of_stock.total()


def test_alpha_alone_recompiles_nothing() -> None:
    model = compiled(build("plain"), backend="aot_eager")
    assert not recompilations(lambda: drive(model, [(alpha, 40) for alpha in (0.0, 0.25, 0.5, 1.0)]))


@pytest.mark.slow
def test_gradients_while_alpha_and_length_change() -> None:
    torch._dynamo.reset()
    model = build("llama", num_hidden_layers=2)
    stock = compiled(copy.deepcopy(model), "model", backend="inductor")
    handle = ds_memo.attach(compiled(model, "model", backend="inductor"), {"alpha": 0.5, "resident_layers": 1})
    policy = inside(handle).policy
    for alpha, length in STEPS:
        policy.placement = lambda layer, alpha=alpha: Placement(PlacementKind.SWAPPED, alpha)
        batch = Batch.random(2, length)
        assert worst(run(model, batch), run(stock, batch)) <= TOLERANCE


# ---- the Hugging Face Trainer, without DeepSpeed


@pytest.mark.slow
def test_torch_compile(tmp_path: Path) -> None:
    ids = torch.randint(1, VOCAB, (8, 32), generator=torch.Generator().manual_seed(0))
    data = [{"input_ids": row[:length], "labels": row[:length]} for row, length in zip(ids, 4 * (32, 24), strict=True)]
    base = build("llama")
    losses, counts = [], []
    for memo in (False, True):
        model = copy.deepcopy(base)
        handle = ds_memo.attach(model, {"alpha": 0.5, "resident_layers": 0}) if memo else None
        args = TrainingArguments(
            str(tmp_path), use_cpu=True, torch_compile=True, torch_compile_backend="aot_eager", max_steps=8, logging_steps=1,
            per_device_train_batch_size=1, report_to=[], save_strategy="no", disable_tqdm=True,
        )  # fmt: skip
        trainer = Trainer(model, args, train_dataset=data)
        counts.append(recompilations(trainer.train))
        losses.append([entry["loss"] for entry in trainer.state.log_history if "loss" in entry])
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
    assert 0 < counts[1].total() <= counts[0].total()
    assert set(kinds_of_recipes(handle)) == {"CompiledRecipe"}
    report = handle.report()
    assert report["bytes_to_host"] > 0 and report["attention_recomputed"] == 0 and not report["warnings"]
