"""An engine that is driven by hand."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from ds_memo.placement import ON_DEVICE, Placement, PlacementKind
from ds_memo.swap.engine import SwapEngine
from ds_memo.swap.frame import Frame, Layout
from ds_memo.swap.host_pool import HostPool
from ds_memo.swap.host_slab import HostSlab
from ds_memo.swap.pinned_segments import PAGE
from ds_memo.swap.streams import ThreadStreams

CPU = torch.device("cpu")


@dataclass
class Rig:
    """An engine, and the calls that a layer makes to it."""

    streams: object = field(default_factory=ThreadStreams)
    pages: int = 1000

    def __post_init__(self) -> None:
        self.slab = HostSlab(self.pages * PAGE, HostPool(CPU))
        if hasattr(self.streams, "watch"):
            self.streams.watch(self.slab)
        self.engine = SwapEngine(self.streams, self.slab, CPU)

    def begin(
        self, tensors: list[torch.Tensor], resident: bool = False, rows: int | None = None, name: str = "x", ahead: bool = True
    ) -> Frame:
        kind = PlacementKind.SWAPPED if ahead else PlacementKind.SWAPPED_ATTENTION_RECOMPUTED
        frame = self.engine.begin(name, ON_DEVICE if resident else Placement(kind))
        layout = Layout()
        for tensor in tensors:
            layout.add(tensor, rows)
        self.engine.adopt(frame, layout)
        return frame

    def layer(self, *shapes: tuple[int, ...], value: float = 1.0, **options) -> Frame:
        tensors = [torch.full(shape, value) for shape in shapes or ((8, 64),)]
        return self.layer_of(tensors, **options)

    def layer_of(self, tensors: list[torch.Tensor], **options) -> Frame:
        frame = self.begin(tensors, **options)
        for kept, tensor in zip(frame.layout.kept, tensors, strict=True):
            self.engine.keep(frame, kept, tensor)
        self.engine.end(frame)
        return frame

    def replay(self, frame: Frame) -> list[torch.Tensor]:
        self.engine.bring_back(frame)
        tensors = [frame.tensor(kept).clone() for kept in frame.layout.kept]
        self.engine.replayed(frame)
        return tensors
