"""A frame: the tensors that one layer call keeps for its backward, and the states it goes through.

    recording ─► swapping ─► away ─► returning ─► ready ─► done ─► returning …   (swapped; `done` returns on retain_graph,
                                                                                  `returning` to `away` if it was not the next)
    recording ─► done ─► ready ─► done …                                          (resident)

A frame lives as long as the graph of its layer call. Its device memory is at most

    recording, swapping    the kept outputs, where compute made them
    away, done             nothing
    returning, ready       one buffer of `Layout.buffer_bytes`
    resident               the kept outputs, until the graph is freed
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

# Inductor's: it takes half of the time of as_strided and detach. torch's stubs lack it.
from torch._C._dynamo.guards import _reinterpret_tensor  # type: ignore[attr-defined]

from ds_memo.errors import MemoError
from ds_memo.placement import Placement
from ds_memo.swap.host_slab import Block, HostSlab
from ds_memo.units import ALIGN, round_up

_NEXT = {
    "recording": {"swapping", "done"},
    "swapping": {"away", "done"},
    "away": {"returning"},
    "returning": {"ready", "away"},
    "ready": {"done"},
    "done": {"returning", "ready"},
}


@dataclass(frozen=True, slots=True)
class Kept:
    """One tensor that a frame keeps, and where its bytes lie (offsets from the begin of the block and of the buffer)."""

    index: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    rows: int
    """Leading rows that are stored, along the slowest dimension in memory; the replay computes the others."""
    stored_bytes: int
    host_offset: int
    buffer_offset: int

    @property
    def nbytes(self) -> int:
        """Bytes of all its rows."""
        return math.prod(self.shape) * self.dtype.itemsize

    def laid(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the tensor if its bytes in memory are as this says, else a copy whose bytes are: copies read bare memory."""
        stride = tensor.stride()
        if (stride == self.stride or lie_alike(self.shape, stride, self.stride)) and not (tensor.is_conj() or tensor.is_neg()):
            return tensor
        return tensor.new_empty_strided(self.shape, self.stride).copy_(tensor)

    def slot_in(self, buffer: ReloadBuffer) -> torch.Tensor:
        """Return the full tensor inside a frame's device buffer.

        It is no view of the buffer to autograd, so slots have separate version counters: an in-place change counts for one alone.
        """
        return _reinterpret_tensor(buffer[self.dtype], self.shape, self.stride, self.buffer_offset // self.dtype.itemsize)


class ReloadBuffer(dict[torch.dtype, torch.Tensor]):
    """A reload buffer on the device, and its views in the dtypes of the slots."""

    def __init__(self, nbytes: int, device: torch.device) -> None:
        self[torch.uint8] = torch.empty(nbytes, dtype=torch.uint8, device=device)

    def __missing__(self, dtype: torch.dtype) -> torch.Tensor:
        view = self[dtype] = self[torch.uint8].view(dtype)
        return view


@dataclass
class Layout:
    """The tensors that a frame keeps, and the bytes that they take."""

    kept: list[Kept] = field(default_factory=list)
    host_bytes: int = 0
    """Size of the host block: stored rows, aligned."""
    buffer_bytes: int = 0
    """Size of the reload buffer: full tensors, aligned."""
    changed_early: set[int] = field(default_factory=set)
    """Indices of tensors that some call changed, or returned to its caller, while they were copied to the host."""

    @property
    def stored_bytes(self) -> int:
        return sum(kept.stored_bytes for kept in self.kept)

    def add(self, tensor: torch.Tensor, rows: int | None = None) -> Kept:
        """Keep `rows` leading rows (None: all) of a tensor shaped like `tensor`. Raise MemoError if it is not dense."""
        order = dense_order(tensor)
        if order is None:
            raise MemoError(
                f"only dense tensors can be kept, got shape {tuple(tensor.shape)}, stride {tensor.stride()}; "
                "leave its layer out of memo.layers"
            )
        all_rows = tensor.shape[order[0]]
        row_bytes = tensor.numel() // all_rows * tensor.dtype.itemsize
        rows = all_rows if rows is None else rows
        kept = Kept(
            index=len(self.kept),
            shape=tuple(tensor.shape),
            stride=tensor.stride(),
            dtype=tensor.dtype,
            rows=rows,
            stored_bytes=rows * row_bytes,
            host_offset=self.host_bytes,
            buffer_offset=self.buffer_bytes,
        )
        self.kept.append(kept)
        self.host_bytes += round_up(kept.stored_bytes, ALIGN)
        self.buffer_bytes += round_up(all_rows * row_bytes, ALIGN)
        return kept

    def new_buffer(self, nbytes: int, device: torch.device) -> ReloadBuffer:
        """Allocate a reload buffer, of `buffer_bytes` or less."""
        return ReloadBuffer(nbytes, device)


def dense_order(tensor: torch.Tensor) -> tuple[int, ...] | None:
    """Return the dimensions from slowest to fastest if the tensor fills its memory without gaps or overlaps, else None."""
    if tensor.dim() == 0 or tensor.numel() == 0:
        return None
    order = tuple(sorted(range(tensor.dim()), key=lambda dim: (tensor.stride(dim), tensor.shape[dim]), reverse=True))
    return order if tensor.permute(order).is_contiguous() else None


def lie_alike(shape: Sequence[int], one: Sequence[int], other: Sequence[int]) -> bool:
    """Return True if two strides are the same for a shape."""
    return all(a == b for size, a, b in zip(shape, one, other, strict=True) if size > 1)


class Frame:
    """A frame, described at the top of this file. Only :class:`ds_memo.swap.engine.SwapEngine` moves it."""

    _defer: Callable[[Frame], None] = staticmethod(lambda frame: None)  # dynamo makes frames without __init__

    def __init__(self, name: str, placement: Placement, age: int, defer: Callable[[Frame], None]) -> None:
        self.name = name
        self.placement = placement
        self.age = age
        """Serial number in order of begin. A backward usually goes from high to low."""
        self.replays = 0
        self.state = "recording"
        self.layout = Layout()
        self.device: dict[int, torch.Tensor] = {}
        """Kept tensors that are still where compute made them, by index."""
        self.versions: dict[int, int] = {}
        """Their version counters when they were kept."""
        self.changed: set[int] = set()
        """Indices of a resident frame's tensors that the layer, and each replay, changes in place."""
        self.block: Block | None = None
        self.stored: set[int] = set()
        """Indices of the tensors whose stored rows were copied to the block."""
        self.late: dict[int, Block] = {}
        """Blocks of the tensors that the backward has stored, by index: all of each."""
        self.sent_late: Any = None
        """Event behind the last copy to those."""
        self.slots: dict[int, torch.Tensor] = {}
        """Kept tensors in the reload buffer, at full shape, by index. Only their stored rows hold values."""
        self.sent: Any = None
        """Event behind the last copy to the host."""
        self.copied: dict[int, Any] = {}
        """Events behind the copies of tensors that may change before that, by index."""
        self.stream: Any = None
        """The compute stream that its layer began on."""
        self.side_streams: set[Any] = set()
        """Other compute streams, on which the layer makes some of what is kept."""
        self.buffer_stream: Any = None
        """The compute stream that the reload buffer was allocated on."""
        self.back: Any = None
        """Event behind the last copy from the host."""
        self.ahead = not placement.kind.recomputes_attention
        """True if the reload may be issued early. Attention is recomputed only where memory is short: then a whole layer's frame
        takes none before its own backward. A tile's takes little."""
        self.first_only = False
        """True if the next replay wants no more than the first tensor: the reload brings no other."""
        self.filed: Any = None
        """The home's side of the frame; see ds_memo.nvme.file_home."""
        self._defer = defer

    @property
    def resident(self) -> bool:
        """True if nothing that is kept goes to the host."""
        return self.placement.kind.on_device

    @property
    def comes_small(self) -> bool:
        """True if its first tensor comes back alone, and takes half of the reload buffer at most."""
        kept = self.layout.kept
        return self.first_only and len(kept) > 1 and 2 * kept[1].buffer_offset <= self.layout.buffer_bytes

    def move(self, state: str) -> None:
        """Go to another state. Raise MemoError if the diagram at the top of this file has no such step."""
        if state not in _NEXT[self.state]:
            raise MemoError(f"frame {self.name} cannot go from '{self.state}' to '{state}'")
        self.state = state

    def tensor(self, kept: Kept) -> torch.Tensor:
        """Return a kept tensor at full shape, during replay. If the frame is swapped, only its stored rows hold values.

        It is a new object each time: autograd gives it a graph, which the frame must not keep.
        """
        if self.state != "ready":
            raise MemoError(f"frame {self.name} was read while '{self.state}'; only a 'ready' frame can be read")
        if (slot := self.slots.get(kept.index)) is not None:
            return slot.detach()
        tensor = self.device[kept.index]
        return tensor.clone() if kept.index in self.changed else tensor.detach()

    def lies_in(self, kept: Kept) -> tuple[Block, int, int]:
        """Return the host block of a stored tensor, where it begins there, and its bytes."""
        late = self.late.get(kept.index)
        return (self.block, kept.host_offset, kept.stored_bytes) if late is None else (late, 0, kept.nbytes)  # type: ignore

    def free_blocks(self, slab: HostSlab) -> None:
        """Free its host blocks. No copy or transfer may use them any more."""
        self.free_late(slab)
        self.free_block(slab)

    def free_block(self, slab: HostSlab) -> None:
        """Free the block of what the forward has stored."""
        if self.block is not None:
            slab.free(self.block)
            self.block = None

    def free_late(self, slab: HostSlab) -> None:
        while self.late:
            index, block = next(iter(self.late.items()))
            self.stored.discard(index)
            slab.free(block)
            del self.late[index]

    def check_unchanged(self) -> None:
        """Raise MemoError if code outside the layer changed a kept tensor in place: a copy may have read either value."""
        for index, tensor in self.device.items():
            if tensor._version != self.versions[index]:
                raise self.changed_in_place(self.layout.kept[index].shape)

    def changed_in_place(self, shape: tuple[int, ...]) -> MemoError:
        """Return the error for a kept tensor of this shape that was changed in place."""
        return MemoError(
            f"frame {self.name}: a tensor of shape {shape} that the layer needs for its backward (an input or a kept output) was "
            "changed in place after the layer ran. torch.utils.checkpoint and plain autograd refuse that too; write the result "
            "to a new tensor."
        )

    def __del__(self) -> None:
        self._defer(self)
