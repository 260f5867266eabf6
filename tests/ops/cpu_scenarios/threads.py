"""Forks, DataLoaders, and threads that allocate or free during a pass."""

from __future__ import annotations

import os
import threading
from concurrent.futures import ThreadPoolExecutor

import torch

from ds_memo.plan.phases import LayerPass
from tests.ops.cpu_scenarios.table import CPU, MIB, scenario
from tests.ops.rig import WIDTH, Rig, same


@scenario
def a_fork() -> None:
    rig = Rig(CPU)
    block = rig.a_block()
    child = os.fork()
    if child == 0:
        mine = torch.empty(MIB, dtype=torch.uint8)
        right = bool((block == 7).all()) and not rig.allocator.owns(mine.data_ptr()) and rig.allocator.mode == "off"
        del block
        os._exit(0 if right and rig.allocator.live_blocks == 0 else 3)
    assert os.waitpid(child, 0)[1] == 0
    assert bool((block == 7).all()) and rig.allocator.live_blocks == 1 and rig.allocator.mode == "plan"


@scenario
def forks_while_other_threads_allocate() -> None:
    rig = Rig(CPU)
    rig.allocator.load_plan(0, [("embed", [(64 << 10, 0)] * 10)])
    rig.allocator.reserve(MIB)
    done = threading.Event()

    def hammer() -> None:
        while not done.is_set():
            torch.empty(64 << 10, dtype=torch.uint8)

    threads = [threading.Thread(target=hammer) for _ in range(2)]
    for thread in threads:
        thread.start()
    for _ in range(20):
        rig.allocator.follow(0)
        rig.allocator.phase("embed")
        child = os.fork()
        if child == 0:
            torch.empty(64 << 10, dtype=torch.uint8)
            rig.allocator.stats()
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
    done.set()
    for thread in threads:
        thread.join()


@scenario
def a_data_loader_with_workers() -> None:
    rig = Rig(CPU)
    reference = rig.forward_and_backward()
    rig.planned()
    rows = [torch.full((WIDTH * 64,), float(i)) for i in range(8)]
    loader = torch.utils.data.DataLoader(rows, batch_size=2, num_workers=2, multiprocessing_context="fork")
    rig.allocator.follow(0)  # the workers start in the middle of a pass
    rig.allocator.phase(LayerPass(0, backward=False))
    batches = list(loader)
    assert torch.equal(torch.cat(batches), torch.stack(rows))
    assert same(rig.follow(), reference)


@scenario
def frees_from_other_threads() -> None:
    rig = Rig(CPU)
    reference = rig.forward_and_backward()
    rig.planned()
    with ThreadPoolExecutor(2) as pool:
        kept: list[torch.Tensor] = []
        for layer in rig.net.layers:
            layer[1].register_forward_hook(lambda module, args, out: kept.append(out))
        for _ in range(5):
            assert same(rig.follow(), reference)
            blocks = [kept.pop() for _ in range(len(kept))]
            freed = [pool.submit(blocks.clear) for _ in range(2)]
            with rig.counting() as counts:
                assert same(rig.follow(), reference)
            for future in freed:
                future.result()
            kept.clear()
            assert set(counts) <= {"hit", "overlap"}
    assert rig.allocator.live_blocks == 0


@scenario
def requests_of_other_threads() -> None:
    """They are not planned and do not move the plan's cursor."""
    rig = Rig(CPU)
    reference = rig.forward_and_backward()
    rig.planned()
    done = threading.Event()

    def hammer(value: int) -> None:
        while not done.is_set():
            block = torch.full((256 << 10,), value, dtype=torch.uint8)
            assert bool((block == value).all())

    with ThreadPoolExecutor(2) as pool, rig.counting() as counts:
        hammering = [pool.submit(hammer, value) for value in (1, 2)]
        for _ in range(5):
            assert same(rig.follow(), reference)
        done.set()
        for future in hammering:
            future.result()
    assert set(counts) <= {"hit", "stream", "unplanned"} and counts["hit"] == 5 * rig.requests and counts["stream"] > 0
