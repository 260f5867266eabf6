"""The policy without an autopilot: what is configured, ablations, and what the host holds."""

from __future__ import annotations

import pytest
import torch

from ds_memo.autotune.pending_calls import Calls
from ds_memo.autotune.policy import FULL_RECOMPUTE, Decisions
from ds_memo.config import MemoConfig
from ds_memo.errors import MemoError
from ds_memo.remat.checkpoint import Layer, Setting
from ds_memo.swap.host_pool import HostPool
from ds_memo.swap.host_slab import HostSlab

WHOLE, ROWS = 1 << 20, 1 << 22


def decide(layers: int = 4, budget: int = 1 << 30, **config: object) -> tuple[Decisions, list[Layer]]:
    them = [Layer(index, f"layer {index}", None) for index in range(layers)]
    return Decisions(
        MemoConfig(enabled=True, **config), them, HostSlab(budget, HostPool(torch.device("cpu"))), Calls(), pytest.fail
    ), them


def test_as_configured() -> None:
    decisions, layers = decide(alpha=0.25, resident_layers=1)
    assert [decisions.setting(layer) for layer in layers] == [Setting()] * 3 + [Setting(resident=True)]
    assert decisions.alpha(layers[0], WHOLE, ROWS) == decisions.alpha_used == 0.25
    assert decisions.binding.startswith("as configured: 0.00586 of 1 GiB")  # 3 · (1 + 0.25 · 4) MiB


@pytest.mark.parametrize("budget, alpha", [(1 << 30, 1.0), (2 * (WHOLE + ROWS // 2), 0.5), (2 * WHOLE, 0.0)])
def test_as_much_as_the_host_holds(budget: int, alpha: float) -> None:
    decisions, layers = decide(budget=budget + 2 * (1 << 16))  # what alignment may take of two frames
    assert decisions.places.residents == {2, 3}
    assert decisions.alpha(layers[0], WHOLE, ROWS) == pytest.approx(alpha)
    assert decisions.binding.startswith("all rows fit" if alpha == 1 else "host memory")


@pytest.mark.parametrize(
    "budget, says", [(2 * WHOLE - 1, "even memo.alpha 0 does not fit"), (2 * WHOLE + ROWS, "memo.alpha of at most 0.5 fits")]
)
def test_more_than_the_host_holds(budget: int, says: str) -> None:
    decisions, layers = decide(budget=budget, alpha=0.75)
    with pytest.raises(MemoError, match=f"2 swapped layers like layer 0 need .* {says}"):
        decisions.alpha(layers[0], WHOLE, ROWS)
    assert decisions.binding == "not known before the first forward"


def test_full_recompute() -> None:
    decisions, layers = decide(ablation="full_recompute")
    assert {decisions.setting(layer) for layer in layers} == {FULL_RECOMPUTE} and decisions.places.residents == frozenset()
    assert decisions.alpha_used == 0.0 and "full recomputation" in decisions.binding


def test_layers_that_show_as_they_run() -> None:
    """How many will share the host is not known in the first forward: no rows go there."""
    decisions, layers = decide(layers=0)
    assert not decisions.layers_known and decisions.places.residents == frozenset()
    for index in range(4):
        layers.append(Layer(index, f"layer {index}", None))
        assert decisions.alpha(layers[-1], WHOLE, ROWS) == 0.0
    decisions.know_layers()
    assert decisions.places.residents == {2, 3} and decisions.alpha(layers[0], WHOLE, ROWS) == 1.0
