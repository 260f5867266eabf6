"""Gain of planned addresses: each way to allocate in a process of its own, on the layers of the claims.

    bash benchmarks/gpu.sh planner [--workloads gpt7b llama8b ulysses8] [--budget-s 420] [--device cuda|cpu] [--out DIR]

Per workload at one length, and at three lengths in turn, ds_memo trains with PyTorch's native allocator, its expandable
segments, planned addresses, and both. Two layers are resident: where everything fits, ds_memo would not checkpoint and have
no phases to plan. Printed and written per way, after the warm-up:

    cudaMalloc, cudaFree   per step; bar for planned: 0
    reserved               most bytes held from CUDA; bar for planned: 1.02 × the requested peak of the native allocator with the
                           same placements: with a plan the arena is among what is requested, however large
    plan                   peak, lower bound, hits, misses by reason, seconds that planning took
    step                   median seconds; steps during which ds_memo changed its solution are dropped and timed again
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from benchmarks import host as host_memory
from benchmarks import results
from benchmarks.rivals import RIVALS, SWAPPING, Budget
from benchmarks.speed import add_common
from benchmarks.timing import Trainer, arena, placements, served, timed
from benchmarks.workloads import NAMES, Shape, batch, build, shapes
from ds_memo.units import GIB

WAYS = {"native": (False, False), "planned": (False, True), "expandable segments": (True, False), "both": (True, True)}
"""Expandable segments, planned addresses; those that the bars compare come first."""
LEAST_S = 20.0
"""Seconds that a way needs: a process has to load its libraries and to train until addresses are planned."""
BAR = 1.02
STEPS = 4
ENOUGH_GIB = 32.0
"""GiB of host memory that suffice."""
WARM_UP = 5


def lengths_of(shape: Shape, cuda: bool) -> dict[str, list[int]]:
    """Return one length, and three that take turns: the shortest two of the workload and one between them."""
    short, long = shape.lengths[:2]
    between = (short + long) // 2 // (64 * shape.ranks) * (64 * shape.ranks) if cuda else (short + long) // 2
    return {"fixed length": [long], "three lengths": [long, short, between]}


def train(shape: Shape, planned: bool, lengths: list[int], budget: Budget) -> dict[str, Any]:
    """Train in this process and return its samples, counts and bytes."""
    device = budget.device
    model = build(shape, device)
    trainer = Trainer(model, batch(shape, lengths[0], device))
    batches = [batch(shape, length, device) for length in lengths]
    rival = replace(RIVALS[SWAPPING], settings=RIVALS[SWAPPING].settings | {"planned": planned})
    with rival.on(model, replace(budget, ranks=shape.ranks)) as installed:

        def step(ids: torch.Tensor) -> float:
            trainer.ids = ids
            return trainer.seconds(installed)

        def steps(rounds: int) -> list[float]:
            return [step(ids) for _ in range(rounds) for ids in batches]

        warm = steps(WARM_UP)
        block = timed(installed, device, lambda: steps(STEPS), lambda: steps(WARM_UP))
        row = {"warm_up_s": warm, "samples_s": block.samples_s, "dropped_s": block.dropped_s, "settled": block.settled}
        row |= block.memory.read(len(block.samples_s), lambda: step(batches[0]))
        row["report"] = results.plain(block.after)
        if planned and block.after["plan"]:
            plan = block.after["plan"]
            row |= served(block.before["plan"], plan)
            row["over_lower_bound"] = plan["peak"] / plan["lower_bound"] if plan["lower_bound"] else None
    return row


def run_way(shape: Shape, way: str, lengths: list[int], budget: Budget, seconds: float) -> dict[str, Any]:
    """Train in a process of its own: the allocator's configuration is the process's. Return `train`'s row, or an "error"."""
    expandable, planned = WAYS[way]
    words = [f"--child={int(planned)}", f"--workload={shape.name}", f"--device={budget.device.type}"]
    words += [f"--host-bytes={budget.host_bytes}", f"--cache-dir={budget.cache_dir}", "--lengths", *map(str, lengths)]
    command = [sys.executable, "-m", "benchmarks.planner", *words]
    given = os.environ | {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True" if expandable else ""}
    root = Path(__file__).parents[2]
    try:
        done = subprocess.run(
            command, env=given, capture_output=True, text=True, timeout=max(1.0, seconds), cwd=root, check=False
        )
    except subprocess.TimeoutExpired:
        return {"error": f"{results.NO_TIME} after {seconds:.0f} s"}
    if done.returncode:
        return {"error": f"exit {done.returncode}: {done.stderr[-3000:]}"}
    return json.loads(done.stdout.splitlines()[-1])


def claims(ways: dict[str, dict[str, Any]], where: str) -> list[dict[str, Any]]:
    """Return the bars of planned addresses: counts and bytes, if the device counts them."""
    found: list[dict[str, Any]] = []
    planned, native = ways.get("planned", {"error": results.NO_TIME}), ways.get("native", {"error": results.NO_TIME})
    mallocs, reserved = f"cudaMalloc and cudaFree a step, {where}", f"reserved / requested without a plan, {where}"
    if "error" in planned:
        return [results.unmeasured(name, f"planned did not run: {planned['error']}") for name in (mallocs, reserved)]
    if "cuda_mallocs_per_step" not in planned:
        return found
    if not arena(planned["report"]):
        return [results.unmeasured(name, "no addresses were planned") for name in (mallocs, reserved)]
    calls = planned["cuda_mallocs_per_step"] + planned["cuda_frees_per_step"]
    found.append({"claim": mallocs, "value": calls, "bar": 0, "held": calls == 0})
    if "error" in native:
        return [*found, results.unmeasured(reserved, f"native did not run: {native['error']}")]
    if placements(native["report"]) != placements(planned["report"]):
        return [
            *found,
            results.unmeasured(reserved, "the two processes have other placements, so their bytes cannot be compared"),
        ]
    over = planned["device_reserved_peak"] / native["device_peak"]
    return [*found, {"claim": reserved, "value": over, "bar": BAR, "held": over <= BAR}]


def measure(run: results.Run, names: list[str], budget: Budget, budget_s: float) -> None:
    """Measure every way of every workload and kind, while there is time.

    Args:
        budget: layers are profiled once for all ways, in its cache.
        budget_s: seconds since the run began.
    """
    device = budget.device
    jobs = [(name, kind) for name in names for kind in ("fixed length", "three lengths")]
    runs, dropped = [], []
    run.found |= {"runs": runs, "dropped": dropped}
    for name, kind in jobs:
        if budget_s - run.seconds() < LEAST_S:
            dropped.append({"workload": name, "kind": kind})
            results.say(f"{name}, {kind}: dropped, {max(0.0, budget_s - run.seconds()):.0f} s are left")
            continue
        shape = shapes(device)[name]
        lengths = lengths_of(shape, device.type == "cuda")[kind]
        results.say(f"{name}, {kind}: {', '.join(map(str, lengths))} tokens")
        ways: dict[str, dict[str, Any]] = {}
        runs.append({"workload": name, "kind": kind, "lengths": lengths, "ways": ways})
        for way in WAYS:
            left = budget_s - run.seconds()
            if left < LEAST_S:
                ways[way] = {"error": results.NO_TIME}
            else:
                part = f"planner: {name}, {kind}, {way}"
                row = run.attempt(part, run_way, shape, way, lengths, budget, left) or {"error": "it broke"}
                ways[way] = row
                if row.get("error", "").startswith("exit"):
                    run.failures.append(f"{part}: {row['error']}")
                elif "error" not in row and WAYS[way][1] and not row.get("hits"):
                    run.failures.append(f"{part}: no request got a planned address")
            results.say(f"    {way:20s} {_line(ways[way])}")
            runs[-1]["claims"] = claims(ways, f"{name}, {kind}")
            run.save()
        results.say_claims(runs[-1]["claims"])


def _line(row: dict[str, Any]) -> str:
    if "error" in row:
        return row["error"].splitlines()[-1][:110]
    text = f"step {statistics.median(row['samples_s']) * 1e3:9.1f} ms"
    if "device_reserved_peak" in row:
        text += f", reserved {row['device_reserved_peak'] / GIB:.2f} GiB, {row['cuda_mallocs_per_step']:.1f} cudaMalloc"
        text += f" and {row['cuda_frees_per_step']:.1f} cudaFree a step"
    if "hits" in row:
        text += f", {row['hits']} hits, misses {row['misses'] or 'none'}"
    return text


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser("gpu.sh planner", description=__doc__.splitlines()[0])
    add_common(parser)
    parser.add_argument("--lengths", type=int, nargs="+", help=argparse.SUPPRESS)
    parser.add_argument("--child", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--workload", help=argparse.SUPPRESS)
    parser.add_argument("--host-bytes", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--cache-dir", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.child is not None:
        budget = Budget(torch.device(options.device), options.host_bytes, cache_dir=options.cache_dir)
        shape = shapes(budget.device)[options.workload]
        print(json.dumps(train(shape, bool(options.child), options.lengths, budget)))
        return 0
    device = results.device_or_exit(options.device, "planner")
    names = options.workloads or list(NAMES)
    run = results.Run("planner", device, options.out, vars(options))
    host = run.attempt("host memory", host_memory.budget, options.host_gib, device, ENOUGH_GIB) or 0
    with tempfile.TemporaryDirectory() as cache:  # profiles in it are of this run, not of one before
        run.attempt("planner", measure, run, names, Budget(device, host, cache_dir=cache), options.budget_s)
    return run.finish()


if __name__ == "__main__":
    sys.exit(main())
