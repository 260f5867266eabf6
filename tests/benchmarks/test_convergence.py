"""Ranks of a run of `benchmarks.convergence`."""

from __future__ import annotations

import subprocess
import sys

import pytest

from benchmarks.convergence import exit_codes


def start(code: str) -> subprocess.Popen:
    return subprocess.Popen([sys.executable, "-c", code])


@pytest.mark.processes
def test_a_rank_that_fails_ends_the_wait_for_the_others() -> None:
    waiting, failing = start("import time; time.sleep(600)"), start("raise SystemExit(3)")
    try:
        assert exit_codes([waiting, failing]) == [None, 3]
    finally:
        waiting.kill()


@pytest.mark.processes
def test_all_ranks_are_waited_for() -> None:
    assert exit_codes([start("import time; time.sleep(0.5)"), start("")]) == [0, 0]
