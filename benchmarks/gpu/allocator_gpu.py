"""Memory that training holds on a GPU: PyTorch's allocator, its expandable segments, and planned addresses.

    python -m benchmarks.allocator_gpu [--hidden 2048] [--layers 8] [--lengths 16384] [--steps 10] [--json PATH]

A GPT trains with AdamW and alpha 0.5; each way to allocate has a process of its own, because its setting is the process's.
After the warm-up (two profiled iterations and a planned one per length), printed per way:

    cudaMalloc, cudaFree   calls per step; bar for planned addresses: 0
    reserved               most bytes that PyTorch held from CUDA, and over the peak of what is alive; bar: 1.02
    step                   median seconds

What is alive is the same in every way, so its peak is taken where PyTorch serves every request: the most bytes asked for at
once. With several lengths, steps take them in turn; each further --lengths is a training of its own in the same processes.
--device cpu tries the harness; there is nothing to count there.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

import ds_memo
from benchmarks import results
from benchmarks.timing import Memory, clear, seconds, served
from benchmarks.ways import WAYS, run_apart
from benchmarks.workloads import batch, build, gpt_shape, loss_of
from ds_memo.units import GIB

BAR = 1.02
STEPS_TO_A_PLAN = 4


def train(device: torch.device, planned: bool, hidden: int, layers: int, lengths: list[int], steps: int) -> dict[str, Any]:
    """Train in this process and return its samples, counts and bytes."""
    cuda = device.type == "cuda"
    shape = gpt_shape(layers, hidden, max(1, hidden // 128), tuple(lengths))
    model = build(shape, device)
    batches = [batch(shape, length, device) for length in lengths]
    handle = ds_memo.attach(model, {"alpha": 0.5, "resident_layers": min(2, layers), "plan": {"enabled": planned}})
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

    def train_on(ids: torch.Tensor) -> None:
        optimizer.zero_grad()
        loss_of(model, ids).backward()
        optimizer.step()

    def step(ids: torch.Tensor) -> float:
        return seconds(partial(train_on, ids), device)

    for ids in batches * STEPS_TO_A_PLAN:
        step(ids)
    memory, plan_before = Memory(device), handle.report()["plan"]
    samples = [step(batches[i % len(batches)]) for i in range(steps)]
    plan = handle.report()["plan"]
    row = {"samples_s": samples, "plan": plan}
    if cuda:
        found = memory.read(steps, lambda: None)
        row |= {name: found[name] for name in ("cuda_mallocs_per_step", "cuda_frees_per_step")}
        row |= {"reserved": found["device_reserved_peak"], "requested": found["device_peak"]}
    if planned:
        row |= served(plan_before, plan)
    handle.detach()
    return row


def measure(
    device: torch.device,
    hidden: int,
    layers: int,
    trainings: list[list[int]],
    steps: int,
    left: Callable[[], float] = lambda: math.inf,
) -> list[dict[str, Any]]:
    """Measure every way in a process of its own.

    Args:
        trainings: lengths of each training.
        left: seconds that are left.

    Returns:
        A result per training.
    """
    arguments = {"hidden": hidden, "layers": layers, "steps": steps}
    ways: dict[str, list[dict[str, Any]]] = {}
    for way, (_, planned) in WAYS.items():
        words = [f"--{name}={value}" for name, value in arguments.items()]
        for lengths in trainings:
            words += ["--lengths", *map(str, lengths)]
        words += [f"--device={device.type}", "--planned" if planned else "--no-planned"]
        rows = run_apart("benchmarks.allocator_gpu", words, way, left())
        if "error" in rows:
            sys.exit(f"allocator_gpu: {way}: {rows['error']}")
        ways[way] = rows["trainings"]
    return [
        {**arguments, "lengths": lengths, **compared({way: rows[number] for way, rows in ways.items()})}
        for number, lengths in enumerate(trainings)
    ]


def compared(rows: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Print one training's row of each way, and return the rows with the bars that are missed."""
    alive = rows["native"].get("requested")
    failures = []
    for way, row in rows.items():
        print(f"    {way:20s} step {statistics.median(row['samples_s']) * 1e3:9.1f} ms", end="")
        if alive:
            row["over_alive"] = row["reserved"] / alive
            calls = row["cuda_mallocs_per_step"], row["cuda_frees_per_step"]
            print(f", reserved {row['reserved'] / GIB:.2f} GiB ({row['over_alive']:.3f} of what is alive)", end="")
            print(f", {calls[0]:.1f} cudaMalloc and {calls[1]:.1f} cudaFree a step", end="")
            if way == "planned" and (row["over_alive"] > BAR or any(calls)):
                failures.append(
                    f"allocator: reserved {row['over_alive']:.3f} of what is alive, {calls} cudaMalloc and cudaFree a step"
                )
        if "hits" in row:
            print(f", {row['hits']} hits, misses {row['misses'] or 'none'}", end="")
            if not row["hits"]:
                failures.append(f"allocator: {way}: no request got a planned address")
        print()
    return {"ways": rows, "failures": failures}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser("python -m benchmarks.allocator_gpu", description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--lengths", type=int, nargs="+", action="append", help="of one training; default: 16384")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--planned", action=argparse.BooleanOptionalAction, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    device = results.device_or_exit(options.device, "allocator_gpu")
    trainings = options.lengths or [[16384]]
    if options.planned is not None:
        rows = []
        for lengths in trainings:
            rows.append(train(device, options.planned, options.hidden, options.layers, lengths, options.steps))
            clear(device)
        print(json.dumps({"trainings": rows}))
        return 0
    found = measure(device, options.hidden, options.layers, trainings, options.steps)
    return results.end(found, [failure for result in found for failure in result["failures"]], options.json)


if __name__ == "__main__":
    sys.exit(main())
