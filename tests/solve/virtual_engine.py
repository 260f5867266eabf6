"""The real engine in virtual time: the truth that the solver's schedule is compared with.

`ds_memo.swap.engine.SwapEngine` itself runs here, over `ds_memo.nvme.file_home.FileHome` if there are drives. Streams and files
only keep time, tensors only know their bytes, and the layers advance the compute clock as kernels would. The host issues work as
compute reaches it: where it waits for files, compute waits.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple, NoReturn

from ds_memo.errors import MemoError
from ds_memo.nvme.extents import Extent
from ds_memo.nvme.file_home import FileHome
from ds_memo.placement import Placement, PlacementKind
from ds_memo.solve.run_costs import LayerCosts, NvmeCosts, Output, RunCosts, TileCosts
from ds_memo.solve.schedule import Step
from ds_memo.swap.engine import SwapEngine
from ds_memo.swap.frame import Frame
from ds_memo.swap.stream_protocol import COMPUTE, D2H, H2D


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

    def mark(self, stream: str) -> Moment:
        return Moment(stream, self.now[stream])

    def wait(self, stream: str, event: Moment) -> None:
        begin = self.now[stream]
        if event.at > begin:
            self.now[stream] = event.at
            if stream == COMPUTE:
                self.stalls[event.stream] += event.at - begin

    def done(self, event: Moment) -> bool:
        return event.at <= self.now[COMPUTE]

    def copy(self, stream: str, dst: Virtual, src: Virtual, nbytes: float, dst_at: int = 0, src_at: int = 0) -> None:
        self.now[stream] += nbytes / (self.d2h_bytes_per_s if stream == D2H else self.h2d_bytes_per_s)

    def compute(self, seconds: float) -> None:
        self.now[COMPUTE] += seconds

    def current(self) -> None:
        return None

    def record(self, tensor: Virtual, stream: Any) -> None: ...

    def stall_s(self) -> dict[str, float]:
        return dict(self.stalls)

    def close(self) -> None: ...


@dataclass(eq=False, slots=True)
class Virtual:
    """A number of bytes: a tensor, what a frame keeps of it (ds_memo.swap.frame.Kept), and the block on the host."""

    nbytes: float
    index: int = 0
    """Among the tensors of its frame."""
    host_offset = buffer_offset = _version = 0

    @property
    def stored_bytes(self) -> float:
        return self.nbytes

    def detach(self) -> Virtual:
        return self

    def laid(self, tensor: Virtual) -> Virtual:
        return tensor

    def parts(self, begin: int, nbytes: float) -> list[tuple[Virtual, int, int, float]]:
        return [(self, 0, 0, nbytes)]

    def slot_in(self, buffer: Any) -> Virtual:
        return self


class VirtualLayout(NamedTuple):
    kept: list[Virtual]
    host_bytes: int
    buffer_bytes: float = 0.0
    changed_early: frozenset[int] = frozenset()

    def new_buffer(self, nbytes: float, device: Any) -> None:
        return None


class VirtualSlab:
    """A virtual ds_memo.swap.host_slab.HostSlab.

    Args:
        budget: bytes. Without files it has no limit: ds_memo.solve checks budgets.
    """

    blocks = ()

    def __init__(self, budget: float = math.inf) -> None:
        self.left = budget
        self.budget = self
        self._engine: SwapEngine

    def held_by(self, engine: SwapEngine) -> None:
        self._engine = engine

    def allocate(self, nbytes: int, wanted_by: str) -> Virtual:
        if nbytes > self.left:
            self._engine.make_room(lambda: nbytes <= self.left)
        if nbytes > self.left:
            _no_room(f"host memory for {wanted_by}")
        self.left -= nbytes
        return Virtual(nbytes)

    def free(self, block: Virtual) -> None:
        self.left += block.nbytes

    def close(self) -> None: ...


class VirtualTransfer(NamedTuple):
    at: float
    """When it is over."""
    failure: None = None


class VirtualFiles:
    """Files as `ds_memo.nvme.direct_files.DirectFiles`, which keep a clock for each direction."""

    def __init__(self, costs: NvmeCosts, streams: VirtualStreams) -> None:
        self.stall_s = 0.0
        self.costs = costs
        self.streams = streams
        self.written = self.read_until = 0.0
        self._left = costs.budget
        self._extents: list[Extent] = []

    def extent(self, nbytes: int, wanted_by: str) -> Extent:
        if nbytes > self._left:
            _no_room(f"files for {wanted_by}")
        self._left -= nbytes
        extent = Extent(0, nbytes)
        self._extents.append(extent)
        return extent

    def free(self, extent: Extent) -> None:
        self._extents.remove(extent)
        self._left += extent.nbytes

    def extents(self) -> list[Extent]:
        return list(self._extents)

    def write(self, block: Virtual, extent: Extent, after: tuple[Moment, ...]) -> VirtualTransfer:
        self.written = self._over(self.written, extent.nbytes / self.costs.write_bytes_per_s, after)
        return VirtualTransfer(self.written)

    def read(self, extent: Extent, block: Virtual, after: tuple[Moment, ...]) -> VirtualTransfer:
        self.read_until = self._over(self.read_until, extent.nbytes / self.costs.read_bytes_per_s, after)
        return VirtualTransfer(self.read_until)

    def _over(self, free_at: float, seconds: float, after: tuple[Moment, ...]) -> float:
        return max(free_at, self.streams.now[COMPUTE], *(event.at for event in after)) + seconds

    def done(self, transfer: VirtualTransfer) -> bool:
        return transfer.at <= self.streams.now[COMPUTE]

    def wait(self, transfer: VirtualTransfer, compute: Moment) -> None:
        if transfer.at > compute.at:
            self.streams.now[COMPUTE] = transfer.at
            self.stall_s += transfer.at - compute.at

    def wait_beside(self, transfer: VirtualTransfer, compute: Moment) -> bool:
        return self.done(transfer)  # here the host issues as compute reaches it: `compute` is over

    def finish(self) -> None: ...

    def close(self) -> None: ...


def simulate(run: RunCosts, placements: Sequence[Placement]) -> Step:
    """Drive the engine through one forward and backward.

    Args:
        run: seconds and bytes of the layers.
        placements: one per layer. If one of them goes on to a file, the host has no more than the run's budget.

    Raises:
        MemoError: host or files have no room for a block.
    """
    streams, files, home = VirtualStreams(run.d2h_bytes_per_s, run.h2d_bytes_per_s), None, None
    slab: Any = VirtualSlab()
    if run.nvme is not None and any(placement.nvme for placement in placements):
        files, slab = VirtualFiles(run.nvme, streams), VirtualSlab(run.host_budget)
        home = FileHome(streams, slab, files, _no_room)  # type: ignore[arg-type]
    engine = SwapEngine(streams, slab, None, home)  # type: ignore[arg-type]
    layers: list[_Whole] = []
    for index, (layer, placement) in enumerate(zip(run.layers, placements, strict=True)):
        layers.append(_driver(layer, placement)(engine, streams, index, layer, placement))
        layers[-1].forward()
    streams.compute(run.head_s)
    while layers:
        if placements[len(layers) - 1].kind is PlacementKind.SWAPPED_WITHOUT_INPUT and not layers[-1].has_input:
            _compute_inputs(layers)
        layers.pop().backward()
    stalls = streams.stall_s()
    engine.close()
    return Step(0.0, streams.now[COMPUTE], stalls[D2H], stalls[H2D], 0.0 if files is None else files.stall_s)


def _compute_inputs(layers: Sequence[_InTiles]) -> None:
    """Compute the inputs of the last layer's group, as ds_memo.tiles.groups does."""
    first = len(layers) - 1
    while layers[first].placement.kind is PlacementKind.SWAPPED_WITHOUT_INPUT:
        first -= 1
    for below, above in pairwise(layers[first:]):
        below.posts_again(into=above)


def _no_room(what: str) -> NoReturn:
    raise MemoError(f"the simulated machine lacks {what}")


@dataclass
class _Whole:
    """A layer that runs whole: one frame, sizes in place of tensors."""

    engine: Any
    streams: VirtualStreams
    index: int
    layer: LayerCosts
    placement: Placement
    has_input: bool = False
    """True if it was computed in the backward."""

    def forward(self) -> None:
        layer, placement, streams = self.layer, self.placement, self.streams
        frame = self.frame = self.engine.begin(f"layer {self.index}", placement)
        outputs = () if placement.kind is PlacementKind.NO_RECOMPUTE else layer.outputs
        slots = self._adopt(frame, [_stored(output, placement) for output in outputs], layer.host_bytes(placement))
        began = streams.now[COMPUTE]
        for output, slot in zip(outputs, slots, strict=True):
            streams.now[COMPUTE] = began + output.born * layer.forward_s
            self._keep(frame, [slot])
        streams.now[COMPUTE] = began
        self.streams.compute(layer.forward_s)
        self.engine.end(frame)

    def backward(self) -> None:
        layer, placement = self.layer, self.placement
        self.engine.bring_back(self.frame)
        if placement.kind is not PlacementKind.NO_RECOMPUTE:
            attention_s = layer.attention_s if placement.kind.recomputes_attention else 0.0
            self.streams.compute(layer.replay_s + (1 - placement.decided_alpha) * layer.gemm_s + attention_s)
        self.engine.replayed(self.frame)
        self.streams.compute(layer.backward_s)

    def _adopt(self, frame: Frame, nbytes: Iterable[float], host_bytes: int) -> list[Virtual | None]:
        """Set what a frame will keep, and the bytes of its host block. None: an output of no bytes."""
        kept: list[Virtual] = []
        slots: list[Virtual | None] = []
        for size in nbytes:
            slots.append(Virtual(size, len(kept)) if size > 0 else None)
            kept += slots[-1:] if size > 0 else []  # type: ignore[arg-type]
        self.engine.adopt(frame, VirtualLayout(kept, host_bytes))
        return slots

    def _keep(self, frame: Frame, slots: Iterable[Virtual | None]) -> None:
        for slot in slots:
            if slot is not None:
                self.engine.keep(frame, slot, slot)


class _InTiles(_Whole):
    """A layer in tiles: the engine's methods in the order in which ds_memo.tiles.layer calls them.

    Of attention's outputs the first, its result, is cut into tiles; others are in attention's frame. If the result is not stored,
    or differs from what the kernel returned, none is cut, and the backward begins with what is before attention.
    """

    def forward(self) -> None:
        engine, layer, tiles = self.engine, self.layer, self._tiles
        self._count = tiles.count
        stored = tiles.stored(self.placement.decided_alpha)
        self._whole_tiles = {number * self._count // stored for number in range(stored)}
        at = next((i for i, output in enumerate(layer.outputs) if output.role == "attention"), len(layer.outputs))
        attended_s = layer.forward_s * (layer.outputs[at].born if at < len(layer.outputs) else 1.0)
        of_attention = [output for output in layer.outputs if output.role == "attention"]
        result = [] if self._begins_with_pre else of_attention[:1]
        apart, with_gemms, without = layer.tile_blocks(self.placement.kind)
        of_tile = [*layer.outputs[:at], *result, *(output for output in layer.outputs[at:] if output.role != "attention")]

        self._attention = None
        if not self.placement.kind.recomputes_attention:
            self._attention = engine.begin(f"layer {self.index}, attention", self.placement)
        self._frames: list[Frame] = []
        slots = self._slots = []
        computed = self.placement.kind is PlacementKind.SWAPPED_WITHOUT_INPUT
        for number in range(self._count):
            frame = engine.begin(f"layer {self.index}, tile {number}", self.placement)
            frame.ahead = True
            self._frames.append(frame)
            host_bytes = with_gemms if number in self._whole_tiles else without
            slots.append(self._adopt(frame, [self._bytes_in_tile(output, number) for output in of_tile], host_bytes))
            self._keep(frame, [] if computed else slots[-1][:1])  # the input
            self.streams.compute((attended_s - layer.attention_s) / self._count)
            self._keep(frame, slots[-1][1:at])
        engine.let_go_but(0)
        self.streams.compute(layer.attention_s)
        if self._attention is not None:
            kept = [output.nbytes for output in of_attention[len(result) :]]
            self._keep(self._attention, self._adopt(self._attention, kept, apart))
            engine.end(self._attention)
        for number, frame in enumerate(self._frames):
            self._keep(frame, slots[number][at : at + len(result)])
            self.streams.compute((layer.forward_s - attended_s) / self._count)
            self._keep(frame, slots[number][at + len(result) :])
            engine.end(frame)
            if number in self._whole_tiles:
                engine.let_go_but(2)

    def backward(self) -> None:
        engine, layer, tiles, last = self.engine, self.layer, self._tiles, self._frames[-1]
        below = [self._attention or last, *self._frames]
        attention_s = layer.backward_s + layer.replay_s + layer.gemm_s - tiles.post_backward_s - tiles.pre_backward_s
        if self._begins_with_pre:
            self._run_pre_again(below)
            if self._attention is not None:
                engine.bring_back(self._attention, then=last)
                attention_s -= tiles.pre_again_s  # in the seconds of the backward
            else:
                self.streams.compute(layer.attention_s)
        for number, frame in reversed(list(enumerate(self._frames))):
            engine.bring_back(frame, then=below[number], again=True)
            seconds = tiles.post_backward_s - (layer.gemm_s if number in self._whole_tiles else 0.0)
            self.streams.compute(seconds / self._count)
            engine.replayed(frame)
            frame.first_only = True
        if self._attention is not None and not self._begins_with_pre:
            engine.bring_back(self._attention, then=last)
        self.streams.compute(attention_s)
        if self._attention is not None:
            engine.replayed(self._attention)
        for frame in reversed(self._frames):
            engine.bring_back(frame)
            frame.first_only = False
            self.streams.compute(tiles.pre_backward_s / self._count)
            engine.replayed(frame)
        for frame in self._frames:
            engine.drop_late(frame)

    def posts_again(self, into: _InTiles) -> None:
        """Compute the input of the layer above."""
        engine, last = self.engine, self._frames[-1]
        if self._begins_with_pre:
            self._run_pre_again([self._attention or last, *self._frames])
            if self._attention is not None:
                engine.bring_back(self._attention, then=last)
        posts_s = self.layer.posts_again_s - (self._tiles.pre_again_s if self._begins_with_pre else 0.0)
        for number, frame in reversed(list(enumerate(self._frames))):
            engine.bring_back(frame, then=self._frames[max(0, number - 1)], again=True)
            self.streams.compute(posts_s / self._count)
            engine.replayed(frame)
            engine.keep_late(into._frames[number], into._slots[number][0], into._slots[number][0])
        engine.let_go_late_but(0)
        if self._attention is not None:
            engine.give_up(self._attention)
        into.has_input = True

    def _run_pre_again(self, below: Sequence[Frame]) -> None:
        for frame in self._frames:
            frame.first_only = True
        for number, frame in reversed(list(enumerate(self._frames))):
            self.engine.bring_back(frame, then=below[number], again=True)
            frame.first_only = False
            self.streams.compute(self._tiles.pre_again_s / self._count)
            self.engine.replayed(frame)

    @property
    def _begins_with_pre(self) -> bool:
        return self.placement.kind.recomputes_attention or self._tiles.result_differs

    @property
    def _tiles(self) -> TileCosts:
        assert self.layer.in_tiles is not None
        return self.layer.in_tiles

    def _bytes_in_tile(self, output: Output, number: int) -> float:
        return 0.0 if output.role == "gemm" and number not in self._whole_tiles else output.nbytes / self._count


def _driver(layer: LayerCosts, placement: Placement) -> type[_Whole]:
    whole = layer.in_tiles is None or placement.kind is PlacementKind.NO_RECOMPUTE
    return _Whole if whole else _InTiles


def _stored(output: Output, placement: Placement) -> float:
    if output.role == "gemm":  # seconds are affine in alpha, as in the solver: whole rows count in bytes alone
        return placement.decided_alpha * output.nbytes
    return 0.0 if placement.kind.recomputes_attention and output.role == "attention" else output.nbytes
