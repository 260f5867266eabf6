"""Starts processes that import this checkout, and finds processes that should be gone."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from tests.haste import forkserver

ROOT = Path(__file__).parents[1]


def python(
    *words: object, timeout: float = 300, cwd: Path = ROOT, stdin: str | None = None, **environment: str | None
) -> subprocess.CompletedProcess[str]:
    """Run `python WORDS…` and capture its output. An environment variable that is None is removed."""
    variables = {**os.environ, "PYTHONPATH": str(ROOT), **environment}
    variables = {name: value for name, value in variables.items() if value is not None}
    command = [sys.executable, *map(str, words)]
    return subprocess.run(command, env=variables, input=stdin, capture_output=True, text=True, timeout=timeout, cwd=cwd)


def forked(function: Callable[..., Any], *arguments: object, timeout: float = 120) -> Any:
    """Return, or raise, what a function returns or raises in a process of its own, forked with the tests' imports.

    If the process ends without an answer, or hangs, raise TimeoutError.
    """
    with forkserver().Pool(1) as process:
        return process.apply_async(function, arguments).get(timeout)


def finished(words: Sequence[object], environment: Mapping[str, str], timeout: float) -> subprocess.CompletedProcess[str]:
    """Run a launcher or a script in the repository until it and all that it started have closed their output.

    Raises:
        TimeoutError: They have not in this many seconds. All were killed; the message has what they printed and, of each Python
            process that has no handler of its own for SIGABRT, the stacks.
    """
    marker, pipe = new_marker(), subprocess.PIPE
    traced = {**environment, marker: "1", "PYTHONFAULTHANDLER": "1"}
    with subprocess.Popen(list(map(str, words)), env=traced, stdout=pipe, stderr=pipe, text=True, cwd=ROOT) as process:
        try:
            out, err = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            deadline = time.monotonic() + 10
            for each in processes_with(marker):  # one writes its stacks, and ends, before the next: they share a pipe
                signal_one(each, signal.SIGABRT)
                while each in processes_with(marker) and time.monotonic() < deadline:
                    time.sleep(0.05)
            signal_all(marker, signal.SIGKILL)
            raise TimeoutError("\n".join([f"{words} still ran after {timeout} s", *process.communicate()])) from None
        finally:
            signal_all(marker, signal.SIGKILL)
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


def new_marker() -> str:
    """Return a word for the environment of every process that a test starts."""
    return f"ds_memo_test_{os.getpid()}_{time.monotonic_ns()}"


def signal_all(marker: str, which: signal.Signals) -> None:
    """Send a signal to every process with this word."""
    for process in processes_with(marker):
        signal_one(process, which)


def signal_one(process: int, which: signal.Signals) -> None:
    """Send a signal to a process that may be gone."""
    with suppress(ProcessLookupError):
        os.kill(process, which)


def processes_with(marker: str) -> list[int]:
    """Return the ids of the processes that have this word in their environment."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if marker.encode() in (folder / "environ").read_bytes():
                found.append(int(folder.name))
        except OSError:  # gone meanwhile, or another user's
            continue
    return found


def assert_gone(marker: str, within_s: float = 10) -> None:
    """Wait until the kernel has removed every process with this word."""
    deadline = time.monotonic() + within_s
    while left := processes_with(marker):
        assert time.monotonic() < deadline, f"processes {left} are left"
        time.sleep(0.05)
