"""Memory that training holds on a GPU: PyTorch's allocator, its expandable segments, and planned addresses.

    python -m benchmarks.allocator_gpu [--hidden 2048] [--layers 8] [--lengths 16384] [--steps 10] [--json PATH]

A GPT trains with AdamW and alpha 0.5; each way to allocate has a process of its own, because its setting is the process's.
After the warm-up (two profiled iterations and a planned one per length), printed per way:

    cudaMalloc, cudaFree   calls per step; bar for planned addresses: 0
    reserved               most bytes that PyTorch held from CUDA, and over the peak of what is alive; bar: 1.02
    step                   median seconds

What is alive is the same in every way, so its peak is taken where PyTorch serves every request: the most bytes asked for at
once. With several lengths, steps take them in turn. --device cpu tries the harness; there is nothing to count there.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import ds_memo
from benchmarks import results
from benchmarks.timing import served
from benchmarks.workloads import batch, build, gpt_shape, loss_of
from ds_memo.units import GIB

BAR = 1.02
WAYS = {"native": (False, False), "expandable segments": (True, False), "planned": (False, True), "both": (True, True)}
"""Expandable segments, planned addresses."""
STEPS_TO_A_PLAN = 4


def train(device: torch.device, planned: bool, hidden: int, layers: int, lengths: list[int], steps: int) -> dict[str, Any]:
    """One process's part."""
    cuda = device.type == "cuda"
    shape = gpt_shape(layers, hidden, max(1, hidden // 128), tuple(lengths))
    model = build(shape, device, torch.bfloat16 if cuda else torch.float32)
    batches = [batch(shape, length, device) for length in lengths]
    handle = ds_memo.attach(model, {"alpha": 0.5, "resident_layers": min(2, layers), "plan": {"enabled": planned}})
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

    def step(ids: torch.Tensor) -> float:
        begin = time.perf_counter()
        optimizer.zero_grad()
        loss_of(model, ids).backward()
        optimizer.step()
        if cuda:
            torch.cuda.synchronize()
        return time.perf_counter() - begin

    for ids in batches * STEPS_TO_A_PLAN:
        step(ids)
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    before, plan_before = torch.cuda.memory_stats() if cuda else {}, handle.report()["plan"]
    samples = [step(batches[i % len(batches)]) for i in range(steps)]
    after, plan = torch.cuda.memory_stats() if cuda else {}, handle.report()["plan"]
    row = {"samples_s": samples, "plan": plan}
    if cuda:
        row |= {
            "cuda_mallocs_per_step": (after["num_device_alloc"] - before["num_device_alloc"]) / steps,
            "cuda_frees_per_step": (after["num_device_free"] - before["num_device_free"]) / steps,
            "reserved": after["reserved_bytes.all.peak"],
            "requested": after["requested_bytes.all.peak"],
        }
    if planned:
        row |= served(plan_before, plan)
    handle.detach()
    return row


def measure(
    device: torch.device, hidden: int, layers: int, lengths: list[int], steps: int, left: Callable[[], float] = lambda: math.inf
) -> dict[str, Any]:
    """Every way in its own process.

    Args:
        left: seconds that are left for all that is to come.
    """
    rows: dict[str, dict[str, Any]] = {}
    arguments = {"hidden": hidden, "layers": layers, "lengths": lengths, "steps": steps}
    for way, (expandable, planned) in WAYS.items():
        words = [f"--{name}={value}" for name, value in arguments.items() if name != "lengths"]
        words += ["--lengths", *map(str, lengths), f"--device={device.type}", "--planned" if planned else "--no-planned"]
        environment = os.environ | {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True" if expandable else ""}
        command = [sys.executable, "-m", "benchmarks.allocator_gpu", *words]
        root = Path(__file__).parents[1]
        limit = None if math.isinf(left()) else max(1.0, left())
        try:
            done = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=root, check=False, timeout=limit)
        except subprocess.TimeoutExpired:
            sys.exit(f"allocator_gpu: {way}: {results.NO_TIME}")
        if done.returncode:
            sys.exit(f"allocator_gpu: {way}: {done.stderr[-3000:]}")
        rows[way] = json.loads(done.stdout.splitlines()[-1])
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
    return {**arguments, "ways": rows, "failures": failures}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--lengths", type=int, nargs="+", default=[16384])
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--planned", action=argparse.BooleanOptionalAction, help=argparse.SUPPRESS)
    options = parser.parse_args()
    device = results.device_or_exit(options.device, "allocator_gpu")
    if options.planned is not None:
        print(json.dumps(train(device, options.planned, options.hidden, options.layers, options.lengths, options.steps)))
        return 0
    result = measure(device, options.hidden, options.layers, options.lengths, options.steps)
    if options.json:
        options.json.write_text(json.dumps(result, indent=1) + "\n")
    print("\n".join(result["failures"]))
    return 1 if result["failures"] else 0


if __name__ == "__main__":
    sys.exit(main())
