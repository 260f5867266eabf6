"""TRL's million tokens, rehearsed at a small size: which op of attention runs on ranks, and steps take the time of its kernel."""

import json

import pytest

from benchmarks import trl_million
from ds_memo.estimate import hardware
from tests.benchmarks.emulated import NEEDED, no_emulated_process_hangs  # noqa: F401

LENGTH = 1 << 18
REST_S = {"trl": 0.99, "ours": 0.775}
"""Seconds of a step in GEMMs, head and loss, the optimizer. No kernel of attention changes it."""
OPS = {
    "trl": {"cudnn": "_scaled_dot_product_cudnn_attention", "flash_attn_3": "_scaled_dot_product_flash_attention"},
    "ours": {
        "cudnn": "_scaled_dot_product_cudnn_attention",
        "flash": "_flash_attention_forward",
        "flash_attn_3": "_flash_attention_forward",
    },
}


pytestmark = NEEDED


@pytest.mark.parametrize("way, kernel", [(way, kernel) for way in OPS for kernel in OPS[way]])
def test_steps_take_the_time_of_their_attention(way, kernel, tmp_path):
    """Ranks run cuDNN's kernel, and FlashAttention-3 if its package is there. FlashAttention-2, if forced, takes longer."""
    found = tmp_path / "found.json"
    asked = ["--layers", "2", "--tokens", str(LENGTH), "--steps", "2", "--ways", way, "--attention", kernel]
    assert trl_million.main(["rehearse", *asked, "--json", str(found)]) == 0
    took = json.loads(found.read_text())
    calls = [call[:2] for call in took["calls of attention"][way]]
    assert [kernel, OPS[way][kernel]] in calls and {ran for ran, _ in calls} == {kernel}
    rates = hardware.load("h100").attention_rates(kernel)
    forward, backward = (factor * LENGTH**2 * 4096 / 8 / rate for factor, rate in zip((2, 5), rates, strict=True))
    attention_s = 2 * ((2 if way == "trl" else 1) * forward + backward)
    assert took[way][-1]["s"] == pytest.approx(attention_s + REST_S[way], abs=0.05)
    assert took[way][-1]["gib"] > 5
