"""The real engine on threads, with throttled copies and sleeping compute: the reference for the simulator.

Events are: each copy's begin and end, and each stretch of compute's begin, per layer. A layer's copies count as one, from the
first's begin to the last's end: ThreadStreams hand them over together.
"""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch

from ds_memo.estimate.simulate import Simulated, simulate
from ds_memo.placement import ON_DEVICE, Placement, PlacementKind
from ds_memo.solve.run_costs import LayerCosts, Output, RunCosts
from ds_memo.swap.engine import SwapEngine
from ds_memo.swap.frame import Layout
from ds_memo.swap.host_pool import HostPool
from ds_memo.swap.host_slab import HostSlab
from ds_memo.swap.stream_protocol import COMPUTE, D2H, H2D
from ds_memo.swap.streams import ThreadStreams

TICK_S = 0.004
"""All durations are whole multiples of it."""
ROW_BYTES = 256
CONFIGURATIONS = 20
SURE_S = 0.9 * TICK_S
"""Predicted further apart than this, two events have one order."""


@dataclass(frozen=True)
class Event:
    at: float
    name: str


class ThrottledStreams(ThreadStreams):
    """Streams whose copies last bytes over bandwidth, and record their begin and end."""

    def __init__(self, d2h_bytes_per_s: float, h2d_bytes_per_s: float) -> None:
        super().__init__()
        self.rates = {D2H: d2h_bytes_per_s, H2D: h2d_bytes_per_s}
        self.events: list[Event] = []
        self.names: dict[int, str] = {}
        """Names by address of a layer's host block."""
        self.waits: list[tuple[str, float]] = []
        """Compute's, with the seconds each took."""

    def _hand_over(self, stream: str) -> None:
        if self._copies[stream]:
            self._queues[stream].put((self._slowly, stream, self._copies[stream]))
            self._copies[stream] = []

    def _slowly(self, stream: str, copies: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        begin = time.perf_counter()
        host = copies[0][0 if stream == D2H else 1]
        name = self.names[host.untyped_storage().data_ptr() + host.storage_offset() * host.itemsize]
        self.events.append(Event(begin, f"{stream} {name} begins"))
        for dst, src in copies:
            dst.copy_(src)
        sleep_until(begin + sum(src.nbytes for _, src in copies) / self.rates[stream])
        self.events.append(Event(time.perf_counter(), f"{stream} {name} ends"))

    def wait(self, stream: str, event: object) -> None:
        begin = time.perf_counter()
        super().wait(stream, event)
        if stream == COMPUTE:
            self.waits.append((event.stream, time.perf_counter() - begin))


def sleep_until(moment: float) -> None:
    while (left := moment - time.perf_counter()) > 0:
        time.sleep(left)


@dataclass(frozen=True)
class Configuration:
    run: RunCosts
    alpha: float
    residents: frozenset[int]

    @classmethod
    def random(cls, seed: int) -> Configuration:
        """Whole rows and whole ticks, so that the simulator and the threads move the same bytes."""
        draw = random.Random(seed)
        alpha = draw.choice((0.0, 0.25, 0.5, 1.0))
        layers = tuple(
            LayerCosts(
                outputs=(
                    Output("input", 4 * draw.randint(1, 4), ROW_BYTES),
                    Output("gemm", 4 * draw.randint(1, 6), ROW_BYTES),
                ),
                forward_s=TICK_S * draw.randint(2, 6),
                backward_s=TICK_S * draw.randint(3, 8),
                replay_s=TICK_S * draw.randint(1, 2),
                gemm_s=TICK_S * 4 * draw.randint(0, 1),
                attention_s=0.0,
                no_recompute_bytes=0,
            )
            for _ in range(draw.randint(4, 6))
        )
        row_s = TICK_S * draw.choice((0.15, 0.35, 0.6, 1.1))
        rates = ROW_BYTES / row_s, ROW_BYTES / (row_s * draw.choice((0.7, 1.0, 1.4)))
        residents = frozenset(draw.sample(range(len(layers)), draw.randint(0, 2)))
        return cls(RunCosts(layers, *rates, 0, 0, head_s=TICK_S * draw.randint(1, 4)), alpha, residents)

    def predicted(self) -> Simulated:
        return simulate(self.run, self.placements)

    @property
    def placements(self) -> list[Placement]:
        swapped = Placement(PlacementKind.SWAPPED, self.alpha)
        return [ON_DEVICE if index in self.residents else swapped for index in range(len(self.run.layers))]


def predicted_events(simulated: Simulated) -> list[Event]:
    """Return the simulator's events, named as in `measured_events`."""
    found: list[Event] = []
    for span in simulated.spans:
        if span.stream == COMPUTE and span.kind != "stall":
            found.append(Event(span.begin, f"compute {span.name} begins"))
    for stream in (D2H, H2D):
        layers = dict.fromkeys(span.layer for span in simulated.spans if span.stream == stream)
        for layer in layers:
            mine = [span for span in simulated.spans if (span.stream, span.layer) == (stream, layer)]
            found.append(Event(mine[0].begin, f"{stream} {layer} begins"))
            found.append(Event(mine[-1].end, f"{stream} {layer} ends"))
    return sorted(found, key=lambda event: event.at)


def measured_events(
    configuration: Configuration, engine_class: type[SwapEngine] = SwapEngine
) -> tuple[list[Event], ThrottledStreams]:
    """Run a configuration; return its events, in seconds from the start of the step, and the streams."""
    run, alpha = configuration.run, configuration.alpha
    streams = ThrottledStreams(run.d2h_bytes_per_s, run.h2d_bytes_per_s)
    cpu = torch.device("cpu")
    engine = engine_class(streams, HostSlab(1 << 22, HostPool(cpu)), cpu)
    events = streams.events
    start = now = time.perf_counter()

    def compute(name: str, seconds: float) -> None:
        begin = time.perf_counter()
        if seconds > 0:
            events.append(Event(begin, f"compute {name} begins"))
        sleep_until(begin + seconds)

    try:
        frames = []
        for index, layer in enumerate(run.layers):
            resident = index in configuration.residents
            frame = engine.begin(f"layer {index}", configuration.placements[index])
            layout, kept = Layout(), []
            for output in layer.outputs:
                rows = int(alpha * output.rows) if output.role == "gemm" and not resident else output.rows
                if rows:
                    tensor = torch.zeros(output.rows, output.row_bytes, dtype=torch.uint8)
                    kept.append((layout.add(tensor, rows), tensor))
            engine.adopt(frame, layout)
            if frame.block is not None:
                streams.names[frame.block.pieces[0].memory.data_ptr()] = str(index)
            compute(f"forward of layer {index}", layer.forward_s)
            for place, tensor in kept:
                engine.keep(frame, place, tensor)
            engine.end(frame)
            frames.append(frame)
        compute("head and loss", run.head_s)
        while frames:
            index, frame = len(frames) - 1, frames.pop()
            layer = run.layers[index]
            engine.bring_back(frame)
            again = layer.replay_s + (0.0 if index in configuration.residents else (1 - alpha) * layer.gemm_s)
            compute(f"replay of layer {index}", again)
            engine.replayed(frame)
            compute(f"backward of layer {index}", layer.backward_s)
            del frame
        now = time.perf_counter()
    finally:
        engine.close()
    events.append(Event(now, "the end"))
    return sorted((Event(event.at - start, event.name) for event in events), key=lambda event: event.at), streams


def clear_configurations() -> list[int]:
    """Return seeds whose events are either simultaneous by cause or far enough apart for the clock."""
    found, seed = [], 0
    while len(found) < CONFIGURATIONS:
        times = [event.at for event in predicted_events(Configuration.random(seed).predicted())]
        gaps = [later - earlier for earlier, later in pairwise(times)]
        if all(gap < 1e-9 or gap > SURE_S for gap in gaps):
            found.append(seed)
        seed += 1
    return found


def groups(events: list[Event]) -> list[set[str]]:
    """Return names in order; names predicted for the same moment form one set."""
    found: list[set[str]] = []
    last = -1.0
    for event in events:
        if event.at - last > 1e-9:
            found.append(set())
        found[-1].add(event.name)
        last = event.at
    return found


def mismatch(predicted: list[Event], measured: list[Event]) -> str | None:
    names = [event.name for event in measured if event.name != "the end"]
    at = 0
    for group in groups(predicted):
        observed = set(names[at : at + len(group)])
        if observed != group:
            return f"after {at} events: predicted {sorted(group)}, measured {names[at : at + len(group)]}"
        at += len(group)
    return None if at == len(names) else f"measured {names[at:]} beyond what was predicted"
