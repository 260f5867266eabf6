"""The policy without an tuner: what is configured, ablations, and what the host holds."""

from __future__ import annotations

import pytest
import torch

from ds_memo.autotune.policy import PlacementPolicy
from ds_memo.config import MemoConfig
from ds_memo.errors import MemoError
from ds_memo.placement import FULL_RECOMPUTE, ON_DEVICE, Placement, PlacementKind
from ds_memo.remat.layer import Layer
from ds_memo.swap.host_pool import HostPool
from ds_memo.swap.host_slab import HostSlab

WHOLE, ROWS = 1 << 20, 1 << 22


def make_policy(layers: int = 4, budget: int = 1 << 30, **config: object) -> tuple[PlacementPolicy, list[Layer]]:
    them = [Layer(index, f"layer {index}", None) for index in range(layers)]
    slab = HostSlab(budget, HostPool(torch.device("cpu")))
    policy = PlacementPolicy(MemoConfig(enabled=True, **config), them, slab.budget, pytest.fail)
    policy.slab = slab  # lives as long
    return policy, them


def settled(policy: PlacementPolicy, layer: Layer) -> float:
    return policy.decide_alpha(layer, policy.placement(layer), WHOLE, ROWS).alpha


def test_as_configured() -> None:
    policy, layers = make_policy(alpha=0.25, resident_layers=1)
    assert [policy.placement(layer) for layer in layers] == [Placement(PlacementKind.SWAPPED, 0.25)] * 3 + [ON_DEVICE]
    assert settled(policy, layers[0]) == policy.alpha_used == 0.25
    assert policy.binding.startswith("as configured: 0.00586 of 1 GiB")  # 3 · (1 + 0.25 · 4) MiB


@pytest.mark.parametrize("budget, alpha", [(1 << 30, 1.0), (2 * (WHOLE + ROWS // 2), 0.5), (2 * WHOLE, 0.0)])
def test_as_much_as_the_host_holds(budget: int, alpha: float) -> None:
    policy, layers = make_policy(budget=budget + 2 * (1 << 16))  # what alignment may take of two frames
    assert policy.calls(PlacementKind.ON_DEVICE) == [2, 3]
    assert settled(policy, layers[0]) == pytest.approx(alpha)
    assert policy.binding.startswith("nothing: all rows fit" if alpha == 1 else "host memory")


@pytest.mark.parametrize(
    "budget, says", [(2 * WHOLE - 1, "even memo.alpha 0 does not fit"), (2 * WHOLE + ROWS, "memo.alpha of at most 0.5 fits")]
)
def test_more_than_the_host_holds(budget: int, says: str) -> None:
    policy, layers = make_policy(budget=budget, alpha=0.75)
    with pytest.raises(MemoError, match=f"2 swapped layers like layer 0 need .* {says}"):
        settled(policy, layers[0])
    assert policy.binding == "not known before the first forward"


def test_full_recompute() -> None:
    policy, layers = make_policy(ablation="full_recompute")
    assert {policy.placement(layer) for layer in layers} == {FULL_RECOMPUTE} and policy.calls(PlacementKind.ON_DEVICE) == []
    assert policy.alpha_used == 0.0 and "full recomputation" in policy.binding


def test_layers_that_show_as_they_run() -> None:
    """How many will share the host is not known in the first forward: no rows go there."""
    policy, layers = make_policy(layers=0)
    assert not policy.layers_known and policy.calls(PlacementKind.ON_DEVICE) == []
    for index in range(4):
        layers.append(Layer(index, f"layer {index}", None))
        policy.add_layer(layers[-1])
        assert settled(policy, layers[-1]) == 0.0
    policy.know_layers()
    assert policy.calls(PlacementKind.ON_DEVICE) == [2, 3] and settled(policy, layers[0]) == 1.0
