"""`gpu.sh first`, points 6, 9 and 10: a steady step asks nothing of CUDA, gets its planned addresses, and takes its time."""

from __future__ import annotations

import collections
import contextlib
import ctypes
import functools
import io
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import ds_memo
from benchmarks import overhead, point, speed, streams
from benchmarks.assertions import DRIVER, TIMES, Machine, Measured, Skip, asserts
from benchmarks.rivals import PLANNED, RIVALS, SWAPPING, Budget, Installed
from benchmarks.timing import Memory, Trainer, clear, served
from benchmarks.workloads import batch, build, gpt_shape, shapes
from ds_memo.units import GIB

STEPS, STEPS_TO_A_PLAN = 3, 4
ROOT = Path(__file__).parents[2]
SANITIZER, SANITIZER_S = "compute-sanitizer", 120
PLANNED_STEPS = """
import torch
from benchmarks.rivals import RIVALS, SWAPPING, Budget
from benchmarks.timing import Trainer
from benchmarks.workloads import batch, build, gpt_shape
device, shape = torch.device("cuda"), gpt_shape(2, 512, 4, (2048,))
trainer = Trainer(build(shape, device), batch(shape, 2048, device))
with RIVALS[SWAPPING].on(trainer.model, Budget(device, 1 << 30)) as installed:
    for _ in range(10):
        trainer.step(installed)
"""
MOST_IDLE, MOST_OFF, MOST_STALLED = 0.10, 0.10, 0.02
"""Shares of a step."""
MOST_OUTSIDE = GIB
TIGHT_GIB = 9.0
"""Device budget in which the layers of 4K tokens do not all stay, on CUDA."""


class Steady:
    """A model that trains under ds_memo, after the steps in which addresses are planned."""

    def __init__(self, machine: Machine) -> None:
        wide, tiny = {"hidden": 4096, "heads": 32, "lengths": (4096,)}, {"hidden": 256, "heads": 2, "lengths": (256,)}
        shape = gpt_shape(4, **(wide if machine.cuda else tiny))
        self.trainer = Trainer(build(shape, machine.device), batch(shape, shape.lengths[0], machine.device))
        self.handle = ds_memo.attach(self.trainer.model, {"alpha": 0.5, "resident_layers": 1, "plan": {"time_limit_s": 10.0}})
        self.take(STEPS_TO_A_PLAN + 1)
        if machine.cuda:
            torch.cuda.synchronize(machine.device)

    def take(self, steps: int = STEPS) -> None:
        for _ in range(steps):
            self.trainer.step(Installed())


@functools.cache
def _steady(machine: Machine) -> Steady:
    return Steady(machine)


def _end_steady(machine: Machine) -> None:
    """Free what the steady model holds, so that it is not in the way of the next."""
    if _steady.cache_info().currsize:
        _steady(machine).handle.detach()
        _steady.cache_clear()
    clear(machine.device)


@asserts(
    6,
    "steady steps under sync-debug mode",
    "no call that synchronizes",
    "the traceback above names the line: read the value later, from pinned memory behind an event, or agree over gloo",
    only_cuda=True,
)
def no_hidden_sync(machine: Machine) -> Measured:
    steady = _steady(machine)
    torch.cuda.set_sync_debug_mode("error")
    try:
        steady.take()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return Measured(f"none in {STEPS} steps", held=True)


UNWANTED = (
    "cudaMalloc",
    "cudaFree",
    "cudaHostAlloc",
    "cudaHostRegister",
    "cudaHostUnregister",
    "cudaMemcpy",
    "cudaDeviceSynchronize",
    "cudaEventSynchronize",
    "cudaStreamSynchronize",
)
_MARK = "steady steps"
_LOGGED = {"malloc": "cudaMalloc", "free": "cudaFree", "register": "cudaHostRegister", "unregister": "cudaHostUnregister"}
"""Names in the emulator's log, which it keeps with EMULATED_CALLS=1."""


def _traced(steps: Callable[[], Any]) -> dict[str, int]:
    def marked() -> None:
        with torch.profiler.record_function(_MARK):
            steps()

    with tempfile.TemporaryDirectory() as folder:
        return in_trace(streams.traced(marked, Path(folder) / "trace.json"))


def in_trace(events: list[dict[str, Any]]) -> dict[str, int]:
    """Count calls within the mark. Around it the profiler itself synchronizes the device."""
    spans = [event for event in events if event.get("ph") == "X"]
    (mark,) = (event for event in spans if event["name"] == _MARK and event["cat"] == "user_annotation")  # the host's
    inside = [event["name"] for event in spans if 0 <= event["ts"] - mark["ts"] < mark["dur"]]
    return dict(collections.Counter(name for name in inside if name in UNWANTED))


def _counted(steps: Callable[[], Any]) -> dict[str, int]:
    emulator = ctypes.CDLL("libcuda.so.1")
    emulator.emulated_host_waits.restype, emulator.emulated_calls.restype = ctypes.c_size_t, ctypes.c_char_p
    waits = emulator.emulated_host_waits()
    emulator.emulated_calls()
    steps()
    calls = collections.Counter(line.split()[0] for line in emulator.emulated_calls().decode().splitlines())
    found = {name: calls[logged] for logged, name in _LOGGED.items() if calls[logged]}
    waited = emulator.emulated_host_waits() - waits
    return found | ({"synchronize": waited} if waited else {})


@asserts(
    6,
    "calls of CUDA in steady steps",
    "no malloc, free, registering or synchronizing",
    "cudaMalloc: a request missed its plan (next point). cudaHostRegister: the slab grew, so a frame is larger than planned. "
    "synchronize: find who waits with py-spy or in the trace's stacks",
    only_cuda=True,
)
def no_calls(machine: Machine) -> Measured:
    calls = (_counted if machine.emulated else _traced)(_steady(machine).take)
    return Measured(", ".join(f"{name} x{n}" for name, n in calls.items()) or f"none in {STEPS} steps", not calls, calls)


@asserts(
    9,
    "planned addresses in steady steps",
    "hits, no misses, no cudaMalloc or cudaFree",
    "read the misses' reason in docs/troubleshooting.md",
)
def addresses(machine: Machine) -> Measured:
    steady = _steady(machine)
    before, memory = steady.handle.report()["plan"], Memory(machine.device)
    steady.take()
    row = served(before, steady.handle.report()["plan"])
    text = f"{row['hits']} hits, misses {row['misses'] or 'none'}"
    if machine.cuda:
        row |= memory.read(STEPS, lambda: None)
        row["calls"] = row["cuda_mallocs_per_step"] + row["cuda_frees_per_step"]
        text += f", {row['calls']:g} cudaMalloc and cudaFree a step"
    return Measured(text, bool(row["hits"]) and not row["misses"] and not row.get("calls"), row)


@asserts(
    9,
    "compute-sanitizer on a planned step",
    "no errors",
    "the first error names a kernel and an address: see if it is in the arena, and run PLANNED_STEPS (first_steps.py) without "
    "a plan",
    DRIVER,
    only_cuda=True,
)
def sanitizer(machine: Machine) -> Measured:
    if shutil.which(SANITIZER) is None:
        raise Skip(f"{SANITIZER} is not on the PATH; it comes with the CUDA toolkit")
    command = [SANITIZER, "--tool", "memcheck", "--error-exitcode", "86", sys.executable, "-c", PLANNED_STEPS]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=SANITIZER_S, cwd=Path(__file__).parents[2], check=False
        )
    except subprocess.TimeoutExpired as late:
        raise Skip(f"not over after {SANITIZER_S} s; without a limit: {SANITIZER} over PLANNED_STEPS (first_steps.py)") from late
    said = [line for line in (done.stdout + done.stderr).splitlines() if "=========" in line]
    return Measured(said[-1].strip("= ") if said else f"exit {done.returncode}", done.returncode == 0, {"said": said[:50]})


@asserts(
    10,
    "host time of a layer beside torch.utils.checkpoint's",
    f"<= {overhead.RESIDENT_BAR} x where resident, {overhead.SWAPPED_BAR} x where swapped or in tiles",
    "profile `python -m benchmarks.overhead` with py-spy; small models at short lengths will be bound by the host",
    TIMES,
)
def host_time(machine: Machine) -> Measured:
    names = overhead.MODELS if machine.cuda and not machine.emulated else overhead.MODELS[:1]  # not judged there
    variants = overhead.chosen([name for name, variant in overhead.VARIANTS.items() if variant.tokens == overhead.SHORT])
    found = {name: overhead.measure(name, variants, machine.device, turns=2) for name in names}
    judged = [(name, variant, row) for name, rows in found.items() for variant, row in rows.items() if row["bar"]]
    words = ", ".join(f"{name}, {variant} {row['ratio']:.2f} x" for name, variant, row in judged)
    return Measured(words, not any(row["over"] for *_, row in judged), found)


@functools.cache
def _point(machine: Machine) -> dict[str, Any]:
    """Return a point of `speed`: 4K tokens where not all layers fit, so that ds_memo swaps."""
    _end_steady(machine)
    device = machine.device
    shape = shapes(device)["gpt7b"]
    length = 4096 if machine.cuda else shape.lengths[0]
    with tempfile.TemporaryDirectory() as cache:
        tight = int(TIGHT_GIB * GIB) if machine.cuda else None
        budget = Budget(device, 8 * GIB, tight, cache_dir=cache)
        rivals = [RIVALS[PLANNED], RIVALS[SWAPPING]]
        with contextlib.redirect_stdout(io.StringIO()) as said:
            found = point.run_point("gpt7b", length, rivals, budget, take=point.take_turn)
            speed.show(found)
    return found | {"said": said.getvalue()}


@asserts(
    10,
    "compute idle at 4K",
    f"<= {MOST_IDLE:.0%}",
    "profile a step (torch.profiler): gaps behind copies are stalls, gaps elsewhere are host time",
    DRIVER,
    only_cuda=True,
)
def idle(machine: Machine) -> Measured:
    seen = _point(machine)["streams"]
    if "compute_share" not in seen:
        raise RuntimeError(seen.get("skipped", "no spans"))
    share = 1 - seen["compute_share"]
    return Measured(f"{share:.1%} of {seen['span_s'] * 1e3:.1f} ms", share <= MOST_IDLE, seen)


@asserts(
    10,
    "step against its prediction",
    f"within {MOST_OFF:.0%}",
    "compare the profile's layer times with the trace: clocks, warm caches (docs/estimate.md); then the device's file in "
    "ds_memo/estimate/hardware_data",
    TIMES,
)
def prediction(machine: Machine) -> Measured:
    found = _point(machine)
    row, said = found["rivals"][PLANNED], found["predicted"]
    if "median_s" not in row:
        raise RuntimeError(row.get("out", "no samples"))
    told = said.get("step_s")
    if told is None:
        raise Skip(said.get("why") or "the estimator does not know this device")
    off = row["median_s"] / told - 1
    text = f"predicted {told * 1e3:.1f} ms, took {row['median_s'] * 1e3:.1f} ms ({off:+.1%}); alpha {said['alpha']:.3g}"
    return Measured(text, abs(off) <= MOST_OFF, {"predicted": said})


@asserts(
    10,
    "stalls",
    f"<= {MOST_STALLED:.0%} of the step above the predicted ones",
    "copies are slower than profiled: compare with the rates of point 4, and look for other jobs on the link",
    TIMES,
)
def stalls(machine: Machine) -> Measured:
    """Compare with the solver's: short layers cannot hide all copies, and it knows."""
    rivals = _point(machine)["rivals"]
    rows = {name: row for name, row in rivals.items() if "stall_s_per_step" in row and "median_s" in row}
    if not rows:
        raise RuntimeError("; ".join(str(row.get("out")) for row in rivals.values()))
    shares = {}
    for name, row in rows.items():
        told = row["report"]["predicted"] or {"d2h_stall_s": 0.0, "h2d_stall_s": 0.0}
        found = sum(row["stall_s_per_step"].values())
        shares[name] = [seconds / row["median_s"] for seconds in (found, told["d2h_stall_s"] + told["h2d_stall_s"])]
    words = [f"{name} {found:.1%}, predicted {told:.1%}" for name, (found, told) in shares.items()]
    return Measured("; ".join(words), all(found - told <= MOST_STALLED for found, told in shares.values()), shares)


@asserts(
    10,
    "device memory outside PyTorch",
    f"<= {MOST_OUTSIDE / GIB:g} GiB",
    "other processes (`nvidia-smi`), or libraries' workspaces: set memo.device_memory_gib lower by what is above the bar",
    DRIVER,
    only_cuda=True,
)
def outside_torch(machine: Machine) -> Measured:
    torch.cuda.synchronize(machine.device)
    free, total = torch.cuda.mem_get_info(machine.device)
    outside = total - free - torch.cuda.memory_reserved(machine.device)
    return Measured(f"{outside / GIB:.2f} GiB", outside <= MOST_OUTSIDE, {"bytes": outside})
