"""Norms beside the layers run in tiles, and only those that treat each token alone."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from ds_memo.tiles import probe
from tests.models import Batch, Different, Outcome, step
from tests.tiles.rig import assert_within, attached, compare, small

TOKENS = 35


def drive(model: nn.Module, number: int) -> Outcome:
    return step(model, Batch.random(2, TOKENS, seed=number))


class OverTokens(nn.Module):
    """Divides each feature by its spread over the tokens."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight * x / (x.square().mean(1, keepdim=True) + 0.1).sqrt()


class Counts(nn.LayerNorm):
    """A norm by tokens with a buffer that counts its calls: it must be called as often as in stock."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return super().forward(x)


def test_the_last_norm_runs_in_tiles() -> None:
    model, lengths, seen = small("llama"), [], []
    stock = drive(model, 1)
    model.model.norm.register_forward_hook(lambda _, args, __: seen.append(args[0].shape[1]))
    inner = model.model.norm.forward

    def watched(x: torch.Tensor) -> torch.Tensor:
        lengths.append(x.shape[1])
        return inner(x)

    model.model.norm.forward = watched
    with attached(model, tile=16):
        drive(model, 0)
        lengths.clear(), seen.clear()
        assert_within(drive(model, 1).grads, stock.grads)
    assert lengths == [12, 12, 11] * 4, "two rows, forward and backward"
    assert seen == [TOKENS], "hooks see the whole"


@pytest.mark.parametrize("norm", (OverTokens, Counts))
def test_a_module_that_is_no_norm_of_tokens_runs_whole(norm: type[nn.Module]) -> None:
    model = small("llama")
    model.model.norm = norm(model.config.hidden_size)
    warned = compare(model, drive, quiet=True)["warnings"]
    assert [norm.__name__ in line and "beside the layers runs whole" in line for line in warned] == [True]


def test_without_the_check_it_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "is_by_token", lambda *_: True)
    model = small("llama")
    model.model.norm = OverTokens(model.config.hidden_size)
    with pytest.raises((Different, AssertionError)):
        compare(model, drive)
