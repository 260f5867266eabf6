"""A rank of a ring is lost inside a forward: all others end in time, each with an error that says so; nothing is left behind."""

import os
import re
import signal
import subprocess
import sys
import time

import pytest

from tests.processes import ROOT, assert_gone
from tests.sequence.loses_a_rank import LOST, SECONDS

pytestmark = pytest.mark.processes
RANKS = 4
GONE = "Connection closed by peer|Connection reset by peer|Broken pipe"
LATE = "Timed out"


@pytest.mark.parametrize(
    "how, told, within_s",
    [
        pytest.param(signal.SIGKILL, GONE, 10, id="killed"),
        pytest.param(signal.SIGSTOP, f"{LATE}|{GONE}", SECONDS + 20, id="frozen", marks=pytest.mark.slow),
    ],
)
def test_the_other_ranks_end(how, told, within_s, marker, tmp_path):
    logs = [tmp_path / f"rank{rank}.txt" for rank in range(RANKS)]
    words = ["-m", "tests.sequence.loses_a_rank"]
    ranks = [
        subprocess.Popen(
            [sys.executable, *words, str(rank), str(RANKS), str(tmp_path / "store"), str(int(how))],
            cwd=ROOT,
            env={**os.environ, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", marker: "1"},
            stdout=log.open("w"),
            stderr=subprocess.STDOUT,
        )
        for rank, log in enumerate(logs)
    ]
    deadline = time.monotonic() + 120
    while "step 1 is done" not in logs[LOST].read_text():
        assert time.monotonic() < deadline, "\n".join(log.read_text() for log in logs)
        time.sleep(0.1)
    deadline = time.monotonic() + within_s
    others = [rank for rank in range(RANKS) if rank != LOST]
    for rank in others:
        assert ranks[rank].wait(max(0.1, deadline - time.monotonic())) != 0
    for rank in others:
        last = logs[rank].read_text().splitlines()[-1]
        assert re.search(told, last), logs[rank].read_text()
        assert "step 2 is done" not in logs[rank].read_text()
    ranks[LOST].kill()
    ranks[LOST].wait()
    assert_gone(marker)
