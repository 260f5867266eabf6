"""Device bytes by part, at the moment when most are alive."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ds_memo.placement import PlacementKind
from ds_memo.solve.memory import PARTS, bytes_of_layers, device_bytes, device_bytes_by_part
from ds_memo.solve.placement_kinds import place
from ds_memo.solve.solver import solve
from tests.placements import swapped_at
from tests.solve.runs import random_run, run
from tests.solve.test_tiles import LAYERS, UNIT, WHOLE, all_parts_alike, tiled

BESIDE = {"working_bytes": 3 * UNIT, "backward_bytes": (UNIT,) * LAYERS, "forward_bytes": UNIT}


def test_whole_layers_with_residents() -> None:
    """The peak is in the last layer's backward, which reloads the last swapped frame."""
    frame = WHOLE.frame_bytes
    parts = device_bytes_by_part(run(WHOLE, LAYERS, **BESIDE), place(LAYERS, 2), 1.0)
    expected = {"frames": 2 * frame, "reload_buffers": frame, "layer": 26 * UNIT, "head": 0, "non_layer": 4 * UNIT}
    assert parts == expected and tuple(parts) == PARTS


def test_head_and_loss() -> None:
    frame = WHOLE.frame_bytes
    for residents, on_device in ((2, 2 * frame), (0, 0)):
        parts = device_bytes_by_part(run(WHOLE, LAYERS, head_bytes=99 * UNIT, **BESIDE), place(LAYERS, residents), 1.0)
        moving = frame if residents else 2 * frame
        assert parts == {
            "frames": on_device, "reload_buffers": moving, "layer": 0, "head": 99 * UNIT, "non_layer": 3 * UNIT
        }  # fmt: skip


def test_layers_without_recompute() -> None:
    """A resident layer's replay makes what autograd saves; here it is there from the forward on."""
    kept = WHOLE.no_recompute_bytes
    parts = device_bytes_by_part(run(WHOLE, LAYERS), place(LAYERS, 0, LAYERS), 1.0)
    assert parts["frames"] == LAYERS * kept and parts["reload_buffers"] == 0
    assert parts["layer"] == WHOLE.frame_bytes + 26 * UNIT - kept


def test_tiles() -> None:
    """One tile's hidden states next to attention's backward; two tiles next to that of the rest."""
    costs = tiled()
    attention = costs.working.backward + costs.attention_bytes
    parts = device_bytes_by_part(run(costs, LAYERS), place(LAYERS, 0), 0.0)
    assert (parts["frames"], parts["reload_buffers"], parts["layer"]) == (0, UNIT // 8, attention)
    even = replace(costs, working_at_0=all_parts_alike(costs.working_at_0))
    parts = device_bytes_by_part(run(even, LAYERS), place(LAYERS, 0), 0.0)
    assert (parts["frames"], parts["reload_buffers"], parts["layer"]) == (0, costs.small_frame_bytes * 2 // 8, attention)
    differs = replace(even, in_tiles=replace(even.in_tiles, result_differs=True))
    parts = device_bytes_by_part(run(differs, LAYERS), place(LAYERS, 0), 0.0)
    moving = costs.attention_bytes + costs.smallest_frame_bytes * 2 // 8
    assert (parts["frames"], parts["reload_buffers"], parts["layer"]) == (0, moving, costs.working.backward)
    assert differs.host_bytes(swapped_at(0.0)) == pytest.approx(even.host_bytes(swapped_at(0.0)), rel=0.01)
    parts = device_bytes_by_part(run(costs, LAYERS), [PlacementKind.GEMMS_RECOMPUTED] * LAYERS, 0.0)
    assert (parts["frames"], parts["reload_buffers"]) == (LAYERS * costs.small_frame_bytes, 0)


def test_the_last_resort() -> None:
    costs = run(WHOLE, LAYERS, host=4 * UNIT, device=40 * UNIT)
    solution = solve(costs, may_skip_recompute=False)
    again = [kind for kind in solution.kinds if kind.recomputes_attention]
    assert again, "attention is recomputed"
    frames = {PlacementKind.FULL_RECOMPUTE: WHOLE.smallest_frame_bytes, PlacementKind.GEMMS_RECOMPUTED: WHOLE.small_frame_bytes}
    assert solution.device_bytes_by_part["frames"] == sum(frames.get(kind, 0) for kind in solution.kinds)
    assert solution.device_bytes_by_part["layer"] == 33 * UNIT


def test_no_moment_has_more() -> None:
    """Each moment's layers and non-layer memory together take at most the sum of the parts, and one moment takes all of it."""
    for seed in range(20):
        costs = replace(random_run(seed), head_bytes=seed << 12, forward_bytes=seed << 10)
        for residents in range(len(costs.layers) + 1):
            kinds = place(len(costs.layers), residents)
            forward, between, backward = bytes_of_layers(costs, kinds, 1.0)
            most = max(max(forward) + costs.forward_bytes, between + costs.head_bytes, max(backward))
            assert (
                device_bytes(costs, kinds, 1.0)
                == most + costs.working_bytes
                == sum(device_bytes_by_part(costs, kinds, 1.0).values())
            )
            assert min(device_bytes_by_part(costs, kinds, 1.0).values()) >= 0
