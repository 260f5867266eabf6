"""FLOP counts and device peaks against the paper's own numbers."""

import pytest

from ds_memo.estimate.hardware import mfu, named, peak_flops
from ds_memo.hf.model_flops import sequence_flops
from tests.estimate.gpt import gpt_parameters


@pytest.mark.parametrize(
    ("seq_k", "percent", "tgs"),  # the paper's 7B table: MEMO on 8 A800
    [(4, 49.45, 3578.86), (64, 52.34, 1786.22), (256, 53.62, 679.92), (512, 51.84, 357.70), (1024, 52.30, 188.73)],
)
def test_the_papers_table_agrees_with_its_formula(seq_k, percent, tgs):
    s, n, h, vocab = seq_k * 1024, 32, 4096, 50257
    flops = sequence_flops(s, gpt_parameters(n, h, vocab), n, h)
    seconds = s / (tgs * 8)  # of one sequence
    assert 100 * mfu(flops, seconds, 8, 312e12) == pytest.approx(percent, abs=0.01)


@pytest.mark.parametrize(
    ("device", "peak"),
    [
        ("NVIDIA H200", 989e12),
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA GH200 480GB", 989e12),
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA B200", 2250e12),
        ("NVIDIA A100-SXM4-80GB MIG 3g.40gb", None),
        ("NVIDIA GeForce RTX 4090", 165.2e12),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
        ("NVIDIA GeForce RTX 3090", None),
        ("", None),
    ],
)
def test_peaks(device, peak):
    assert peak_flops(device) == peak
    assert "MIG" not in device or named(device) is None
