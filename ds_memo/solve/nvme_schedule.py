"""Seconds of a step whose first swapped layers go on to files: the schedule of ds_memo.nvme.home.

To that of ds_memo.solve.schedule it adds a clock for writes and one for reads, and the host's room. A block's position is the sum
of the blocks before it. The host holds the blocks from one position to another, and drops the first of them as it needs room.

    forward    a block is written once its copies to the host are over, and those before it are written; a layer waits until as
               many of the first bytes are written as the host has no room for beside its own block
    backward   as layers' blocks are freed, those below are read; a layer waits until its block is read
    in tiles   the same, tile by tile: between a layer's first and last tile, bytes are written and read evenly

It is not convex in alpha: alpha decides how many layers are written.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from itertools import accumulate

from ds_memo.placement import Placement, PlacementKind
from ds_memo.solve.costs import LayerCosts, RunCosts
from ds_memo.solve.kinds import Kinds
from ds_memo.solve.schedule import LEAVING, Leg, Schedule, Step

_ROUNDING = 1e-3
"""Bytes; sums of equal blocks are off by less."""


@dataclass(eq=False)
class _Blocks:
    """Equal blocks that are written one after another, and read in the opposite order: a layer's tiles, or a single one."""

    begin: int
    """Position."""
    count: int
    nbytes: float
    """Bytes of each."""
    in_file: int = 0
    """How many of the first are in their file alone."""
    first_written: float = math.inf
    """When the first is written; of blocks that are not: never."""
    last_written: float = math.inf
    reads: list[tuple[int, int, float, float]] = field(default_factory=list)
    """Each: the blocks from one number to before another were read, from one moment to another."""

    def written(self, number: int) -> float:
        """Return the moment when the first so many are written."""
        if number == 1:
            return self.first_written
        return self.first_written + (number - 1) / (self.count - 1) * (self.last_written - self.first_written)

    def read_at(self) -> list[float]:
        """Return the moment when each is on the host."""
        found = [0.0] * self.count
        for low, high, begin, end in self.reads:
            each = (end - begin) / (high - low)
            found[low:high] = [end - (number - low) * each for number in range(low, high)]
        return found


class NvmeSchedule:
    """The steps of a run with given kinds of placements, some of whose blocks go on to files.

    Args:
        run: seconds, bytes, bandwidths, with NVMe.
        kinds: one per layer.
    """

    def __init__(self, run: RunCosts, kinds: Kinds) -> None:
        assert run.nvme is not None
        self.nvme = run.nvme
        self.host_budget = run.host_budget
        self.legs, self.head_s = Schedule(run, kinds).legs, run.head_s
        self.layers = [(layer, PlacementKind(kind)) for layer, kind in zip(run.layers, kinds, strict=True)]
        attended = {layer: _attended_s(layer) for layer in set(run.layers)}
        self.attended = [attended[layer] for layer in run.layers]

    def blocks(self, alpha: float) -> list[int]:
        """Return the bytes of each layer's host block, or blocks; 0 on the device."""
        of = {pair: pair[0].host_bytes(Placement(pair[1], alpha)) for pair in set(self.layers)}
        return [of[pair] for pair in self.layers]

    def files(self, alpha: float) -> int | None:
        """Return the fewest layers, from the first on, whose swapped blocks must be in files so that the host holds the rest.
        None: a single layer's are too large for the host."""
        blocks = self.blocks(alpha)
        rest = sum(blocks)
        for number, nbytes in enumerate(blocks):
            if rest <= self.host_budget:
                return number
            if nbytes > self.host_budget:
                return None
            rest -= nbytes
        return len(blocks)

    def at(self, alpha: float, files: int) -> Step:
        """Return the step at one alpha with the swapped blocks of the first `files` layers in files."""
        return _Pass(self, alpha, files).step()


class _Pass:
    """One step: the clocks, and the blocks of each layer."""

    def __init__(self, schedule: NvmeSchedule, alpha: float, files: int) -> None:
        self.alpha, self.files = alpha, files
        self.nvme, self.host_budget, self.head_s = schedule.nvme, schedule.host_budget, schedule.head_s
        self.legs, self.attended = schedule.legs, schedule.attended
        self.nbytes = schedule.blocks(alpha)
        self.begins = [0, *accumulate(self.nbytes)]
        self.blocks = [self._blocks(*pair, index) for index, pair in enumerate(schedule.layers)]
        self.in_order = [blocks for of_layer in self.blocks for blocks in of_layer]
        self.now = self.out = self.back = self.write = self.read = 0.0
        self.at = 0
        """Number in order: the forward drops what is below, the backward has read what is above."""
        self.d2h_stall = self.h2d_stall = self.nvme_stall = 0.0
        self.first_passes: dict[Leg, tuple[list[float], list[float], float]] = {}
        """Seconds to compute and to reload each tile, and of all if no read is late."""

    def _blocks(self, layer: LayerCosts, kind: PlacementKind, index: int) -> list[_Blocks]:
        """Return a layer's blocks in the order of writes: attention's, if it has a frame of its own, and tiles'."""
        nbytes, begin = self.nbytes[index], self.begins[index]
        if nbytes == 0:
            return []
        if layer.in_tiles is None:
            return [_Blocks(begin, 1, nbytes)]
        apart, count = layer.tile_blocks(kind)[0], layer.in_tiles.count
        first = [_Blocks(begin, 1, apart)] if apart else []
        return [*first, _Blocks(begin + apart, count, (nbytes - apart) / count)]

    def step(self) -> Step:
        self._forward()
        if math.isfinite(self.now):
            self._backward()
        return Step(self.alpha, self.now, math.nan, self.d2h_stall, self.h2d_stall, self.nvme_stall)

    def _wait(self, until: float) -> float:
        """Let compute wait, and return for how long."""
        begin, self.now = self.now, max(self.now, until)
        return self.now - begin

    # ---- forward

    def _forward(self) -> None:
        leaving: list[float] = []
        for index, leg in enumerate(self.legs):
            while len(leaving) >= (LEAVING if leg.tiles is None else 1):
                self.d2h_stall += self._wait(leaving.pop(0))
            if not leg.copies:
                self.now += leg.forward_s
                continue
            heads_s, attended_s = self.attended[index]
            self._wait_for_room(index, heads_s, attended_s)
            sent = self.now + attended_s
            for after, constant, per_alpha in leg.copies:
                self.out = max(self.out, self.now + after) + constant + per_alpha * self.alpha
                if after < attended_s:
                    sent = max(sent, self.out)
            self.now += leg.forward_s
            leaving.append(self.out)
            if index < self.files:
                self._write(index, sent, leg.forward_s - attended_s)
        self.now += self.head_s
        for sent in leaving:
            self.d2h_stall += self._wait(sent)

    def _wait_for_room(self, index: int, heads_s: float, attended_s: float) -> None:
        """Wait until the host has room for a layer's blocks, each as it is allocated: tiles' one after another in the layer's
        heads, attention's behind it."""
        *apart, tiles = self.blocks[index]
        self._drop(self.begins[index] + tiles.nbytes - self.host_budget, 0.0)
        self._drop(self.begins[index] + tiles.count * tiles.nbytes - self.host_budget, heads_s * (1 - 1 / tiles.count))
        if apart:
            self._drop(self.begins[index + 1] - self.host_budget, attended_s)

    def _drop(self, position: float, after: float) -> None:
        """Free the host of all blocks up to a position, `after` seconds from now: compute waits until they are written."""
        if position <= 0:
            return
        while position > (blocks := self.in_order[self.at]).begin + blocks.count * blocks.nbytes + _ROUNDING:
            blocks.in_file = blocks.count
            self.at += 1
        number = min(blocks.count, math.ceil((position - blocks.begin - _ROUNDING) / blocks.nbytes))
        if number > 0:
            blocks.in_file = max(blocks.in_file, number)
            self.nvme_stall += self._wait(blocks.written(number) - after)

    def _write(self, index: int, sent: float, tails_s: float) -> None:
        """Write a layer's blocks.

        Args:
            sent: when attention is over, and all copies of what is before.
            tails_s: seconds of what follows attention. A tile's copies are over with its part of that.
        """
        all_sent, whole = max(self.now, self.out), self.legs[index].tiles is None
        for blocks in self.blocks[index]:
            each = blocks.nbytes / self.nvme.write_bytes_per_s
            if blocks.count == 1:
                begin = max(self.write, all_sent if whole else sent)
                blocks.first_written = blocks.last_written = self.write = begin + each
            else:
                begin = max(self.write, sent + tails_s / blocks.count)
                blocks.first_written = begin + each
                blocks.last_written = self.write = max(begin + blocks.count * each, all_sent + each)

    # ---- backward

    def _backward(self) -> None:
        ahead, legs, self.at = -1, self.legs, min(self.at, len(self.in_order) - 1)
        for index in range(len(legs) - 1, -1, -1):
            leg = legs[index]
            if index + 1 < self.files:  # the blocks of the layer above are freed
                for blocks in self.blocks[index + 1]:
                    self.nvme_stall += self._wait(blocks.last_written)
            if leg.copies and leg.tiles is not None:
                self._backward_in_tiles(index, leg)
                continue
            if leg.copies:
                if ahead != index:
                    self._read_ahead(index, only=True)
                    self.nvme_stall += self._wait(self._is_read(index))
                    self._reload(leg)
                self.h2d_stall += self._wait(self.back)
                ahead = -1
            if ahead < 0:
                below = next((below for below in range(index - 1, -1, -1) if legs[below].copies), -1)
                if below >= 0 and legs[below].ahead and legs[below].tiles is None and self._is_read(below) <= self.now:
                    ahead = below
                    self._reload(legs[below])
            self._read_ahead(index)
            self.now += leg.backward_s + leg.replay_s - leg.saved_s * self.alpha

    def _backward_in_tiles(self, index: int, leg: Leg) -> None:
        self._read_ahead(index)
        *apart, tiles = self.blocks[index]
        if tiles.reads and tiles.reads[-1][-1] > self.now:
            if leg not in self.first_passes:
                first_pass = leg.first_pass(self.alpha)
                self.first_passes[leg] = *first_pass, _tile_by_tile(0.0, [0.0] * tiles.count, *first_pass)[0]
            computes, reloads, at_best_s = self.first_passes[leg]
            end, waited = _tile_by_tile(self.now, tiles.read_at(), computes, reloads)
            later = end - self.now - at_best_s
            self.now += later
            self.nvme_stall += waited
            self.h2d_stall += later - waited
        for attention in apart:  # wanted behind the first pass
            if attention.reads:
                self.nvme_stall += self._wait(attention.reads[-1][-1] - (leg.heads_again_s or 0.0))
        self.now, _, stall = leg.backward_in_tiles(self.alpha, self.now, 0.0)
        self.h2d_stall += stall

    def _reload(self, leg: Leg) -> None:
        self.back = max(self.back, self.now) + leg.reload_s + leg.reload_per_alpha * self.alpha

    def _is_read(self, index: int) -> float:
        """Return the moment when a whole layer's block is on the host."""
        (blocks,) = self.blocks[index]
        if blocks.in_file:
            return math.inf
        return blocks.reads[-1][-1] if blocks.reads else 0.0

    def _read_ahead(self, index: int, only: bool = False) -> None:
        """Read as many blocks as the host has room for: those of a layer whose backward begins and, unless `only` those are
        wanted, of the layers below."""
        while self.at >= 0 and (not only or self.in_order[self.at].begin >= self.begins[index]):
            blocks = self.in_order[self.at]
            held = self.begins[index + 1] - blocks.begin - blocks.in_file * blocks.nbytes
            number = min(blocks.in_file, math.floor((self.host_budget - held + _ROUNDING) / blocks.nbytes))
            if number > 0:
                begin = max(self.read, self.now, self.back, self.out)
                self.read = begin + number * blocks.nbytes / self.nvme.read_bytes_per_s
                blocks.reads.append((blocks.in_file - number, blocks.in_file, begin, self.read))
                blocks.in_file -= number
            if blocks.in_file:
                return
            self.at -= 1


def _attended_s(layer: LayerCosts) -> tuple[float, float]:
    """Return the seconds before attention, and until it is over, of a layer in tiles. One that runs whole allocates at once."""
    if layer.in_tiles is None:
        return 0.0, 0.0
    born = next((output.born for output in layer.outputs if output.kind == "attention"), 1.0)
    return max(0.0, born * layer.forward_s - layer.attention_s), born * layer.forward_s


def _tile_by_tile(now: float, read_at: list[float], computes: list[float], reloads: list[float]) -> tuple[float, float]:
    """Return when a pass over a layer's tiles ends, last to first, and how long it waits for reads.

    Args:
        now: when it begins.
        read_at: when each tile's block is on the host. A reload is issued one tile ahead if it is there by then.
        computes, reloads: seconds of each.
    """
    waited, back, ahead = 0.0, now, False
    for number in range(len(read_at) - 1, -1, -1):
        if not ahead:
            if (late := read_at[number] - now) > 0:
                waited, now = waited + late, now + late
            back = (now if now > back else back) + reloads[number]
        if back > now:
            now = back
        if ahead := number > 0 and read_at[number - 1] <= now:
            back = now + reloads[number - 1]
        now += computes[number]
    return now, waited
