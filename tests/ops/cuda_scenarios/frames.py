"""The swap engine's frames, and its unsplit blocks."""

from __future__ import annotations

import gc
from unittest import mock

import torch
from torch import nn

import ds_memo
from ds_memo.memory import device as device_memory
from ds_memo.memory.device import join_split_blocks, keep_blocks_whole
from ds_memo.placement import SWAPPED
from ds_memo.swap import streams as streams_module
from ds_memo.swap.engine import SwapEngine
from ds_memo.swap.frame import Frame, Layout
from ds_memo.swap.host_pool import HostPool
from ds_memo.swap.host_slab import HostSlab
from ds_memo.swap.streams import COMPUTE, D2H, H2D, CudaStreams
from tests.ops.cuda_scenarios.rig import (
    DEVICE,
    MIB,
    expandable,
    holds,
    is_standin,
    scenario,
    slow_links,
    standin,
    standin_calls,
    write,
)


@scenario
def split_blocks_are_joined() -> None:
    """deepspeed.zero.Init leaves such blocks: pieces of the block that they were cut from."""
    if expandable():  # whose parts are freed by themselves
        return
    torch.cuda.empty_cache()
    whole = torch.empty(96 * MIB, dtype=torch.uint8, device=DEVICE)
    block = whole.data_ptr()
    del whole
    pieces = [write(torch.empty(24 * MIB, dtype=torch.uint8, device=DEVICE), value) for value in range(3)]
    part, elsewhere = pieces[1][7:9], torch.empty(40 * MIB, dtype=torch.uint8, device=DEVICE)
    unmoved = elsewhere.data_ptr()
    assert all(0 <= piece.data_ptr() - block < 96 * MIB for piece in pieces)
    keep_blocks_whole(DEVICE, True)
    assert not device_memory._blocks_are_whole()  # they could not be
    keep_blocks_whole(DEVICE, False)
    join_split_blocks(DEVICE, [*pieces, part, elsewhere, torch.empty(2), torch.empty(0, device=DEVICE)])
    keep_blocks_whole(DEVICE, True)
    try:
        assert device_memory._blocks_are_whole() and elsewhere.data_ptr() == unmoved
        assert all(holds(piece, value) for value, piece in enumerate(pieces)) and holds(part, 1)
        assert part.data_ptr() == pieces[1].data_ptr() + 7
    finally:
        keep_blocks_whole(DEVICE, False)


def _orders(streams: CudaStreams) -> list[tuple[str, ...]]:
    """Return the stand-in's waits, successful queries and copies: what, where, and the stream of the event."""
    names = {streams._copy_streams[name].cuda_stream: name for name in (D2H, H2D)}
    made, seen = {}, []  # event → the stream that it was recorded on
    for call, what, stream in standin_calls():
        where = names.get(stream, COMPUTE)
        if call == "record":
            made[what] = where
        elif call == "copy":
            seen.append((call, where))
        elif call in ("wait", "done"):
            seen.append((call, where, made[what]))
    return seen


def _two_tensors_go(engine: SwapEngine, layout: Layout) -> Frame:
    """Swap a frame of two tensors, the second in part, and have it come back."""
    tensors = [write(torch.empty(4, MIB, dtype=torch.uint8, device=DEVICE), value) for value in (3, 5)]
    kept = [layout.add(tensor, rows) for tensor, rows in zip(tensors, (4, 2), strict=True)]
    frame = engine.begin("layer 0", SWAPPED)
    engine.adopt(frame, layout)
    if is_standin():
        assert [size for call, _, size in standin_calls() if call == "register"] == [layout.host_bytes]
    if not is_standin():
        torch.cuda._sleep(100_000_000)  # else copies may be over before compute would wait for them
    for place, tensor in zip(kept, tensors, strict=True):
        engine.keep(frame, place, tensor)
    engine.end(frame)
    tensors.clear()
    del tensor
    engine.bring_back(frame)
    return frame


@scenario
def a_frame_goes_to_the_host_and_back() -> None:
    """Every copy waits for an event of the stream that made or freed its memory, and uses locked host memory."""
    slab, streams = HostSlab(64 * MIB, HostPool(DEVICE)), CudaStreams(DEVICE)
    engine = SwapEngine(streams, slab, DEVICE)
    layout = Layout()
    with slow_links():
        frame = _two_tensors_go(engine, layout)
    if is_standin():
        away = [("wait", D2H, COMPUTE), ("copy", D2H)] * 2 + [("wait", COMPUTE, D2H)]
        seen = _orders(streams)
        assert seen == [*away, ("wait", H2D, COMPUTE), *[("copy", H2D)] * 2, ("wait", COMPUTE, H2D)], seen
    first, second = (frame.tensor(place) for place in layout.kept)
    assert holds(first, 3) and holds(second[:2], 5)
    assert streams.stall_s()[D2H] > 0 and streams.stall_s()[H2D] > 0
    engine.replayed(frame)
    del first, second, frame
    engine.close()
    assert slab.size == 0
    if is_standin():
        gc.collect()
        assert "unregister" in [call for call, _, _ in standin_calls()]


@scenario
def a_frame_goes_where_the_runtime_hides_its_symbols() -> None:
    """PyTorch issues the copies, in the same order."""
    with mock.patch.object(streams_module, "_memcpy", lambda: None):
        a_frame_goes_to_the_host_and_back()


@standin
def compute_waits_for_no_copy_that_is_over() -> None:
    """A query has seen its event complete. Copies wait for compute as ever, and nothing is counted as a stall."""
    slab, streams = HostSlab(64 * MIB, HostPool(DEVICE)), CudaStreams(DEVICE)
    engine = SwapEngine(streams, slab, DEVICE)
    frame = _two_tensors_go(engine, Layout())
    away = [("wait", D2H, COMPUTE), ("copy", D2H)] * 2 + [("done", COMPUTE, D2H)]
    seen = _orders(streams)
    assert seen == [*away, ("wait", H2D, COMPUTE), *[("copy", H2D)] * 2, ("done", COMPUTE, H2D)], seen
    assert streams.stall_s() == {D2H: 0.0, H2D: 0.0}
    engine.replayed(frame)
    del frame
    engine.close()


@scenario
def attaching_joins_split_blocks() -> None:
    """Weights, a gradient and cuBLAS's workspaces lie in a block that scratch memory has left in torch's cache."""
    if expandable():
        return
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()
    torch.empty(256 * MIB, dtype=torch.uint8, device=DEVICE)
    model = nn.Sequential(*(nn.Linear(1024, 1024, bias=False, device=DEVICE) for _ in range(3)))
    model(torch.ones(1, 1024, device=DEVICE)).sum().backward()
    tensors = [tensor for p in model.parameters() for tensor in (p, p.grad)]
    (large,) = (s for s in torch.cuda.memory_snapshot() if s["total_size"] == 256 * MIB)
    inside = sum(tensor.nbytes for tensor in tensors if 0 <= tensor.data_ptr() - large["address"] < 256 * MIB)
    assert 0 < inside <= large["allocated_size"], (inside, large)  # the rest are workspaces; torch 2.15 has none there
    handle = ds_memo.attach(model, {"alpha": 0.0, "resident_layers": 0, "host_memory_gib": 1}, layers=["0", "1", "2"])
    keep_blocks_whole(DEVICE, True)
    try:
        assert device_memory._blocks_are_whole()
    finally:
        keep_blocks_whole(DEVICE, False)
        handle.detach()
