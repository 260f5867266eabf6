"""Other processes: a Python that imports this checkout, and looking for those that should be gone."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.haste import forkserver

ROOT = Path(__file__).parents[1]


def python(
    *words: object, timeout: float = 300, cwd: Path = ROOT, stdin: str | None = None, **environment: str | None
) -> subprocess.CompletedProcess[str]:
    """Run `python WORDS…` and keep what it prints; an environment variable that is None is taken away."""
    variables = {**os.environ, "PYTHONPATH": str(ROOT), **environment}
    variables = {name: value for name, value in variables.items() if value is not None}
    command = [sys.executable, *map(str, words)]
    return subprocess.run(command, env=variables, input=stdin, capture_output=True, text=True, timeout=timeout, cwd=cwd)


def forked(function: Callable[..., Any], *arguments: object, timeout: float = 120) -> Any:
    """What a function returns, or raises, in a process of its own that has imported what tests need, and that what it sets dies
    with. One that ends without an answer, or hangs, is a TimeoutError."""
    with forkserver().Pool(1) as process:
        return process.apply_async(function, arguments).get(timeout)


def processes_with(marker: str) -> list[int]:
    """Ids of the processes that have this word in their environment."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if marker.encode() in (folder / "environ").read_bytes():
                found.append(int(folder.name))
        except OSError:  # gone meanwhile, or somebody else's
            continue
    return found


def assert_gone(marker: str, within_s: float = 10) -> None:
    """None with this word is left, as soon as the kernel has taken its time."""
    deadline = time.monotonic() + within_s
    while left := processes_with(marker):
        assert time.monotonic() < deadline, f"processes {left} are left"
        time.sleep(0.05)
