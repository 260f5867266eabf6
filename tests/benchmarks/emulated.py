"""The emulator in tests: what they need, and a verb of it."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from typing import Any

import pytest

from benchmarks import emulator
from ds_memo.ops.library import cuda_headers

NEEDED = [
    pytest.mark.slow,
    pytest.mark.processes,
    pytest.mark.skipif(
        not os.environ.get("DS_MEMO_CUDA_TORCH") or cuda_headers() is None,
        reason="needs DS_MEMO_CUDA_TORCH (see benchmarks/emulator/emulator.py) and CUDA's runtime headers",
    ),
    pytest.mark.usefixtures("no_emulated_process_hangs"),
]
"""Marks of such a test; the module imports the fixture."""


def needs_emulator(test: Any) -> Any:
    """Mark one test of a module."""
    for mark in NEEDED:
        test = mark(test)
    return test


@pytest.fixture
def no_emulated_process_hangs(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """End one after some minutes. It takes a half to two on a core of its own."""
    monkeypatch.setenv("EMULATED_LIMIT_S", "400")
    yield


def ran(capfd: pytest.CaptureFixture[str], *words: str) -> Any:
    assert emulator.main([*words, "--json"]) == 0
    return json.loads(capfd.readouterr().out.splitlines()[-1])
