"""`gpu.sh first`, points 2 to 4: page-locked host memory, the time to lock it, and copies beside compute."""

from __future__ import annotations

import functools
import time

import torch

from benchmarks import host, link
from benchmarks.assertions import TIMES, Machine, Measured, asserts
from ds_memo.memory.host import available_bytes
from ds_memo.swap import pinned_segments
from ds_memo.swap.stream_protocol import D2H, H2D
from ds_memo.units import GIB

MOST_US = 50
"""Microseconds of the host per copy."""
LEAST_LOCKED, LEAST_COPIED = 1.0, 10.0
"""GB/s."""
LEAST_BESIDE, MOST_SLOWDOWN = 0.9, 1.05
_ISSUED = 256


@asserts(
    2,
    "memory of the host slab",
    "page-locked",
    "read HostPool._grow and pinned_segments.pin in ds_memo/swap: cudaHostRegister was left out or undone",
    only_cuda=True,
)
def pinned(machine: Machine) -> Measured:
    ends = link.Link(machine.device, 1 << 20)
    is_pinned = ends.there.is_pinned()
    ends.close()
    return Measured("page-locked" if is_pinned else "pageable", is_pinned)


@asserts(
    2,
    "host time per copy",
    f"< {MOST_US} us",
    "a copy that takes longer waits for the device: if memory is page-locked, read CudaStreams.copy under py-spy",
    TIMES,
    only_cuda=True,
)
def host_time(machine: Machine) -> Measured:
    ends = link.Link(machine.device, 1 << 20)
    took = {}
    for name, way in (("d2h", (True, False)), ("h2d", (False, True))):
        ends.issue(*way)
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(_ISSUED):
            ends.issue(*way)
        took[name] = 1e6 * (time.perf_counter() - begin) / _ISSUED
        torch.cuda.synchronize()
    ends.close()
    return Measured(", ".join(f"{name} {us:.0f} us" for name, us in took.items()), max(took.values()) < MOST_US, took)


@functools.cache
def _locked(machine: Machine) -> dict[str, float]:
    """Map, touch and lock memory once; return the bytes, the seconds, and the machine's memory before and after."""
    nbytes = int(min(8 * GIB if machine.cuda else GIB / 4, available_bytes() / 2)) // (1 << 21) * (1 << 21)
    before, begin = host.total_bytes(), time.perf_counter()
    segment = pinned_segments.map_pages(nbytes)
    pinned_segments.touch(segment)
    touched = time.perf_counter()
    if machine.cuda:
        pinned_segments.pin(segment)
    locked = time.perf_counter()
    found = {"bytes": nbytes, "touch_s": touched - begin, "lock_s": locked - touched}
    return found | {"total_before": before, "total_after": host.total_bytes()}


@asserts(
    3,
    "touching and locking host memory",
    f">= {LEAST_LOCKED:g} GB/s",
    "set transparent_hugepage to madvise or always, give the process more cores, or set a smaller memo.host_memory_gib",
    TIMES,
)
def locking(machine: Machine) -> Measured:
    found = _locked(machine)
    gb = found["bytes"] / 1e9
    rate = gb / (found["touch_s"] + found["lock_s"])
    words = f"{found['bytes'] / GIB:.3g} GiB: touched at {gb / found['touch_s']:.2g} GB/s"
    words += f", locked at {gb / found['lock_s']:.2g} GB/s" if machine.cuda else ""
    return Measured(f"{words}, together {rate:.2g} GB/s", rate >= LEAST_LOCKED, found)


@asserts(
    3,
    "memory of the machine while it is used",
    "MemTotal unchanged",
    "this machine grows as it is used, and budgets count what it has. benchmarks/host.py makes it grow first: do so before "
    "training, or set memo.host_memory_gib",
)
def machine_stays(machine: Machine) -> Measured:
    found = _locked(machine)
    before, after = found["total_before"], found["total_after"]
    return Measured(f"MemTotal {before / GIB:.1f} GiB before, {after / GIB:.1f} after", before == after)


@functools.cache
def _under_gemms(machine: Machine) -> dict[str, dict[str, float]]:
    return link.under_gemms(machine.device, 1.0)


@asserts(
    4,
    "copies",
    f">= {LEAST_COPIED:g} GB/s each way, beside GEMMs >= {LEAST_BESIDE:g} of it",
    "look at the link (`nvidia-smi -q`, `nvidia-smi topo -m`), at the NUMA node (ds_memo/memory/numa.py) and at other jobs",
    TIMES,
    only_cuda=True,
)
def copies(machine: Machine) -> Measured:
    rows = _under_gemms(machine)
    words = [f"{name} {row['gb_per_s']:.1f}, {row['gb_per_s_beside']:.1f}" for name, row in rows.items()]
    alone = min(rows[name]["gb_per_s"] for name in (D2H, H2D)) >= LEAST_COPIED
    kept = all(row["gb_per_s_beside"] >= LEAST_BESIDE * row["gb_per_s"] for row in rows.values())
    return Measured(f"alone and beside GEMMs, GB/s: {'; '.join(words)}", alone and kept, rows)


@asserts(
    4,
    "GEMMs beside copies",
    f"<= x{MOST_SLOWDOWN:g}",
    "copies take SMs or the device's bandwidth: see in a trace if they are kernels. The solver's steps are too short by this",
    TIMES,
    only_cuda=True,
)
def gemms(machine: Machine) -> Measured:
    slowed = {name: row["gemm_slowdown"] for name, row in _under_gemms(machine).items()}
    words = ", ".join(f"{name} x{slower:.3f}" for name, slower in slowed.items())
    return Measured(words, max(slowed.values()) <= MOST_SLOWDOWN, slowed)
