"""Pace: the host runs no further ahead of the device than it must.

Where ranks hold parameters in pieces, each layer's are gathered on another stream, into memory that is the layer's until the device
has passed it, however long ago the host let it go. A host that is a whole forward ahead has the parameters of the whole model in
memory: torch's allocator asks for more, empties its cache, and both wait.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Protocol

import torch

from ds_memo.swap.phases import Phases

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


def mark_now() -> torch.cuda.Event:
    """On the current stream. Who waits for it leaves the processor to others."""
    event = torch.cuda.Event(blocking=True)
    event.record()
    return event
