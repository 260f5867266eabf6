"""A CUDA build of torch takes the calls that kernels make, in both directions, without a GPU."""

from __future__ import annotations

import json
import os

import pytest

from benchmarks.emulated_process import run_emulated
from ds_memo.ops.builder import cuda_headers
from tests.sequence.cuda_calls import CASES

FLASH, EFFICIENT = "_flash_attention", "_scaled_dot_product_efficient_attention"
CALLS = {
    "packed": (1, 4), "packed rows": (1, 5), "window": (1, 2), "packed windows": (1, 4), "ring": (3, 4), "packed ring": (4, 8),
    "softcap": (0, 0),
}  # fmt: skip
"""Calls of flash attention for bfloat16, and of the other kernel for float32. Elsewhere one each."""


@pytest.mark.slow
@pytest.mark.skipif(
    not os.environ.get("DS_MEMO_CUDA_TORCH") or cuda_headers() is None,
    reason="needs DS_MEMO_CUDA_TORCH (see benchmarks/emulator/emulator.py) and CUDA's runtime headers",
)
def test_cuda_accepts_every_call(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("EMULATED_LIMIT_S", "300")
    assert run_emulated("tests.sequence.cuda_calls", [], 4) == 0
    found = [json.loads(line) for line in capfd.readouterr().out.splitlines() if line.startswith('["torch')]
    assert len(found) == 2 * len(CASES)
    for dtype, name, ops in found:
        op = FLASH if dtype == "torch.bfloat16" and name != "large" else EFFICIENT
        calls = CALLS.get(name, (1, 1))[dtype == "torch.float32"]
        forward = op + "_forward" if op == FLASH else op
        assert ops == ({forward: calls, op + "_backward": calls} if calls else {}), (dtype, name)
