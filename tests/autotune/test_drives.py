"""What a rank learns of its drives, and what it says of the bytes that are written a day."""

from __future__ import annotations

import types
from typing import Any

import pytest
import torch

from ds_memo.autotune import drives as module
from ds_memo.autotune.drives import Drives
from ds_memo.nvme.direct_files import Meter
from ds_memo.units import GIB
from tests.solve import runs

DAY_S = 86400
RUN = runs.run(runs.layer(1024), 2)


def made(monkeypatch: pytest.MonkeyPatch, max_tb_per_day: float | None = None) -> tuple[Drives, Any]:
    """Return drives that were measured at 5 and 4 GB/s, and the files that they look at."""
    monkeypatch.setattr(module, "measure_drives", lambda *_: (5e9, 4e9))
    files = types.SimpleNamespace(budget=GIB, stall_s=0.0, meters={True: Meter(), False: Meter()}, directories=[])
    drives = Drives(max_tb_per_day, files, types.SimpleNamespace(share=GIB), torch.device("cpu"))
    assert drives.correct(RUN).nvme is None
    drives.measure()
    return drives, files


def moved(files: Any, write_gb: float, read_gb: float, seconds: float = 1.0) -> None:
    for writes, gb in ((True, write_gb), (False, read_gb)):
        files.meters[writes].nbytes += int(gb * 1e9)
        files.meters[writes].busy_s += seconds


def test_the_solver_is_told_what_was_measured_and_this_ranks_share_of_the_writes(monkeypatch):
    monkeypatch.setattr(module, "ranks_on_node", lambda: 8)
    costs = made(monkeypatch, max_tb_per_day=8.0)[0].correct(RUN).nvme
    assert (costs.budget, costs.write_bytes_per_s, costs.read_bytes_per_s) == (GIB, 5e9, 4e9)
    assert costs.most_written_per_s == pytest.approx(1e12 / DAY_S)


@pytest.mark.parametrize(
    "stall_s, read_gb, slower", [(2.0, 2.0, True), (0.1, 2.0, False), (2.0, 3.95, False)], ids=["slower", "as predicted", "noise"]
)
def test_drives_that_get_slower_are_noticed_once(stall_s, read_gb, slower, monkeypatch):
    drives, files = made(monkeypatch)
    passed = types.SimpleNamespace(solution=types.SimpleNamespace(nvme_stall_s=0.1))
    for again in (False, True):
        before = drives.totals()
        moved(files, 5.0, read_gb)
        files.stall_s += stall_s
        window = drives.totals().since(before)._replace(passes=4, seconds=4.0)
        why = drives.learn([drives.measured(window, passed), None])
        assert why == ("drives write 5 and read 2 GB/s, less than before" if slower and not again else None)
        assert drives.correct(RUN).nvme.read_bytes_per_s == (2e9 if slower else 4e9)


@pytest.mark.parametrize("most, words", [(None, "compare that with"), (1.0, "more than memo.nvme.max_tb_per_day"), (100.0, None)])
def test_what_is_written_a_day_is_told_once(most, words, monkeypatch):
    drives, files = made(monkeypatch, most)
    said = []
    for step in range(8):
        said.append(drives.stepped(now=float(step)))
        moved(files, 1.0, 1.0)
    heard = [message for message in said if message]
    assert [words in message and "86.4 TB a day" in message for message in heard] == ([True] if words else [])
    report = drives.report()
    assert report["bytes_written_per_step"] == 10**9 and report["tb_per_day"] == pytest.approx(86.4)
