"""The real swap engine in virtual time: a simulator whose schedule is the schedule.

`SwapEngine` is driven with frames of the wanted sizes, on streams that move no bytes but keep a clock each. The driver moves
compute's clock on, as kernels would; copies take their bytes over the bandwidth. One byte of a tensor stands for many.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import torch

from ds_memo.solve.costs import LayerCosts, RunCosts
from ds_memo.swap.engine import SwapEngine
from ds_memo.swap.frame import Frame, Layout
from ds_memo.swap.slab import HostSlab
from ds_memo.swap.streams import COMPUTE, D2H, H2D


@dataclass
class Moment:
    stream: str
    at: float


class VirtualStreams:
    """`Streams` that only keep time."""

    def __init__(self, d2h_bytes_per_s: float, h2d_bytes_per_s: float, scale: float) -> None:
        self.now = {COMPUTE: 0.0, D2H: 0.0, H2D: 0.0}
        self._stall = {D2H: 0.0, H2D: 0.0}
        self._seconds_per_byte = {D2H: scale / d2h_bytes_per_s, H2D: scale / h2d_bytes_per_s}

    def mark(self, stream: str) -> Moment:
        return Moment(stream, self.now[stream])

    def wait(self, stream: str, event: Moment) -> None:
        late = event.at - self.now[stream]
        if late > 0:
            self.now[stream] = event.at
            if stream == COMPUTE:
                self._stall[event.stream] += late

    def copy(self, stream: str, dst: torch.Tensor, src: torch.Tensor) -> None:
        assert dst.nbytes == src.nbytes
        self.now[stream] += src.nbytes * self._seconds_per_byte[stream]

    def stall_s(self) -> dict[str, float]:
        return dict(self._stall)

    def close(self) -> None: ...


ROWS = 2000
"""Of each simulated tensor: alpha is simulated in steps of 1 / ROWS."""


@dataclass
class Simulated:
    seconds: float
    d2h_stall_s: float
    h2d_stall_s: float


def simulate(run: RunCosts, alpha: float, residents: Collection[int], dropped: Collection[int] = ()) -> Simulated:
    """Seconds of one forward and backward through the engine."""
    scale = max(output.nbytes for layer in run.layers for output in layer.outputs) / ROWS / 112
    streams = VirtualStreams(run.d2h_bytes_per_s, run.h2d_bytes_per_s, scale)
    slab = HostSlab(1 << 40, pinned=False)
    engine = SwapEngine(streams, slab, torch.device("cpu"))
    made: dict[int, list[torch.Tensor]] = {}

    def tensors(layer: LayerCosts) -> list[torch.Tensor]:
        if id(layer) not in made:
            widths = [max(1, round(output.nbytes / ROWS / scale)) for output in layer.outputs]
            made[id(layer)] = [torch.empty(ROWS, width, dtype=torch.uint8) for width in widths]
        return made[id(layer)]

    def forward(index: int, layer: LayerCosts) -> Frame:
        resident = index in residents
        frame = engine.begin(str(index), resident)
        began = streams.now[COMPUTE]
        kept = []
        layout = Layout()
        for output, tensor in zip(layer.outputs, tensors(layer), strict=True):
            rows = int(alpha * ROWS) if output.kind == "gemm" and not resident else ROWS
            if rows and (output.kind != "attention" or index not in dropped):
                kept.append((output.born, layout.add(tensor, rows), tensor))
        engine.adopt(frame, layout)
        for born, place, tensor in kept:
            streams.now[COMPUTE] = began + born * layer.forward_s
            engine.keep(frame, place, tensor)
        streams.now[COMPUTE] = began + layer.forward_s
        engine.end(frame)
        return frame

    streams.now[COMPUTE] += run.other_s
    frames = [forward(index, layer) for index, layer in enumerate(run.layers)]
    streams.now[COMPUTE] += run.head_s
    for index in range(len(frames) - 1, -1, -1):
        layer, frame = run.layers[index], frames.pop()
        engine.bring_back(frame)
        supplied = 1.0 if index in residents else int(alpha * ROWS) / ROWS
        streams.now[COMPUTE] += layer.replay_s + (1 - supplied) * layer.gemm_s
        streams.now[COMPUTE] += layer.attention_s if index in dropped else 0.0
        engine.replayed(frame)
        streams.now[COMPUTE] += layer.backward_s
        del frame
    stalls = streams.stall_s()
    engine.close()
    return Simulated(streams.now[COMPUTE], stalls[D2H], stalls[H2D])
