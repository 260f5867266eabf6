"""Planned addresses on this machine: the part "allocator" of `gpu.sh check`.

scenarios        on CUDA: the op with all other users of device memory (tests/ops/cuda_scenarios), with torch's
                 segments and with expandable ones
pairs            nanoseconds of a planned request (benchmarks/allocator.py)

Memory that training holds is `gpu.sh planner`'s.
"""

from __future__ import annotations

import math
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks import allocator

Left = Callable[[], float]
"""Seconds that are left."""


def measure(device: torch.device, attempt: Callable[[str, Callable[[], Any], Left], Any], left: Left) -> dict[str, Any]:
    """Run all of it.

    Args:
        attempt: returns a part's result; "failures" if it raises or would begin too late.
    """
    result: dict[str, Any] = {"failures": [], "scenarios": {}}
    for expandable in (False, True) if device.type == "cuda" else ():
        segments = f"expandable_segments:{expandable}"
        passed, failures = scenarios(segments if expandable else "", left())
        print(f"    {segments}: {passed} scenarios passed")
        result["scenarios"][segments] = passed
        result["failures"] += [f"allocator, {segments}: {failure}" for failure in failures]
    indexed = torch.empty(0, device=device).device  # the op wants the device's number
    result["pairs"] = pairs = attempt("allocator, pairs", lambda: allocator.measure(10, indexed), left)
    if pairs.keys() == {"failures"}:  # it raised or would begin too late; its bars, nanoseconds, depend on what else runs
        result["failures"] += pairs["failures"]
    return result


def scenarios(segments: str, seconds: float) -> tuple[int, list[str]]:
    """Run the scenarios in a process of their own; return the number that passed, and the failures.

    Args:
        segments: PYTORCH_CUDA_ALLOC_CONF; if it is not empty, ds_memo does not change how blocks are split.
    """
    ran = subprocess.Popen(
        [sys.executable, "-m", "tests.ops.cuda_scenarios"],
        env=os.environ | {"PYTORCH_CUDA_ALLOC_CONF": segments},
        cwd=Path(__file__).parents[2],
        text=True,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    try:
        said, _ = ran.communicate(timeout=None if math.isinf(seconds) else seconds)
    except subprocess.TimeoutExpired:
        ran.kill()
        said, _ = ran.communicate()
    passed = sum(line.startswith("ok ") for line in said.splitlines())
    return passed, [f"exit {ran.returncode}: {said[-5000:]}"] if ran.returncode else []
