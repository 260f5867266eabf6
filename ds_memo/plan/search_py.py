"""Exact search in Python: the readable twin of ops/csrc/dsa_search.cpp, and its stand-in without a compiler.

The question: does every buffer fit below a capacity, and where? The search builds upwards. `floor[s]` is the height below which
nothing more may lie in section s. A *valley* is a run of sections of equal floor with higher floors on both sides.
At a section of a valley exactly one thing is true: one of the buffers that fit into the valley rests on the floor
here, or none does (the section is *closed* at this floor and later *lifted* to the lower of the walls around it).
Branching on that is complete: every solution can be pushed down until each buffer rests on another or on the ground.

The reasons for a dead end are a set of *literals*, the bits of an int: bit i is "buffer i rests at its offset", bit n + s
is "section s was closed". `cone[s]` holds the literals that imply floor[s] and the buffers below it. If a decision's
literal is not among the reasons for the failure below it, changing that decision cannot help: the search jumps over it.

Canonical solutions, sections and decomposition are ideas of MiniMalloc (Moffitt, ASPLOS 2023, doi
10.1145/3623278.3624752). Both implementations visit the same nodes in the same order (tests/plan/test_search.py); this
one is about 50 times slower.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

MASK = (1 << 64) - 1
NO_WALL = MASK  # higher than any


class OutOfNodes(Exception):
    pass


class OutOfTime(Exception):
    pass


def mix(x: int) -> int:
    """Return splitmix64 of `x`."""
    x = (x + 0x9E3779B97F4A7C15) & MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK
    return x ^ (x >> 31)


class Search:
    """One question: `n` buffers over `sections` sections, below `capacity`. See search.py for the arguments."""

    def __init__(self, sections: int, first: list[int], last: list[int], size: list[int], capacity: int, twin: list[int]):
        self.n, self.sections = len(size), sections
        self.first, self.last, self.size, self.capacity, self.twin = first, last, size, capacity, twin
        self.offset: list[int | None] = [None] * self.n
        self.release = [0] * self.n  # a buffer's lowest possible offset: the highest floor it covers
        self.floor = [0] * sections
        self.rest = [0] * sections  # units still to come
        self.slack = [0] * sections  # capacity that is left over in any case
        self.closed = [False] * sections
        self.times_closed = [0] * sections
        self.count = [0] * sections  # unplaced buffers
        self.cut = [0] * sections  # of those, the buffers that go on to s + 1
        self.cone = [0] * sections
        self.at: list[list[int]] = [[] for _ in range(sections)]
        for i in range(self.n):
            for s in range(first[i], last[i] + 1):
                self.at[s].append(i)
                self.rest[s] += size[i]
                self.count[s] += 1
                self.cut[s] += s < last[i]
        self.weight = [1.0] * sections  # grows with the failures at a section
        self.dead: set[tuple] = set()
        self.trail: list[tuple] = []
        self.raised: list[tuple[int, int, int]] = []  # (first, last, floor) since the last propagation
        self.dirty: dict[int, None] = dict.fromkeys(range(sections))  # sections whose bound must be computed again
        self.nodes = 0

    def run(self, preference: Sequence[Sequence[float]], seconds: float, max_nodes: int) -> int:
        """Return 1 with `offset` set, 0 if no placement exists, -1 at max_nodes, -2 at the time limit."""
        self.deadline = time.monotonic() + seconds
        everything = list(range(self.n))
        if self.propagate(0, self.sections - 1, everything) is not None:
            return 0
        root = len(self.trail)
        limit, turn, orders = 4 * self.n, 0, len(preference)
        while True:
            noise = [1.0] * self.n
            if turn >= orders:
                noise = [1.0 + 0.3 * ((mix(1 + turn * self.n + i) >> 40) / (1 << 24)) for i in everything]
            self.prefer = [p * z for p, z in zip(preference[turn % orders], noise, strict=True)]
            self.low_first = turn // orders % 2 == 0
            self.node_limit = min(self.nodes + limit, max_nodes)
            try:
                return 1 if self.solve(0, self.sections - 1, everything) is None else 0
            except OutOfNodes:
                self.undo(root)
                if self.nodes >= max_nodes:
                    return -1
            except OutOfTime:
                return -2
            self.weight = [1.0 + (w - 1.0) * 0.3 for w in self.weight]
            turn += 1
            if turn % orders == 0:
                limit += limit // 2

    # ---- decisions and their undoing

    def place(self, i: int, at: int) -> None:
        self.offset[i] = at
        for s in range(self.first[i], self.last[i] + 1):
            self.trail.append(("floor", s, self.floor[s], self.closed[s]))
            self.floor[s] = at + self.size[i]
            self.closed[s] = False
            self.rest[s] -= self.size[i]
            self.count[s] -= 1
            self.cut[s] -= s < self.last[i]
            self.cone[s] |= 1 << i
        self.raised.append((self.first[i], self.last[i], at + self.size[i]))
        self.trail.append(("placed", i))

    def close(self, s: int) -> None:
        self.trail.append(("cone", s, self.cone[s]))
        self.trail.append(("closed", s))
        self.trail.append(("floor", s, self.floor[s], self.closed[s]))
        self.closed[s] = True
        self.times_closed[s] += 1
        self.cone[s] |= 1 << (self.n + s)

    def lift(self, s: int, height: int, why: int) -> None:
        self.trail.append(("cone", s, self.cone[s]))
        self.trail.append(("floor", s, self.floor[s], self.closed[s]))
        self.floor[s] = height
        self.closed[s] = False
        self.cone[s] |= why

    def undo(self, mark: int) -> None:
        while len(self.trail) > mark:
            kind, x, *before = self.trail.pop()
            if kind == "floor":
                self.floor[x], self.closed[x] = before
            elif kind == "release":
                self.release[x] = before[0]
            elif kind == "slack":
                self.slack[x] = before[0]
            elif kind == "cone":
                self.cone[x] = before[0]
            elif kind == "closed":
                self.times_closed[x] -= 1
            else:
                self.offset[x] = None
                for s in range(self.first[x], self.last[x] + 1):
                    self.rest[s] += self.size[x]
                    self.count[s] += 1
                    self.cut[s] += s < self.last[x]
                    self.cone[s] &= ~(1 << x)
        self.raised.clear()

    # ---- inference; each returns None, or the literals that make it impossible

    def propagate(self, first: int, last: int, items: list[int]) -> int | None:
        """Lift closed runs, update releases, bound every section that changed."""
        why = self.lift_closed_runs(first, last, items)
        if why is not None:
            return why
        if self.raised:
            for i in items:
                release = self.release[i]
                for lo, hi, height in self.raised:
                    if self.first[i] <= hi and lo <= self.last[i]:
                        release = max(release, height)
                if release != self.release[i]:
                    self.trail.append(("release", i, self.release[i]))
                    self.release[i] = release
                    self.dirty.update(dict.fromkeys(range(self.first[i], self.last[i] + 1)))
            for lo, hi, _ in self.raised:
                self.dirty.update(dict.fromkeys(range(lo, hi + 1)))
            self.raised.clear()
        for s in self.dirty:
            if self.count[s] and (why := self.bound(s)) is not None:
                self.weight[s] += 1.0
                break
        self.dirty.clear()
        return why

    def lift_closed_runs(self, first: int, last: int, items: list[int]) -> int | None:
        again = True
        while again:
            again, s = False, first
            while s <= last:
                e = s
                if self.closed[s] and self.count[s]:
                    while e < last and self.closed[e + 1] and self.count[e + 1] and self.floor[e + 1] == self.floor[s]:
                        e += 1
                    height = min(self.wall(s - 1, first, last), self.wall(e + 1, first, last))
                    if height > self.floor[s]:
                        why = 0
                        for q in range(max(first, s - 1), min(last, e + 1) + 1):
                            why |= self.cone[q]
                        # Nothing to rest on, or a buffer could drop into the gap.
                        gap = height - self.floor[s]
                        if height == NO_WALL or any(
                            s <= self.first[i] and self.last[i] <= e and self.size[i] <= gap for i in items
                        ):
                            return why
                        for q in range(s, e + 1):
                            self.lift(q, height, why)
                        self.raised.append((s, e, height))
                        again = True
                s = e + 1
        return None

    def wall(self, s: int, first: int, last: int) -> int:
        return self.floor[s] if first <= s <= last and self.count[s] else NO_WALL

    def bound(self, s: int) -> int | None:
        """Stack the unplaced buffers of section s, none below its release, and check their lowest possible end."""
        height = base = self.floor[s]
        late = []
        for i in self.at[s]:
            if self.offset[i] is None:
                if self.release[i] <= base:
                    height += self.size[i]
                else:
                    late.append((self.release[i], i))
        late.sort()
        base_k = 0  # late[base_k:] alone, stacked from `base`, end at `height`
        for k, (release, i) in enumerate(late):
            if release > height:
                base = height = release
                base_k = k
            height += self.size[i]
        slack = self.capacity - height
        if slack != self.slack[s]:
            self.trail.append(("slack", s, self.slack[s]))
            self.slack[s] = slack
        if slack >= 0:
            return None
        if base == self.floor[s]:
            return self.cone[s]
        why, used = 0, set()
        for _, i in late[base_k:]:  # one section that keeps each of them at or above `base`
            high = [q for q in range(self.first[i], self.last[i] + 1) if self.floor[q] >= base]
            keeper = next((q for q in high if q in used), None)
            if keeper is None:
                keeper = min(high, key=lambda q: abs(q - s))
                used.add(keeper)
                why |= self.cone[keeper]
        return why

    # ---- the tree; None is success, an int the literals of a dead end

    def solve(self, first: int, last: int, parent: list[int]) -> int | None:
        if self.nodes >= self.node_limit:
            raise OutOfNodes
        self.nodes += 1
        if self.nodes % 16 == 0 and time.monotonic() > self.deadline:
            raise OutOfTime
        items = [i for i in parent if self.offset[i] is None]
        mark = len(self.trail)
        why = self.propagate(first, last, items)
        if why is not None:
            self.undo(mark)
            return why
        if not items:
            return None
        parts = self.components(first, last)
        if parts != [(first, last)]:
            members = [[i for i in items if lo <= self.first[i] and self.last[i] <= hi] for lo, hi in parts]
            for p in sorted(range(len(parts)), key=lambda p: (len(members[p]), p)):
                why = self.solve(*parts[p], members[p])
                if why is not None:
                    self.undo(mark)
                    return why
            return None
        span = slice(first, last + 1)
        state = (first, tuple(items), tuple(self.floor[span]), tuple(self.closed[span]))
        if state in self.dead:
            why = 0
            for s in range(first, last + 1):
                why |= self.cone[s]
            self.undo(mark)
            return why
        why = self.branch(first, last, items)
        if why is not None:
            self.undo(mark)
            if len(self.dead) < 1_000_000:
                self.dead.add(state)
        return why

    def components(self, first: int, last: int) -> list[tuple[int, int]]:
        """Return the stretches of sections that no unplaced buffer connects."""
        parts, start = [], None
        for s in range(first, last + 1):
            if self.count[s]:
                start = s if start is None else start
                if s == last or self.cut[s] == 0:
                    parts.append((start, s))
                    start = None
        return parts

    def twinned(self, i: int) -> bool:
        """Return True if an equal, earlier buffer is not placed yet: that one is tried first."""
        return self.twin[i] >= 0 and self.offset[self.twin[i]] is None

    def choose(self, first: int, last: int, items: list[int]) -> tuple[int, int, int]:
        """Return the section of a valley with the fewest options, often-failing sections before others; and the valley."""
        best, best_score = None, 0.0
        left = first
        while left <= last:
            right = left
            if not self.closed[left]:
                floor = self.floor[left]
                while right < last and not self.closed[right + 1] and self.floor[right + 1] == floor:
                    right += 1
                if self.wall(left - 1, first, last) >= floor and self.wall(right + 1, first, last) >= floor:
                    options = [0] * (right - left + 2)
                    for i in items:
                        if left <= self.first[i] and self.last[i] <= right and not self.twinned(i):
                            options[self.first[i] - left] += 1
                            options[self.last[i] + 1 - left] -= 1
                    resting = 0
                    for s in range(left, right + 1):
                        resting += options[s - left]
                        here = resting + (self.slack[s] > 0)
                        score = -1.0
                        if here > 1:
                            score = here / self.weight[s]
                            if self.low_first:
                                score += 10.0 * float(floor) / float(self.capacity)
                        if best is None or score < best_score:
                            best, best_score = (s, left, right), score
            left = right + 1
        assert best is not None  # the caller has buffers left, so there is a lowest floor
        return best

    def branch(self, first: int, last: int, items: list[int]) -> int | None:
        s, left, right = self.choose(first, last, items)
        at = self.floor[s]
        here = [i for i in self.at[s] if self.offset[i] is None]
        resting = [i for i in here if left <= self.first[i] and self.last[i] <= right and not self.twinned(i)]
        resting.sort(key=lambda i: (-self.prefer[i], i))
        # The reasons for no other options: the buffers in this section, and the walls that keep wider buffers out.
        reasons = self.cone[s]
        if left > first and any(self.first[i] < left for i in here):
            reasons |= self.cone[left - 1]
        if right < last and any(self.last[i] > right for i in here):
            reasons |= self.cone[right + 1]
        literals = [*resting, self.n + s] if at + self.rest[s] < self.capacity else resting
        mark = len(self.trail)
        for literal in literals:
            if literal < self.n:
                self.place(literal, at)
            else:
                self.close(s)
            below = self.solve(first, last, items)
            if below is None:
                return None
            self.undo(mark)
            if not below >> literal & 1:  # this decision had no part in the failure
                return below
            if literal < self.n or self.times_closed[s] == 0:
                below &= ~(1 << literal)
            reasons |= below
        return reasons
