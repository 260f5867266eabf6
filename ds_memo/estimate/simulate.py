"""Simulate a step in virtual time: layers through three streams, driven by the real engine.

`ds_memo.swap.engine.SwapEngine` itself runs here, so the schedule cannot differ from the real one. Its streams only keep time,
its tensors only know their bytes, and this module advances the compute clock as kernels would.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ds_memo.placement import Placement, PlacementKind
from ds_memo.solve.costs import LayerCosts, Output, RunCosts
from ds_memo.swap.engine import SwapEngine
from ds_memo.swap.frame import Frame
from ds_memo.swap.stream_protocol import COMPUTE, D2H, H2D


class Span(NamedTuple):
    """One operation of a stream, or a stall of compute. Seconds from the start of the step."""

    stream: str
    name: str
    kind: str
    """forward, backward, replay, head, offload, reload, stall."""
    layer: int
    begin: float
    end: float


@dataclass(frozen=True)
class Simulated:
    """The result for one forward and backward."""

    seconds: float
    d2h_stall_s: float
    h2d_stall_s: float
    spans: tuple[Span, ...]


class Moment(NamedTuple):
    """An event: a point in a stream."""

    stream: str
    at: float


@dataclass
class VirtualStreams:
    """`ds_memo.swap.stream_protocol.Streams` that keep one clock each."""

    d2h_bytes_per_s: float
    h2d_bytes_per_s: float
    now: dict[str, float] = field(default_factory=lambda: {COMPUTE: 0.0, D2H: 0.0, H2D: 0.0})
    stalls: dict[str, float] = field(default_factory=lambda: {D2H: 0.0, H2D: 0.0})
    spans: list[Span] = field(default_factory=list)

    def mark(self, stream: str) -> Moment:
        return Moment(stream, self.now[stream])

    def wait(self, stream: str, event: Moment) -> None:
        begin = self.now[stream]
        if event.at > begin:
            self.now[stream] = event.at
            if stream == COMPUTE:
                self.stalls[event.stream] += event.at - begin
                self.spans.append(Span(COMPUTE, f"waits for {event.stream}", "stall", -1, begin, event.at))

    def copy(self, stream: str, dst: Extent, src: Extent) -> None:
        rate = self.d2h_bytes_per_s if stream == D2H else self.h2d_bytes_per_s
        begin = self.now[stream]
        self.now[stream] = begin + src.nbytes / rate
        kind = "offload" if stream == D2H else "reload"
        self.spans.append(Span(stream, f"{kind} of layer {src.layer}", kind, src.layer, begin, self.now[stream]))

    def compute(self, name: str, kind: str, layer: int, seconds: float) -> None:
        begin = self.now[COMPUTE]
        self.now[COMPUTE] = begin + seconds
        if seconds > 0:
            self.spans.append(Span(COMPUTE, name, kind, layer, begin, self.now[COMPUTE]))

    def stall_s(self) -> dict[str, float]:
        return dict(self.stalls)

    def close(self) -> None: ...


class Extent:
    """A virtual tensor: a number of bytes of a layer."""

    __slots__ = ("layer", "nbytes")
    _version = 0

    def __init__(self, layer: int, nbytes: float) -> None:
        self.layer = layer
        self.nbytes = nbytes

    def detach(self) -> Extent:
        return self


@dataclass(slots=True)
class VirtualKept:
    """The virtual ds_memo.swap.frame.Kept."""

    index: int
    stored_bytes: float
    extent: Extent

    def rows_in(self, block: Any) -> Extent:
        return self.extent

    def pairs(self, host: Extent, tensor: Any) -> list[tuple[Extent, Extent]]:
        return [(host, self.extent)]

    def slot_in(self, buffer: Any) -> Extent:
        return self.extent


class VirtualLayout(NamedTuple):
    kept: list[VirtualKept]
    host_bytes: float
    buffer_bytes: float = 0.0


class VirtualSlab:
    """A host without limits: ds_memo.solve checks budgets."""

    blocks = ()

    def allocate(self, nbytes: float, wanted_by: str) -> VirtualSlab:
        return self

    def free(self, block: VirtualSlab) -> None: ...

    def close(self) -> None: ...


class VirtualEngine(SwapEngine):
    """The engine with virtual reload buffers."""

    def _new_buffer(self, nbytes: int) -> None:
        return None


def simulate(run: RunCosts, placements: Sequence[Placement]) -> Simulated:
    """Drive the engine through one forward and backward.

    Args:
        run: seconds and bytes of the layers.
        placements: one per layer.
    """
    streams = VirtualStreams(run.d2h_bytes_per_s, run.h2d_bytes_per_s)
    slab: Any = VirtualSlab()
    engine = VirtualEngine(streams, slab, device=None)
    frames = [
        _forward(engine, streams, i, layer, placement)
        for i, (layer, placement) in enumerate(zip(run.layers, placements, strict=True))
    ]
    streams.compute("head and loss", "head", -1, run.head_s)
    while frames:
        index, frame = len(frames) - 1, frames.pop()
        layer, placement = run.layers[index], placements[index]
        engine.bring_back(frame)
        if placement.kind is not PlacementKind.NO_RECOMPUTE:
            attention_s = layer.attention_s if placement.kind.recomputes_attention else 0.0
            again = layer.replay_s + (1 - placement.decided_alpha) * layer.gemm_s + attention_s
            streams.compute(f"replay of layer {index}", "replay", index, again)
        engine.replayed(frame)
        streams.compute(f"backward of layer {index}", "backward", index, layer.backward_s)
        del frame
    stalls = streams.stall_s()
    seconds = streams.now[COMPUTE]
    engine.close()
    return Simulated(seconds, stalls[D2H], stalls[H2D], tuple(sorted(streams.spans, key=lambda span: span.begin)))


def _forward(engine: Any, streams: VirtualStreams, index: int, layer: LayerCosts, placement: Placement) -> Frame:
    """Run one forward of the engine on sizes in place of tensors."""
    frame = engine.begin(f"layer {index}", placement)
    began = streams.now[COMPUTE]
    kept: list[tuple[Output, VirtualKept]] = []
    for output in () if placement.kind is PlacementKind.NO_RECOMPUTE else layer.outputs:
        nbytes = _stored(output, placement)
        if nbytes > 0:
            kept.append((output, VirtualKept(len(kept), nbytes, Extent(index, nbytes))))
    engine.adopt(frame, VirtualLayout([slot for _, slot in kept], sum(slot.stored_bytes for _, slot in kept)))
    for output, slot in kept:
        streams.now[COMPUTE] = began + output.born * layer.forward_s
        engine.keep(frame, slot, slot.extent)
    streams.now[COMPUTE] = began
    streams.compute(f"forward of layer {index}", "forward", index, layer.forward_s)
    engine.end(frame)
    return frame


def _stored(output: Output, placement: Placement) -> float:
    if output.kind == "gemm":
        return placement.decided_alpha * output.nbytes
    return 0.0 if placement.kind.recomputes_attention and output.kind == "attention" else output.nbytes
