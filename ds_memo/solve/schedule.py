"""Seconds of a step at a given alpha: the schedule of ds_memo.swap.engine, also with files behind the host.

Every time is the latest of some earlier ones plus a duration (ds_memo.solve.legs). Without files the step is convex in alpha:
a maximum of sums of durations.

    forward    an output's copy starts once it is born and the copies before it are done; a layer begins when at most one swapped
               frame below it is still being copied
    backward   begins when all copies are done; a frame's reload starts with the replay of the layer call above, its own replay
               when the reload is done
    in tiles   a layer begins when all copies of the one below it are done; its frame is reloaded during its own backward
    files      the first swapped layers go on to files: ds_memo.solve.files has their clocks. Files only add waits. How many
               layers that are depends on alpha, so the step is not convex
"""

from __future__ import annotations

from dataclasses import dataclass

from ds_memo.placement import Placement, PlacementKind
from ds_memo.solve.files import Files
from ds_memo.solve.legs import Leg
from ds_memo.solve.placement_kinds import Kinds
from ds_memo.solve.run_costs import LayerCosts, RunCosts


@dataclass(frozen=True)
class Step:
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
        self._legs = [Leg.of(layer, run, kind) for layer, kind in self._distinct]
        self._swapped_below: list[int] = []
        """Index of the next swapped layer below each; -1: there is none."""
        below = -1
        for index, number in enumerate(self._numbers):
            self._swapped_below.append(below)
            below = index if self._legs[number].copies else below

    @property
    def legs(self) -> list[Leg]:
        return [self._legs[number] for number in self._numbers]

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

    def at(self, alpha: float, files: int = 0) -> Step:
        """Return the step at one alpha with the swapped blocks of the first `files` layers in files.

        Args:
            files: at least as many as `files(alpha)`; 0: the host is as large as it must be.
        """
        of_legs = [leg.at(alpha) for leg in self._legs]
        legs, layers = self.legs, [of_legs[number] for number in self._numbers]
        drives = self._drives(alpha, files) if files else None
        now = out = back = 0.0  # when compute, and the streams to and from the host, are done with their work so far
        before = 0.0  # when the copies of all swapped layers but the latest are over
        d2h_stall = h2d_stall = 0.0
        for index, (leg, layer) in enumerate(zip(legs, layers, strict=True)):
            sent = before if leg.tiles is None else out
            if sent > now:
                d2h_stall += sent - now
                now = sent
            if leg.copies:
                if drives is not None:
                    now = drives.make_room(index, now)
                before, began = out, now
                out += layer.copies_s
                if now + layer.copied_s > out:
                    out = now + layer.copied_s
                if index < files:
                    drives.write(index, began, before, began + leg.forward_s, out)  # type: ignore[union-attr]
            now += leg.forward_s
        now += self.run.head_s
        if out > now:
            d2h_stall += out - now
            now = out
        ahead = -1  # the frame whose reload is under way
        for index in range(len(layers) - 1, -1, -1):
            leg, layer = legs[index], layers[index]
            if drives is not None:
                now = drives.written_above(index, now)
            if leg.copies and leg.tiles is not None:
                if drives is not None:
                    drives.read_ahead(index, max(now, back, out))
                    now, late = drives.wait_for_tiles(index, now)
                    h2d_stall += late
                h2d_stall += layer.waits_s
                now += layer.backward_s
                continue
            if leg.copies:
                if ahead != index:
                    if drives is not None:
                        now = drives.read_now(index, now, max(now, back, out))
                    back = (now if now > back else back) + layer.reload_s
                if back > now:
                    h2d_stall += back - now
                    now = back
                ahead = -1
            below = self._swapped_below[index]
            if ahead < 0 <= below and legs[below].ahead and (drives is None or drives.is_read(below) <= now):
                ahead = below
                back = (now if now > back else back) + layers[below].reload_s
            if drives is not None:
                drives.read_ahead(index, max(now, back, out))
            now += layer.backward_s
        return Step(alpha, now, d2h_stall, h2d_stall, 0.0 if drives is None else drives.stall_s)

    def _drives(self, alpha: float, files: int) -> Files:
        assert self.run.nvme is not None
        apart = [layer.tile_blocks(kind)[0] if layer.in_tiles and not kind.on_device else 0 for layer, kind in self._distinct]
        apart_of_layers = [apart[number] for number in self._numbers]
        return Files(self.run.nvme, self.run.host_budget, self.legs, self.blocks(alpha), apart_of_layers, alpha, files)
