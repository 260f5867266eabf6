"""The op in front of torch's allocator: slots, statistics, streams, pools, threads, arenas that come and go."""

from __future__ import annotations

import gc
import random
import threading

import torch

from ds_memo.ops.allocator import NATIVE, Allocator
from ds_memo.profile.live import LiveBytes, bytes_made
from tests.ops.cuda_scenarios.rig import (
    DEVICE,
    LEAVES_AN_ARENA,
    MIB,
    Slots,
    expandable,
    holds,
    is_standin,
    scenario,
    standin,
    standin_calls,
    write,
)


@scenario
def requests_get_their_slots() -> None:
    slots = Slots((0, 8), (8, 8), (0, 4), (4, 4))
    a, b, c, d = (slots.take(mib) for mib in (8, 8, 4, 4))
    assert [slots.owns(t) for t in (a, b, c, d)] == [True, True, False, False]  # a is still there
    assert b.data_ptr() - a.data_ptr() == 8 * MIB and slots.count("hit") == 2 and slots.count("overlap") == 2
    for value, tensor in enumerate((a, b, c, d)):
        write(tensor, value)
    assert all(holds(tensor, value) for value, tensor in enumerate((a, b, c, d)))
    del a
    slots.again()
    assert slots.owns(slots.take(8))


@scenario
def small_requests_are_torchs() -> None:
    slots = Slots((0, 8))
    assert not slots.owns(torch.empty(MIB - 1, dtype=torch.uint8, device="cuda"))
    assert slots.owns(slots.take(8)) and slots.count("hit") == 1


@scenario
def statistics_stay_true() -> None:
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    slots = Slots((0, 32), (NATIVE, 16))
    assert torch.cuda.memory_allocated() - before == 32 * MIB  # the arena
    hit = slots.take(32)
    assert slots.owns(hit) and torch.cuda.memory_allocated() - before == 32 * MIB
    other = slots.take(16)
    assert torch.cuda.memory_allocated() - before == 48 * MIB
    stats = torch.cuda.memory_stats()
    assert stats["allocated_bytes.all.current"] - before == 48 * MIB and stats["allocated_bytes.all.peak"] - before >= 48 * MIB
    assert torch.cuda.max_memory_allocated() >= 48 * MIB and torch.cuda.memory_reserved() >= 48 * MIB
    assert "allocated" in torch.cuda.memory_summary().lower()
    blocks = [block for segment in torch.cuda.memory_snapshot() for block in segment["blocks"]]
    assert 32 * MIB in [block["size"] for block in blocks if block["state"] == "active_allocated"]
    del other
    torch.cuda.empty_cache()
    write(hit, 9)
    assert holds(hit, 9)
    del hit
    slots.allocator.release()
    assert torch.cuda.memory_allocated() == before
    reserved = torch.cuda.memory_reserved()
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() < reserved
    assert torch.cuda.get_allocator_backend() == "native"


@scenario
def a_kernels_own_memory_counts_in_a_profile() -> None:
    """Storages that no op returns, such as a kernel's workspace, count; garbage does not."""
    circle = [torch.empty(64 * MIB, dtype=torch.uint8, device="cuda")]
    circle.append(circle)
    del circle
    with bytes_made(DEVICE) as count, LiveBytes("cuda") as tensors:
        output = torch.empty(3 * MIB + 5, dtype=torch.uint8, device="cuda")
        workspace = torch.UntypedStorage(16 * MIB, device="cuda")
        assert count.live == count.peak == 19 * MIB + 5 and tensors.peak == 3 * MIB + 5
        del workspace
        assert count.live == 3 * MIB + 5 and count.peak == 19 * MIB + 5
        count.reset_peak()
        assert count.peak == 3 * MIB + 5
        del output
        assert count.live == 0


@scenario
def blocks_of_before_and_after() -> None:
    """Native blocks from before the install, and planned ones from before the uninstall."""
    Allocator(DEVICE).uninstall()
    before = write(torch.empty(4 * MIB, dtype=torch.uint8, device="cuda"), 1)
    allocated = torch.cuda.memory_allocated()
    slots = Slots((0, 8))
    planned = write(slots.take(8), 2)
    assert holds(before, 1)
    del before
    assert torch.cuda.memory_allocated() == allocated + 4 * MIB
    slots.allocator.uninstall()
    fresh = write(slots.take(8), 3)
    assert holds(planned, 2) and not slots.owns(fresh) and slots.allocator.retired_arenas == 1
    del planned
    assert slots.allocator.retired_arenas == 0
    slots.allocator.uninstall()
    assert not slots.allocator.installed and holds(fresh, 3)


@scenario
def a_pass_is_logged() -> None:
    allocator = Allocator(DEVICE)
    allocator.install()
    allocator.profile()
    allocator.phase("embed")
    kept = torch.empty(3 * MIB + 5, dtype=torch.uint8, device="cuda")
    view = torch.empty(2 * MIB, dtype=torch.uint8, device="cuda")[MIB:]
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.empty(4 * MIB, dtype=torch.uint8, device="cuda")  # on another stream: not in this order
    allocator.phase("head")
    threading.Thread(target=lambda: kept.untyped_storage().resize_(0)).run()
    del view
    log = allocator.requests()
    allocator.stop()
    assert [(e.kind, e.phase, e.size) for e in log] == [
        ("enter", "embed", 0),
        ("malloc", "embed", 3 * MIB + 5),
        ("malloc", "embed", 2 * MIB),
        ("elsewhere", "embed", 4 * MIB),
        ("free", None, 0),
        ("enter", "head", 0),
        ("free", None, 0),
        ("free", None, 0),
    ]
    assert [e.id - log[1].id for e in log if e.kind == "free"] == [2, 0, 1]


@scenario
def another_stream_is_served_by_torch() -> None:
    slots = Slots((0, 8))
    with torch.cuda.stream(torch.cuda.Stream()):
        assert not slots.owns(slots.take(8)) and slots.count("stream") == 1
    assert slots.owns(slots.take(8))


@scenario
def record_stream_of_a_native_block() -> None:
    slots = Slots((NATIVE, 8), (0, 8))
    block = slots.take(8)
    block.record_stream(torch.cuda.Stream())
    del block
    assert slots.owns(slots.take(8)) and slots.count("waits") == 0


@scenario
def record_stream_is_waited_for_once() -> None:
    slots, side, other = Slots((0, 8), (0, 8)), torch.cuda.Stream(), torch.cuda.Stream()
    block = slots.take(8)
    for stream in (side, other, side, torch.cuda.current_stream()):
        block[MIB:].record_stream(stream)  # of a view, twice, and of the arena's own stream
    if is_standin():
        standin_calls()
    del block
    if is_standin():
        recorded = [(event, stream) for call, event, stream in standin_calls() if call == "record"]
        assert [stream for _, stream in recorded] == [side.cuda_stream, other.cuda_stream]
    block = slots.take(8)
    assert slots.owns(block) and slots.count("waits") == 1
    if is_standin():
        compute = torch.cuda.current_stream().cuda_stream
        assert standin_calls() == [("wait", event, compute) for event, _ in recorded]
    del block
    slots.again()
    assert slots.owns(slots.take(8)) and slots.count("waits") == 1


@standin
def a_dropped_arena_is_waited_for() -> None:
    slots, side = Slots((0, 8), (8, 8)), torch.cuda.Stream()
    blocks = [slots.take(8), slots.take(8)]
    blocks[0].record_stream(side)
    blocks[1].record_stream(side)
    blocks.pop()
    slots.allocator.release()
    standin_calls()
    blocks.pop()
    assert slots.allocator.retired_arenas == 0
    calls = standin_calls()
    assert [call for call, _, _ in calls] == ["record", "wait", "wait"]
    assert {stream for call, _, stream in calls if call == "wait"} == {torch.cuda.current_stream().cuda_stream}


@scenario
def memory_pools_go_past_the_plan() -> None:
    slots = Slots((0, 8))
    pool = torch.cuda.MemPool()
    with torch.cuda.use_mem_pool(pool):
        inside = write(slots.take(8), 1)
    assert not slots.owns(inside) and slots.count("pool") == 1
    assert slots.owns(slots.take(8)) and holds(inside, 1)
    assert any(segment["total_size"] >= 8 * MIB for segment in pool.snapshot())
    del inside, pool


@scenario
def a_block_of_two_streams_that_dies_in_a_pool() -> None:
    slots, side = Slots((0, 8)), torch.cuda.Stream()
    block = slots.take(8)
    block.record_stream(side)
    with torch.cuda.use_mem_pool(torch.cuda.MemPool()):
        del block
        assert slots.allocator.live_blocks == 1  # an event of a stream that may be captured cannot be used outside
    assert slots.allocator.live_blocks == 0
    slots.again()
    assert slots.owns(slots.take(8)) and slots.count("waits") == 1


@scenario
def an_arena_that_does_not_fit() -> None:
    slots = Slots((0, 8))
    before = slots.allocator.arena
    try:
        slots.allocator.reserve(1 << 50)
    except torch.OutOfMemoryError:
        pass
    else:
        raise AssertionError("a pebibyte was reserved")
    assert slots.allocator.arena == before and slots.owns(slots.take(8))


@scenario
def an_empty_arena_gives_way() -> None:
    """An empty arena is freed for a request that torch's allocator has no room for, in front of the op or through it. An arena
    with a live block is not."""
    slots = Slots((0, 64))
    torch.cuda.empty_cache()
    limit = torch.cuda.memory_reserved() + 32 * MIB
    torch.cuda.set_per_process_memory_fraction(limit / torch.cuda.mem_get_info()[1])
    before = slots.allocator.stats()["gave_way"]
    try:
        inside = write(slots.take(64), 7)
        assert slots.owns(inside)
        try:
            torch.empty(80 * MIB, dtype=torch.uint8, device="cuda")
        except torch.OutOfMemoryError:
            pass
        else:
            raise AssertionError("there was room next to the arena: the limit does nothing")
        assert holds(inside, 7) and slots.allocator.stats()["gave_way"] == before
        del inside
        beside = torch.empty(80 * MIB, dtype=torch.uint8, device="cuda")
        assert not slots.owns(beside) and slots.allocator.arena_bytes == 0
        assert slots.allocator.stats()["gave_way"] == before + 1
        del beside
        slots.allocator.reserve(64 * MIB)
        raw = torch.cuda.caching_allocator_alloc(80 * MIB)
        assert slots.allocator.arena_bytes == 0 and slots.allocator.stats()["gave_way"] == before + 2
        torch.cuda.caching_allocator_delete(raw)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


@scenario
def random_requests() -> None:
    """Right or wrong sizes, overlapping slots, two streams, changing arenas: every block keeps its contents."""
    draw = random.Random(0)
    allocator = Allocator(DEVICE)
    allocator.install()
    side = torch.cuda.Stream()
    visits = [[(draw.randrange(1, 5) * MIB, draw.randrange(0, 60) * MIB) for _ in range(12)] for _ in range(20)]
    allocator.load_plan(0, [("embed", visit) for visit in visits])
    before, alive, value = allocator.stats(), [], 0
    for _ in range(15):
        allocator.reserve(draw.choice((48, 64)) * MIB)
        allocator.follow(0)
        for visit in visits:
            allocator.phase("embed")
            for size, _offset in visit:
                on_side = draw.random() < 0.05
                with torch.cuda.stream(side if on_side else None):
                    value = (value + 1) % 251
                    wrong = MIB if draw.random() < 0.02 else 0
                    block = write(torch.empty(size + wrong, dtype=torch.uint8, device="cuda"), value)
                if on_side:
                    side.synchronize()
                elif draw.random() < 0.2:
                    block.record_stream(side)
                alive.append((block, value))
                del block
                while len(alive) > 12 or (alive and draw.random() < 0.4):
                    block, written = alive.pop(draw.randrange(len(alive)))
                    assert holds(block[:: 64 << 10].contiguous() if not is_standin() else block, written)
                    del block
    allocator.stop()
    after = allocator.stats()
    for name in ("hit", "overlap", "size", "abandoned", "stream", "arena", "waits"):
        assert after[name] > before[name], f"no {name}: nothing was shown about it"
    alive.clear()
    allocator.release()
    assert allocator.retired_arenas == 0 and allocator.stats()["live_bytes"] == before["live_bytes"]


@scenario
def a_planned_block_has_an_ipc_handle() -> None:
    """No process receives the shared block, so torch keeps it and its arena."""
    if expandable():
        return
    slots = Slots((0, 8), (8, 8))
    first, second = slots.take(8), slots.take(8)
    shared = [tensor.untyped_storage()._share_cuda_() for tensor in (first, second)]
    handles, offsets = [s[1] for s in shared], [s[3] for s in shared]
    assert handles[0] == handles[1] and offsets[1] - offsets[0] == 8 * MIB
    LEAVES_AN_ARENA.add("a_planned_block_has_an_ipc_handle")
