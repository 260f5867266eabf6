"""Frames: the state machine, and layouts over odd shapes and strides."""

from __future__ import annotations

import itertools

import pytest
import torch

from ds_memo.errors import MemoError
from ds_memo.placement import ON_DEVICE, SWAPPED
from ds_memo.swap.frame import Frame, Kept, Layout, ReloadBuffer, dense_order
from ds_memo.swap.host_pool import Range
from ds_memo.swap.host_slab import Block
from ds_memo.swap.pinned_segments import Segment
from ds_memo.swap.streams import bytes_of
from ds_memo.units import ALIGN
from tests.swap.crumbs import crumbled

LEGAL = {
    ("recording", "swapping"),
    ("recording", "done"),
    ("swapping", "away"),
    ("swapping", "done"),
    ("away", "returning"),
    ("returning", "ready"),
    ("returning", "away"),
    ("ready", "done"),
    ("done", "returning"),
    ("done", "ready"),
}
STATES = ["recording", "swapping", "away", "returning", "ready", "done"]


def frame(name: str = "model.layers.7", resident: bool = False) -> Frame:
    return Frame(name, ON_DEVICE if resident else SWAPPED, 1, lambda _: None)


def test_each_step_is_legal_or_raises_with_the_frames_name():
    for now, then in itertools.product(STATES, STATES):
        one = frame()
        one.state = now
        if (now, then) in LEGAL:
            one.move(then)
            assert one.state == then
        else:
            with pytest.raises(MemoError, match=rf"model\.layers\.7 cannot go from '{now}' to '{then}'"):
                one.move(then)
            assert one.state == now


def test_only_a_ready_frame_can_be_read():
    for state in STATES:
        one = frame()
        kept = one.layout.add(torch.empty(4, 4))
        one.state = state
        with pytest.raises(KeyError if state == "ready" else MemoError, match=f"was read while '{state}'|0"):
            one.tensor(kept)


# ---- layouts

S, D = 5, 3
TENSORS = {
    "gemm output": lambda: torch.randn(7, 13),
    "one row": lambda: torch.randn(1, 13),
    "one column": lambda: torch.randn(13, 1),
    "one element": lambda: torch.randn(1, 1),
    "vector": lambda: torch.randn(17),
    "SDPA output, transposed": lambda: torch.randn(2, S, 4, D).transpose(1, 2),
    "SDPA output, batch of one": lambda: torch.randn(1, S, 4, D).transpose(1, 2),
    "SDPA output, one head": lambda: torch.randn(2, S, 1, D).transpose(1, 2),
    "sequence first": lambda: torch.randn(S, 2, 6).transpose(0, 1),
    "fully reversed": lambda: torch.randn(2, 3, 4, 5).permute(3, 2, 1, 0),
    "log-sum-exp in float32": lambda: torch.randn(2, 4, S),
    "bfloat16": lambda: torch.randn(3, 5).bfloat16(),
    "float64": lambda: torch.randn(3, 5, dtype=torch.float64),
    "complex": lambda: torch.randn(3, 5, dtype=torch.complex128),
    "indices": lambda: torch.randint(-9, 9, (3, 5)),
    "bytes": lambda: torch.randint(0, 255, (3, 5), dtype=torch.uint8),
    "bools": lambda: torch.rand(3, 5) > 0.5,
    "inner view": lambda: torch.randn(9, 5)[2:6],
}


def host_block(nbytes: int, crumbs: bool = False) -> tuple[Block, torch.Tensor]:
    """Return a block and the bytes behind it, in one piece or in several pieces in another order."""
    memory = torch.full((nbytes,), 0xAB, dtype=torch.uint8)
    pieces = [Range(Segment(memory), 0, nbytes)]
    return Block(crumbled(pieces, seed=1) if crumbs else pieces), memory


def pairs(kept: Kept, block: Block, tensor: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return pairs to copy between: (part on the host, the same part of the tensor's stored rows)."""
    parts = block.parts(kept.host_offset, kept.stored_bytes)
    return [(bytes_of(memory, begin, nbytes), bytes_of(tensor, at, nbytes)) for memory, begin, at, nbytes in parts]


def send(kept: Kept, block: Block, tensor: torch.Tensor) -> None:
    for there, here in pairs(kept, block, tensor):
        there.copy_(here)


def fetch(kept: Kept, block: Block, slot: torch.Tensor) -> None:
    for there, here in pairs(kept, block, slot):
        here.copy_(there)


def filled(nbytes: int, value: int) -> tuple[ReloadBuffer, torch.Tensor]:
    """Return a reload buffer, and its bytes."""
    buffer = ReloadBuffer(nbytes, torch.device("cpu"))
    return buffer, buffer[torch.uint8].fill_(value)


@pytest.mark.parametrize("times", [1, 40])
@pytest.mark.parametrize("crumbs", [False, True], ids=["one piece", "many pieces"])
def test_kept_tensors_round_trip_bit_exactly_with_their_strides(crumbs, times):
    for make in TENSORS.values():
        round_trip(make(), crumbs, times)


def round_trip(tensor: torch.Tensor, crumbs: bool, times: int) -> None:
    if times > 1:  # as dense, and long enough to cross many borders
        order = dense_order(tensor)
        long = torch.cat([tensor.permute(order)] * times)
        tensor = long.permute([order.index(dim) for dim in range(long.dim())])
    layout = Layout()
    layout.add(torch.empty(3, 1, dtype=torch.uint8))  # an odd number of bytes before it
    kept = layout.add(tensor)
    block, host = host_block(layout.host_bytes, crumbs)
    views, buffer = filled(layout.buffer_bytes, 0xCD)

    send(kept, block, tensor)
    slot = kept.slot_in(views)
    fetch(kept, block, slot)

    assert slot.dtype == tensor.dtype
    assert slot.stride() == tensor.stride()
    assert torch.equal(slot, tensor)
    parts = block.parts(kept.host_offset, kept.stored_bytes)
    assert len(parts) == (-(-kept.stored_bytes // ALIGN) if crumbs else 1), "one copy for each piece"
    assert slot.untyped_storage()._cdata == buffer.untyped_storage()._cdata
    assert kept.stored_bytes == tensor.numel() * tensor.itemsize
    assert torch.cat(block.views(0, ALIGN)).tolist() == [0xAB] * ALIGN, "the neighbour was written to"
    assert host.ne(0xAB).sum() <= kept.stored_bytes, "the neighbour was written to"
    assert buffer[:3].tolist() == [0xCD] * 3, "the neighbour was written to"


@pytest.mark.parametrize("crumbs", [False, True], ids=["one piece", "many pieces"])
@pytest.mark.parametrize("rows", [0, 1, 3, 7])
def test_rows_are_the_leading_ones(rows, crumbs):
    tensor = torch.arange(7 * 40.0).view(7, 40)
    layout = Layout()
    kept = layout.add(tensor, rows)
    assert kept.stored_bytes == layout.stored_bytes == rows * 160
    block, _ = host_block(layout.host_bytes, crumbs)
    send(kept, block, tensor)
    slot = kept.slot_in(filled(layout.buffer_bytes, 0)[0])
    assert slot.shape == tensor.shape, "the slot is whole whatever the host holds"
    fetch(kept, block, slot)
    assert torch.equal(slot[:rows], tensor[:rows])
    assert not slot[rows:].any()


def test_offsets_are_aligned_and_do_not_overlap():
    layout = Layout()
    tensors = [make() for make in TENSORS.values()]
    kept = [layout.add(tensor, max(1, tensor.shape[dense_order(tensor)[0]] // 2)) for tensor in tensors]
    for before, after in itertools.pairwise(kept):
        assert before.host_offset + before.stored_bytes <= after.host_offset
    for item, after in zip(kept, [*(k.buffer_offset for k in kept[1:]), layout.buffer_bytes], strict=True):
        whole = torch.Size(item.shape).numel() * item.dtype.itemsize
        assert item.buffer_offset + whole <= after
        assert item.host_offset % ALIGN == item.buffer_offset % ALIGN == 0
    assert layout.host_bytes % ALIGN == layout.buffer_bytes % ALIGN == 0
    assert layout.stored_bytes == sum(item.stored_bytes for item in kept)


def test_changing_a_slot_in_place_does_not_count_on_its_neighbours():
    layout = Layout()
    one, two = layout.add(torch.empty(4, 4)), layout.add(torch.empty(4, 4))
    views, buffer = filled(layout.buffer_bytes, 0)
    first, second = one.slot_in(views), two.slot_in(views)
    before = second._version, buffer._version
    first.add_(1)
    assert (second._version, buffer._version) == before


NOT_DENSE = {
    "scalar": torch.tensor(1.0),
    "empty": torch.empty(0, 4),
    "every other column": torch.empty(4, 8)[:, ::2],
    "a slice of columns": torch.empty(4, 8)[:, 2:5],
    "expanded": torch.empty(1, 4).expand(3, 4),
    "overlapping windows": torch.empty(9).unfold(0, 4, 1),
}


def test_tensors_with_gaps_or_overlaps_are_refused():
    for tensor in NOT_DENSE.values():
        assert dense_order(tensor) is None
        with pytest.raises(MemoError, match="only dense tensors"):
            Layout().add(tensor)
