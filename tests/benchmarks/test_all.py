"""The verbs one after the other: each is ended with all that it started."""

import contextlib
import os
import subprocess
import sys
import time

import pytest

from benchmarks import all as every
from benchmarks.check import LIMIT_S


def alive(pid: int) -> bool:
    with contextlib.suppress(OSError):
        os.kill(pid, 0)
        return open(f"/proc/{pid}/stat").read().split()[2] != "Z"
    return False


def child_of(folder) -> int:
    """As soon as it is there."""
    path = folder / "pid"
    for _ in range(600):
        if path.exists() and path.read_text().endswith("\n"):
            return int(path.read_text())
        time.sleep(0.05)
    raise TimeoutError("no child")


def gone(pid: int) -> bool:
    for _ in range(100):
        if not alive(pid):
            return True
        time.sleep(0.05)
    return False


@pytest.mark.parametrize("waits, status", [("; wait", 124), ("", 0)])
def test_no_child_of_a_verb_outlives_it(waits, status, tmp_path):
    """One that did would hold the GPU."""
    verb = ["bash", "-c", f"sleep 300 & echo $! > {tmp_path}/part; mv {tmp_path}/part {tmp_path}/pid{waits}"]
    assert every.run(verb, 2.0) == status
    assert gone(child_of(tmp_path))


def test_who_ends_all_ends_the_verb_too(tmp_path):
    verb = f"sleep 300 & echo $! > {tmp_path}/part; mv {tmp_path}/part {tmp_path}/pid; wait"
    code = "import signal, sys; from benchmarks import all as every; every.end_with_children(); "
    code += f"every.run(['bash', '-c', {verb!r}], 300)"
    ran = subprocess.Popen([sys.executable, "-c", code])
    child = child_of(tmp_path)
    ran.terminate()
    assert ran.wait(60) == 143 and gone(child)


def test_check_ends_before_it_is_ended():
    assert LIMIT_S + 30 <= every.LIMIT_S
