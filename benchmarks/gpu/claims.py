"""The bars of a point of `speed`: name, measured, bar, held. A measurement that is missing is a bar
that is not held."""

from __future__ import annotations

import math
import statistics
from typing import Any

from benchmarks.results import unmeasured
from benchmarks.rivals import INPUT_OFFLOAD, OURS, PLANNED, SWAPPING
from benchmarks.timing import arena

MOST_NOISE = 0.03
"""Noise allows no more than this; the bar against no checkpointing allows as much."""


def spread(samples: list[float]) -> float:
    """Return the width of the middle half of the samples over their median."""
    if len(samples) < 2:
        return 0.0
    low, middle, high = statistics.quantiles(samples, n=4, method="inclusive")
    return (high - low) / middle


def _has_room_to_hide(length: int, row: dict[str, Any]) -> bool:
    """Return True if copies should cost nothing: attention is long enough, and the host has room for the rows."""
    binding = (row.get("report") or {}).get("binding") or ""
    return length >= 65536 and not binding.startswith(("host memory", "last resort"))


def claims(point: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the bars of "ds_memo, planned", the default. If another way trains and it does not, the bar is missed.

    Two ways may be equally fast. So a bar has a `margin`: the middle halves of both samples (root of the sum of squares),
    MOST_NOISE at most.
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
