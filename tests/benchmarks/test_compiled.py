"""Compiled layers side by side: what is measured, never how long it took."""

from __future__ import annotations

import pytest
import torch

from benchmarks.compiled import SIZES, measure, show


@pytest.mark.slow
def test_every_variant_is_sampled() -> None:
    torch._dynamo.reset()
    found = measure(SIZES["tiny"], "aot_eager", rounds=2)
    assert len(found) == 5 and all(len(of["samples_s"]) == 2 and min(of["samples_s"]) > 0 for of in found.values())
    assert found["memo, compiled"]["stored_bytes"] == found["memo, eager"]["stored_bytes"] > 0
    said: list[str] = []
    show("tiny", found, said.append)
    assert len(said) == 1 + len(found)
