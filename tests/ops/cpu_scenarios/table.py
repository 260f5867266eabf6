"""The table of the CPU scenarios, and their shared parts."""

from __future__ import annotations

from collections.abc import Callable

import torch

CPU = torch.device("cpu")
MIB = 1 << 20
RAW_BLOCKS = "DS_MEMO_RAW_BLOCKS"
"""Environment variable with the path of raw_blocks.cpp, compiled."""
SCENARIOS: dict[str, Callable[[], None]] = {}


def scenario(run: Callable[[], None]) -> Callable[[], None]:
    SCENARIOS[run.__name__] = run
    return run
