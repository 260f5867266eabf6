"""A probe of a model with several kinds of layers: how much of a layer it runs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import ds_memo
from ds_memo.profile import caught_call
from ds_memo.profile.layer_kinds import kinds_of
from tests.inside import inside

HIDDEN, LONG = 8, 16
RAN: list[int] = []
"""Lengths at which a layer ran. What a layer holds is put back."""


class First(nn.Module):
    """A layer that notes the lengths at which it runs."""

    def __init__(self, returns: str) -> None:
        super().__init__()
        self.linear, self.returns = nn.Linear(HIDDEN, HIDDEN), returns

    def forward(self, x: torch.Tensor) -> Any:
        RAN.append(x.shape[1])
        out = x + self.linear(x).relu()
        return {"tensor": out, "tuple": (out,), "two": (out, out.mean(1))}[self.returns]


class Second(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Linear(HIDDEN, 2 * HIDDEN)
        self.up = nn.Linear(2 * HIDDEN, HIDDEN)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.up(self.down(x).relu())


class Model(nn.Module):
    def __init__(self, returns: str) -> None:
        super().__init__()
        self.layers = nn.ModuleList([First(returns), Second()])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.layers[0](x)
        return self.layers[1](out[0] if isinstance(out, tuple) else out)


@pytest.mark.parametrize(
    ("returns", "length", "ran"),
    [("tensor", 64, [LONG]), ("tuple", 64, [LONG]), ("tensor", LONG, [LONG]), ("two", 64, [LONG, 64])],
)
def test_a_long_layer_runs_on_its_first_tokens(
    monkeypatch: pytest.MonkeyPatch, returns: str, length: int, ran: list[int]
) -> None:
    """Whole it may not fit. A layer that returns other tensors, too, runs whole."""
    monkeypatch.setattr(caught_call, "_LONG", LONG)
    RAN.clear()
    model = Model(returns)
    handle = ds_memo.attach(model, {"alpha": 0.5, "resident_layers": 1, "layers": ["layers.0", "layers.1"]})
    try:
        kinds = kinds_of(inside(handle).layers)
        x = torch.randn(2, length, HIDDEN)
        instead = inside(handle).remat.instead
        calls = caught_call.layer_calls(instead, x.device, model, (x,), {}, kinds, lambda calls: len(calls) == 2)
    finally:
        handle.detach()
    assert ran == RAN
    assert [call.length for call in calls.values()] == [length, length]
    assert calls[1].hidden.requires_grad
