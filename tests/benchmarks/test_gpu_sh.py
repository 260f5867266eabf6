"""`gpu.sh`: its usage, and `all`, which runs the verbs one after the other and ends each with all that it started."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.processes import assert_gone, finished

pytestmark = pytest.mark.processes
GPU_SH = Path(__file__).parents[2] / "benchmarks" / "gpu.sh"
VERBS = ("check", "check --parts flex,tiles,tiles_float32", "speed", "capacity")


def standing_in(folder, script):
    """Return an environment in which every verb is this script."""
    python = folder / "python"
    python.write_text(f"#!/bin/sh\n{script}\n")
    python.chmod(0o755)
    return {**os.environ, "PYTHON": str(python)}


@pytest.mark.parametrize("waits, limit_s, status", [("wait", "1", 124), ("", "60", 0)])
def test_no_child_of_a_verb_outlives_it(waits, limit_s, status, marker, tmp_path):
    """One that did would hold the GPU."""
    environment = standing_in(tmp_path, f"echo asked: $*; sleep 300 >&- 2>&- & {waits}")
    ran = subprocess.run(
        ["bash", GPU_SH, "all", "--device", "cpu"],
        env=environment | {"LIMIT_S": limit_s, marker: "1"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert ran.returncode == status, ran.stderr
    asked = [line for line in ran.stdout.splitlines() if line.startswith("asked")]
    assert asked == [f"asked: -m benchmarks.{verb} --device cpu" for verb in VERBS]
    assert ran.stdout.count(f"exit {status}\n") == len(VERBS)
    assert_gone(marker)


@pytest.mark.parametrize(
    "verb, says",
    [
        ("chek", "gpu.sh check"),
        pytest.param("check", "no CUDA device", marks=pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")),
    ],
)
def test_a_verb_that_cannot_run_says_why(verb, says):
    ran = finished(["bash", GPU_SH, verb], {**os.environ, "PYTHON": sys.executable}, timeout=120)
    assert ran.returncode == 2 and says in ran.stderr
