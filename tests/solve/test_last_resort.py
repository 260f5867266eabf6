"""The last resort, beside every split there is, and beside what torch.utils.checkpoint needs."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from ds_memo.placement import Places, spread
from ds_memo.solve.costs import RunCosts
from ds_memo.solve.memory import device_bytes, swapped_bytes
from ds_memo.solve.refusals import NothingFits
from ds_memo.solve.schedule import Schedule
from ds_memo.solve.solver import solve
from tests.solve.runs import GPT, LLAMA, layer, run

KI = 1024
LAYERS = 10
FAST = 1e15
"""A link that nothing waits for."""
BUDGETS = (0, 2, 5, 9, 14, 19)
"""In inputs of a layer, beyond what two reload buffers take."""


def again_s(costs: RunCosts, places: Places) -> float:
    """Seconds of GEMMs and attention that replays compute."""
    layers = enumerate(costs.layers)
    return sum((i not in places.residents) * one.gemm_s + (i in places.dropped) * one.attention_s for i, one in layers)


def every_split(layers: int) -> list[Places]:
    """Of like layers: what matters is how many there are of each kind, residents last, swapped first."""
    splits = []
    for residents, lean, dropped, lean_dropped in itertools.product(range(layers + 1), repeat=4):
        swapped = layers - residents - lean
        if swapped < 0 or lean_dropped > lean or dropped > swapped:
            continue
        splits.append(
            Places(
                frozenset(range(layers - residents, layers)),
                frozenset(range(swapped, swapped + lean)),
                frozenset(range(dropped)) | frozenset(range(swapped, swapped + lean_dropped)),
            )
        )
    return splits


@pytest.mark.parametrize("shape, tokens", [(GPT, 128 * KI), (GPT, 2 * KI), (LLAMA, 32 * KI)], ids=str)
def test_no_split_computes_much_less_again(shape: tuple, tokens: int) -> None:
    """Where layers are lean, or compute attention again, all other splits are tried: none is better by more than the attention of
    two layers or the GEMMs of one, which is what whole layers can be off by."""
    one = layer(tokens, shape=shape)
    unit = one.nbytes("input")
    seen = {"lean": 0, "dropped": 0, "residents": 0}
    for host, device in itertools.product(BUDGETS, BUDGETS):
        costs = run(one, LAYERS, FAST, host * unit, 4 * unit + device * unit)
        fitting = [
            split
            for split in every_split(LAYERS)
            if swapped_bytes(costs, split, 0.0) <= costs.host_budget and device_bytes(costs, split, 0.0) <= costs.device_budget
        ]
        try:
            homes = solve(costs)
        except NothingFits:
            assert not fitting, (host, device)
            continue
        assert homes.host_bytes <= costs.host_budget and homes.device_bytes <= costs.device_budget
        if not homes.places.lean | homes.places.dropped:
            continue
        assert homes.binding.startswith("last resort: " if homes.places.dropped else "host memory: ")
        best = min(again_s(costs, split) for split in fitting)
        assert again_s(costs, homes.places) <= best + max(2 * one.attention_s, one.gemm_s), (host, device, homes)
        for kind in seen:
            seen[kind] += bool(getattr(homes.places, kind))
    assert all(seen[kind] for kind in ("lean", "dropped")), seen
    assert seen["residents"] or tokens > 2 * KI, seen


def test_where_the_host_has_nothing_this_is_torchs_checkpoint() -> None:
    """And needs no byte more of the device: inputs of all layers, and the work of one."""
    one = layer(512 * KI)
    costs = run(one, 32, host=0, device=32 * one.nbytes("input"))
    homes = solve(costs)
    assert homes.places.lean == homes.places.dropped == frozenset(range(32))
    assert (homes.host_bytes, homes.device_bytes) == (0, costs.device_budget)
    assert homes.d2h_stall_s == homes.h2d_stall_s == 0
    with pytest.raises(NothingFits) as caught:
        solve(replace(costs, device_budget=costs.device_budget - 1))
    assert (caught.value.where, caught.value.device_needed) == ("host", costs.device_budget)
    assert "the device has room for those of" in str(caught.value)
    roomier = solve(replace(costs, device_budget=costs.device_budget + 5 * one.attention_bytes))
    assert len(roomier.places.dropped) == 27


def test_both_memories_add_up() -> None:
    """Half of the inputs here, half there: more tokens than either alone."""
    one = layer(512 * KI)
    half = 16 * one.nbytes("input")
    with_both = solve(run(one, 32, host=half, device=half + one.nbytes("input")))
    assert len(with_both.places.lean) in (16, 17) and len(with_both.places.dropped) == 32


def test_no_layer_is_resident_while_long_attention_must_run_again() -> None:
    """A resident layer's GEMM outputs take the room of eight attention outputs, which are worth far more."""
    one = layer(128 * KI)
    unit = one.nbytes("input")
    homes = solve(run(one, 32, host=20 * unit, device=2 * one.frame_bytes + 30 * unit))
    assert not homes.places.residents and len(homes.places.lean) > 20
    short = layer(KI)  # here attention is cheap by the byte, and residents come first
    unit = short.nbytes("input")
    homes = solve(run(short, 32, FAST, 20 * unit, 2 * short.frame_bytes + 30 * unit))
    assert len(homes.places.residents) >= 3 and homes.places.dropped


def test_attention_is_computed_again_only_as_often_as_it_must() -> None:
    one = layer(64 * KI)
    costs = run(one, 32, device=4 * one.nbytes("input"))
    every_other = solve(replace(costs, host_budget=32 * one.host_bytes(0.0) - 16 * one.attention_bytes))
    assert 14 <= len(every_other.places.dropped) <= 16  # some room is left on the device
    assert f"{len(every_other.places.dropped)} of 32 layers compute attention again" in every_other.binding
    all_of_them = solve(replace(costs, host_budget=30 * one.nbytes("input")))
    assert all_of_them.step_s > every_other.step_s > solve(costs).step_s


def test_residents_that_are_asked_for_come_first() -> None:
    one = layer(64 * KI)
    unit = one.nbytes("input")
    costs = run(one, 16, host=10 * unit, device=2 * one.frame_bytes + 6 * unit)
    homes = solve(costs, resident_layers=2)
    assert homes.places.residents == {14, 15} and homes.places.lean and homes.places.dropped
    with pytest.raises(NothingFits, match="even with the 4 resident layers asked for"):
        solve(costs, resident_layers=4)


# ---- copies that take longer than compute


def test_waiting_for_copies_is_no_answer_where_something_else_is_faster() -> None:
    """A slow link: what must be swapped for want of device memory is less where layers are lean, or nothing of it."""
    one = layer(16 * KI)
    slow = run(one, 32, link=2e9, device=2 * one.frame_bytes + 80 * one.nbytes("input"))
    homes = solve(slow)
    swaps_more = Schedule(slow, Places(residents=spread(32, 8)))
    assert homes.binding.startswith("link: compute would wait for more copies") and homes.places.lean
    assert homes.d2h_stall_s + homes.h2d_stall_s < 0.01 * homes.step_s
    assert homes.step_s < 0.9 * min(swaps_more.at(alpha).seconds for alpha in (0.0, 0.1, 0.5))
    assert not solve(run(one, 32, link=50e9, device=slow.device_budget)).places.lean


@pytest.mark.parametrize("link", [0.2e9, 2e9, 10e9, 50e9])
@pytest.mark.parametrize("tokens", [2 * KI, 16 * KI, 128 * KI])
@pytest.mark.parametrize("device", [34, 60, 150, 250])
def test_never_slower_than_full_recompute(link: float, tokens: int, device: int) -> None:
    """Nor than recompute with attention outputs kept on the device, wherever they fit."""
    one = layer(tokens)
    costs = run(one, 32, link, device=device * one.nbytes("input"))
    everyone = frozenset(range(32))
    recompute = [Places(lean=everyone, dropped=everyone), Places(lean=everyone)]
    fitting = [rival for rival in recompute if device_bytes(costs, rival, 0.0) <= costs.device_budget]
    assert fitting
    assert solve(costs).step_s <= min(Schedule(costs, rival).at(0.0).seconds for rival in fitting) * (1 + 1e-9)
