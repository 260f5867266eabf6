"""Pace: the host runs no further ahead of the device than it must.

Under ZeRO-3 each layer's parameters are gathered on a stream of their own. Their memory is free for the next layer's only once
the device has passed the layer, however long ago the host let it go. A host that is a whole forward ahead has gathered the whole
model: torch's allocator asks for more and more memory, empties its cache when there is none, and all wait for that. (FSDP limits
its all-gathers for the same reason; DeepSpeed limits those that are under way, not those that compute has yet to use.)
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Protocol

import torch

from ds_memo.layer_observer import Phases
from ds_memo.runtime.handle import Memo

AHEAD = 2
"""Layers. The device has at least a whole one to do while the host waits for it to pass the one before."""


class Mark(Protocol):
    """A place among the device's commands."""

    def synchronize(self) -> None:
        """Wait until the device has come there."""


class Paced:
    """Tells `phases` all that it is told.

    Args:
        mark: the place that the host has come to.
    """

    def __init__(self, phases: Phases, mark: Callable[[], Mark]) -> None:
        self._phases = phases
        self._mark = mark
        self._begun: deque[Mark] = deque()

    def layer_begins(self, layer: int) -> None:
        self._wait()
        self._phases.layer_begins(layer)

    def layer_ends(self, layer: int) -> None:
        self._phases.layer_ends(layer)

    def layer_replays(self, layer: int) -> None:
        self._wait()
        self._phases.layer_replays(layer)

    def interrupted(self) -> None:
        self._begun.clear()
        self._phases.interrupted()

    def _wait(self) -> None:
        self._begun.append(self._mark())
        if len(self._begun) > AHEAD:
            self._begun.popleft().synchronize()


def limit_run_ahead(memo: Memo) -> None:
    """Have the host run no further ahead of the device than it must: layers' parameters are gathered."""
    if memo.engine.device.type == "cuda":
        memo.engine.phases = Paced(memo.engine.phases, mark_now)


def mark_now() -> torch.cuda.Event:
    """On the current stream. Who waits for it leaves the processor to others."""
    event = torch.cuda.Event(blocking=True)
    event.record()
    return event
