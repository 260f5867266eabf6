"""The op on CUDA, against everything else that torch does with device memory.

    python -m tests.ops.cuda_scenarios            # all that this machine can run; one line each, ends with 1 if one failed

Most run over benchmarks/emulator.cpp too, where device memory is host memory, copies happen at once and kernels do nothing: data
is moved by copies alone, and what streams wait for is read from the calls that it notes. Those marked `gpu` need the real thing.
"""

from __future__ import annotations

import ctypes
import gc
import os
import random
import sys
import threading
import traceback
from collections.abc import Callable

import torch

from ds_memo.ops.allocator import NATIVE, Allocator
from ds_memo.profile import device_memory
from ds_memo.profile.device_memory import join_split_blocks, keep_blocks_whole
from ds_memo.profile.live import LiveBytes, bytes_made
from ds_memo.swap.engine import SwapEngine
from ds_memo.swap.frame import Layout
from ds_memo.swap.pool import HostPool
from ds_memo.swap.slab import HostSlab
from ds_memo.swap.streams import COMPUTE, D2H, H2D, CudaStreams
from tests.ops.rig import Rig, same

MIB = 1 << 20
DEVICE = torch.device("cuda", 0)
SCENARIOS: dict[str, Callable[[], None]] = {}
ON_A_GPU: set[str] = set()
ON_A_STANDIN: set[str] = set()
LEAVES_AN_ARENA = {"a_planned_block_has_an_ipc_handle"}


def scenario(run: Callable[[], None]) -> Callable[[], None]:
    SCENARIOS[run.__name__] = run
    return run


def gpu(run: Callable[[], None]) -> Callable[[], None]:
    ON_A_GPU.add(run.__name__)
    return scenario(run)


def standin(run: Callable[[], None]) -> Callable[[], None]:
    ON_A_STANDIN.add(run.__name__)
    return scenario(run)


def is_standin() -> bool:
    return hasattr(ctypes.CDLL(None), "emulated_calls")


def expandable() -> bool:
    """Whether torch's own blocks are in expandable segments: where the driver cannot share those, neither can we."""
    return "expandable_segments:True" in os.environ.get("PYTORCH_CUDA_ALLOC_CONF", "")


def standin_calls() -> list[tuple[str, int, int]]:
    """(what, event or block, stream or bytes) since the last time."""
    take = ctypes.CDLL(None).emulated_calls
    take.restype = ctypes.c_char_p
    return [(call, int(a), int(b)) for call, a, b in map(str.split, take().decode().splitlines())]


class Slots:
    """A visit with the given slots in an arena that just holds them; `take` makes the next request.

    Args:
        slots: (offset, bytes) in MiB.
    """

    def __init__(self, *slots: tuple[int, int]) -> None:
        self.allocator = Allocator(DEVICE)
        self.allocator.install()
        places = [(size * MIB, NATIVE if offset == NATIVE else offset * MIB) for offset, size in slots]
        self.allocator.load_plan(0, [("embed", places)] * 8)
        self.allocator.reserve(max(offset + size for size, offset in places if offset != NATIVE))
        self.allocator.follow(0)
        self.allocator.phase("embed")
        self._before = self.allocator.stats()

    def again(self) -> None:
        """From the first slot on."""
        self.allocator.phase("embed")

    def take(self, mib: int) -> torch.Tensor:
        return torch.empty(mib * MIB, dtype=torch.uint8, device="cuda")

    def owns(self, tensor: torch.Tensor) -> bool:
        return self.allocator.owns(tensor.data_ptr())

    def count(self, name: str) -> int:
        return self.allocator.stats()[name] - self._before[name]


def write(tensor: torch.Tensor, value: int) -> torch.Tensor:
    return tensor.copy_(torch.full(tensor.shape, value, dtype=torch.uint8))


def holds(tensor: torch.Tensor, value: int) -> bool:
    return bool((tensor.cpu() == value).all())


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
    """Storages that no op returns, as a kernel's workspace is none; not what is garbage by then."""
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
def history_is_recorded() -> None:
    torch.cuda.memory._record_memory_history(max_entries=1000)
    slots = Slots((0, 8), (NATIVE, 8))
    blocks = [slots.take(8), slots.take(8)]
    assert slots.count("hit") == 1
    snapshot = torch.cuda.memory._snapshot()
    torch.cuda.memory._record_memory_history(enabled=None)
    assert snapshot["segments"] and any(entry["action"] == "alloc" for trace in snapshot["device_traces"] for entry in trace)
    del blocks


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
def a_pass_on_another_stream_than_the_arena() -> None:
    slots = Slots((0, 8))
    with torch.cuda.stream(torch.cuda.Stream()):
        slots.allocator.follow(0)
        slots.again()
        assert not slots.owns(slots.take(8)) and slots.count("stream") == 1


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
        assert slots.allocator.live_blocks == 1  # an event of a stream that may be captured is of no use outside
    assert slots.allocator.live_blocks == 0
    slots.again()
    assert slots.owns(slots.take(8)) and slots.count("waits") == 1


@scenario
def frees_from_other_threads() -> None:
    slots = Slots(*((i, 1) for i in range(32)))
    for _ in range(5):
        blocks = [write(slots.take(1), i) for i in range(32)]
        assert all(slots.owns(block) and holds(block, i) for i, block in enumerate(blocks))
        threads = [threading.Thread(target=blocks[i::4].clear) for i in range(4)]
        halves = [blocks[:16], blocks[16:]]
        blocks.clear()
        threads += [threading.Thread(target=half.clear) for half in halves]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        del halves, threads
        assert slots.allocator.live_blocks == 0
        slots.again()


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
    """To what torch's allocator has no room for beside it, in front of the op or through it; not while something lives in it."""
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
            raise AssertionError("there was room beside the arena: the limit is none")
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
def no_native_calls_once_warm() -> None:
    slots = Slots((0, 8), (8, 8), (NATIVE, 4))

    def passes(count: int) -> dict[str, int]:
        for _ in range(count):
            slots.allocator.follow(0)
            slots.again()
            blocks = [slots.take(mib) for mib in (8, 8, 4)]
            del blocks
        return torch.cuda.memory_stats()

    warm = passes(3)
    if is_standin():
        standin_calls()
    after = passes(50)
    for name in ("num_device_alloc", "num_device_free"):
        assert after[name] == warm[name]
    assert not is_standin() or standin_calls() == []
    assert slots.count("hit") == 106


@scenario
def random_requests() -> None:
    """Right or wrong sizes, overlapping slots, two streams, arenas that change: what is written is what is read."""
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
    """Nobody receives what is shared here, so torch keeps it, and so its arena."""
    if expandable():
        return LEAVES_AN_ARENA.clear()
    slots = Slots((0, 8), (8, 8))
    first, second = slots.take(8), slots.take(8)
    shared = [tensor.untyped_storage()._share_cuda_() for tensor in (first, second)]
    handles, offsets = [s[1] for s in shared], [s[3] for s in shared]
    assert handles[0] == handles[1] and offsets[1] - offsets[0] == 8 * MIB


# ---- the swap engine


@scenario
def split_blocks_are_joined() -> None:
    """As deepspeed.zero.Init leaves them: pieces in the block of what they were cut from."""
    if expandable():  # whose parts go back by themselves
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
    assert not device_memory._blocks_are_whole  # they could not be
    keep_blocks_whole(DEVICE, False)
    join_split_blocks(DEVICE, [*pieces, part, elsewhere, torch.empty(2), torch.empty(0, device=DEVICE)])
    keep_blocks_whole(DEVICE, True)
    try:
        assert device_memory._blocks_are_whole and elsewhere.data_ptr() == unmoved
        assert all(holds(piece, value) for value, piece in enumerate(pieces)) and holds(part, 1)
        assert part.data_ptr() == pieces[1].data_ptr() + 7
    finally:
        keep_blocks_whole(DEVICE, False)


@scenario
def a_frame_goes_to_the_host_and_back() -> None:
    """Every copy behind an event of the stream that made or freed its memory, through host memory that is locked."""
    slab, streams = HostSlab(64 * MIB, HostPool(pinned=True)), CudaStreams(DEVICE)
    engine = SwapEngine(streams, slab, DEVICE)
    tensors = [write(torch.empty(4, MIB, dtype=torch.uint8, device=DEVICE), value) for value in (3, 5)]
    layout = Layout()
    kept = [layout.add(tensor, rows) for tensor, rows in zip(tensors, (4, 2), strict=True)]
    frame = engine.begin("layer 0", resident=False)
    engine.adopt(frame, layout)
    if is_standin():
        assert [(call, size) for call, _, size in standin_calls() if call == "register"] == [("register", layout.host_bytes)]
    for place, tensor in zip(kept, tensors, strict=True):
        engine.keep(frame, place, tensor)
    engine.end(frame)
    tensors.clear()
    del tensor
    engine.bring_back(frame)
    if is_standin():
        names = {streams._copy_streams[D2H].cuda_stream: D2H, streams._copy_streams[H2D].cuda_stream: H2D}
        made, seen = {}, []  # event → the stream that it was recorded on
        for call, what, stream in standin_calls():
            where = names.get(stream, COMPUTE)
            if call == "record":
                made[what] = where
            elif call in ("wait", "copy"):
                seen.append((call, where, made[what]) if call == "wait" else (call, where))
        away = [("wait", D2H, COMPUTE), ("copy", D2H)] * 2 + [("wait", COMPUTE, D2H)]
        assert seen == [*away, ("wait", H2D, COMPUTE), *[("copy", H2D)] * 2, ("wait", COMPUTE, H2D)], seen
    first, second = (frame.tensor(place) for place in kept)
    assert holds(first, 3) and holds(second[:2], 5)
    assert streams.stall_s()[D2H] > 0 and streams.stall_s()[H2D] > 0
    engine.replayed(frame)
    del first, second, frame
    engine.close()
    assert slab.size == 0
    if is_standin():
        gc.collect()
        assert "unregister" in [call for call, _, _ in standin_calls()]


# ---- with kernels


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
    """Whether a slow reader on another stream saw what it should, though the block was freed and written anew."""
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


def _child_reads(queue: torch.multiprocessing.Queue, answer: torch.multiprocessing.Queue) -> None:
    tensor = queue.get()
    answer.put(bool((tensor == 7).all().item()))
    tensor.fill_(8)
    torch.cuda.synchronize()
    del tensor
    answer.put("written")


@gpu
def another_process_reads_a_planned_block() -> None:
    if expandable():
        return
    slots = Slots((0, 8), (8, 8))
    block = [slots.take(8), slots.take(8).fill_(7)][1]
    torch.cuda.synchronize()
    context = torch.multiprocessing.get_context("spawn")
    queue, answer = context.Queue(), context.Queue()
    child = context.Process(target=_child_reads, args=(queue, answer))
    child.start()
    queue.put(block)
    assert answer.get(timeout=60) is True and answer.get(timeout=60) == "written"
    child.join(60)
    assert child.exitcode == 0 and holds(block, 8)


@gpu
def a_zero_3_engine() -> None:
    """Loss with planned addresses equal to the loss without, and requests that hit.

    Sequences of 128: over longer ones the backward of attention adds up in the order in which its blocks happen to end.
    """
    losses = {planned: _zero_3_losses(planned) for planned in (False, True)}
    assert losses[True] == losses[False], losses


def _zero_3_losses(planned: bool) -> list[float]:
    import deepspeed
    from transformers import LlamaConfig, LlamaForCausalLM

    import ds_memo

    for name, value in {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29511",
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "1",
    }.items():
        os.environ.setdefault(name, value)
    deepspeed.init_distributed()
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(hidden_size=512, intermediate_size=1024, num_hidden_layers=4, num_attention_heads=8, vocab_size=512)
    )
    config = {
        "train_micro_batch_size_per_gpu": 16,
        "zero_optimization": {"stage": 3},
        "zero_allow_untested_optimizer": True,
        "bf16": {"enabled": True},
        "memo": {"enabled": True, "alpha": 0.5, "plan": {"enabled": planned}},
    }
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    engine, *_ = ds_memo.initialize(model=model, optimizer=optimizer, config=config)
    tokens = torch.randint(0, 512, (16, 128), device=engine.device, generator=torch.Generator(engine.device).manual_seed(0))
    losses = []
    for _ in range(8):
        loss = engine(input_ids=tokens, labels=tokens, use_cache=False).loss
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    if planned:
        assert ds_memo.report(engine)["plan"]["hits"] > 0, ds_memo.report(engine)
    engine.destroy()
    return losses


def runnable() -> list[str]:
    here = ON_A_GPU if is_standin() else ON_A_STANDIN
    return [name for name in SCENARIOS if name not in here]


def run(name: str) -> str:
    """Nothing, or what went wrong."""
    allocator = Allocator(DEVICE)
    allocator.install()
    expected = allocator.retired_arenas + (name in LEAVES_AN_ARENA)
    try:
        SCENARIOS[name]()
    except Exception:
        return traceback.format_exc()
    finally:
        allocator.install()
        gc.collect()
        torch.cuda.ipc_collect()
        allocator.uninstall()
    left = allocator.retired_arenas
    return f"{left} arenas still have live blocks, and {expected} should\n" if left != expected else ""


def main() -> int:
    torch.cuda.init()
    Allocator(DEVICE).uninstall()  # what was never installed
    failed = 0
    for name in runnable():
        print(f"run {name}", flush=True)
        wrong = run(name)
        failed += bool(wrong)
        print(f"{'FAILED' if wrong else 'ok'} {name}\n{wrong}", end="", flush=True)
    print(f"{failed} failed", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
