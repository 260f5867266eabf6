"""The verbs one after the other: each is ended with all that it started."""

import os
import subprocess
import sys
import time

import pytest
import torch

from benchmarks import all as every
from benchmarks.check import LIMIT_S
from tests.processes import assert_gone, processes_with

pytestmark = pytest.mark.processes


@pytest.mark.parametrize("waits, limit_s, status", [(" wait", 2.0, 124), ("", 60.0, 0)])
def test_no_child_of_a_verb_outlives_it(waits, limit_s, status, marker):
    """One that did would hold the GPU."""
    assert every.run(["env", f"{marker}=1", "bash", "-c", f"sleep 300 &{waits}"], limit_s) == status
    assert_gone(marker)


def test_who_ends_all_ends_the_verb_too(marker):
    code = "from benchmarks import all as every; every.end_with_children(); every.run(['bash', '-c', 'sleep 300 & wait'], 300)"
    ran = subprocess.Popen([sys.executable, "-c", code], env=os.environ | {marker: "1"})
    while len(processes_with(marker)) < 3:  # this one, bash and sleep
        assert ran.poll() is None
        time.sleep(0.05)
    ran.terminate()
    assert ran.wait(60) == 143
    assert_gone(marker)


def test_parts_of_check_that_take_long_have_a_command_of_their_own(tmp_path):
    found = every.commands(torch.device("cuda"), tmp_path, 420.0)
    assert list(found) == ["check", "check allocator", "check flex", "speed", "capacity", "planner"]
    assert found["check flex"][:3] == ["benchmarks.check", "--parts", "flex"]
    files = [words[words.index("--out") + 1] for name, words in found.items() if name.startswith("check")]
    assert len(set(files)) == 3
    assert "check flex" not in every.commands(torch.device("cpu"), tmp_path, 420.0)


def test_check_ends_before_it_is_ended():
    assert LIMIT_S + 30 <= every.LIMIT_S
