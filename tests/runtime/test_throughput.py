"""Medians between optimizer steps, MFU where it is known, and who is told of a step."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ds_memo
from ds_memo.runtime import throughput as speed
from ds_memo.runtime.optimizer_hooks import watch_optimizers
from ds_memo.runtime.throughput import Speed, model_flops_utilization
from tests.inside import inside
from tests.models import Batch, Toy

PLANNED = {"alpha": 0.5, "resident_layers": 1, "plan": {"enabled": True}}


def test_medians_are_of_steps_and_not_of_their_sum() -> None:
    speed, now, seen = Speed(), 0.0, 0
    for seconds, tokens in [(0.0, 10), (1.0, 100), (50.0, 100), (2.0, 400)]:  # one step was interrupted
        now += seconds
        seen += tokens
        speed.stepped(now, seen)
    assert speed.medians() == (2.0, pytest.approx(100.0))


def test_steps_count_that_are_settled() -> None:
    """One in which something was profiled, analysed, solved for or planned took longer."""
    speed, now = Speed(), 0.0
    for number, (seconds, unsettled) in enumerate([(0, 4), (90, 6), (80, 7), (2, 7), (70, 8), (4, 8), (3, 8)], 1):
        assert speed.medians()[0] == (None if number < 5 else 2.0 if number < 7 else 3.0)
        now += seconds
        speed.stepped(now, 12 * number, unsettled)
    assert speed.medians() == (3.0, 4.0)


def test_where_no_step_is_ever_settled_all_count() -> None:
    """Each batch has a new length."""
    speed = Speed()
    for number in range(20):
        speed.stepped(2.0 * number, 10 + 10 * number, number)
        assert speed.medians() == (None, None)
    speed.stepped(40.0, 210, 20)
    assert speed.medians() == (2.0, 5.0)


@pytest.mark.parametrize("ranks", [1, 8])
def test_attention_is_of_whole_sequences(ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """MFU is the same however many ranks share one: each has its part of the tokens, and of their FLOPs."""
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
    monkeypatch.setattr(speed, "ranks_per_sequence", lambda model: ranks)
    monkeypatch.setattr(speed, "model_flops", lambda model, length: length * (6e9 + length * 6e5))
    got = model_flops_utilization(torch.nn.Linear(2, 2), (1, 65536 // ranks, 64), 1e4, torch.device("cuda"))
    assert got == pytest.approx(1e4 * (6e9 + 65536 * 6e5) / 989e12)


@pytest.mark.parametrize(
    "memo, settled",
    [
        ({"alpha": 0.5, "resident_layers": 1}, [0, 1, 1, 1, 0, 1]),
        ({"alpha": 0.5, "resident_layers": 1, "tile_tokens": 16}, [0, 1, 1, 1, 0, 1]),
        ({"device_memory_gib": 1e-3, "tile_tokens": 0}, [0, 0, 1, 1, 0, 1]),
        pytest.param(PLANNED, [0, 0, 0, 1, 0, 0], marks=pytest.mark.processes),  # a compiler
    ],
)
def test_which_steps_of_training_are_settled(memo: dict[str, Any], settled: list[int], tmp_path: Path) -> None:
    """The first is profiled and analysed; what the head takes is solved for in the second; addresses are planned in the third.
    The fifth has another length."""
    model = Toy()
    handle = ds_memo.attach(model, {"plan": {"enabled": False}, "cache_dir": str(tmp_path), **memo})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    seen = [0]
    for length in (40, 40, 40, 40, 48, 48):
        batch = Batch.random(2, length)
        model(inputs_embeds=batch.embeds, labels=batch.labels).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        seen.append(inside(handle).speed._latest[-1].unsettled)
    assert [int(now == before) for before, now in itertools.pairwise(seen)] == settled


# ---- steps of torch optimizers are told to the watcher of a model of theirs


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
