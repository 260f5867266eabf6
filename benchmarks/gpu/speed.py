"""Step time and memory of every rival at every length, side by side in one run.

    bash benchmarks/gpu.sh speed [--workloads gpt7b llama8b ulysses8] [--lengths 65536 …] [--rivals …] [--host-gib X]
                                 [--budget-s 420] [--device cuda|cpu] [--out DIR]

The points (workload, length) that the bars name come first, with the rivals that they name, and with others as the time allows;
then the other points, from short to long, and attention kernels last. Points for which time lacks are dropped and named; where
lengths are given, there are no others. benchmarks/point.py measures a point, benchmarks/claims.py has the bars.

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
from collections.abc import Iterable
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from benchmarks import attention, results
from benchmarks import host as host_memory
from benchmarks.claims import claims
from benchmarks.open_slab import held_open
from benchmarks.point import NEEDED, WARM_UP, run_point, urgency
from benchmarks.predict import in_words
from benchmarks.rivals import OURS, PLANNED, RIVALS, SWAPPING, Budget, Rival
from benchmarks.timing import clear
from benchmarks.workloads import NAMES, Shape, build, shapes, step_flops
from ds_memo.profile.bandwidth import CopyBench
from ds_memo.swap.stream_protocol import D2H
from ds_memo.units import GIB

ASSUMED_FLOPS = {"cuda": 4.5e14, "cpu": 3e9}
"""Per second, until the first step has been timed."""
AT_LEAST_S = 60.0
"""Seconds that the first point may take, whatever time is left."""
KERNELS_S = 25.0
"""Seconds for attention kernels; points that no bar names leave them over."""
BARS = {("gpt7b", 65536): 2, ("ulysses8", 65536): 1, ("gpt7b", 16384): 1, ("ulysses8", 131072): 1}
"""Points that the bars name, the first one first, and how many turns the time holds there. On a slow card the last one falls out;
the one that gradients have their bar at must not."""
ENOUGH = 0.6
"""Share of the time of such a point that is worth using: the most urgent rivals alone say something too."""


@dataclass(frozen=True)
class Point:
    """One length of a workload that is to be measured."""

    shape: Shape
    length: int
    compare: bool
    """The gradients too."""
    turns: int | None = None
    """Turns of each rival; None: by the length of its steps."""

    def visits(self, rate: float) -> tuple[int, int]:
        """Return the turns of each rival, and the steps timed in a turn.

        Args:
            rate: FLOP/s that a step is expected to reach.
        """
        step_s = step_flops(self.shape, self.length) / rate
        return self.turns or (3 if step_s < 0.5 else 2), 3 if step_s < 1.5 else 2

    def cost_s(self, rivals: Iterable[Rival], rate: float) -> float:
        """Return the seconds of the point: rivals recompute and are a third longer, installing takes a while, prediction and
        gradients have steps of their own. Streams are not counted, as they are left out when the time is over."""
        step_s, (turns, steps) = step_flops(self.shape, self.length) / rate, self.visits(rate)
        each = turns * (WARM_UP + steps) + (WARM_UP + 1 if self.compare else 0)
        beside = 13 if self.compare else 5
        longer = [1.05 if rival.name in ("none", *OURS, SWAPPING) else 1.35 for rival in rivals]
        return beside * step_s + each * step_s * sum(longer) + turns * 0.5 * min(1.0, step_s) * len(longer)

    def held(self, needed: list[Rival], rivals: list[Rival], rate: float, most_s: float) -> list[Rival]:
        """Return the needed rivals, and others in their order while all of them fit these seconds."""
        found = list(needed)
        for rival in (rival for rival in rivals if rival not in needed):
            if self.cost_s([*found, rival], rate) > most_s:
                break
            found.append(rival)
        return found


def points_of(names: list[str], lengths: list[int] | None, device: torch.device) -> list[Point]:
    """Return the points in the order of measurement; given lengths have all the turns that their steps allow."""
    table = shapes(device)
    found = []
    for name in names:
        of_it = lengths or table[name].lengths
        turns = {} if lengths else BARS
        compare = min(of_it) if lengths or table[name].ranks == 1 else None
        found += [Point(table[name], length, length == compare, turns.get((name, length))) for length in of_it]
    order = list(BARS)

    def key(point: Point) -> tuple[int, float]:
        what = (point.shape.name, point.length)
        return order.index(what) if point.turns else len(order), step_flops(point.shape, point.length)

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
    rate, slower = ASSUMED_FLOPS[device.type], 1.0
    done, dropped = [], []
    run.found |= {"points": done, "dropped": dropped, "attention": None}
    rivals = sorted(rivals, key=urgency)
    needed = [rival for rival in rivals if rival.name in NEEDED] or rivals[:1]

    def keep(found: dict[str, Any]) -> None:
        if not any(found is other for other in done):
            done.append(found)
        found["claims"] = claims(found)
        run.save()

    def measured(point: Point, taking: list[Rival], until: float) -> dict[str, Any]:
        began = time.perf_counter()
        shape, length, visits = point.shape, point.length, point.visits(rate)
        model = build(shape, device)
        found = run_point(model, shape, length, taking, budget, visits, point.compare, details, until, keep)
        found["left_out"] = [rival.name for rival in rivals if rival not in taking]
        found["seconds"] = time.perf_counter() - began
        keep(found)
        return found

    for number, point in enumerate(points):
        name = f"{point.shape.name} {point.length}"
        left = budget_s - run.seconds() - (0 if point.turns or not kernels else KERNELS_S)
        needs = point.cost_s(needed, rate) * slower
        if number and needs * (ENOUGH if point.turns else 1.0) > left:
            dropped.append({"workload": point.shape.name, "length": point.length, "needs_s": needs, "left_s": max(0.0, left)})
            results.say(f"{name}: dropped, needs about {needs:.0f} s and {max(0.0, left):.0f} s are left")
            continue
        behind = slower * sum(other.cost_s(needed, rate) for other in points[number + 1 :] if other.turns)
        most = needs + (left - behind - needs) / 2  # half of what nothing that a bar names needs is for the other rivals
        taking = point.held(needed, rivals, rate, most / slower)
        results.say(f"{point.shape.name}, {point.length} tokens")
        until = time.perf_counter() + (left if number else max(left, AT_LEAST_S))
        found = run.attempt(name, measured, point, taking, until)
        run.attempt(f"after {name}", clear, device)
        if found is None:
            run.save()
            continue
        run.failures += [*found["failures"], *found.get("gradients", {}).get("failures", ())]
        run.save()
        run.attempt(f"{name}, printed", show, found)
        slower = max(1.0, found["seconds"] / point.cost_s(taking, rate))  # locking host memory, above all
        fast = [row["tflops"] for row in found["rivals"].values() if "tflops" in row]
        rate = max(fast, default=rate / 1e12) * 1e12
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
    parser.add_argument("--lengths", type=int, nargs="+", help="tokens; absent: all of a workload")
    parser.add_argument("--device-gib", type=float, help="device budget of ds_memo; absent: all there is")
    parser.add_argument("--no-attention", action="store_true", help="leave the attention kernels out")
    options = parser.parse_args(arguments)
    device = results.device_or_exit(options.device, "speed")
    rivals = list(RIVALS.values()) if "all" in options.rivals else [RIVALS[name] for name in options.rivals]
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
