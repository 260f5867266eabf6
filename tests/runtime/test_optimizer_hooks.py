"""Steps of torch optimizers are told to the watcher of a model of theirs, and no object is kept alive."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable

import pytest
import torch
from torch import nn

from ds_memo.runtime.optimizer_hooks import watch_optimizers


class Listener:
    def __init__(self) -> None:
        self.heard: list[str] = []

    def begins(self) -> None:
        self.heard.append("begins")

    def ended(self) -> None:
        self.heard.append("ended")


def watch(model: nn.Module, listener: Listener) -> list[Callable[[], None]]:
    return watch_optimizers(weakref.ref(model), listener, Listener.begins, Listener.ended)


def optimizer(model: nn.Module) -> torch.optim.Optimizer:
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    return torch.optim.SGD(model.parameters(), lr=0.1)


@pytest.mark.parametrize("made", ["before", "after"])
def test_only_optimizers_of_the_model(made: str) -> None:
    model, other, listener = nn.Linear(2, 2), nn.Linear(2, 2), Listener()
    early = optimizer(model) if made == "before" else None
    ends = watch(model, listener)
    mine, others = early or optimizer(model), optimizer(other)
    others.step()
    assert listener.heard == []
    mine.step()
    mine.step()
    assert listener.heard == ["begins", "ended"] * 2
    for end in ends:
        end()
    mine.step()
    assert len(listener.heard) == 4


def test_parameters_that_come_later() -> None:
    """A head first, then what is below it."""
    model, head, listener = nn.Linear(2, 2), nn.Linear(2, 2), Listener()
    watch(model, listener)
    steps = optimizer(head)
    steps.step()
    assert listener.heard == []
    steps.add_param_group({"params": model.parameters()})
    steps.step()
    assert listener.heard == ["begins", "ended"]


def test_who_has_gone_hears_nothing_and_is_not_kept() -> None:
    model, listener = nn.Linear(2, 2), Listener()
    steps, heard = optimizer(model), listener.heard
    watch(model, listener)
    gone = weakref.ref(listener)
    del listener
    gc.collect()
    steps.step()
    assert gone() is None and heard == []
