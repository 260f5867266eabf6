"""Ways to allocate device memory, side by side. Each has a process of its own: the allocator's setting is the process's."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks.results import NO_TIME

WAYS = {"native": (False, False), "planned": (False, True), "expandable segments": (True, False), "both": (True, True)}
"""Expandable segments, planned addresses; those that the bars compare come first."""


def run_apart(module: str, words: list[str], way: str, seconds: float) -> dict[str, Any]:
    """What a module prints last, as JSON; "error" where it broke or took too long.

    Args:
        words: its arguments.
        seconds: that it may take; inf: as many as it needs.
    """
    setting = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True" if WAYS[way][0] else ""}
    command = [sys.executable, "-m", module, *words]
    limit, root = None if math.isinf(seconds) else max(1.0, seconds), Path(__file__).parents[2]
    try:
        done = subprocess.run(
            command, env=os.environ | setting, capture_output=True, text=True, timeout=limit, cwd=root, check=False
        )
    except subprocess.TimeoutExpired:
        return {"error": f"{NO_TIME} after {seconds:.0f} s"}
    if done.returncode:
        return {"error": f"exit {done.returncode}: {done.stderr[-3000:]}"}
    return json.loads(done.stdout.splitlines()[-1])
