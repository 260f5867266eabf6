"""Step time and memory of every rival at every length, side by side in one run. Each turn of a rival has a process of its own.

    bash benchmarks/gpu.sh speed [--workloads gpt7b llama8b] [--lengths 65536 …] [--rivals …|all] [--host-gib X] [--device-gib X]
                                 [--turns N] [--device cuda|cpu] [--out DIR]

Without lengths, gpt7b at 64 Ki and 16 Ki tokens comes first, with the rivals of benchmarks/point.py's NEEDED; then llama8b from
short to long. With lengths, every rival has its turn. The file is written after every turn: what is ended from outside leaves the
turns before.

A rival that runs out of memory is written down as such. One whose gradients have another norm than most is a failure. Samples
during which ds_memo changed its solution are dropped and taken again (`dropped_s`; `unsettled` where it did not come to rest).

"ds_memo, swapping" keeps two layers on the device whatever there is room for: where everything fits, ds_memo itself does not
checkpoint, and its speed would say nothing of swapping.

--host-gib lowers the host budget of ds_memo: host-bound points; --device-gib its device budget. `ds-memo estimate` predicts
"ds_memo, planned" under these budgets before anything is timed. A virtual machine whose memory grows as it is used is made to
grow first (benchmarks/host.py).
"""

from __future__ import annotations

import argparse
import functools
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from benchmarks import host as host_memory
from benchmarks import results
from benchmarks.point import NEEDED, answer, run_point, take_in_child
from benchmarks.predict import in_words
from benchmarks.rivals import OURS, PLANNED, RIVALS, Budget, Rival
from benchmarks.workloads import NAMES, Shape, shapes
from ds_memo.units import GIB

FIRST = {("gpt7b", 65536): 2, ("gpt7b", 16384): 1}
"""Points that come first, and the turns of a rival there."""
TURNS, STEPS = 2, 3
"""Turns of each rival at other points, and steps timed in a turn."""


Point = tuple[Shape, int, int]
"""A workload, its tokens, and the turns of each rival."""


def points_of(names: Sequence[str], lengths: Sequence[int], device: torch.device) -> list[Point]:
    """Return the points in the order of measurement."""
    table = shapes(device)
    if lengths:
        return [(table[name], length, TURNS) for name in names for length in lengths]
    ours = {(name, length) for name in names for length in table[name].lengths}
    first = [(table[name], length, turns) for (name, length), turns in FIRST.items() if (name, length) in ours]
    others = [name for name in names if name not in {shape.name for shape, *_ in first}]
    return first + [(table[name], length, TURNS) for name in others for length in table[name].lengths]


def measure(run: results.Run, points: list[Point], rivals: list[Rival], budget: Budget) -> None:
    """Measure the points, and write the file after every turn."""
    take = take_in_child("benchmarks.speed")
    done: list[dict[str, Any]] = []
    run.found["points"] = done

    def keep(found: dict[str, Any]) -> None:
        if not any(found is other for other in done):
            done.append(found)
        run.save()

    for shape, length, turns in points:
        name = f"{shape.name} {length}"
        results.say(f"{shape.name}, {length} tokens")
        found = run.attempt(name, functools.partial(run_point, take=take), shape.name, length, rivals, budget, turns, STEPS, keep)
        if found is not None:
            run.failures += found["failures"]
            run.attempt(f"{name}, printed", show, found)
        run.save()
    if any(rival.name in OURS for rival in rivals):
        run.failures += _without_ours(done)


def _without_ours(points: list[dict[str, Any]]) -> list[str]:
    """Return a failure if no row of ds_memo has samples."""
    ours = [row for point in points for name, row in point["rivals"].items() if name in OURS]
    if any(row["samples_s"] for row in ours):
        return []
    why = next((row["out"] for row in ours if "out" in row), "no point was measured")
    return [f"no row of ds_memo has samples: {why}"]


def show(point: dict[str, Any]) -> None:
    """Print a point, one line for each rival."""
    say = results.say
    for name, row in point["rivals"].items():
        if "median_s" not in row:
            say(f"    {name:22s} {row.get('out', 'no samples')[:110]}")
            continue
        spread = (max(row["samples_s"]) - min(row["samples_s"])) / row["median_s"]
        text = f"    {name:22s} {row['median_s'] * 1e3:10.1f} ms ±{50 * spread:4.1f} %  {row['tflops']:7.3g} TFLOP/s"
        say(text + f"  device {row['memory']['device_peak'] / GIB:7.3f} GiB")
    if point.get("predicted"):
        say(f"      predicted: {in_words(point['predicted'], point['rivals'].get(PLANNED, {}).get('median_s'))}")
    if "hidden_share" in point.get("streams", ()):
        seen = point["streams"]
        hidden = ", ".join(f"{row} {share:.1%} hidden" for row, share in seen["hidden_share"].items() if share is not None)
        say(f"      streams: compute busy {seen['compute_share']:.1%} of {seen['span_s'] * 1e3:.1f} ms; {hidden or 'no copies'}")


def make_budget(run: results.Run, device: torch.device, host_gib: float | None, device_gib: float | None = None) -> Budget:
    """Return the rivals' budget; a measurement that raises is a failure and counts as 0."""
    host = run.attempt("host memory", host_memory.budget, host_gib, device) or 0
    return Budget(device, host, None if device_gib is None else int(device_gib * GIB))


def add_common(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--workloads", nargs="+", choices=NAMES)
    parser.add_argument("--rivals", nargs="+", choices=[*RIVALS, "all"], default=[])
    parser.add_argument("--lengths", type=int, nargs="+", default=(), help="tokens; absent: as the page of this command says")
    parser.add_argument("--device-gib", type=float, help="device budget")
    parser.add_argument("--out", help="file or folder of the result; absent: $OUT, else benchmarks/results")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser("gpu.sh speed", description=__doc__.splitlines()[0])
    add_common(parser)
    parser.add_argument("--host-gib", type=float, help="host budget of ds_memo")
    parser.add_argument("--turns", type=int, help="of each rival; absent: as the page of this command says")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.child:
        return answer(options.child)
    device = results.device_or_exit(options.device, "speed")
    default = RIVALS if options.lengths else NEEDED
    rivals = [RIVALS[name] for name in (RIVALS if "all" in options.rivals else options.rivals or default)]
    points = points_of(options.workloads or list(NAMES), options.lengths, device)
    points = [(shape, length, options.turns or turns) for shape, length, turns in points]
    run = results.Run("speed", device, options.out, vars(options))
    with tempfile.TemporaryDirectory() as cache:  # profiles in it are of this run, not of one before
        budget = replace(make_budget(run, device, options.host_gib, options.device_gib), cache_dir=cache)
        run.attempt("speed", measure, run, points, rivals, budget)
        return run.finish()


if __name__ == "__main__":
    sys.exit(main())
