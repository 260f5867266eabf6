"""The run-ahead limit: the host runs no further ahead of the device than it must.

Under ZeRO-3 each layer's parameters are gathered on a stream of their own. Their memory is free for the next layer's only once
the device has passed the layer, however long ago the host let it go. A host that is a whole forward ahead has gathered the whole
model: torch's allocator asks for more and more memory, empties its cache when there is none, and all wait for that. (FSDP limits
its all-gathers for the same reason; DeepSpeed limits those that are under way, not those that compute has yet to use.)
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from ds_memo.distributed.topology import meet_in_layers

AHEAD = 2
"""Layers. The device has at least a whole one to do while the host waits for it to pass the one before."""


class RunAheadLimit:
    """Has the host wait, at each forward and replay of a layer, until the device has passed the layer before the last.

    Args:
        mark: returns an event at the place that the host has come to.
    """

    def __init__(self, mark: Callable[[], Any]) -> None:
        self._mark = mark
        self._begun: deque[Any] = deque()

    def layer_begins(self, layer: int) -> None:
        self._begun.append(self._mark())
        if len(self._begun) > AHEAD:
            self._begun.popleft().synchronize()

    layer_replays = layer_begins

    def layer_ends(self, layer: int) -> None: ...

    def interrupted(self) -> None:
        self._begun.clear()


def limit_run_ahead(model: nn.Module, device: torch.device) -> RunAheadLimit | None:
    """Return the limit for a model whose ranks gather parameters in layers on a CUDA device; None: another one needs none."""
    return RunAheadLimit(mark_now) if device.type == "cuda" and meet_in_layers(model) else None


def mark_now() -> torch.cuda.Event:
    """An event on the current stream. The processor is free for others while the host waits for it."""
    event = torch.cuda.Event(blocking=True)
    event.record()
    return event
