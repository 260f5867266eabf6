"""Plans for another sequence length, without solving again.

Tensor sizes of a transformer are affine in the sequence length, `size = a + b·s`, so two profiled lengths give every size
(`fit_sizes`). The vertical order of the tensors is the hard part of a plan. `rescale` keeps that order and stacks the
slots again, each as low as those below it allow. 6,000 slots take some tens of milliseconds.

The result is verified. Its lower bound is that of the new sizes; its peak can be above, if another order is better now.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import pairwise
from math import ceil, inf
from typing import NamedTuple

from ds_memo.plan import verify
from ds_memo.plan.bilevel import PhaseReport, Plan
from ds_memo.plan.dsa import Buffer, lower_bound, peak
from ds_memo.plan.errors import TracesDiffer
from ds_memo.plan.trace import UNIT, Trace, rounded


class Affine(NamedTuple):
    """Bytes of one tensor as a + b·s, in exact fractions."""

    a: Fraction
    b: Fraction

    def at(self, s: int) -> int:
        return ceil(self.a + self.b * s)


@dataclass
class Lines:
    """Sizes of a run's requests as functions of the sequence length, and the lengths at which they hold."""

    sizes: dict[str, Affine]
    least: int
    most: int
    """Passes of `least` to `most` tokens make these requests."""
    under: float = 0
    over: float = inf
    """Passes of at most `under` tokens, or at least `over`, make others."""

    def hold_at(self, length: int) -> bool:
        """Return True if passes of this length are known to make these requests."""
        return self.least <= length <= self.most

    def may_hold_at(self, length: int, min_bytes: int) -> bool:
        """Return True if they may, as far as is known. A request below `min_bytes` is not logged, so none may be smaller."""
        return self.under < length < self.over and min(line.at(length) for line in self.sizes.values()) >= min_bytes

    def learn(self, length: int, fits: bool) -> None:
        """Note whether a pass of this length made these requests."""
        if fits:
            self.least, self.most = min(self.least, length), max(self.most, length)
        elif length < self.least:
            self.under = max(self.under, length)
        elif length > self.most:
            self.over = min(self.over, length)


def fit_sizes(short: Trace, s_short: int, long: Trace, s_long: int) -> dict[str, Affine]:
    """Return the size of every tensor of `short` over the sequence length, from two traces of the same run.

    Tensors are matched by phase and order (the k-th malloc), not by id.

    Raises:
        TracesDiffer: The phases or the order of mallocs and frees differ, or the length is the same twice.
    """
    if s_short == s_long:
        raise TracesDiffer(f"two sequence lengths are needed to fit sizes, got {s_short} twice")
    names = [[str(p.name) for p in t.phases] for t in (short, long)]
    if names[0] != names[1]:
        raise TracesDiffer(f"the traces have other phases: {names[0]} and {names[1]}")
    births = [t.births() for t in (short, long)]
    if len(short.requests) != len(long.requests):
        raise TracesDiffer(f"{len(short.requests)} requests at {s_short} tokens, {len(long.requests)} at {s_long}")
    sizes: dict[str, Affine] = {}
    for at, (x, y) in enumerate(zip(short.requests, long.requests, strict=True)):
        if births[0][x.id] != births[1][y.id] or (x.size is None) != (y.size is None):
            raise TracesDiffer(f"request {at} is {x} at {s_short} tokens and {y} at {s_long}")
        if x.size is not None and y.size is not None:
            b = Fraction(y.size - x.size, s_long - s_short)
            sizes[x.id] = Affine(x.size - b * s_short, b)
    return sizes


def rescale(plan: Plan, sizes: Sequence[int]) -> Plan:
    """Return the plan with other sizes and the same vertical order.

    Args:
        sizes: Requested bytes, one per slot.

    Raises:
        TracesDiffer: Not one size per slot.
    """
    began = time.monotonic()
    if len(sizes) != len(plan.slots):
        raise TracesDiffer(f"{len(sizes)} sizes for {len(plan.slots)} slots")
    above = _neighbours(plan)
    order = sorted(range(len(plan.slots)), key=lambda i: plan.slots[i].offset)
    offsets = [0] * len(order)
    for i in order:
        end = offsets[i] + rounded(sizes[i])
        for j in above[i]:
            if offsets[j] < end:
                offsets[j] = end
    slots = tuple(slot._replace(requested=z, offset=o) for slot, z, o in zip(plan.slots, sizes, offsets, strict=True))
    buffers = [slot.buffer() for slot in slots]
    top, bound = peak(buffers, offsets), lower_bound(buffers)
    verify.require(buffers, offsets, peak=top, lower_bound=bound, alignment=UNIT)
    return replace(
        plan, slots=slots, phases=_phases(plan, offsets, buffers), peak=top, lower_bound=bound, proven=top == bound,
        kind="rescaled", method=f"the order of a plan by {plan.method}", flat_peak=None, bilevel_peak=top,
        seconds=time.monotonic() - began, notes=(),
    )  # fmt: skip


def _neighbours(plan: Plan) -> list[list[int]]:
    """Return for each slot the slots that at some time lie directly above it. If none of these overlaps it, no slot does."""
    # At equal times the deaths come first.
    events = sorted([(s.birth, 1, i) for i, s in enumerate(plan.slots)] + [(s.death, 0, i) for i, s in enumerate(plan.slots)])
    keys = [(s.offset, i) for i, s in enumerate(plan.slots)]
    above: list[list[int]] = [[] for _ in plan.slots]
    alive: list[tuple[int, int]] = []  # keys, sorted
    for _, birth, i in events:
        at = bisect_left(alive, keys[i])
        if birth:
            alive.insert(at, keys[i])
        column = [j for _, j in alive[max(0, at - 1) : at + 2]]
        if not birth:
            column.remove(i)
            del alive[at]
        for lower, upper in pairwise(column):
            above[lower].append(upper)
    return above


def _phases(plan: Plan, offsets: list[int], buffers: list[Buffer]) -> tuple[PhaseReport, ...]:
    """Return the phases with the transient tensors' new bounds and extents. Equal phases may differ at another length."""
    inside: dict[int, list[int]] = defaultdict(list)
    for i, slot in enumerate(plan.slots):
        if slot.transient:
            inside[slot.phase].append(i)
    bounds: dict[tuple, int] = {}
    out = []
    for p, report in enumerate(plan.phases):
        transient = inside[p]
        shape = report.shape, tuple(buffers[i].size for i in transient)
        if shape not in bounds:
            bounds[shape] = lower_bound([buffers[i] for i in transient])
        bound = bounds[shape]
        low = min((offsets[i] for i in transient), default=0)
        extent = max((offsets[i] + buffers[i].size for i in transient), default=0) - low
        out.append(replace(report, peak=extent, lower_bound=bound, proven=extent == bound, method="rescaled", seconds=0.0))
    return tuple(out)
