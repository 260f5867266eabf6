"""The planner's numbers: python -m benchmarks.plan [--scaling | --tiles]

Prints the figures of docs/plan.md and writes them with hardware and versions to benchmarks/results/plan.json.

--scaling   plans traces of 10^3 to 10^6 requests, in layers and in one phase (tests/plan/instances.py), each in a fresh process:
            time and memory, and docs/plan_scaling.png (10 minutes)
--tiles     trains a model of 32 layers and 64 tiles, 64 wide, on the allocator op for CPUs. The first three steps are logged, the
            fourth follows the plan. Then the log is planned once more (4 minutes)
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import time
from pathlib import Path

import torch

from benchmarks.caching_allocator import simulate
from benchmarks.results import environment, markdown
from ds_memo.plan import plan_trace, read_trace, search, solve, verify
from ds_memo.plan.trace import Trace
from ds_memo.units import GIB
from tests.plan import instances
from tests.plan.instances import CAPACITY, MINIMALLOC, TRACES, packing
from tests.plan.repeat import repeat_layer

ROOT = Path(__file__).resolve().parents[2]
SIZES = (1_000, 10_000, 100_000, 300_000, 1_000_000)
"""Requests of --scaling."""
LIMIT = 60.0
"""Seconds of a plan of --scaling."""
LAYERS, TILES, TOKENS = 32, 64, 256
"""Sizes of --tiles."""


def table(title: str, rows: list[dict]) -> list[dict]:
    cells = [[f"{v:.4f}" if isinstance(v, float) else v for v in row.values()] for row in rows]
    print(f"\n{title}", *markdown(rows[0], cells), sep="\n")
    return rows


def all_traces() -> list[tuple[str, Trace]]:
    out = []
    for path in TRACES:
        trace = read_trace(path)
        out.append((path.stem, trace))
        if "_L4_" in path.stem:
            out.append((path.stem.replace("_L4_", "_L32_"), repeat_layer(trace, 32)))
    return out


def plans() -> dict[str, list[dict]]:
    rows: dict[str, list[dict]] = {"plans": [], "allocators": []}
    for name, trace in all_traces():
        plan = plan_trace(trace)
        segments = [p for p in plan.phases if p.tensors]
        native, expandable = (simulate(trace, expandable=how, iterations=2).reserved for how in (False, True))
        rows["plans"].append(
            {
                "trace": name,
                "requests": len(trace.requests),
                "level-1 segments": len(segments),
                "at their bound": sum(p.peak == p.lower_bound for p in segments),
                "slowest s": max(p.seconds for p in segments),
                "pseudo blocks/bound": plan.block_bound / plan.lower_bound,
                "bi-level/bound": plan.bilevel_peak / plan.lower_bound,
                "plan/bound": plan.peak / plan.lower_bound,
                "proven": plan.proven,
                "seconds": plan.seconds,
            }
        )
        gib = {"plan GiB": plan.peak / GIB, "native GiB": native / GIB, "expandable GiB": expandable / GIB}
        ratios = {"native/plan": native / plan.peak, "expandable/plan": expandable / plan.peak}
        rows["allocators"].append({"trace": name} | gib | ratios)
    table("Plans of the shared traces, and of 32 layers (level 1 at its bound: each under 0.1 s)", rows["plans"])
    table("Plan peak against what PyTorch's allocator reserves (simulated, two iterations)", rows["allocators"])
    return rows


def minimalloc() -> list[dict]:
    rows = []
    for path in MINIMALLOC:
        problem = packing(path)
        found = solve(problem, seconds=10)
        good = verify.check(problem.buffers, found.offsets, capacity=CAPACITY) is None
        rows.append(
            {"instance": path.name[0], "buffers": len(problem), "fits": good, "seconds": found.seconds, "by": found.method}
        )
    return table(f"MiniMalloc's challenging set, capacity {CAPACITY} (target: each under 10 s on one core)", rows)


# ---- --scaling


def scaling() -> list[dict]:
    rows = []
    for solver in ("greedy", "cbc"):
        for kind in ("layered", "flat"):
            for size in SIZES:
                words = [sys.executable, "-m", "benchmarks.plan", "--one", kind, str(size), solver]
                run = subprocess.run(words, capture_output=True, text=True, check=True, cwd=ROOT)
                rows.append(json.loads(run.stdout.splitlines()[-1]))
                print("  ".join(f"{k} {v}" for k, v in rows[-1].items()), flush=True)
    return rows


def one(kind: str, size: int, solver: str) -> dict:
    """Make one plan in this process. Memory is that of trace and plan, without Python's and numpy's own."""
    before = _most_memory()
    trace = getattr(instances, kind)(size)
    began, busy = time.perf_counter(), time.process_time()
    plan = plan_trace(trace, solver=solver, seconds=LIMIT)
    took = time.perf_counter() - began
    memory = _most_memory() - before
    return {
        "trace": kind,
        "requests": len(trace.requests),
        "solver": solver,
        "seconds": round(took, 2),
        "of the limit": round(took / LIMIT, 3),
        "CPU s": round(time.process_time() - busy, 2),
        "MiB": memory >> 20,
        "bytes/request": memory // len(trace.requests),
        "peak/bound": round(plan.peak / plan.lower_bound, 4),
        "by": plan.method,
    }


def _most_memory() -> int:
    """Return the peak bytes of this process."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def draw(rows: list[dict], target: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 3.4), dpi=100)
    for column, key, unit in ((1, "seconds", "s"), (2, "MiB", "MiB")):
        axes = figure.add_subplot(1, 2, column)
        for kind in ("layered", "flat"):
            for solver, line in (("greedy", "o-"), ("cbc", "x--")):
                mine = [row for row in rows if (row["trace"], row["solver"]) == (kind, solver)]
                axes.loglog([row["requests"] for row in mine], [row[key] for row in mine], line, label=f"{kind}, {solver}")
        if key == "seconds":
            axes.axhline(LIMIT, color="grey", linewidth=0.8, label="time limit")
        axes.set(xlabel="requests", ylabel=unit)
        axes.legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(target)


# ---- --tiles


def tiles() -> dict:
    """Return the plan's numbers, and what the step that followed it hit and missed."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    import ds_memo

    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "vocab_size": 64}
    model = LlamaForCausalLM(LlamaConfig(num_hidden_layers=LAYERS, use_cache=False, **sizes))
    section = {"alpha": 0.0, "resident_layers": 0, "tile_tokens": TOKENS, "head_groups": 2}
    handle = ds_memo.attach(model, section)
    ids = torch.randint(sizes["vocab_size"], (TILES, TOKENS))  # a sequence is a tile: attention takes little time
    for _ in range(4):
        model.zero_grad()
        model(input_ids=ids, labels=ids).loss.backward()
    report, addresses = handle.report(), handle._session.addresses
    assert report["tiles"]["layers"] == list(range(LAYERS))
    trace = addresses.log.trace()
    handle.detach()
    began, busy = time.perf_counter(), time.process_time()
    plan = plan_trace(trace)
    return {
        "layers": LAYERS,
        "tiles": TILES,
        "requests": len(trace.requests),
        "CPU s": round(time.process_time() - busy, 2),
        "seconds": round(time.perf_counter() - began, 2),
        "peak/bound": round(plan.peak / plan.lower_bound, 4),
        "by": plan.method,
        "hits": report["plan"]["hits"],
        "misses": sum(report["plan"]["misses"].values()),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scaling", action="store_true")
    parser.add_argument("--tiles", action="store_true")
    parser.add_argument("--one", nargs=3, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        kind, size, solver = args.one
        print(json.dumps(one(kind, int(size), solver)))
    elif args.scaling:
        rows = scaling()
        draw(rows, ROOT / "docs" / "plan_scaling.png")
        _write("plan_scaling", {"limit": LIMIT, "scaling": rows})
    elif args.tiles:
        _write("plan_tiles", {"tiles": table("Layers in tiles", [tiles()])})
    else:
        search.load()  # compiled before anything is timed
        results = plans() | {"minimalloc": minimalloc()}
        _write("plan", results)


def _write(name: str, results: dict) -> None:
    target = ROOT / "benchmarks" / "results" / f"{name}.json"
    machine = environment(torch.device("cpu")) | {"cores": os.cpu_count()}
    target.write_text(json.dumps({"machine": machine, **results}, indent=1) + "\n")
    print(f"\n{target.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
