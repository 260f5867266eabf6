"""Clocks of the files behind the host in one step: the schedule of ds_memo.nvme.file_home.

A block's position is the sum of the blocks before it. The host holds the blocks from one position to another, and drops the first
of them as it needs room.

    forward    a block is written once its copies to the host are over, and those before it are written; a layer waits until as
               many of the first bytes are written as the host has no room for beside its own block
    backward   as layers' blocks are freed, those below are read; a layer waits until its block is read
    in tiles   the same, tile by tile: between a layer's first and last tile, bytes are written and read evenly
"""

from __future__ import annotations

import math
from bisect import bisect
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate

from ds_memo.solve.layer_timing import LayerTiming
from ds_memo.solve.run_costs import RunCosts
from ds_memo.solve.timeline import READ, WRITE, Note, not_noted
from ds_memo.swap.stream_protocol import COMPUTE

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

    def late(self, now: float, pass_s: float) -> float:
        """Return how long a pass over them waits, last to first.

        Args:
            now: when it begins.
            pass_s: what it takes if it waits for none.
        """
        each_s, most = pass_s / self.count, 0.0
        for low, high, begin, end in self.reads:
            first = begin + (end - begin) / (high - low)
            most = max(most, first - now - (self.count - high) * each_s, end - now - (self.count - 1 - low) * each_s)
        return most


class FileClocks:
    """The clocks of writes and reads, and the host's room.

    Args:
        timings: one per layer.
        blocks: bytes of each layer's host blocks.
        files: the swapped blocks of the first so many layers are written.
        note: as in Schedule.at.
    """

    def __init__(
        self,
        run: RunCosts,
        timings: Sequence[LayerTiming],
        blocks: Sequence[int],
        alpha: float,
        files: int,
        note: Note = not_noted,
    ) -> None:
        assert run.nvme is not None
        self.stall_s = 0.0
        """Seconds that compute waited for files."""
        self._nvme, self._host_budget, self._note = run.nvme, run.host_budget, note
        self._timings, self._alpha, self._files = timings, alpha, files
        self._begins = [0, *accumulate(blocks)]
        self._blocks = [
            _Blocks(begin, count := 1 if timing.tiles is None else timing.tiles.count, nbytes / count)
            for timing, begin, nbytes in zip(timings, self._begins, blocks, strict=False)
        ]
        self._in_order = [blocks for blocks in self._blocks if blocks.nbytes]
        self._write = self._read = 0.0
        self._at = 0
        """Number in order: the forward drops what is below, the backward has read what is above."""

    def _wait(self, now: float, until: float) -> float:
        """Let compute wait, and return when it goes on."""
        self._note(COMPUTE, "nvme stall", -1, now, until)
        self.stall_s += max(0.0, until - now)
        return max(now, until)

    # ---- forward

    def make_room(self, index: int, now: float) -> float:
        """Wait until the host has room for a layer's blocks, each as it is allocated: tiles' one after another before its
        attention. Return when compute goes on."""
        tiles, pre_s, budget = self._blocks[index], self._timings[index].pre_s, self._host_budget
        now = self._drop(tiles.begin + tiles.nbytes - budget, now, 0.0)
        return self._drop(self._begins[index + 1] - budget, now, pre_s * (1 - 1 / tiles.count))

    def _drop(self, position: float, now: float, after: float) -> float:
        """Free the host of all blocks up to a position, `after` seconds from now: compute waits until they are written."""
        if position <= 0:
            return now
        while position > (blocks := self._in_order[self._at]).begin + blocks.count * blocks.nbytes + _ROUNDING:
            blocks.in_file = blocks.count
            self._at += 1
        number = min(blocks.count, math.ceil((position - blocks.begin - _ROUNDING) / blocks.nbytes))
        if number <= 0:
            return now
        blocks.in_file = max(blocks.in_file, number)
        return self._wait(now, blocks.written(number) - after)

    def write(self, index: int, began: float, before: float, now: float, out: float) -> None:
        """Write a layer's blocks once its forward is over.

        Args:
            began: when the forward began.
            before: when the copies of the layers before it are over.
            out: when its own are.
        """
        timing, all_sent = self._timings[index], max(now, out)
        sent = all_sent
        if (
            timing.tiles is not None
        ):  # when attention is over, and all copies of what is before; a tile's with its part of the rest
            copies_s, copied_s = timing.copies_at(self._alpha, until=timing.attended_s)
            sent = max(began + timing.attended_s, before + copies_s, began + copied_s)
            sent += (timing.forward_s - timing.attended_s) / timing.tiles.count
        blocks = self._blocks[index]
        each, begin = blocks.nbytes / self._nvme.write_bytes_per_s, max(self._write, sent)
        blocks.first_written = begin + each
        blocks.last_written = self._write = max(begin + blocks.count * each, all_sent + each)
        self._note(WRITE, "write", index, begin, self._write)

    # ---- backward

    def written_above(self, index: int, now: float) -> float:
        """Wait until the blocks of the layer above are written, as they are freed. Return when compute goes on."""
        above = index + 1
        return self._wait(now, self._blocks[above].last_written) if above < self._files and self._blocks[above].nbytes else now

    def wait_for_tiles(self, index: int, now: float) -> float:
        """Wait for the blocks of a layer in tiles, as its backward comes to them. Return when compute goes on."""
        return self._wait(now, now + self._blocks[index].late(now, self._timings[index].first_pass_s(self._alpha)))

    def is_read(self, index: int) -> float:
        """Return the moment when a whole layer's block is on the host."""
        blocks = self._blocks[index]
        if blocks.in_file:
            return math.inf
        return blocks.reads[-1][-1] if blocks.reads else 0.0

    def read_now(self, index: int, now: float, begin: float) -> float:
        """Read a whole layer's block and wait for it. Return when compute goes on."""
        self.read_ahead(index, begin, only=True)
        return self._wait(now, self.is_read(index))

    def read_ahead(self, index: int, begin: float, only: bool = False) -> None:
        """Read as many blocks as the host has room for: those of a layer whose backward begins and, unless `only` those are
        wanted, of the layers below.

        Args:
            begin: when the streams are done with their work so far.
        """
        while 0 <= self._at < len(self._in_order) and (not only or self._in_order[self._at].begin >= self._begins[index]):
            blocks = self._in_order[self._at]
            held = self._begins[index + 1] - blocks.begin - blocks.in_file * blocks.nbytes
            number = min(blocks.in_file, math.floor((self._host_budget - held + _ROUNDING) / blocks.nbytes))
            if number > 0:
                begun = max(self._read, begin)
                self._read = begun + number * blocks.nbytes / self._nvme.read_bytes_per_s
                blocks.reads.append((blocks.in_file - number, blocks.in_file, begun, self._read))
                self._note(READ, "read", bisect(self._begins, blocks.begin) - 1, begun, self._read)
                blocks.in_file -= number
            if blocks.in_file:
                return
            self._at -= 1
