"""The drives behind host memory: their bandwidth, measured first and learned while training, and what is written a day."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from ds_memo.autotune.learning import TOLERATED, Totals
from ds_memo.autotune.pass_solution import PassSolution
from ds_memo.distributed.agree import from_all_ranks, on_all_ranks
from ds_memo.memory.host import ranks_on_node
from ds_memo.nvme.bandwidth import measure_drives
from ds_memo.nvme.direct_files import DirectFiles
from ds_memo.solve.run_costs import NvmeCosts, RunCosts
from ds_memo.swap.host_budget import HostBudget

_DAY_S = 86400
_TB = 1e12
_WATCHED = 3
"""Optimizer steps between the first and the one after which the bytes written a day are told."""
_NOISE = 0.03
"""Share by which bandwidths may be lower without being new."""


class Drives:
    """The files of one rank: a part of the prediction that training corrects (learning.py).

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
        self._since_first = (0, 0, 0.0)
        """Optimizer steps after the first, bytes written in them, and their seconds."""
        self._first = (0, 0.0)
        """Bytes written by the end of the first step, and its time."""

    @property
    def budget(self) -> int:
        return self._files.budget

    # ---- for the solver

    def measure(self) -> None:
        """Measure the bandwidths. All ranks call this together.

        Raises:
            Failed: it failed on some rank. All ranks raise it.
        """
        rates = on_all_ranks(functools.partial(measure_drives, self._files, self._host.share, self._device))
        writes, reads = zip(*from_all_ranks(rates), strict=True)
        self._rates = min(writes), min(reads)
        for meter in self._files.meters.values():
            meter.zero()

    def correct(self, run: RunCosts) -> RunCosts:
        if self._rates is None:
            return run
        most = math.inf if self._max_tb_per_day is None else self._max_tb_per_day * _TB / _DAY_S / ranks_on_node()
        return replace(run, nvme=NvmeCosts(self.budget, *self._rates, most_written_per_s=most))

    def totals(self) -> Totals:
        writes, reads = self._files.meters[True], self._files.meters[False]
        return Totals(0, 0.0, 0.0, self._files.stall_s, writes.nbytes, writes.busy_s, reads.nbytes, reads.busy_s)

    def measured(self, window: Totals, passed: PassSolution) -> tuple[float, float] | None:
        if not window.is_late(window.file_stall_s, passed.solution.nvme_stall_s):
            return None
        return _rate(window.written, window.writing_s), _rate(window.read, window.reading_s)

    def learn(self, by_rank: Sequence[tuple[float, float] | None]) -> str | None:
        """Take lower bandwidths: a cache that is full, heat, other users."""
        if self._rates is None:
            return None
        slow = [rates for rates in by_rank if rates]
        before = self._rates
        write, read = (min([was, *(rates[way] for rates in slow if rates[way])]) for way, was in enumerate(before))
        if write > before[0] * (1 - _NOISE) and read > before[1] * (1 - _NOISE):
            return None
        self._rates = write, read
        return f"drives write {write / 1e9:.3g} and read {read / 1e9:.3g} GB/s, less than before"

    # ---- for users

    def stepped(self, now: float) -> str | None:
        """Follow the end of an optimizer step. Return once what the user should know of the bytes that are written.

        Args:
            now: the time, in seconds.
        """
        written = self._files.meters[True].nbytes
        if not self._steps:
            self._first = written, now
        self._since_first = self._steps, written - self._first[0], now - self._first[1]
        self._steps += 1
        tb, most = self._tb_per_day, self._max_tb_per_day
        if self._steps != 1 + _WATCHED or not tb:
            return None
        if most is None:
            return (
                f"this node writes {tb:.3g} TB a day to memo.nvme.path; compare that with what its drives are rated for. "
                "memo.nvme.max_tb_per_day bounds what the solver writes"
            )
        if tb > most * (1 + TOLERATED):
            return (
                f"this node writes {tb:.3g} TB a day to memo.nvme.path, more than memo.nvme.max_tb_per_day ({most:g}): alpha is "
                "configured, or steps are shorter than predicted. Lower memo.alpha, or leave it out"
            )
        return None

    @property
    def _tb_per_day(self) -> float:
        """TB that all ranks of the node write a day, if they write as much as this one."""
        _, written, seconds = self._since_first
        return _rate(written, seconds) * _DAY_S * ranks_on_node() / _TB

    def report(self) -> dict[str, Any]:
        """Return the report's entry; bytes and seconds of this rank."""
        writes, reads = self._files.meters[True], self._files.meters[False]
        steps, written, _ = self._since_first
        return {
            "directories": [str(directory.path) for directory in self._files.directories],
            "budget": self.budget,
            "bytes_written": writes.nbytes,
            "bytes_read": reads.nbytes,
            "write_gb_s": _rate(writes.nbytes, writes.busy_s) / 1e9,
            "read_gb_s": _rate(reads.nbytes, reads.busy_s) / 1e9,
            "stall_s": self._files.stall_s,
            "bytes_written_per_step": written // steps if steps else 0,
            "tb_per_day": self._tb_per_day,
        }


def _rate(nbytes: int, seconds: float) -> float:
    return nbytes / seconds if seconds > 0 else 0.0
