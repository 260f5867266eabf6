"""How long the solver thinks: python -m benchmarks.solver [--runs 200] [--json PATH]

For random runs of 8 to 128 layers of up to three kinds, with budgets from too little to plenty: milliseconds of one solve
(residents, alpha, last resort, sentence and all), beside its bar of 50 ms. Each is the median of five; all are in the JSON.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from pathlib import Path

import torch

from benchmarks.environment import environment
from ds_memo.solve.costs import LayerCosts, Output, RunCosts
from ds_memo.solve.homes import NothingFits, solve

BAR_MS = 50.0


def random_layer(draw: random.Random) -> LayerCosts:
    """A GPT or Llama layer of some length, as measured on a device of some speed."""
    tokens, hidden = draw.choice([4, 16, 64, 256]) * 1024, draw.choice([2048, 4096, 8192])
    shares = draw.choice([(3.0, -1.0, 1.0, 4.0), (1.0, 0.25, 0.25, -1.0, 1.0, 3.5, 3.5)])  # attention is negative
    forward_s = tokens * hidden * hidden * 24 / draw.uniform(1e14, 8e14) + tokens * tokens * hidden * 2 / 5e14
    outputs = [Output("input", tokens, 2 * hidden, 0.0)]
    for number, share in enumerate(shares, 1):
        kind = "attention" if share < 0 else "gemm"
        outputs.append(Output(kind, tokens, int(abs(share) * hidden) * 2, number / (len(shares) + 1)))
    return LayerCosts(
        outputs=tuple(outputs),
        forward_s=forward_s,
        backward_s=2.2 * forward_s,
        replay_s=0.1 * forward_s,
        gemm_s=0.5 * forward_s,
        attention_s=0.3 * forward_s,
        plain_bytes=int(2.2 * sum(output.nbytes for output in outputs)),
    )


def random_run(seed: int, layers: int) -> RunCosts:
    draw = random.Random(seed)
    kinds = [random_layer(draw) for _ in range(draw.randint(1, 3))]
    all_of_them = tuple(draw.choice(kinds) for _ in range(layers))
    whole = sum(layer.host_bytes(1.0) for layer in all_of_them)
    link = draw.uniform(5e9, 60e9)
    device = draw.uniform(1.0, layers / 2) * max(layer.frame_bytes for layer in kinds)
    return RunCosts(all_of_them, link, link, int(draw.uniform(0.05, 2.0) * whole), int(device))


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


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=200, help="of each number of layers")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    result, worst = {"environment": environment(torch.device("cpu")), "bar_ms": BAR_MS}, 0.0
    print(f"{'layers':>6s} {'median ms':>10s} {'worst ms':>9s}   answers")
    for layers in (8, 32, 80, 128):
        found = [milliseconds(random_run(seed, layers)) for seed in range(options.runs)]
        times = [ms for ms, _ in found]
        outcomes = sorted({outcome: sum(o == outcome for _, o in found) for _, outcome in found}.items(), key=lambda x: -x[1])
        said = ", ".join(f"{count} {outcome}" for outcome, count in outcomes)
        print(f"{layers:6d} {statistics.median(times):10.2f} {max(times):9.2f}   {said}")
        result[f"{layers} layers"] = {"ms": times, "answers": dict(outcomes)}
        worst = max(worst, max(times))
    print(f"bar {BAR_MS:g} ms: {'met' if worst < BAR_MS else 'MISSED'}")
    if options.json:
        options.json.write_text(json.dumps(result, indent=1) + "\n")
    return worst >= BAR_MS


if __name__ == "__main__":
    sys.exit(main())
