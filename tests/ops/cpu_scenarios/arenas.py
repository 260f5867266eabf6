"""Passes and their plans, blocks and their arenas, on one thread."""

from __future__ import annotations

import ctypes
import os

import torch

from ds_memo.plan.phases import LayerPass
from tests.ops.cpu_scenarios.table import CPU, MIB, RAW_BLOCKS, scenario
from tests.ops.rig import Rig, same


@scenario
def a_plan_with_all_offsets_0() -> None:
    rig = Rig(CPU)
    reference = rig.forward_and_backward()
    log, plan = rig.plan()
    rig.allocator.load_plan(0, [(visit.phase, [(size, 0) for size in visit.sizes]) for visit in log.visits])
    rig.allocator.reserve(plan.peak)
    for _ in range(3):
        with rig.counting() as counts:
            assert same(rig.follow(), reference)
        assert counts["overlap"] > counts["hit"] > 0 and set(counts) == {"hit", "overlap"}


@scenario
def resize() -> None:
    rig = Rig(CPU)
    block = rig.a_block()
    block.resize_(3 * MIB)
    assert not rig.allocator.owns(block.data_ptr()) and bool((block[:MIB] == 7).all())
    assert rig.allocator.live_blocks == 0
    rig.allocator.stop()
    block = rig.a_block()
    block.resize_(10)  # smaller: the storage is the same
    assert rig.allocator.owns(block.data_ptr())
    block.untyped_storage().resize_(0)
    assert rig.allocator.live_blocks == 0


@scenario
def uninstall_with_live_blocks() -> None:
    rig = Rig(CPU)
    block = rig.a_block()
    rig.allocator.uninstall()
    assert rig.allocator.retired_arenas == 1 and rig.allocator.mode == "off"
    fresh = torch.empty(MIB, dtype=torch.uint8)
    assert not rig.allocator.owns(fresh.data_ptr()) and bool((block == 7).all())
    del block
    assert rig.allocator.retired_arenas == 0
    rig.allocator.uninstall()
    assert not rig.allocator.installed
    rig.allocator.install()
    block = rig.a_block()
    assert rig.allocator.installed and bool((block == 7).all())


@scenario
def uninstall_in_a_pass() -> None:
    rig = Rig(CPU)
    reference = rig.forward_and_backward()
    rig.planned()
    hook = rig.net.layers[1].register_forward_hook(lambda *_: rig.allocator.uninstall())
    with rig.counting() as counts:
        assert same(rig.follow(), reference)
    assert 0 < counts["hit"] < rig.requests
    hook.remove()
    assert same(rig.forward_and_backward(), reference) and rig.allocator.retired_arenas == 0


@scenario
def raw_blocks() -> None:
    """Blocks without an owner, before and after install, pass and uninstall."""
    raw = ctypes.CDLL(os.environ[RAW_BLOCKS])
    raw.raw_allocate.restype, raw.raw_allocate.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
    raw.raw_deallocate.restype, raw.raw_deallocate.argtypes = None, [ctypes.c_void_p]
    before = raw.raw_allocate(MIB)
    rig = Rig(CPU)
    block = rig.a_block()
    planned, other, logged = raw.raw_allocate(MIB), raw.raw_allocate(2 * MIB), None
    assert rig.allocator.owns(planned) and not rig.allocator.owns(other)
    raw.raw_deallocate(before)
    del block
    rig.allocator.profile()
    rig.allocator.phase("embed")
    logged = raw.raw_allocate(MIB)
    logged_and_freed = raw.raw_allocate(MIB)
    raw.raw_deallocate(logged_and_freed)
    rig.allocator.uninstall()
    for address in (planned, other, logged):
        raw.raw_deallocate(address)
    assert [event.kind for event in rig.allocator.requests()] == ["enter", "malloc", "malloc", "free"]
    assert rig.allocator.retired_arenas == 0 and rig.allocator.stats()["live_bytes"] == 0
    rig.allocator.uninstall()
    assert not rig.allocator.installed


@scenario
def the_arena_is_replaced_in_a_pass() -> None:
    rig = Rig(CPU)
    reference = rig.forward_and_backward()
    log, plan = rig.plan()
    rig.use(log, plan)
    for layer in rig.net.layers:
        layer[2].register_forward_hook(lambda *_: rig.allocator.reserve(plan.peak))
    for _ in range(3):
        with rig.counting() as counts:
            assert same(rig.follow(), reference)
        assert set(counts) <= {"hit", "overlap"} and rig.allocator.retired_arenas == 0


@scenario
def logged_blocks_freed_later() -> None:
    rig = Rig(CPU)
    reference = rig.forward_and_backward()

    rig.allocator.profile()
    rig.allocator.phase("embed")
    blocks = [torch.full((MIB,), 3, dtype=torch.uint8) for _ in range(4)]
    born = [event.id for event in rig.allocator.requests() if event.kind == "malloc"]
    rig.allocator.stop()
    blocks.pop(0)  # off
    rig.planned()
    rig.allocator.follow(0)
    rig.allocator.phase(LayerPass(0, backward=False))
    blocks.pop(0)  # in a plan
    rig.allocator.stop()
    assert rig.allocator.requests() == []
    rig.allocator.profile()
    blocks.pop(0)  # in a later profile, with its old number and in no phase
    assert [(e.kind, e.phase, e.id) for e in rig.allocator.requests()] == [("free", None, born[2])]
    rig.allocator.uninstall()
    assert bool((blocks.pop() == 3).all())  # uninstalled
    assert same(rig.forward_and_backward(), reference)


@scenario
def an_arena_that_cannot_be_had() -> None:
    rig = Rig(CPU)
    reference = rig.forward_and_backward()
    rig.planned()
    before = rig.allocator.arena
    try:
        rig.allocator.reserve(1 << 60)
    except RuntimeError:
        pass
    else:
        raise AssertionError("an exbibyte was reserved")
    assert rig.allocator.arena == before and same(rig.follow(), reference)


@scenario
def nothing_changes_while_off() -> None:
    rig = Rig(CPU)
    rig.allocator.uninstall()
    reference = rig.forward_and_backward()
    rig.allocator.install()
    before = rig.allocator.stats()
    rig.allocator.phase(LayerPass(0, backward=False))
    assert same(rig.forward_and_backward(), reference)
    assert rig.allocator.stats() == before and rig.allocator.requests() == []
