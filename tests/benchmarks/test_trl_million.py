"""TRL's million tokens, rehearsed at a small size: both ways train, and steps take the time of their attention."""

import json

from benchmarks import trl_million
from benchmarks.published_runs import machine
from tests.benchmarks.emulated import NEEDED, no_emulated_process_hangs  # noqa: F401

LENGTH = 1 << 18


pytestmark = NEEDED


def test_steps_take_the_time_of_their_attention(tmp_path):
    found = tmp_path / "found.json"
    assert trl_million.main(["rehearse", "--layers", "2", "--tokens", str(LENGTH), "--steps", "3", "--json", str(found)]) == 0
    took = json.loads(found.read_text())
    h100 = machine("cudnn")
    forward = 2.0 * LENGTH**2 * 4096 / 8 / h100.attention_rates("cudnn").forward
    backward = 5.0 * LENGTH**2 * 4096 / 8 / h100.attention_rates("cudnn").backward
    for way, of_layers in (("trl", 2 * (2 * forward + backward)), ("ours", 2 * (forward + backward))):
        assert of_layers < took[way][-1]["s"] < of_layers + 1.0  # head, loss and GEMMs
        assert took[way][-1]["gib"] > 5
