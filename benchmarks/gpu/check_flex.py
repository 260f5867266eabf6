"""The part of `gpu.sh check` on FlexAttention: compiled by PyTorch, its kernels are out of every dispatch mode's sight."""

from __future__ import annotations

import itertools
from typing import Any

import torch

import ds_memo
from benchmarks.noise import distance
from tests import models

LENGTH = 256
SETTINGS = tuple(itertools.product((0.0, 0.5, 1.0), (0, 2)))
"""Alpha and resident layers."""


def measure(device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
    """Compare gradients with the model without memo, within half precision; the loss to the bit; attention runs once."""
    model = models.build("llama", dtype, attn_implementation="flex_attention").to(device)
    batch = models.Batch.random(2, LENGTH, dtype).to(device)
    want = models.step(model, batch, use_cache=False)
    failures, worst = [], 0.0
    for alpha, residents in SETTINGS:
        handle = ds_memo.attach(model, {"alpha": alpha, "resident_layers": residents})
        try:
            for _ in range(3):
                got = models.step(model, batch, use_cache=False)
                worst = max(worst, *distance(got.grads, want.grads, ()).values())
                models.assert_same(got, want, models.BF16)
            if again := handle.report()["attention_recomputed"]:
                failures.append(f"flex, alpha {alpha} resident {residents}: attention ran again {again} times")
        except models.Different as different:
            failures.append(f"flex, alpha {alpha} resident {residents}: {different}")
        finally:
            handle.detach()
    print(f"    {len(SETTINGS)} settings, worst gradient {worst:.1e} off, bar {models.BF16:.0e}, {len(failures)} failures")
    return {"length": LENGTH, "settings": SETTINGS, "worst": worst, "failures": failures}
