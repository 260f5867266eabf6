"""The placement that a layer call gets, in each way to run it: with room on the host, without at its first call, and later."""

from __future__ import annotations

import copy
import weakref
from typing import Any

import pytest
import torch

import ds_memo
from ds_memo.placement import PlacementKind
from ds_memo.runtime.handle import MemoHandle
from ds_memo.swap.frame import Frame
from tests.compiled_layers.rig import TOLERANCE, compiled, run, worst
from tests.models import Toy, step
from tests.remat.situations import BATCH, WAYS, assert_in_way, toy

KINDS = {
    "mixed": {"room": "SWAPPED", "none at first": "FULL_RECOMPUTE", "none later": "FULL_RECOMPUTE"},
    "compiled": {"room": "SWAPPED", "none at first": "ON_DEVICE", "none later": "FULL_RECOMPUTE"},
    "tiles": {"room": "SWAPPED", "none at first": "GEMMS_RECOMPUTED", "none later": "GEMMS_RECOMPUTED"},
}
MEMORY = {"alpha": 0.5, "resident_layers": 0, "host_memory_gib": 1.5e-3, "plan": {"enabled": False}}
"""Room for a few forwards of one model. Models with the same settings share it."""


def attached(model: Toy, way: str) -> MemoHandle:
    if way == "compiled":
        compiled(model, backend="aot_eager")
    return ds_memo.attach(model, {**WAYS[way], **MEMORY})


def fill(model: Toy, handle: MemoHandle) -> list[Any]:
    """Run forwards until the host has no room for a layer more. Return their graphs."""
    graphs = []
    while not handle.report()["warnings"]:
        graphs.append(model(inputs_embeds=BATCH.embeds, labels=BATCH.labels).loss)
    return graphs


@pytest.mark.filterwarnings("ignore::ds_memo.MemoWarning")
@pytest.mark.parametrize("room", ["room", "none at first", "none later"])
@pytest.mark.parametrize("way", KINDS)
def test_placement(way: str, room: str, frames: weakref.WeakSet[Frame]) -> None:
    torch._dynamo.reset()
    model = toy()
    stock, other = copy.deepcopy(model), toy()
    handle, of_other = attached(model, way), attached(other, way)
    if room == "none later":
        run(model, BATCH)
    graphs = fill(other, of_other) if room != "room" else []
    before, kinds = set(frames), set[str]()
    model.register_forward_hook(
        lambda *_: kinds.update(PlacementKind(frame.placement.kind).name for frame in set(frames) - before)
    )
    got, want = run(model, BATCH), step(stock, BATCH)
    if way == "compiled":
        assert worst(got, want) <= TOLERANCE
    else:
        assert_in_way(way, got, want)
    assert kinds == {KINDS[way][room]}
    said = handle.report()["warnings"]
    assert len(said) == (room != "room") and all("without memo.alpha 0.5" in line for line in said)
    del graphs
    for each in (handle, of_other):
        each.detach()
