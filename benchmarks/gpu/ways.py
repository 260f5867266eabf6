"""Ways to allocate device memory. Each has a process of its own, because the allocator's configuration is the process's."""

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
    """Run a module and return its last line, as JSON; "error" if it raised or took too long.

    Args:
        words: its arguments.
        seconds: that it may take; inf: as many as it needs.
    """
    variable = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True" if WAYS[way][0] else ""}
    command = [sys.executable, "-m", module, *words]
    limit, root = None if math.isinf(seconds) else max(1.0, seconds), Path(__file__).parents[2]
    try:
        done = subprocess.run(
            command, env=os.environ | variable, capture_output=True, text=True, timeout=limit, cwd=root, check=False
        )
    except subprocess.TimeoutExpired:
        return {"error": f"{NO_TIME} after {seconds:.0f} s"}
    if done.returncode:
        return {"error": f"exit {done.returncode}: {done.stderr[-3000:]}"}
    return json.loads(done.stdout.splitlines()[-1])
