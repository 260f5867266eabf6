"""ds_memo's CUDA paths at full width, on a machine without a GPU: bytes, calls, and what waits for what; no values.

    export DS_MEMO_CUDA_TORCH=/path/to/python
    python -m benchmarks.emulator step [gpt7b|llama8b] [16384] [--memo '{"alpha": 0.5}'] [--models 2] [--zero 3]
    python -m benchmarks.emulator step gpt7b 65536 --zero 3 --ranks 8 --device-gib 24 [--rival checkpoint]
    python -m benchmarks.emulator syncs gpt7b 32768 --zero 3 --ranks 8 [--rival checkpoint]
    python -m benchmarks.emulator order gpt7b 16384 [--memo '{"alpha": 0.5}']
    python -m benchmarks.emulator peak llama8b 102400 [--rival "ds_memo, tiles"] [--device-gib 16] [--snapshot FILE.pickle]
    python -m benchmarks.emulator capacity [gpt7b] [--device-gib 16] [--host-gib 32] [--rivals …]
    python -m benchmarks.emulator speed [gpt7b] [65536] [--hardware h200] [--device-gib 20] [--host-gib 32] [--rivals …]

emulator.cpp stands in for CUDA below a real CUDA build of torch: the caching allocator, autograd's thread, streams and events,
and the allocator op are used as on a GPU, kernels do nothing and take the time that emulated_time.py says. `step` shows what each
step asked for, reserved and missed; `syncs` who makes the host or compute wait in steady steps; `order` which accesses to the
same bytes nothing orders; `peak` what stands on the device at a step's peak, by the code that asked for it, in units of tokens ·
hidden size · 2 bytes; `capacity` runs the search of `gpu.sh capacity` in here, `speed` a point of `gpu.sh speed`.
None of it is a GPU's result. What results/ has of it is marked `emulated`.

DS_MEMO_CUDA_TORCH: the Python of an environment with a CUDA build of torch, DeepSpeed, Transformers and ninja.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import functools
import itertools
import json
import os
import sys
import tempfile
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any, TextIO

import torch
from torch import nn

import ds_memo
from benchmarks.capacity import longest, search_here
from benchmarks.emulated_calls import PER_LAYER, SYNCHRONIZING, Calls
from benchmarks.emulated_files import emulated_drives
from benchmarks.emulated_order import Unordered
from benchmarks.emulated_process import HOST_GIB, run_emulated, without_values
from benchmarks.emulated_ranks import NAME, among
from benchmarks.emulated_steps import HEADER, Step, line
from benchmarks.emulated_time import Clock, keeping_time
from benchmarks.point import answer, run_point, take_in_child
from benchmarks.rivals import RIVALS, Budget, Installed, Rival
from benchmarks.speed import show
from benchmarks.timing import Trainer, clear
from benchmarks.workloads import batch, build, loss_of, shapes
from ds_memo.estimate import hardware
from ds_memo.runtime.handle import MemoHandle
from ds_memo.units import GIB

STEPS = 9
WATCHED = 3
"""Last steps that `syncs` and `order` watch."""
SLOW_AFTER = 6
"""Steps that --slow-link leaves alone; as many as STEPS come after."""

Run = tuple[MemoHandle | None, Callable[[], Any]]
"""The handle, if the model is under ds_memo, and a function that trains a step."""


def _attached(model: nn.Module, ids: torch.Tensor, memo: dict[str, Any] | None, rival: Installed) -> Run:
    trainer = Trainer(model, ids)
    return ds_memo.attach(model, memo) if memo else None, lambda: trainer.step(rival)


def _under_deepspeed(
    model: nn.Module, ids: torch.Tensor, memo: dict[str, Any] | None, rival: Installed, zero: int, ranks: int
) -> Run:
    import deepspeed

    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    deepspeed.init_distributed(dist_backend=NAME)
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": zero},
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-5, "torch_adam": True}},  # DeepSpeed's own would be compiled first
        **({"memo": memo} if memo else {}),
    }
    engine, *_ = ds_memo.initialize(model=model, model_parameters=model.parameters(), config=config)

    def step() -> None:
        with rival.around():
            loss = loss_of(engine, ids)
        engine.backward(loss)
        engine.step()

    return engine.memo if memo else None, step


def step(
    clock: Clock,
    workload: str,
    length: int,
    memo: dict[str, Any],
    models: int = 1,
    slow_link: float | None = None,
    zero: int | None = None,
    ranks: int = 1,
    rival: str | None = None,
    compiled: str | None = None,
    around: Callable[[int], AbstractContextManager[Any]] = nullcontext,
) -> list[dict[str, Any]]:
    """Train some steps and return a row for each.

    Args:
        models: that take turns, each with half the tokens of the one before.
        slow_link: the share of the link's rate that copies have after some steps.
        zero: the stage, under DeepSpeed; None: without DeepSpeed.
        ranks: under DeepSpeed, that train alike.
        rival: to train with in place of ds_memo.
        compiled: backend that torch.compile compiles the models with.
        around: given the number of a step, returns a context for it.
    """
    device = torch.device("cuda", 0)
    shape = shapes(device)[workload]
    trained = [(build(shape, device), batch(shape, length >> turn, device)) for turn in range(models)]
    make = _attached
    if zero is not None:
        among(ranks, clock)
        make = functools.partial(_under_deepspeed, zero=zero, ranks=ranks)
    stack, budget = contextlib.ExitStack(), Budget(device, HOST_GIB * GIB)
    if rival is None:
        runs = [make(model, ids, memo, Installed()) for model, ids in trained]
    else:
        runs = [make(model, ids, None, stack.enter_context(RIVALS[rival].on(model, budget))) for model, ids in trained]
    for model, _ in trained:
        if compiled is not None:
            model.compile(backend=compiled)
    rows = []
    steps = STEPS if slow_link is None else SLOW_AFTER + STEPS
    for number, turn in itertools.product(range(1, steps + 1), range(models)):
        if slow_link is not None and number > SLOW_AFTER:
            clock.link_share(slow_link)
        handle, take_step = runs[turn]
        running = Step(clock, handle)
        with around(number):
            take_step()
        rows.append(running.row(number, rival, model=turn))
    stack.close()  # a step that fails ends the process
    for handle, _ in runs:
        if handle:
            handle.detach()
    clear(device)  # autograd's thread may still free the last graph, and would abort the process as it ends
    return rows


def capacity(
    workload: str, rivals: list[str], device_gib: float, host_gib: float, lengths: list[int], to: TextIO = sys.stdout
) -> dict[str, Any]:
    """Print the longest length of each rival, as `gpu.sh capacity` searches it, and return what its steps took there.

    Args:
        lengths: tried in full, instead of a search.
    """
    device = torch.device("cuda", 0)
    found: dict[str, Any] = {"emulated": True, "workload": workload, "device_gib": device_gib, "host_gib": host_gib, "rivals": {}}
    for rival in rivals:
        probes: list[dict[str, Any]] = []

        def tell(probe: dict[str, Any], probes: list[dict[str, Any]] = probes) -> None:
            probes.append(probe)
            if probe["fits"]:
                text = f"{probe['device_peak'] / GIB:.2f} GiB requested, {probe['device_reserved_peak'] / GIB:.2f} reserved"
                text += f"; {probe['report']['binding']}" if probe["report"] else ""
            else:
                text = f"no: {probe['why']}"
            print(f"    {probe['length']:9,} {probe['steps']} steps: {text}", file=to, flush=True)

        with tempfile.TemporaryDirectory() as cache:
            budget = Budget(device, int(host_gib * GIB), int(device_gib * GIB), cache_dir=cache)
            search_here(shapes(device)[workload], rival, budget, tell, lengths)
        best = longest(probes)
        print(f"{rival:22s} {best['length'] if best else 0:9,} tokens", file=to, flush=True)
        fails = min((probe["length"] for probe in probes if not probe["fits"]), default=None)
        at = {key: best[key] for key in ("step_s", "device_peak", "device_reserved_peak", "pinned_by_torch_peak")} if best else {}
        report = (best or {}).get("report") or {}
        at |= {key: report[key] for key in ("binding", "tiles", "attention_recomputed", "host") if key in report}
        found["rivals"][rival] = {"longest": best and best["length"], "fails_at": fails, **at}
    return found


def speed(
    workload: str, length: int, rivals: list[str], host_gib: float, device_gib: float | None, machine: str
) -> dict[str, Any]:
    """Run a point of `gpu.sh speed`, each rival in an emulated process of its own.

    Args:
        machine: whose rates the processes have.
    """
    device_bytes = None if device_gib is None else int(device_gib * GIB)
    take = take_in_child("benchmarks.emulator", "speed", "--emulated", "--hardware", machine)
    with tempfile.TemporaryDirectory() as cache:
        budget = Budget(torch.device("cuda", 0), int(host_gib * GIB), device_bytes, cache_dir=cache)
        point = run_point(workload, length, [RIVALS[name] for name in rivals], budget, steps=2, take=take)
    return point | {"emulated": True, "hardware": machine}


def syncs(run: Callable[..., Any]) -> dict[str, Any]:
    """Return the calls that order streams or make the host wait, of one of the last steps.

    Args:
        run: `step` with all arguments but `around`.
    """
    calls = Calls()

    def around(number: int) -> Calls:
        """Watch all steps, since what watches keeps arguments of ops alive and so changes the plan, and count the last."""
        if number == STEPS - WATCHED + 1:
            calls.forget()
        return calls

    run(around=around)
    return {
        "calls": [[*what, n / WATCHED] for what, n in calls.counts.most_common()],
        "compute_held_ms": 1e3 * calls.held_s / WATCHED,
        "least_queued_ms": 1e3 * calls.least_queued_s,
    }


def show_syncs(found: dict[str, Any], layers: int) -> None:
    def total(who: str, *names: str) -> float:
        return sum(n for call, whose, _, n in found["calls"] if call in names and whose == who)

    print(
        "In a step; the host waits for the device or the driver in", "calls  by           call                      in", sep="\n"
    )
    for call, who, where, n in found["calls"]:
        if call in SYNCHRONIZING:
            print(f"{n:5.1f}  {who:12s} {call:25s} {where}")
    print(f"ds_memo: {total('ds_memo', *SYNCHRONIZING):.1f}; compute had {found['least_queued_ms']:.1f} ms of work left at least")
    print(
        f"Waits of compute that ds_memo asks for hold it for {found['compute_held_ms']:.2f} ms",
        "In a layer, for ds_memo:",
        sep="\n",
    )
    for name in PER_LAYER:
        print(f"{total('ds_memo', name) / layers:7.1f}  {name}")


def peak(
    workload: str, length: int, rival: Rival, device_gib: float, host_gib: float, snapshot: str | None
) -> tuple[int, dict[str, list[int]]]:
    """Train until steps are steady; return the bytes of a unit, and those of the blocks at the peak of one more step, by source.

    Args:
        snapshot: a file for the step's history of allocations, which layer_backward.py draws.
    """
    device = torch.device("cuda", 0)
    shape, found = shapes(device)[workload], collections.defaultdict[str, list[int]](list)
    trainer = Trainer(build(shape, device), batch(shape, length, device))
    with tempfile.TemporaryDirectory() as cache:
        budget = Budget(device, int(host_gib * GIB), int(device_gib * GIB), cache_dir=cache)
        with rival.on(trainer.model, budget) as installed:
            for _ in range(max(2, rival.warm_up)):
                trainer.step(installed)
            torch.cuda.memory._record_memory_history(context="alloc", stacks="python", max_entries=10**7)
            trainer.step(installed)
            (trace,) = torch.cuda.memory._snapshot(device)["device_traces"][:1]
            if snapshot:
                torch.cuda.memory._dump_snapshot(snapshot)
            torch.cuda.memory._record_memory_history(enabled=None)
    for event in at_peak(trace).values():
        found[source(event["frames"])].append(event["size"])
    return length * trainer.model.config.hidden_size * 2, found


def at_peak(trace: list[dict[str, Any]]) -> dict[int, dict[str, Any]]:
    """Return the blocks that are allocated when most bytes are, by address. Weights and gradients are not in the trace."""
    live: dict[int, dict[str, Any]] = {}
    total = most = 0
    found: dict[int, dict[str, Any]] = {}
    for event in trace:
        if event["action"] == "alloc":
            live[event["addr"]] = event
            total += event["size"]
            if total > most:
                most, found = total, dict(live)
        elif event["action"] == "free_completed" and event["addr"] in live:
            total -= live.pop(event["addr"])["size"]
    return found


def source(frames: list[dict[str, Any]]) -> str:
    """Return the innermost line of ours, or of the model, in a stack."""
    for frame in frames:
        ours = any(part in frame["filename"] for part in ("ds_memo/", "benchmarks/", "transformers/models/"))
        if ours and "/emulated_" not in frame["filename"]:  # the clock passes every op on
            return f"{frame['filename'].rpartition('/')[2]}:{frame['line']} {frame['name']}"
    return "autograd"


def show_peak(unit: int, found: dict[str, list[int]]) -> None:
    print(f"one unit: {unit / GIB:.3f} GiB")
    for where, sizes in sorted(found.items(), key=lambda item: -sum(item[1])):
        if sum(sizes) > 0.005 * unit:
            print(f"{sum(sizes) / unit:6.2f} units  {sum(sizes) / GIB:6.2f} GiB  {len(sizes):4d} blocks  {where}")
    print(f"{sum(map(sum, found.values())) / unit:6.2f} units in all")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser("python -m benchmarks.emulator", description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=("step", "syncs", "order", "peak", "capacity", "speed"))
    parser.add_argument("workload", nargs="?", default="gpt7b")
    parser.add_argument("length", nargs="?", type=int, default=16384)
    parser.add_argument("--memo", type=json.loads, default={}, metavar="JSON", help='the "memo" section; default: all is solved')
    parser.add_argument("--models", type=int, default=1, metavar="N", help="that take turns in `step`; default: 1")
    parser.add_argument("--zero", type=int, choices=range(4), help="train under DeepSpeed at this stage; for `step`")
    parser.add_argument("--ranks", type=int, default=1, metavar="N", help="that train alike, with --zero; default: 1")
    parser.add_argument("--rival", choices=RIVALS, help="to train with in place of what --memo says")
    parser.add_argument("--snapshot", metavar="FILE.pickle", help="of `peak`: the step's history of allocations")
    parser.add_argument("--compile", choices=("aot_eager", "inductor"), help="compile the model with torch.compile")
    parser.add_argument("--slow-link", type=float, metavar="X", help="share of the link that `step` has after some steps")
    parser.add_argument("--device-gib", type=float, help="default: 139.8, for capacity 16")
    parser.add_argument("--host-gib", type=float, default=32.0)
    parser.add_argument("--lock-gib", type=float, help="host memory that CUDA can lock; default: any")
    parser.add_argument("--rivals", nargs="+", default=["ds_memo, planned", "alst", "checkpoint", "deepspeed", "hf_offload"])
    parser.add_argument("--lengths", type=int, nargs="+", default=[], help="`capacity` tries these in full instead of searches")
    parser.add_argument("--hardware", default="h200", help="whose rates: a name or file of ds-memo estimate; default: h200")
    parser.add_argument("--nvme-gb-per-s", type=float, metavar="X", help="of emulated drives behind the host, for `step`")
    parser.add_argument("--nvme-gib", type=float, default=15000.0, metavar="X", help="their size; default: 15,000")
    parser.add_argument("--json", action="store_true", help="print what was found as JSON")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--emulated", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if not options.emulated:
        whole = options.device_gib if options.what in ("step", "syncs", "order") and options.device_gib else 139.8
        asked = [*(sys.argv[1:] if arguments is None else arguments), "--emulated"]
        return run_emulated("benchmarks.emulator", asked, whole, options.lock_gib)
    without_values()
    with keeping_time(hardware.load(options.hardware)) as clock:
        if options.child:
            return answer(options.child)
        _run(clock, options)
    return 0


def _run(clock: Clock, options: argparse.Namespace) -> None:
    def tell(found: Any, show: Callable[[], Any]) -> None:
        print(json.dumps(found)) if options.json else show()

    if options.what == "capacity":
        asked = options.workload, options.rivals, options.device_gib or 16.0, options.host_gib, options.lengths
        found = capacity(*asked, to=sys.stderr if options.json else sys.stdout)
        tell(found | {"hardware": options.hardware}, lambda: None)
        return
    if options.what == "speed":
        memory = options.host_gib, options.device_gib
        point = speed(options.workload, options.length, options.rivals, *memory, options.hardware)
        tell(point, lambda: show(point))
        return
    if options.what == "peak":
        rival = RIVALS[options.rival] if options.rival else replace(RIVALS["ds_memo"], settings=options.memo)
        found = peak(options.workload, options.length, rival, options.device_gib or 16.0, options.host_gib, options.snapshot)
        tell(found, lambda: show_peak(*found))
        return
    memo, drives = {"enabled": True, **options.memo}, nullcontext()
    if options.nvme_gb_per_s:
        memo["nvme"] = {"path": "/emulated"}
        drives = emulated_drives(clock, options.nvme_gib, options.nvme_gb_per_s)
    with_what = options.models, options.slow_link, options.zero, options.ranks, options.rival, options.compile
    run = functools.partial(step, clock, options.workload, options.length, memo, *with_what)
    if options.what == "syncs":
        found = syncs(run)
        tell(found, lambda: show_syncs(found, shapes(torch.device("cuda"))[options.workload].layers))
        return
    if options.what == "order":
        unordered = Unordered()
        run(around=lambda number: unordered if number > STEPS - WATCHED else nullcontext())
        tell({"checked": unordered.checked, "races": list(unordered.races)}, lambda: print(unordered))
        return
    with drives:
        rows = run()
    last = rows[-1]
    lines = [HEADER, *map(line, rows), f"{last['kernels']:,} kernels launched in the last step"]
    tell(rows, lambda: print(*lines, f"set by {last['binding']}", *last["changes"], *last["warnings"], sep="\n"))


if __name__ == "__main__":
    sys.exit(main())
