"""The three streams during one step: how long each is busy, and what compute hides, from the kernels and copies of a trace."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ds_memo.swap.stream_protocol import COMPUTE, D2H, H2D

ROWS = (COMPUTE, D2H, H2D)


@dataclass(frozen=True)
class Span:
    stream: str
    begin: float
    """Seconds."""
    end: float


def traced(step: Callable[[], Any], trace: Path) -> list[dict[str, Any]]:
    """Write a chrome trace of a step on CUDA and return its events."""
    from torch.profiler import ProfilerActivity, profile

    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        step()
        torch.cuda.synchronize()
    profiler.export_chrome_trace(str(trace))
    return json.loads(trace.read_text())["traceEvents"]


def spans_of(events: Iterable[dict[str, Any]]) -> list[Span]:
    """Return the spans of a chrome trace. A copy between device and host belongs to its direction; all else is compute."""
    found = []
    for event in events:
        if event.get("ph") != "X" or event.get("cat") not in ("kernel", "gpu_memcpy", "gpu_memset"):
            continue
        name = event["name"]
        stream = D2H if "DtoH" in name else H2D if "HtoD" in name else COMPUTE
        found.append(Span(stream, event["ts"] * 1e-6, (event["ts"] + event["dur"]) * 1e-6))
    return found


def union(spans: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """The same times without overlaps, in order."""
    merged: list[tuple[float, float]] = []
    for begin, end in sorted(spans):
        if merged and begin <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((begin, end))
    return merged


def common(a: list[tuple[float, float]], b: list[tuple[float, float]]) -> float:
    """Return the seconds that are in both of two unions."""
    total, i, j = 0.0, 0, 0
    while i < len(a) and j < len(b):
        total += max(0.0, min(a[i][1], b[j][1]) - max(a[i][0], b[j][0]))
        if a[i][1] < b[j][1]:
            i += 1
        else:
            j += 1
    return total


def analyse(spans: list[Span]) -> dict[str, Any]:
    """Seconds busy per stream, compute's share of the step, and the share of each copy stream that compute hides."""
    if not spans:
        return {}
    times = {row: union((span.begin, span.end) for span in spans if span.stream == row) for row in ROWS}
    busy = {row: sum(end - begin for begin, end in spans) for row, spans in times.items()}
    whole = max(span.end for span in spans) - min(span.begin for span in spans)
    hidden = {row: common(times[COMPUTE], times[row]) / busy[row] if busy[row] else None for row in (D2H, H2D)}
    return {"span_s": whole, "busy_s": busy, "compute_share": busy[COMPUTE] / whole if whole else None, "hidden_share": hidden}
