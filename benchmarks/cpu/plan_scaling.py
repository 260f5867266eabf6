"""Time and memory of the planner by the size of the trace: python -m benchmarks.plan --scaling

Plans traces of 10^3 to 10^6 requests, in layers and in one phase (tests/plan/instances.py), each in a fresh process. Writes
benchmarks/results/plan_scaling.json and draws docs/plan_scaling.png.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import time
from pathlib import Path

from ds_memo.plan import plan_trace
from tests.plan import instances

ROOT = Path(__file__).resolve().parents[2]
SIZES = (1_000, 10_000, 100_000, 300_000, 1_000_000)
LIMIT = 60.0


def scaling() -> list[dict]:
    rows = []
    for solver in ("greedy", "cbc"):
        for kind in ("layered", "flat"):
            for size in SIZES:
                words = [sys.executable, "-m", "benchmarks.plan_scaling", kind, str(size), solver]
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


if __name__ == "__main__":
    print(json.dumps(one(sys.argv[1], int(sys.argv[2]), sys.argv[3])))
