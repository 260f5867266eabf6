"""Drives behind the emulated machine: files that keep time on its clock and hold nothing, as its memory holds no values."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.emulated_time import Clock
from ds_memo.errors import MemoError
from ds_memo.nvme.direct_files import Meter
from ds_memo.nvme.directory import Directory
from ds_memo.nvme.extents import Extent, Space
from ds_memo.units import GIB


@dataclass(frozen=True)
class _Transfer:
    at: float
    """When it is over, on the emulator's clock."""
    failure: None = None


class EmulatedFiles:
    """See :class:`ds_memo.nvme.direct_files.DirectFiles`. Each direction moves one transfer at a time.

    Args:
        budget: bytes.
        bytes_per_s: of each direction.
    """

    directories = (Directory(Path("/emulated"), 0, "emulated", None),)

    def __init__(self, clock: Clock, budget: int, bytes_per_s: float) -> None:
        self.budget = budget
        self.stall_s = 0.0
        self.meters = {True: Meter(), False: Meter()}
        self._clock = clock
        self._bytes_per_s = bytes_per_s
        self._free_at = {True: 0.0, False: 0.0}
        self._latest = 0.0
        self._space = Space()
        self._space.grow(budget)

    def extent(self, nbytes: int, wanted_by: str) -> Extent:
        extent = self._space.allocate(nbytes)
        if extent is None:
            raise MemoError(f"files for activations: {wanted_by} needs {nbytes / GIB:.3g} GiB; all are full")
        return extent

    def free(self, extent: Extent) -> None:
        self._space.free(extent)

    def extents(self) -> list[Extent]:
        return self._space.extents

    def write(self, block: Any, extent: Extent, after: tuple[Any, ...]) -> _Transfer:
        return self._transfer(True, extent.nbytes, after)

    def read(self, extent: Extent, block: Any, after: tuple[Any, ...]) -> _Transfer:
        return self._transfer(False, extent.nbytes, after)

    def _transfer(self, writes: bool, nbytes: int, after: tuple[Any, ...]) -> _Transfer:
        took = nbytes / self._bytes_per_s
        begin = max(self._free_at[writes], self._clock.now(), *(self._clock.at(event) for event in after))
        self._free_at[writes] = begin + took
        self._latest = max(self._latest, begin + took)
        self.meters[writes].nbytes += nbytes
        self.meters[writes].busy_s += took
        return _Transfer(begin + took)

    def done(self, transfer: _Transfer) -> bool:
        return transfer.at <= self._clock.now()

    def wait(self, transfer: _Transfer, compute: Any) -> None:
        self.stall_s += max(0.0, transfer.at - max(self._clock.at(compute), self._clock.now()))
        self._clock.host_waits_until(transfer.at)

    def wait_beside(self, transfer: _Transfer, compute: Any) -> bool:
        self._clock.host_waits_until(min(transfer.at, self._clock.at(compute)))
        return self.done(transfer)

    def finish(self) -> None:
        self._clock.host_waits_until(self._latest)

    def close(self) -> None: ...


@contextmanager
def emulated_drives(clock: Clock, gib: float, gb_per_s: float) -> Iterator[None]:
    """Put such files behind memo.nvme within the block."""
    from ds_memo.autotune import drives
    from ds_memo.runtime import session

    before = session.open_files, drives.measure_drives
    session.open_files = lambda *_: EmulatedFiles(clock, int(gib * GIB), gb_per_s * 1e9)
    drives.measure_drives = lambda *_: (gb_per_s * 1e9, gb_per_s * 1e9)
    try:
        yield
    finally:
        session.open_files, drives.measure_drives = before
