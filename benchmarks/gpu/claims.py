"""The bars that a point of `speed` can speak to: name, measured, bar, held. What should have been measured and was not is a bar
that is not held."""

from __future__ import annotations

import math
import statistics
from typing import Any

from benchmarks.results import unmeasured
from benchmarks.rivals import INPUT_OFFLOAD, OURS, PLANNED, SWAPPING
from benchmarks.timing import arena

MOST_NOISE = 0.03
"""No samples excuse more than this; the bar beside no checkpointing allows as much."""


def spread(samples: list[float]) -> float:
    """Width of the middle half of the samples over their median."""
    if len(samples) < 2:
        return 0.0
    low, middle, high = statistics.quantiles(samples, n=4, method="inclusive")
    return (high - low) / middle


def _has_room_to_hide(length: int, row: dict[str, Any]) -> bool:
    """Whether copies can be expected to cost nothing: attention takes its time, and the host has room for what is copied."""
    binding = (row.get("report") or {}).get("binding") or ""
    return length >= 65536 and not binding.startswith(("host memory", "last resort"))


def claims(point: dict[str, Any]) -> list[dict[str, Any]]:
    """Of ours, planned, which is what a user gets: where another way trains and it does not, that is a bar missed.

    Where two ways train that may be equally fast, they are told apart no further than their samples tell: `margin`, the middle
    halves of both (root of the sum of squares), is beside the bar, and MOST_NOISE at most.
    """
    rows = {name: row for name, row in point["rivals"].items() if "median_s" in row}
    found: list[dict[str, Any]] = []

    def say(name: str, value: float, bar: float, at_most: bool, **margin: float) -> None:
        held = value <= bar + margin.get("margin", 0.0) if at_most else value >= bar
        found.append({"claim": name, "value": value, "bar": bar, **margin, "held": held})

    for name in (PLANNED, SWAPPING):
        if name in point["rivals"] and name not in rows and rows.keys() - OURS - {SWAPPING}:
            found.append(unmeasured(f"{name} did not run", point["rivals"][name].get("out", "no samples")))
        if name in rows and "none" in rows and (name == PLANNED or _has_room_to_hide(point["length"], rows[name])):
            which = ", swapping" if name == SWAPPING else ""
            say(f"step / no checkpointing{which}", rows[name]["median_s"] / rows["none"]["median_s"], 1.03, at_most=True)
    others = {name: row["median_s"] for name, row in rows.items() if name not in (*OURS, SWAPPING, "none")}
    if PLANNED in rows:
        ours = rows[PLANNED]["median_s"]
        for name in ("checkpoint", *INPUT_OFFLOAD):
            if 65536 <= point["length"] <= 262144 and name in rows:
                say(f"{name} / step", rows[name]["median_s"] / ours, 1.20, at_most=False)
        if others:
            best = min(others, key=others.get)
            margin = min(MOST_NOISE, math.hypot(spread(rows[PLANNED]["samples_s"]), spread(rows[best]["samples_s"])))
            say(f"step / best rival ({best})", ours / others[best], 1.0, at_most=True, margin=margin)
    for name in (*OURS, SWAPPING):
        row = rows.get(name, {})
        report, memory = row.get("report") or {}, row.get("memory") or {}
        if host := report.get("host"):
            say(f"host slab / budget, {name}", host["slab"] / host["budget"], 1.0, at_most=True)
        if not arena(report) or "cuda_mallocs_per_step" not in memory:
            continue
        calls = memory["cuda_mallocs_per_step"] + memory["cuda_frees_per_step"]
        say(f"cudaMalloc and cudaFree a step, {name}", calls, 0.0, at_most=True)
        over = f"reserved / requested without a plan, {name}"
        if "unplanned_peak" in memory:  # the peak with a plan has the arena in it, however large
            say(over, memory["device_reserved_peak"] / memory["unplanned_peak"], 1.02, at_most=True)
        else:
            found.append(unmeasured(over, "its placements changed when addresses were planned"))
    return found
