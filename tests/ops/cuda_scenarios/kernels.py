"""Scenarios with real kernels: computed values, a slow reader, graphs, another process, DeepSpeed."""

from __future__ import annotations

import torch

from tests.ops.cuda_scenarios.rig import DEVICE, MIB, Slots, gpu, holds
from tests.ops.rig import Rig, same


@gpu
def a_planned_pass() -> None:
    rig = Rig(DEVICE, rows=1024)
    rig.forward_and_backward()
    reference = rig.forward_and_backward()
    rig.planned()
    for _ in range(3):
        with rig.counting() as counts:
            assert same(rig.follow(), reference)
        assert counts == {"hit": rig.requests}
    rig.allocator.release()


def _read_by_a_side_stream(recorded: bool) -> bool:
    """Return True if a slow reader on another stream read the right values although the block was freed and rewritten."""
    seen = torch.empty(8 * MIB, dtype=torch.uint8, device="cuda")  # before the pass: it is not planned
    slots, side = Slots((0, 8), (0, 8)), torch.cuda.Stream()
    block = slots.take(8).fill_(1)
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        torch.cuda._sleep(200_000_000)
        seen.copy_(block)
    if recorded:
        block.record_stream(side)
    address = block.data_ptr()
    del block
    block = slots.take(8)
    assert block.data_ptr() == address
    block.fill_(2)
    torch.cuda.synchronize()
    return bool((seen == 1).all())


@gpu
def a_side_stream_still_reads() -> None:
    assert _read_by_a_side_stream(recorded=True)
    assert not _read_by_a_side_stream(recorded=False), "the reader was too fast: nothing was tested"


@gpu
def a_graph_is_captured() -> None:
    slots, side = Slots((0, 8), (8, 8)), torch.cuda.Stream()
    x = slots.take(8).fill_(1)
    block = slots.take(8)
    block.record_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = x + 1
        z = y * 2
        del block
    assert slots.owns(x) and not slots.owns(y) and not slots.owns(z) and slots.count("pool") >= 2
    for value in (3, 5):
        x.fill_(value)
        graph.replay()
        torch.cuda.synchronize()
        assert holds(z, 2 * (value + 1))
    slots.again()
    assert not slots.owns(slots.take(8)) and slots.owns(slots.take(8))  # x is still there; block is not
    del graph, x, y, z
