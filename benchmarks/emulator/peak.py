"""What stands on the device at a step's peak, by the code that asked for it, from the allocator's own history.

    export DS_MEMO_CUDA_TORCH=/path/to/python
    python -m benchmarks.peak llama8b 102400 [--rival "ds_memo, tiles"] [--device-gib 16] [--host-gib 64]
    python -m benchmarks.peak llama8b 32768 --memo '{"alpha": 0, "resident_layers": 0, "tile_tokens": 0}' --snapshot whole.pickle

A unit is tokens · hidden size · 2 bytes: one tensor of hidden states in bf16. Weights and their gradients are listed apart.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import json
import sys
import tempfile
from typing import Any

import torch

from benchmarks.emulated_process import run_emulated, without_values
from benchmarks.rivals import RIVALS, Budget
from benchmarks.timing import Trainer
from benchmarks.workloads import batch, build, shapes
from ds_memo.units import GIB

_OURS = ("ds_memo/", "benchmarks/", "transformers/models/")


def at_peak(trace: list[dict[str, Any]]) -> dict[int, dict[str, Any]]:
    """Return the blocks that are allocated when most bytes are, by address."""
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
        for part in _OURS:
            if part in frame["filename"]:
                file = frame["filename"].rpartition("/")[2]
                return f"{file}:{frame['line']} {frame['name']}"
    return "autograd"


def main() -> int:
    parser = argparse.ArgumentParser("python -m benchmarks.peak", description=__doc__.splitlines()[0])
    parser.add_argument("workload")
    parser.add_argument("length", type=int)
    parser.add_argument("--rival", choices=RIVALS, default="ds_memo, tiles")
    parser.add_argument("--device-gib", type=float, default=16.0)
    parser.add_argument("--host-gib", type=float, default=64.0)
    parser.add_argument("--memo", type=json.loads, help='instead of a rival: a "memo" section; addresses are not planned')
    parser.add_argument(
        "--snapshot", metavar="FILE.pickle", help="write the step's history of allocations, for layer_backward.py"
    )
    parser.add_argument("--emulated", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if not options.emulated:
        return run_emulated("benchmarks.peak", [*sys.argv[1:], "--emulated"], 139.8)
    without_values()
    device = torch.device("cuda", 0)
    shape = shapes(device)[options.workload]
    model = build(shape, device)
    trainer = Trainer(model, batch(shape, options.length, device))
    before = torch.cuda.memory_allocated(device)
    with tempfile.TemporaryDirectory() as cache:
        budget = Budget(device, int(options.host_gib * GIB), int(options.device_gib * GIB), bandwidth=50e9, cache_dir=cache)
        rival = RIVALS[options.rival] if options.memo is None else dataclasses.replace(RIVALS["ds_memo"], settings=options.memo)
        with rival.on(model, budget) as installed:
            for _ in range(max(2, rival.warm_up)):
                torch.cuda.reset_peak_memory_stats(device)
                trainer.step(installed)
                print("between steps", torch.cuda.memory_allocated(device) / GIB, torch.cuda.max_memory_allocated(device) / GIB)
            torch.cuda.memory._record_memory_history(context="alloc", stacks="python", max_entries=10**7)
            trainer.step(installed)
            (trace,) = torch.cuda.memory._snapshot(device)["device_traces"][:1]
            if options.snapshot:
                torch.cuda.memory._dump_snapshot(options.snapshot)
            torch.cuda.memory._record_memory_history(enabled=None)
    unit = options.length * model.config.hidden_size * 2
    by_source: dict[str, list[int]] = collections.defaultdict(list)
    for event in at_peak(trace).values():
        by_source[source(event["frames"])].append(event["size"])
    print(f"weights and gradients, before the step: {before / GIB:.2f} GiB; one unit: {unit / GIB:.3f} GiB")
    for where, sizes in sorted(by_source.items(), key=lambda item: -sum(item[1])):
        if sum(sizes) > 0.005 * unit:
            print(f"{sum(sizes) / unit:6.2f} units  {sum(sizes) / GIB:6.2f} GiB  {len(sizes):4d} blocks  {where}")
    print(f"{sum(map(sum, by_source.values())) / unit:6.2f} units in all")
    return 0


if __name__ == "__main__":
    sys.exit(main())
