"""`gpu.sh`: its usage, and a line where a verb cannot run."""

import os
import sys
from pathlib import Path

import pytest
import torch

from tests.processes import finished

GPU_SH = Path(__file__).parents[2] / "benchmarks" / "gpu.sh"


@pytest.mark.processes
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
