"""Plain layers: no checkpointing for some, where their memory is worth most there."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from ds_memo.placement import place
from ds_memo.solve.costs import Working
from ds_memo.solve.memory import device_bytes
from ds_memo.solve.solver import solve
from tests.solve.runs import layer, run

KI = 1024


def test_some_layers_go_without_checkpointing() -> None:
    """Copies hide, so resident layers save nothing: memory is worth more where it saves a replay."""
    one = layer(256 * KI)
    costs = run(one, 32, link=40e9, device=10 * one.plain_bytes)
    homes, checkpointed = solve(costs), solve(costs, may_be_plain=False)
    assert len(homes.places.plain) == 9 and not homes.plain and homes.alpha == checkpointed.alpha == 1.0
    assert len(checkpointed.places.residents) > 15 and not checkpointed.places.plain
    assert homes.step_s == pytest.approx(checkpointed.step_s - 9 * one.replay_s, rel=1e-3)
    assert homes.host_bytes == (23 - len(homes.places.residents)) * one.host_bytes(1.0)
    assert homes.device_bytes == device_bytes(costs, homes.places, 1.0) <= costs.device_budget
    assert not solve(costs, resident_layers=2).places.plain and not solve(costs, alpha=1.0).places.plain


def test_between_all_resident_and_all_plain() -> None:
    """One after the other, and each saves its replay."""
    one = layer(16 * KI)
    before = math.inf
    for plain in range(9):
        homes = solve(run(one, 8, device=plain * one.plain_bytes + (8 - plain) * one.frame_bytes))
        assert (len(homes.places.plain), homes.host_bytes, homes.plain) == (plain, 0, plain == 8)
        assert homes.step_s < before
        before = homes.step_s


def test_a_plain_layer_takes_what_a_resident_one_takes_in_its_backward() -> None:
    """The replay makes what autograd saves: in the layer's own backward the two are alike, below it they are not."""
    one = replace(layer(16 * KI), working=Working(forward=10**9, backward=10**9))
    only = run(one, 1)
    alike = device_bytes(only, place(1, 1), 1.0), device_bytes(only, place(1, 0, 1), 1.0)
    assert alike == (one.frame_bytes + 10**9, max(one.plain_bytes, one.frame_bytes + 10**9))
    two = run(one, 2)
    resident, plain = (device_bytes(two, places, 1.0) for places in (place(2, 2), place(2, 0, 2)))
    assert plain - resident == one.plain_bytes - one.frame_bytes + alike[1] - alike[0]


def test_ranks_that_agree_on_a_number_agree_on_the_layers() -> None:
    assert place(24, 3, 5).plain == place(24, 11, 5).plain
    assert len(place(24, 11, 5).residents) == 11 and not place(24, 11, 5).residents & place(24, 11, 5).plain
