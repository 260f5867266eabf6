"""A frame: what one layer call leaves behind for its backward, and the states it goes through.

    recording ─► swapping ─► away ─► returning ─► ready ─► done ─► returning …   (swapped; `done` returns on retain_graph,
                                                                                  `returning` to `away` if it was not the next)
    recording ─► done ─► ready ─► done …                                          (resident)

A frame lives as long as the graph of its layer call. Its device memory is bounded by

    recording, swapping    the kept outputs, where they were born
    away, done             nothing
    returning, ready       one buffer of `Layout.buffer_bytes`
    resident               the kept outputs, until the graph goes
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ds_memo.errors import MemoError
from ds_memo.placement import Placement
from ds_memo.units import ALIGN, round_up

if TYPE_CHECKING:  # not imported: the estimator runs the schedule without torch
    import torch

    from ds_memo.swap.host_slab import Block

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
    """One tensor that a frame keeps, and where its bytes lie."""

    index: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    rows: int
    """Leading rows, of the dimension that is slowest in memory, that are stored; the others are recomputed."""
    stored_bytes: int
    host_offset: int
    buffer_offset: int

    def rows_of(self, tensor: torch.Tensor) -> torch.Tensor:
        """The stored rows of a tensor of this shape and stride, as a flat view. It is dense, so they are its first bytes."""
        return tensor.as_strided((self.stored_bytes // self.dtype.itemsize,), (1,))

    def rows_in(self, block: Block) -> list[torch.Tensor]:
        """The stored rows inside a frame's host block, in order: flat views, one per piece of the block that they lie in."""
        return [view.view(self.dtype) for view in block.views(self.host_offset, self.stored_bytes)]

    def pairs(self, host: list[torch.Tensor], tensor: torch.Tensor) -> Iterable[tuple[torch.Tensor, torch.Tensor]]:
        """What to copy between the host and a tensor of this shape: (part of the host, the same part of the stored rows)."""
        rows = self.rows_of(tensor)
        return [(host[0], rows)] if len(host) == 1 else zip(host, rows.split([part.numel() for part in host]), strict=True)

    def slot_in(self, buffer: torch.Tensor) -> torch.Tensor:
        """The whole tensor inside a frame's device buffer.

        Not an autograd or version-counting view of the buffer: a slot that is changed in place does not touch its neighbours.
        """
        import torch

        slot = torch.empty(0, dtype=self.dtype, device=buffer.device)
        return slot.set_(buffer.untyped_storage(), self.buffer_offset // self.dtype.itemsize, self.shape, self.stride)


@dataclass
class Layout:
    """What a frame keeps and how many bytes that takes."""

    kept: list[Kept] = field(default_factory=list)
    host_bytes: int = 0
    buffer_bytes: int = 0

    @property
    def stored_bytes(self) -> int:
        return sum(kept.stored_bytes for kept in self.kept)

    def add(self, tensor: torch.Tensor, rows: int | None = None) -> Kept:
        """Keep `rows` leading rows (absent: everything) of tensors shaped like `tensor`, which must be dense."""
        order = dense_order(tensor)
        if order is None:
            raise MemoError(f"only dense tensors can be kept, got shape {tuple(tensor.shape)}, stride {tensor.stride()}")
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


def dense_order(tensor: torch.Tensor) -> tuple[int, ...] | None:
    """Dimensions from slowest to fastest if the tensor fills its memory without gaps or overlaps, else None."""
    if tensor.dim() == 0 or tensor.numel() == 0:
        return None
    order = tuple(sorted(range(tensor.dim()), key=lambda dim: (tensor.stride(dim), tensor.shape[dim]), reverse=True))
    return order if tensor.permute(order).is_contiguous() else None


class Frame:
    """See the module's head. Only :class:`ds_memo.swap.engine.SwapEngine` moves frames."""

    _defer: Callable[[Frame], None] = staticmethod(lambda frame: None)  # dynamo makes frames without __init__

    def __init__(self, name: str, placement: Placement, age: int, defer: Callable[[Frame], None]) -> None:
        self.name = name
        self.placement = placement
        self.age = age
        """Serial number in order of begin; a backward usually goes from high to low."""
        self.replays = 0
        self.state = "recording"
        self.layout = Layout()
        self.device: dict[int, torch.Tensor] = {}
        """Kept tensors that are on the device where they were born, by index."""
        self.versions: dict[int, int] = {}
        """Their version counters when they were kept."""
        self.changed: set[int] = set()
        """Of a resident frame: kept tensors that the layer changes in place, and will again in each replay."""
        self.block: Block | None = None
        self.rows: dict[int, list[torch.Tensor]] = {}
        """Where in the block each kept tensor's rows were sent: the result of `Kept.rows_in`, by index."""
        self.slots: dict[int, torch.Tensor] = {}
        """Kept tensors in the reload buffer, whole; only their stored rows hold values."""
        self.sent: Any = None
        """Event behind the last copy to the host."""
        self.back: Any = None
        """Event behind the last copy from the host."""
        self._defer = defer

    @property
    def resident(self) -> bool:
        """True if nothing that is kept goes to the host."""
        return self.placement.kind.on_device

    @property
    def ahead(self) -> bool:
        """True if the reload may be issued before it is wanted. Attention is recomputed only for want of memory: such a frame
        takes none before it is wanted."""
        return not self.placement.kind.recomputes_attention

    def move(self, state: str) -> None:
        if state not in _NEXT[self.state]:
            raise MemoError(f"frame {self.name} cannot go from '{self.state}' to '{state}'")
        self.state = state

    def tensor(self, kept: Kept) -> torch.Tensor:
        """A kept tensor, whole, during replay. Only its stored rows hold values unless the frame is resident."""
        if self.state != "ready":
            raise MemoError(f"frame {self.name} was read while '{self.state}'; only a 'ready' frame can be read")
        if not self.resident:
            return self.slots[kept.index]
        tensor = self.device[kept.index]
        return tensor.clone() if kept.index in self.changed else tensor.detach()

    def check_unchanged(self) -> None:
        """Raise if code outside the layer changed a kept tensor in place: a copy under way may have read either value."""
        for index, tensor in self.device.items():
            if tensor._version != self.versions[index]:
                raise MemoError(
                    f"frame {self.name}: a tensor of shape {self.layout.kept[index].shape} that the layer needs for its backward "
                    "(an input or a kept output) was changed in place after the layer ran. torch.utils.checkpoint and plain "
                    "autograd refuse that too; write the result to a new tensor."
                )

    def __del__(self) -> None:
        self._defer(self)
