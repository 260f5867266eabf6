"""Instances for the planner's tests and benchmarks: traces on disk, traces of any length, and dense packings cut from a full
rectangle."""

from __future__ import annotations

import csv
import os
import random
from collections.abc import Iterator
from contextlib import contextmanager
from heapq import heappop, heappush
from itertools import permutations
from pathlib import Path

from ds_memo.plan.dsa import Buffer, Problem
from ds_memo.plan.formats import make_trace
from ds_memo.plan.milp import stack
from ds_memo.plan.phases import LayerPass
from ds_memo.plan.trace import Request, Trace

DATA = Path(__file__).resolve().parents[1] / "data"
TRACES = sorted((DATA / "requests").glob("*.txt"))
MINIMALLOC = sorted((DATA / "minimalloc").glob("?.1048576.csv"))
CAPACITY = 1 << 20
GAP = Problem.of(
    (name, *row)
    for name, row in zip(
        "abcdefghi",
        [(0, 8, 1), (6, 9, 5), (0, 3, 5), (8, 9, 4), (0, 5, 3), (0, 5, 1), (3, 4, 4), (3, 9, 1), (4, 8, 3)],
        strict=True,
    )
)
"""The smallest instance without a placement at its lower bound that a random search found."""
GAP_BOUND, GAP_BEST = 10, 11


def packing(path: Path) -> Problem:
    """Read a problem as google/minimalloc stores it: id, lower, upper and size in columns."""
    with open(path) as file:
        return Problem.of((row["id"], int(row["lower"]), int(row["upper"]), int(row["size"])) for row in csv.DictReader(file))


@contextmanager
def a_second_at_most() -> Iterator[None]:
    """Check that a search with a limit of 1 s keeps it; without a limit it takes a minute. Processor seconds of this process and
    its children count, which other processes do not change, with room for the work before and after the search."""
    before = sum(os.times()[:4])
    yield
    assert sum(os.times()[:4]) - before < 5


def dense(n: int, seed: int, *, pinwheels: float = 0.2, trim: float = 0.0, drop: float = 0.0, upright: float = 0.5) -> Problem:
    """Return about n buffers that fit exactly below CAPACITY: pieces of a rectangle that is cut again and again.

    Args:
        pinwheels: Share of the cuts that make five pieces which no straight cut separates.
        trim: Share of pieces that lose some of their lifespan, which leaves holes.
        drop: Share of pieces left out.
        upright: Share of straight cuts that divide time; the others divide memory.
    """
    rng = random.Random(seed)
    pieces = [(0, 0, 1024, 1024)]  # left, bottom, right, top
    while len(pieces) < n:
        pieces.sort(key=lambda p: (p[2] - p[0]) * (p[3] - p[1]) * rng.uniform(0.3, 1.0))
        left, bottom, right, top = pieces.pop()
        wide, high = right - left, top - bottom
        if wide < 3 and high < 3:
            pieces.insert(0, (left, bottom, right, top))
            continue
        if wide >= 4 and high >= 4 and rng.random() < pinwheels:
            x1 = rng.randint(left + 1, right - 2)
            x2 = rng.randint(x1 + 1, right - 1)
            y1 = rng.randint(bottom + 1, top - 2)
            y2 = rng.randint(y1 + 1, top - 1)
            pieces += [(left, bottom, x2, y1), (x2, bottom, right, y2), (x1, y2, right, top), (left, y1, x1, top)]
            pieces.append((x1, y1, x2, y2))
        elif high < 3 or (wide >= 3 and rng.random() < upright):
            x = rng.randint(left + 1, right - 1)
            pieces += [(left, bottom, x, top), (x, bottom, right, top)]
        else:
            y = rng.randint(bottom + 1, top - 1)
            pieces += [(left, bottom, right, y), (left, y, right, top)]
    rows = []
    for left, bottom, right, top in pieces:
        if rng.random() < drop:
            continue
        if rng.random() < trim and right - left > 2:
            cut = rng.randint(1, (right - left) // 2)
            left, right = (left + cut, right) if rng.random() < 0.5 else (left, right - cut)
        rows.append((left, right, (top - bottom) * 1024))
    rng.shuffle(rows)
    return Problem.of((str(i), left, right, size) for i, (left, right, size) in enumerate(rows))


def best_peak(buffers: tuple[Buffer, ...]) -> int:
    """Return the smallest possible peak of up to 7 buffers, by trying every vertical order."""
    orders = permutations(range(len(buffers)))
    return min(max(o + b.size for o, b in zip(stack(buffers, order), buffers, strict=True)) for order in orders)


def layered(requests: int, seed: int = 0) -> Trace:
    """Return a trace of about this many requests in layers of 250, no two of them alike.

    A layer makes 25 skeletal tensors and 50 transient ones on the way forward, and 50 transient ones on the way back.
    """
    rng = random.Random(seed)
    layers = max(1, requests // 250)
    out: list[Request] = []
    marks = []
    for way, order in (("f", range(layers)), ("b", reversed(range(layers)))):
        for layer in order:
            marks.append((LayerPass(layer, way == "b"), len(out)))
            alive: list[str] = []
            for k in range(50):
                alive.append(f"{layer}{way}{k}")
                out.append(Request(alive[-1], _size(rng)))
                if k % 2 and way == "f":
                    out.append(Request(f"{layer}s{k // 2}", _size(rng)))
                elif k % 2:
                    out.append(Request(f"{layer}s{24 - k // 2}", None))
                if len(alive) > 5:
                    out.append(Request(alive.pop(rng.randrange(5)), None))
            out += [Request(i, None) for i in alive]
    return make_trace(out, marks)


def flat(requests: int, seed: int = 0) -> Trace:
    """Return a trace of this many requests in one phase, with all lifespans: up to a tenth of the tensors are alive at once."""
    rng = random.Random(seed)
    out: list[Request] = []
    due: list[tuple[float, str]] = []
    for k in range(requests // 2):
        while due and due[0][0] <= len(out):
            out.append(Request(heappop(due)[1], None))
        out.append(Request(str(k), _size(rng)))
        heappush(due, (len(out) + requests ** rng.random(), str(k)))
    return make_trace(out + [Request(i, None) for _, i in sorted(due)], [])


def _size(rng: random.Random) -> int:
    """Draw bytes from a page to 4 MiB, small sizes as often as large ones."""
    return int(2 ** rng.uniform(12, 22))
