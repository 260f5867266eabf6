"""Step time and memory of every rival at every length, side by side in one run.

    bash benchmarks/gpu.sh speed [--workloads gpt7b llama8b ulysses8] [--lengths 65536 …] [--rivals …] [--host-gib X]
                                 [--budget-s 420] [--device cuda|cpu] [--out DIR]

Without lengths, the points (workload, length) that the bars name come first, with the rivals that they name; then llama8b from
short to long, and attention kernels last. With lengths, every rival has its turn. What the time does not hold is dropped and
named. benchmarks/point.py measures a point, benchmarks/claims.py has the bars.

A rival that runs out of memory is written down as such. At the shortest length of gpt7b and llama8b, and of any lengths that are
given, every rival's gradients are compared with those of no checkpointing. The bar is the error of stock itself when its
GEMMs sum in other orders. Samples during which ds_memo changed its solution are dropped and taken again (`dropped_s`; `unsettled`
where it did not come to rest).

"ds_memo, swapping" keeps two layers on the device whatever there is room for, as the paper does: where everything fits, ds_memo
itself does not checkpoint, and its speed would say nothing of swapping.

--host-gib lowers the host budget of ds_memo and of the paper's MEMO: host-bound points; --device-gib the device budget that
ds_memo gets. `ds-memo estimate` predicts "ds_memo, planned" under these budgets before anything is timed. A
virtual machine whose memory grows as it is used is made to grow first (benchmarks/host.py).

Details go into one archive: profiles, streams, traces if they are small.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from benchmarks import attention, results
from benchmarks import host as host_memory
from benchmarks.claims import claims
from benchmarks.open_slab import held_open
from benchmarks.point import NEEDED, run_point, urgency
from benchmarks.predict import in_words
from benchmarks.rivals import OURS, PLANNED, RIVALS, Budget, Rival
from benchmarks.timing import clear
from benchmarks.workloads import NAMES, Shape, build, shapes, step_flops
from ds_memo.profile.bandwidth import CopyBench
from ds_memo.swap.stream_protocol import D2H
from ds_memo.units import GIB

AT_LEAST_S = 60.0
"""Seconds that the first point may take, whatever time is left."""
KERNELS_S = 25.0
"""Seconds for attention kernels."""
BARS = {("gpt7b", 65536): 2, ("ulysses8", 65536): 1, ("gpt7b", 16384): 1, ("ulysses8", 131072): 1}
"""Points that the bars name, the first one first, and the turns of a rival there. On a slow card the last one falls out."""
TURNS, STEPS = 2, 3
"""Turns of each rival at other points, and steps timed in a turn."""


@dataclass(frozen=True)
class Point:
    """One length of a workload that is to be measured."""

    shape: Shape
    length: int
    compare: bool
    """The gradients too."""
    turns: int = TURNS


def points_of(names: list[str], lengths: list[int] | None, device: torch.device) -> list[Point]:
    """Return the points in the order of measurement."""
    found, order = [], list(BARS)
    for name in names:
        shape = shapes(device)[name]
        named = [length for workload, length in BARS if workload == name and length in shape.lengths]
        of_it = lengths or named or shape.lengths
        compare = min(of_it) if lengths or shape.ranks == 1 else None
        turns = {} if lengths else BARS
        found += [Point(shape, length, length == compare, turns.get((name, length), TURNS)) for length in of_it]

    def key(point: Point) -> tuple[int, float]:
        what = (point.shape.name, point.length)
        return order.index(what) if what in order else len(order), step_flops(point.shape, point.length)

    return sorted(found, key=key)


def measure(
    run: results.Run, points: list[Point], rivals: list[Rival], budget: Budget, budget_s: float, kernels: bool, details: Path
) -> None:
    """Measure all points that the time budget holds, and then the attention kernels.

    Args:
        budget_s: seconds since the run began.
        details: a folder for the other files of each point.
    """
    device = budget.device
    done, dropped = [], []
    run.found |= {"points": done, "dropped": dropped, "attention": None}
    rivals = sorted(rivals, key=urgency)

    def keep(found: dict[str, Any]) -> None:
        if not any(found is other for other in done):
            done.append(found)
        found["claims"] = claims(found)
        run.save()

    def measured(point: Point, until: float) -> dict[str, Any]:
        model, visits = build(point.shape, device), (point.turns, STEPS)
        return run_point(model, point.shape, point.length, rivals, budget, visits, point.compare, details, until, keep)

    for number, point in enumerate(points):
        name = f"{point.shape.name} {point.length}"
        left = budget_s - run.seconds() - (KERNELS_S if kernels else 0)
        if number and left <= 0:
            dropped.append({"workload": point.shape.name, "length": point.length})
            results.say(f"{name}: dropped, {results.NO_TIME}")
            continue
        results.say(f"{point.shape.name}, {point.length} tokens")
        found = run.attempt(name, measured, point, time.perf_counter() + (left if number else max(left, AT_LEAST_S)))
        run.attempt(f"after {name}", clear, device)
        if found is None:
            run.save()
            continue
        keep(found)
        run.failures += [*found["failures"], *found.get("gradients", {}).get("failures", ())]
        run.save()
        run.attempt(f"{name}, printed", show, found)
    if any(rival.name in OURS for rival in rivals):
        run.failures += _without_ours(done)
    if kernels:
        run.save(attention=_kernels(run, device, budget_s - run.seconds()))


def _without_ours(points: list[dict[str, Any]]) -> list[str]:
    """Return a failure if no row of ds_memo has samples."""
    ours = [row for point in points for name, row in point["rivals"].items() if name in OURS]
    if any(row["samples_s"] for row in ours):
        return []
    why = next((row["out"] for row in ours if "out" in row), "no point was measured")
    return [f"no row of ds_memo has samples: {why}"]


def _kernels(run: results.Run, device: torch.device, left: float) -> dict[str, Any]:
    if left < KERNELS_S and device.type == "cuda":
        results.say(f"attention kernels: dropped, {max(0.0, left):.0f} s are left")
        return {"points": [], "skipped": results.NO_TIME}
    heads = attention.heads_for(device)
    found = run.attempt("attention", attention.measure, device, attention.lengths_for(device), heads)
    if found is None:
        return {"points": [], "skipped": "it broke"}
    run.failures += found["failures"]
    return found


def show(point: dict[str, Any]) -> None:
    """Print a point, one line for each rival."""
    say = results.say
    for name, row in point["rivals"].items():
        if "median_s" not in row:
            say(f"    {name:22s} {row['out'][:110]}")
            continue
        spread = (max(row["samples_s"]) - min(row["samples_s"])) / row["median_s"]
        text = f"    {name:22s} {row['median_s'] * 1e3:10.1f} ms ±{50 * spread:4.1f} %  {row['tflops']:7.3g} TFLOP/s"
        say(text + f"  device {row['memory']['device_peak'] / GIB:7.3f} GiB")
    results.say_claims(point["claims"])
    if point.get("predicted"):
        say(f"      predicted: {in_words(point['predicted'], point['rivals'].get(PLANNED, {}).get('median_s'))}")
    if "hidden_share" in point.get("streams", ()):
        seen = point["streams"]
        hidden = ", ".join(f"{row} {share:.1%} hidden" for row, share in seen["hidden_share"].items() if share is not None)
        say(f"      streams: compute busy {seen['compute_share']:.1%} of {seen['span_s'] * 1e3:.1f} ms; {hidden or 'no copies'}")
    if "rivals" in point.get("gradients", {}):
        worst = max((row["worst"] for row in point["gradients"]["rivals"].values()), default=0.0)
        say(f"      gradients off by at most {worst:.2e}, bar {point['gradients']['bar']:.2e}")


def measure_bandwidth(device: torch.device, budget: int) -> float:
    """Return bytes per second to the host, for this rank alone."""
    with closing(CopyBench(device, budget)) as bench:
        return bench.rate(D2H)


def make_budget(run: results.Run, device: torch.device, host_gib: float | None, device_gib: float | None = None) -> Budget:
    """Return the rivals' budget; a measurement that raises is a failure and counts as 0."""
    host = run.attempt("host memory", host_memory.budget, host_gib, device) or 0
    rate = run.attempt("link", lambda: measure_bandwidth(device, min(host, GIB))) or 0.0
    device_bytes = None if device_gib is None else int(device_gib * GIB)
    return Budget(device, host, device_bytes=device_bytes, bandwidth=rate)


def add_common(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--workloads", nargs="+", choices=NAMES)
    parser.add_argument("--rivals", nargs="+", choices=[*RIVALS, "all"], default=["all"])
    parser.add_argument("--host-gib", type=float, help="host budget of ds_memo and of the paper's MEMO")
    parser.add_argument("--budget-s", type=float, default=420.0, help="seconds that the whole may take")
    parser.add_argument("--out", help="folder for the result; absent: $OUT, else benchmarks/results")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser("gpu.sh speed", description=__doc__.splitlines()[0])
    add_common(parser)
    parser.set_defaults(rivals=[])
    parser.add_argument("--lengths", type=int, nargs="+", help="tokens; absent: all of a workload")
    parser.add_argument("--device-gib", type=float, help="device budget of ds_memo; absent: all there is")
    parser.add_argument("--no-attention", action="store_true", help="leave the attention kernels out")
    options = parser.parse_args(arguments)
    device = results.device_or_exit(options.device, "speed")
    default = RIVALS if options.lengths else NEEDED
    rivals = [RIVALS[name] for name in (RIVALS if "all" in options.rivals else options.rivals or default)]
    points = points_of(options.workloads or list(NAMES), options.lengths, device)
    run = results.Run("speed", device, options.out, vars(options))
    with tempfile.TemporaryDirectory() as cache, tempfile.TemporaryDirectory() as made:
        # Profiles in the cache are of this run, not of one before.
        budget = replace(make_budget(run, device, options.host_gib, options.device_gib), cache_dir=cache)
        with held_open(budget) as budget:
            run.attempt("speed", measure, run, points, rivals, budget, options.budget_s, not options.no_attention, Path(made))
        return run.finish(Path(made))


if __name__ == "__main__":
    sys.exit(main())
