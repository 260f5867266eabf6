"""Observers are told which layer runs; a refusal after a layer's forward reaches the user like an error of the layer."""

from __future__ import annotations

import traceback

import pytest

import ds_memo
from tests.inside import inside
from tests.models import LAYERS, every_config, step
from tests.remat.situations import BATCH, toy

pytestmark = pytest.mark.filterwarnings("ignore::ds_memo.errors.MemoWarning")


class Log(list):
    """An observer that notes the events."""

    def layer_begins(self, layer: int) -> None:
        self.append(("begins", layer))

    def layer_ends(self, layer: int) -> None:
        self.append(("ends", layer))

    def layer_replays(self, layer: int) -> None:
        self.append(("replays", layer))

    def interrupted(self) -> None:
        self.append("interrupted")


@every_config
def test_each_layer_begins_ends_and_replays_once(config: dict) -> None:
    """In the step that analyses the layers, and in the one that follows their recipes."""
    model = toy()
    handle = ds_memo.attach(model, config)
    inside(handle).remat.observers = (*inside(handle).remat.observers, log := Log())
    for _ in range(2):
        step(model, BATCH)
        forward = [(what, layer) for layer in range(LAYERS) for what in ("begins", "ends")]
        assert log == [*forward, *(("replays", layer) for layer in reversed(range(LAYERS)))]
        log.clear()
    handle.detach()


def test_a_refusal_rises_out_of_no_mode() -> None:
    """Alpha is decided when the first layer has run. Its frame is freed, and observers are told that the pass is over."""
    model = toy()
    handle = ds_memo.attach(model, {"resident_layers": 0, "alpha": 0.5, "host_memory_gib": 1e-5})
    inside(handle).remat.observers = (*inside(handle).remat.observers, log := Log())
    with pytest.raises(ds_memo.MemoError, match=r"even memo\.alpha 0 does not fit") as refusal:
        step(model, BATCH)
    assert log == [("begins", 0), "interrupted"]
    assert "__exit__" not in [line.name for line in traceback.extract_tb(refusal.tb)]
    assert inside(handle).slab.used == 0 and [layer.recipes for layer in inside(handle).layers] == [{}] * LAYERS
    handle.detach()
