"""The solver against its bars: python -m benchmarks.solver [--runs 200] [--json PATH]

How long it thinks: for random runs of 8 to 128 layers of up to three kinds, with budgets from too little to plenty,
milliseconds of one solve (residents, alpha, last resort, sentence and all). Each is the median of five.
How good its answer is: for the settings of tests/solve/sweep.py, the worst |alpha − best of a sweep over the virtual engine|.
--json keeps all samples. Ends with 1 where a bar is missed.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from benchmarks.environment import environment
from ds_memo.solve.refusals import NothingFits
from ds_memo.solve.run_costs import RunCosts
from ds_memo.solve.solver import solve
from tests.solve import sweep
from tests.solve.runs import random_run

BAR_MS = 50.0


def milliseconds(run: RunCosts) -> tuple[float, str]:
    samples = []
    for _ in range(5):
        begin = time.perf_counter()
        try:
            outcome = solve(run).binding.partition(":")[0]
        except NothingFits as nothing:
            outcome = f"nothing fits the {nothing.where}"
        samples.append((time.perf_counter() - begin) * 1e3)
    return statistics.median(samples), outcome


def times(runs: int) -> tuple[dict[str, Any], float]:
    """Return rows for the JSON, and the slowest solve in milliseconds."""
    kept, worst = {}, 0.0
    print(f"{'layers':>6s} {'median ms':>10s} {'worst ms':>9s}   answers")
    for layers in (8, 32, 80, 128):
        found = [milliseconds(random_run(seed, n=layers)) for seed in range(runs)]
        ms = [sample for sample, _ in found]
        outcomes = dict(Counter(outcome for _, outcome in found).most_common())
        said = ", ".join(f"{count} {outcome}" for outcome, count in outcomes.items())
        print(f"{layers:6d} {statistics.median(ms):10.2f} {max(ms):9.2f}   {said}")
        kept[f"{layers} layers"] = {"ms": ms, "answers": outcomes}
        worst = max(worst, *ms)
    return kept, worst


def alphas() -> tuple[list[dict[str, Any]], float]:
    """Return rows for the JSON, and the largest distance of an alpha from the best of its sweep."""
    kept = []
    for case in sweep.CASES:
        costs = case.costs()
        solution = solve(costs, may_skip_recompute=False)
        kept.append({"setting": asdict(case), "alpha": solution.alpha, "off": sweep.off_the_best(costs, solution)})
    return kept, max(one["off"] for one in kept)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=200, help="of each number of layers (default: %(default)s)")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    timed, slowest = times(options.runs)
    swept, farthest = alphas()
    bars = [
        ("slowest solve", slowest, BAR_MS, " ms"),
        (f"worst |alpha − best of the sweep| of {len(swept)} settings", farthest, sweep.BAR, ""),
    ]
    for what, found, bar, unit in bars:
        print(f"{what}: {found:.3g}{unit}, bar {bar:g}{unit}: {'met' if found <= bar else 'MISSED'}")
    if options.json:
        bar = {"ms": BAR_MS, "alpha": sweep.BAR}
        result = {"environment": environment(torch.device("cpu")), "bar": bar, "solves": timed, "sweep": swept}
        options.json.write_text(json.dumps(result, indent=1) + "\n")
    return int(any(found > bar for _, found, bar, _ in bars))


if __name__ == "__main__":
    sys.exit(main())
