"""The harness for CUDA machines, tried on a CPU."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def check(*arguments: str) -> subprocess.CompletedProcess:
    environment = os.environ | {"PYTHON": sys.executable, "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}
    command = ["bash", str(ROOT / "benchmarks" / "gpu.sh"), *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=900)


@pytest.mark.slow
def test_every_part_runs_on_a_cpu(tmp_path):
    out = tmp_path / "check.json"
    ran = check("check", "--device", "cpu", "--out", str(out))
    assert ran.returncode == 0, ran.stdout[-2000:] + ran.stderr[-2000:]
    result = json.loads(out.read_text())
    assert result["gradients"]["failures"] == result["stream_order"]["failures"] == result["memory"]["failures"] == []
    assert {"environment", "overhead", "allocator", "link", "step"} <= result.keys()
    assert set(result["allocator"]["fixed_length"]["ways"]) == {"native", "expandable segments", "planned", "both"}


def test_a_part_that_breaks_is_a_failure_and_no_end():
    from benchmarks.check import LIMIT_S, attempt

    def breaks():
        sys.exit("a child died")

    assert attempt("one", lambda: {"failures": []}, lambda: LIMIT_S) == {"failures": []}
    assert attempt("two", breaks, lambda: LIMIT_S) == {"failures": ["two: SystemExit: a child died"]}
    late = attempt("three", breaks, lambda: 10.0)
    assert late == {"failures": [f"three: left out, 10 of {LIMIT_S} s are left"]}


def test_an_unknown_verb_shows_the_usage():
    ran = check("chek")
    assert ran.returncode == 2
    assert "gpu.sh check" in ran.stderr


def test_without_the_device_it_says_so():
    torch = pytest.importorskip("torch")
    if torch.cuda.is_available():
        pytest.skip("this machine has a CUDA device")
    ran = check("check")
    assert ran.returncode == 2
    assert "no CUDA device" in ran.stderr
