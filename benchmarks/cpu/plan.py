"""The planner's numbers: python -m benchmarks.plan [--scaling | --tiles]

Prints every figure of docs/plan.md and writes them with hardware and versions to benchmarks/results/plan.json.
--scaling does plan_scaling.py alone (10 minutes), --tiles plan_tiles.py (4 minutes).
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from benchmarks import plan_scaling
from benchmarks.caching_allocator import simulate
from benchmarks.repeat import repeat_layer
from ds_memo.plan import plan_trace, read_trace, search, solve, verify
from ds_memo.plan.dsa import Problem, peak
from ds_memo.plan.milp import MilpFailed, solve_milp
from ds_memo.plan.rescale import rescale
from ds_memo.plan.trace import Trace
from ds_memo.units import GIB
from tests.plan.instances import CAPACITY, GAP, GAP_BEST, MINIMALLOC, TRACES, dense, packing

ROOT = Path(__file__).resolve().parents[2]


def table(title: str, rows: list[dict]) -> list[dict]:
    print(f"\n{title}")
    head = list(rows[0])
    text = [head] + [[f"{v:.4f}" if isinstance(v, float) else str(v) for v in row.values()] for row in rows]
    wide = [max(len(r[c]) for r in text) for c in range(len(head))]
    for r in text:
        print("  " + "  ".join(x.ljust(w) for x, w in zip(r, wide, strict=True)).rstrip())
    return rows


def all_traces() -> list[tuple[str, Trace]]:
    out = []
    for path in TRACES:
        trace = read_trace(path)
        out.append((path.stem, trace))
        if "_L4_" in path.stem:
            out.append((path.stem.replace("_L4_", "_L32_"), repeat_layer(trace, 32)))
    return out


def plans() -> list[dict]:
    rows = []
    for name, trace in all_traces():
        plan = plan_trace(trace)
        segments = [p for p in plan.phases if p.tensors]
        rows.append(
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
    return table("Plans of the shared traces, and of 32 layers (level 1 at its bound: each under 0.1 s)", rows)


def allocators() -> list[dict]:
    rows = []
    for name, trace in all_traces():
        plan = plan_trace(trace)
        native_, expandable = simulate(trace, iterations=2), simulate(trace, expandable=True, iterations=2)
        rows.append(
            {
                "trace": name,
                "plan GiB": plan.peak / GIB,
                "native GiB": native_.reserved / GIB,
                "expandable GiB": expandable.reserved / GIB,
                "native/plan": native_.reserved / plan.peak,
                "expandable/plan": expandable.reserved / plan.peak,
            }
        )
    return table("Plan peak against what PyTorch's allocator reserves for the same trace (simulated, two iterations)", rows)


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


def mip() -> list[dict]:
    rows = []
    for solver in ("cbc", "highs"):
        began = time.perf_counter()
        try:
            found = peak(GAP.buffers, solve_milp(GAP.buffers, 60, solver=solver, tight=False).offsets)
        except MilpFailed as e:
            found = str(e)
        rows.append({"solver": solver, "MIP": found, "optimum": GAP_BEST, "seconds": time.perf_counter() - began})
    return table("The paper's MIP alone (no greedy, no start, no tightening) against the proven optimum", rows)


def speed() -> list[dict]:
    rows = []
    gpt = repeat_layer(read_trace(next(p for p in TRACES if p.stem == "gpt_none_L4_s16k")), 43)
    plan = plan_trace(gpt, solver="greedy")
    sizes = [2 * s.requested for s in plan.slots]
    took = [_time(lambda: rescale(plan, sizes)) for _ in range(7)]
    rows.append({"what": f"rescale {len(gpt.requests)} requests (target 0.05)", "seconds": min(took)})
    buffers, offsets = [s.buffer() for s in plan.slots], [s.offset for s in plan.slots]
    rows.append({"what": f"verify {len(buffers)} slots", "seconds": _time(lambda: verify.check(buffers, offsets))})
    hard = Problem(tuple(b._replace(size=b.size + i % 512) for i, b in enumerate(dense(300, 1, trim=0.2).buffers)))
    for solver in ("search", "cbc", "highs"):
        took = _time(lambda s=solver: solve(hard, solver=s, seconds=1))
        rows.append({"what": f"a limit of 1 s on a hard problem, {solver}", "seconds": took})
    return table("Times", rows)


def _time(work) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def machine() -> dict:
    cpu = platform.processor()
    if Path("/proc/cpuinfo").exists():
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        models = [x.split(":", 1)[1].strip() for x in lines if x.startswith("model name")]
        cpu = models[0] if models else cpu
    packages = {}
    for name in ("numpy", "mip", "cbcbox", "highspy"):
        try:
            packages[name] = version(name)
        except PackageNotFoundError:
            packages[name] = None
    return {
        "cpu": cpu, "cores": os.cpu_count(), "load": os.getloadavg()[0], "python": platform.python_version(),
        "system": platform.system(), "packages": packages, "date": time.strftime("%Y-%m-%d"),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--scaling", action="store_true")
    parser.add_argument("--tiles", action="store_true")
    args = parser.parse_args()
    if args.scaling:
        rows = plan_scaling.scaling()
        plan_scaling.draw(rows, ROOT / "docs" / "plan_scaling.png")
        _write("plan_scaling", {"machine": machine(), "limit": plan_scaling.LIMIT, "scaling": rows})
        return
    if args.tiles:
        from benchmarks import plan_tiles  # torch

        _write("plan_tiles", {"machine": machine(), "tiles": table("Layers in tiles", [plan_tiles.tiles()])})
        return
    search.load()  # compiled before anything is timed
    results = {"machine": machine(), "plans": plans(), "allocators": allocators(), "minimalloc": minimalloc()}
    results |= {"mip": mip(), "speed": speed()}
    _write("plan", results)


def _write(name: str, results: dict) -> None:
    target = ROOT / "benchmarks" / "results" / f"{name}.json"
    target.write_text(json.dumps(results, indent=1) + "\n")
    print(f"\n{target.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
