"""Forwards that find other tensors in the places of a layer's parameters than its backward does."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn

from ds_memo.remat import layer_state
from tests.models import Different, Outcome, compare_with_stock, gradients
from tests.remat.situations import BATCH, WAYS, toy
from tests.tiles.rig import assert_step, config

SETTINGS = {"whole": WAYS["mixed"], "recomputed": WAYS["recomputed"], "tiles": config(tile=16, alpha=0.5)}


class Merges(nn.Module):
    """A frozen base and trained coefficients of its merge with a delta (task arithmetic), or the weights of another model."""

    def __init__(self) -> None:
        super().__init__()
        self.base = toy(layers=2)
        self.share = nn.Parameter(torch.tensor(0.5))
        self.others = nn.ParameterList(nn.Parameter(p.detach() + 0.1 * torch.randn_like(p)) for p in self.base.parameters())

    def merged(self, which: str) -> dict[str, torch.Tensor]:
        pairs = zip(self.base.named_parameters(), self.others, strict=True)
        return {name: p.detach() + self.share * (o.detach() - p.detach()) for (name, p), o in pairs if which in name}

    def another(self, which: str) -> dict[str, torch.Tensor]:
        names = (name for name, _ in self.base.named_parameters())
        return {name: other for name, other in zip(names, self.others, strict=True) if which in name}


def in_functional_call(model: nn.Module, given: dict[str, torch.Tensor], arguments: tuple) -> Any:
    return torch.func.functional_call(model, given, arguments)


@contextmanager
def _in_places(model: nn.Module, given: dict[str, torch.Tensor]) -> Iterator[None]:
    places = [(model.get_submodule(name.rpartition(".")[0]), name.rpartition(".")[2], tensor) for name, tensor in given.items()]
    own = [module._parameters.pop(name) for module, name, _ in places]
    for module, name, tensor in places:
        setattr(module, name, tensor)
    yield
    for (module, name, _), parameter in zip(places, own, strict=True):
        vars(module).pop(name, None)
        module._parameters[name] = parameter


def as_attributes(model: nn.Module, given: dict[str, torch.Tensor], arguments: tuple) -> Any:
    """Set plain tensors where parameters were, for the forward alone."""
    with _in_places(model, given):
        return model(*arguments)


Call = Callable[[nn.Module, dict[str, torch.Tensor], tuple], Any]


def check(call: Call, how: str, which: str, settings: dict[str, Any], first: int = 0) -> None:
    """Compare steps, of which the second, or all before `first`, have the model's own parameters."""

    def drive(model: Any, number: int) -> Outcome:
        x = BATCH.embeds.double().requires_grad_()
        given = {} if number == 1 or number < first else getattr(model, how)(which)
        loss = call(model.base, given, (x, BATCH.labels)).loss
        loss.backward()
        return Outcome(loss.detach(), {**gradients(model), "x": x.grad})

    torch.manual_seed(0)
    compare_with_stock(Merges().double(), drive, settings, 3, same=assert_step)


@pytest.mark.parametrize(
    "which, how, way",
    [
        *(("", "merged", "whole"), ("", "another", "recomputed"), ("", "merged", "tiles")),
        *(("norm1", "another", "whole"), ("norm1", "merged", "recomputed"), ("norm1", "another", "tiles")),
        *(("qkv.weight", "merged", "whole"), ("qkv.weight", "another", "recomputed"), ("qkv.weight", "merged", "tiles")),
    ],
)
def test_functional_call(which: str, how: str, way: str) -> None:
    check(in_functional_call, how, which, SETTINGS[way])


@pytest.mark.filterwarnings("ignore:Block runs whole, not in tiles")
@pytest.mark.parametrize("way", SETTINGS)
@pytest.mark.parametrize("how, first", [("merged", 0), ("another", 0), ("merged", 2)])
def test_tensors_in_parameters_places(how: str, first: int, way: str) -> None:
    check(as_attributes, how, "", SETTINGS[way], first)


@pytest.mark.filterwarnings("ignore:layer base.blocks.1. its replay computes other values")
@pytest.mark.parametrize("way", ["recomputed", "tiles"])
def test_a_replay_that_finds_the_modules_own(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layer_state, "_PLAIN_TENSORS", set())
    with pytest.raises(Different):
        check(in_functional_call, "merged", "norm1", SETTINGS[way])
