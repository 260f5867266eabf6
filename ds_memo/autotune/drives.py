"""The drives behind host memory: their bandwidth, measured first and learned while training, and what is written a day."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any

import torch

from ds_memo.distributed.agree import from_all_ranks, on_all_ranks
from ds_memo.memory.host import ranks_on_node
from ds_memo.nvme.bandwidth import measure_drives
from ds_memo.nvme.direct_files import DirectFiles
from ds_memo.solve.run_costs import NvmeCosts
from ds_memo.swap.host_budget import HostBudget

_DAY_S = 86400
_TB = 1e12
_WATCHED = 3
"""Optimizer steps between the first and the one after which people hear what is written a day."""
_TOLERATED = 0.05
"""Share of a pass that compute may wait longer for files than predicted before their bandwidth counts as lower."""
_NOISE = 0.03
"""Share by which bandwidths may be lower without being new."""


@dataclass(frozen=True)
class _Seen:
    """Totals at some step."""

    now: float = 0.0
    steps: int = 0
    written: int = 0


class Drives:
    """What one rank knows of its files.

    Args:
        max_tb_per_day: of all ranks of the node, as configured.
    """

    def __init__(self, max_tb_per_day: float | None, files: DirectFiles, host: HostBudget, device: torch.device) -> None:
        self._max_tb_per_day = max_tb_per_day
        self._files = files
        self._host = host
        self._device = device
        self._rates: tuple[float, float] | None = None
        """Bytes per second written and read, of the slowest rank; None: not measured."""
        self._steps = 0
        self._first: _Seen | None = None
        self._latest = _Seen()
        self._stalled_s = 0.0
        self._moved = [(0, 0.0), (0, 0.0)]
        """Bytes written and read, and in how many seconds, when `learn` last looked; as is `_stalled_s`."""

    @property
    def budget(self) -> int:
        return self._files.budget

    # ---- for the solver

    def measure(self) -> None:
        """Measure the bandwidths. All ranks call this together.

        Raises:
            Failed: it failed on some rank. All ranks raise it.
        """
        mine = on_all_ranks(functools.partial(measure_drives, self._files, self._host.share, self._device))
        writes, reads = zip(*from_all_ranks(mine), strict=True)
        self._rates = min(writes), min(reads)
        for meter in self._files.meters.values():
            meter.zero()

    def costs(self) -> NvmeCosts | None:
        """Return what the solver is told; None before they are measured."""
        if self._rates is None:
            return None
        most = math.inf if self._max_tb_per_day is None else self._max_tb_per_day * _TB / _DAY_S / ranks_on_node()
        return NvmeCosts(self.budget, *self._rates, most_written_per_s=most)

    def learn(self, predicted_s: float, pass_s: float, passes: int) -> str | None:
        """Look at the passes since the last call. All ranks call this together.

        Args:
            predicted_s: seconds that the solver has compute wait for files, a pass.
            pass_s: seconds of a pass.

        Returns:
            In words what changed, if the drives are slower than is known: a cache that is full, heat, other users. Else None.
        """
        stalled_s, self._stalled_s = self._files.stall_s - self._stalled_s, self._files.stall_s
        now = [(meter.nbytes, meter.busy_s) for meter in (self._files.meters[True], self._files.meters[False])]
        moved, self._moved = [(n - m, t - s) for (n, t), (m, s) in zip(now, self._moved, strict=True)], now
        seen = [_rate(*of_way) for of_way in moved]
        late = passes > 0 and stalled_s / passes > predicted_s + _TOLERATED * pass_s
        everybodys = from_all_ranks(seen if late and self._rates else None)
        slow = [rates for rates in everybodys if rates]
        if not slow or self._rates is None:
            return None
        before = self._rates
        write, read = (min([was, *(rates[way] for rates in slow if rates[way])]) for way, was in enumerate(before))
        if write > before[0] * (1 - _NOISE) and read > before[1] * (1 - _NOISE):
            return None
        self._rates = write, read
        return f"drives write {self._rates[0] / 1e9:.3g} and read {self._rates[1] / 1e9:.3g} GB/s, less than before"

    # ---- for people

    def stepped(self, now: float) -> str | None:
        """An optimizer step is over. Return what people should hear of the bytes that are written, once.

        Args:
            now: the time, in seconds.
        """
        self._steps += 1
        self._latest = _Seen(now, self._steps, self._files.meters[True].nbytes)
        if self._first is None:
            self._first = self._latest
        if self._steps != 1 + _WATCHED or (tb := self._tb_per_day) is None:
            return None
        if self._max_tb_per_day is None:
            return (
                f"this node writes {tb:.3g} TB a day to memo.nvme.path; compare that with what its drives are rated for. "
                "memo.nvme.max_tb_per_day bounds what the solver writes"
            )
        if tb > self._max_tb_per_day * (1 + _TOLERATED):
            return (
                f"this node writes {tb:.3g} TB a day to memo.nvme.path, more than memo.nvme.max_tb_per_day "
                f"({self._max_tb_per_day:g}): alpha is configured, or steps are shorter than predicted. Lower memo.alpha, "
                "or leave it out"
            )
        return None

    @property
    def _tb_per_day(self) -> float | None:
        """TB that all ranks of the node write a day, if they write as much as this one; None: none are written, or too early."""
        written, seconds = self._since_first()
        return written / seconds * _DAY_S * ranks_on_node() / _TB if written and seconds > 0 else None

    def _since_first(self) -> tuple[int, float]:
        if self._first is None:
            return 0, 0.0
        return self._latest.written - self._first.written, self._latest.now - self._first.now

    def report(self) -> dict[str, Any]:
        """Return the report's entry; bytes and seconds of this rank."""
        writes, reads = self._files.meters[True], self._files.meters[False]
        written, _ = self._since_first()
        steps = self._latest.steps - (self._first.steps if self._first else 0)
        return {
            "directories": [str(directory.path) for directory in self._files.directories],
            "budget": self.budget,
            "bytes_written": writes.nbytes,
            "bytes_read": reads.nbytes,
            "write_gb_s": _rate(writes.nbytes, writes.busy_s) / 1e9,
            "read_gb_s": _rate(reads.nbytes, reads.busy_s) / 1e9,
            "stall_s": self._files.stall_s,
            "bytes_written_per_step": written // steps if steps else 0,
            "tb_per_day": self._tb_per_day or 0.0,
        }


def _rate(nbytes: int, seconds: float) -> float:
    return nbytes / seconds if seconds > 0 else 0.0
