"""Seconds of a step at a given alpha: the schedule of ds_memo.swap.engine, also with files behind the host.

Every time is the latest of some earlier ones plus a duration (ds_memo.solve.layer_timing). Without files the step is convex in
alpha: a maximum of sums of durations.

    forward    an output's copy starts once it is born and the copies before it are done; a layer begins when at most one swapped
               frame below it is still being copied
    backward   begins when all copies are done; a frame's reload starts with the replay of the layer call above, its own replay
               when the reload is done
    in tiles   a layer begins when all copies of the one below it are done; its frame is reloaded during its own backward
    inputs     that were not stored are computed as the backward comes to the last layer of their group: a layer's tiles are
               reloaded while those before them are computed
    files      the first swapped layers go on to files: ds_memo.solve.file_clocks has their clocks. Files only add waits. How many
               layers that are depends on alpha, so the step is not convex
"""

from __future__ import annotations

from typing import Any, NamedTuple

from ds_memo.placement import Placement, PlacementKind
from ds_memo.solve.file_clocks import FileClocks
from ds_memo.solve.layer_timing import LayerTiming
from ds_memo.solve.placement_kinds import Kinds
from ds_memo.solve.run_costs import LayerCosts, RunCosts
from ds_memo.solve.timeline import Note, TimelineSpan, not_noted
from ds_memo.swap.stream_protocol import COMPUTE, D2H, H2D


class Step(NamedTuple):
    """One step at one alpha."""

    alpha: float
    seconds: float
    d2h_stall_s: float
    """Seconds that compute waited for copies to the host."""
    h2d_stall_s: float
    """Seconds that compute waited for reloads."""
    nvme_stall_s: float = 0.0
    """Seconds that compute waited for files."""


class Schedule:
    """The steps of a run with given kinds of placements, as a function of alpha.

    Args:
        run: seconds, bytes, bandwidths.
        kinds: one per layer.
    """

    def __init__(self, run: RunCosts, kinds: Kinds) -> None:
        self.run = run
        numbers: dict[tuple[LayerCosts, PlacementKind], int] = {}
        self._numbers = [numbers.setdefault(pair, len(numbers)) for pair in zip(run.layers, kinds, strict=True)]
        self._distinct = list(numbers)
        self._timings = [LayerTiming.of(layer, run, kind) for layer, kind in self._distinct]
        self._computed: dict[int, int] = {}
        """By the last layer of a group, the first one, whose input is stored."""
        first = 0
        for index, kind in enumerate(kinds):
            if kind is not PlacementKind.SWAPPED_WITHOUT_INPUT:
                first = index
            else:
                self._computed.pop(index - 1, None)
                self._computed[index] = first
        self._swapped_below: list[int] = []
        """Index of the next swapped layer below each; -1: there is none."""
        below = -1
        for index, number in enumerate(self._numbers):
            self._swapped_below.append(below)
            below = index if self._timings[number].copies else below

    @property
    def timings(self) -> list[LayerTiming]:
        return [self._timings[number] for number in self._numbers]

    def blocks(self, alpha: float) -> list[int]:
        """Return the bytes of each layer's host block, or blocks; 0 on the device."""
        of = [layer.host_bytes(Placement(kind, alpha)) for layer, kind in self._distinct]
        return [of[number] for number in self._numbers]

    def files(self, alpha: float) -> int | None:
        """Return the fewest layers, from the first on, whose swapped blocks must be in files so that the host holds the rest.
        None: a single layer's are too large for the host."""
        blocks = self.blocks(alpha)
        rest = sum(blocks)
        for number, nbytes in enumerate(blocks):
            if rest <= self.run.host_budget:
                return number
            if nbytes > self.run.host_budget:
                return None
            rest -= nbytes
        return len(blocks)

    def timeline(self, alpha: float, files: int = 0) -> list[TimelineSpan]:
        """Return what every stream does in the step that `at` returns, by begin."""
        spans: list[TimelineSpan] = []

        def note(*span: Any) -> None:
            spans.append(TimelineSpan(*span))

        self.at(alpha, files, note)
        return sorted((span for span in spans if span.end > span.begin), key=lambda span: span.begin)

    def at(self, alpha: float, files: int = 0, note: Note = not_noted) -> Step:
        """Return the step at one alpha with the swapped blocks of the first `files` layers in files.

        Args:
            files: at least as many as `files(alpha)`; 0: the host is as large as it must be.
            note: called with each span of a stream.
        """
        of_timings = [timing.at(alpha) for timing in self._timings]
        timings, layers = self.timings, [of_timings[number] for number in self._numbers]
        drives = FileClocks(self.run, timings, self.blocks(alpha), alpha, files, note) if files else None
        now = out = back = 0.0  # when compute, and the streams to and from the host, are done with their work so far
        before = 0.0  # when the copies of all swapped layers but the latest are over
        d2h_stall = h2d_stall = 0.0
        for index, (timing, layer) in enumerate(zip(timings, layers, strict=True)):
            sent = before if timing.tiles is None else out
            if sent > now:
                note(COMPUTE, "stall", -1, now, sent)
                d2h_stall += sent - now
                now = sent
            if timing.copies:
                if drives is not None:
                    now = drives.make_room(index, now)
                before, began = out, now
                out += layer.copies_s
                if now + layer.copied_s > out:
                    out = now + layer.copied_s
                note(D2H, "offload", index, max(before, began + timing.copies[0][0]), out)
                if index < files:
                    drives.write(index, began, before, began + timing.forward_s, out)  # type: ignore[union-attr]
            note(COMPUTE, "forward", index, now, now + timing.forward_s)
            now += timing.forward_s
        note(COMPUTE, "head", -1, now, now + self.run.head_s)
        now += self.run.head_s
        if out > now:
            note(COMPUTE, "stall", -1, now, out)
            d2h_stall += out - now
            now = out
        ahead = -1  # the frame whose reload is under way
        for index in range(len(layers) - 1, -1, -1):
            timing, layer = timings[index], layers[index]
            if drives is not None:
                now = drives.written_above(index, now)
            first = self._computed.get(index, index)
            if drives is not None and first < index:
                drives.read_ahead(index, max(now, back, out))
            for below in range(first, index):
                if drives is not None:
                    now = drives.wait_for_tiles(below, now)
                seconds, waits_s = timings[below].posts_again(alpha, timings[below + 1].late_s)
                h2d_stall += waits_s
                note(COMPUTE, "stall", -1, now, now + waits_s)
                note(COMPUTE, "replay", below, now + waits_s, now + seconds)
                note(H2D, "reload", below, now, now + (seconds if timings[below].copies else 0.0))
                note(D2H, "offload", below + 1, now + waits_s, now + seconds)
                now += seconds
            if timing.copies and timing.tiles is not None:
                if drives is not None:
                    drives.read_ahead(index, max(now, back, out))
                    now = drives.wait_for_tiles(index, now)
                h2d_stall += layer.waits_s
                note(COMPUTE, "stall", -1, now, now + layer.waits_s)
                note(H2D, "reload", index, now, now + min(layer.backward_s, layer.reload_s + timing.reload_input_s))
            else:
                if timing.copies:
                    if ahead != index:
                        if drives is not None:
                            now = drives.read_now(index, now, max(now, back, out))
                        back = (now if now > back else back) + layer.reload_s
                        note(H2D, "reload", index, back - layer.reload_s, back)
                    if back > now:
                        note(COMPUTE, "stall", -1, now, back)
                        h2d_stall += back - now
                        now = back
                    ahead = -1
                below = self._swapped_below[index]
                if ahead < 0 <= below and timings[below].ahead and (drives is None or drives.is_read(below) <= now):
                    ahead = below
                    back = (now if now > back else back) + layers[below].reload_s
                    note(H2D, "reload", below, back - layers[below].reload_s, back)
                if drives is not None:
                    drives.read_ahead(index, max(now, back, out))
            begins, now = now + layer.waits_s + layer.replay_s, now + layer.backward_s
            note(COMPUTE, "replay", index, begins - layer.replay_s, begins)
            note(COMPUTE, "backward", index, begins, now)
        return Step(alpha, now, d2h_stall, h2d_stall, 0.0 if drives is None else drives.stall_s)
