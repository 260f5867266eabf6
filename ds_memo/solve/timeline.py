"""Work of the streams of a step over time."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

WRITE, READ = "nvme write", "nvme read"
"""The two directions of the drives, as streams."""


class TimelineSpan(NamedTuple):
    """One operation of a stream, or a stall of compute. Seconds from the start of the step."""

    stream: str
    kind: str
    """forward, backward, replay, head, offload, reload, write, read, stall, nvme stall."""
    layer: int
    """-1: no layer's."""
    begin: float
    end: float

    @property
    def name(self) -> str:
        return self.kind if self.layer < 0 else f"{self.kind} of layer {self.layer}"


Note = Callable[[str, str, int, float, float], None]
"""Takes the fields of a TimelineSpan."""


def not_noted(stream: str, kind: str, layer: int, begin: float, end: float) -> None:
    """Drop a span."""
