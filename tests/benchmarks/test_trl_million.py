"""TRL's million tokens, rehearsed at a small size: both ways train, and steps take the time of their attention."""

import json
import os

import pytest

from benchmarks import trl_million
from benchmarks.published_runs import machine
from ds_memo.ops.builder import cuda_headers
from tests.benchmarks.test_emulator import no_emulated_process_hangs  # noqa: F401

LENGTH = 1 << 18


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.skipif(
    not os.environ.get("DS_MEMO_CUDA_TORCH") or cuda_headers() is None,
    reason="needs DS_MEMO_CUDA_TORCH (see benchmarks/emulator/emulator.py) and CUDA's runtime headers",
)
def test_steps_take_the_time_of_their_attention(tmp_path):
    found = tmp_path / "found.json"
    assert trl_million.main(["rehearse", "--layers", "2", "--tokens", str(LENGTH), "--steps", "3", "--json", str(found)]) == 0
    took = json.loads(found.read_text())
    h100 = machine("cudnn")
    forward = 2.0 * LENGTH**2 * 4096 / 8 / (h100.peak * h100.attention_forward_efficiency)
    backward = 5.0 * LENGTH**2 * 4096 / 8 / (h100.peak * h100.attention_backward_efficiency)
    for way, of_layers in (("trl", 2 * (2 * forward + backward)), ("ours", 2 * (forward + backward))):
        assert of_layers < took[way][-1]["s"] < of_layers + 1.0  # head, loss and GEMMs
        assert took[way][-1]["gib"] > 5
