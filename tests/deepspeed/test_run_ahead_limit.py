"""The host runs no further ahead of the device than two layers."""

from __future__ import annotations

from typing import Any

import pytest

from ds_memo.autotune import tuner
from ds_memo.deepspeed.run_ahead_limit import AHEAD, RunAheadLimit
from tests.deepspeed.engines import ON_ONE_CPU_RANK, ds_config, start, train

pytestmark = [*ON_ONE_CPU_RANK, pytest.mark.usefixtures("own_cache")]


class Device:
    """An observer that logs the marks that the host waited for and the events, in order."""

    def __init__(self) -> None:
        self.log: list[Any] = []
        self.marks = 0

    def mark(self) -> Any:
        self.marks += 1
        return Mark(self, self.marks)

    def layer_begins(self, layer: int) -> None:
        self.log.append(("begins", layer))

    def layer_ends(self, layer: int) -> None:
        self.log.append(("ends", layer))

    def layer_replays(self, layer: int) -> None:
        self.log.append(("replays", layer))

    def interrupted(self) -> None:
        self.log.append("interrupted")


class Mark:
    def __init__(self, device: Device, number: int) -> None:
        self.device, self.number = device, number

    def synchronize(self) -> None:
        self.device.log.append(self.number)


def test_a_layer_waits_for_the_one_before_the_last() -> None:
    """In the forward and in the backward, which begins while the device is still in the forward."""
    device = Device()
    limit = RunAheadLimit(device.mark)
    for layer in range(3):
        for observer in (limit, device):
            observer.layer_begins(layer)
        for observer in (limit, device):
            observer.layer_ends(layer)
    for layer in (2, 1):
        for observer in (limit, device):
            observer.layer_replays(layer)
    forward = [("begins", 0), ("ends", 0), ("begins", 1), ("ends", 1), 1, ("begins", 2), ("ends", 2)]
    assert AHEAD == 2 and device.log == [*forward, 2, ("replays", 2), 3, ("replays", 1)]


def test_nobody_waits_for_a_pass_that_was_interrupted() -> None:
    device = Device()
    limit = RunAheadLimit(device.mark)
    for layer in range(AHEAD):
        limit.layer_begins(layer)
    limit.interrupted()
    for layer in range(AHEAD):
        limit.layer_begins(layer)
    assert device.marks == 2 * AHEAD and device.log == []


@pytest.mark.slow
@pytest.mark.parametrize("meets", [True, False])
def test_layers_that_are_gathered_tell_when_they_run(meets: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where everything fits and none of them is checkpointed, too."""
    monkeypatch.setattr(tuner, "meet_in_layers", lambda model: meets)
    engine = start(ds_config(3, memo={"enabled": True}))
    train(engine, steps=1)
    device = Device()
    engine.memo._session.remat.observers = (device,)
    train(engine, steps=1)
    plain = engine.memo._session.policy.no_recompute
    engine.destroy()
    forward = [(what, layer) for layer in range(4) for what in ("begins", "ends")]
    backward = [("replays", layer) for layer in reversed(range(4))]
    assert plain and device.log == ([*forward, *backward] * 2 if meets else [])
