"""check, its parts allocator and flex, speed, capacity and planner, each in a process of its own and ended after eight minutes.

bash benchmarks/gpu.sh all [--budget-s 420] [--device cuda|cpu] [--out DIR]
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

import torch

from benchmarks import results

LIMIT_S = 480


def end_with_children() -> None:
    """Have SIGTERM raise SystemExit, so that `run` ends its children."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))


def run(command: list[str], seconds: float) -> int:
    """Run a command and return its exit status, 124 if it took too long. No child outlives it, unless SIGKILL ends this process:
    such a child would hold the GPU."""
    verb = subprocess.Popen(command, start_new_session=True)
    try:
        return verb.wait(seconds)
    except subprocess.TimeoutExpired:
        return 124
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(verb.pid, signal.SIGKILL)  # also where the verb itself has ended
        verb.wait()


def commands(device: torch.device, folder: Path, budget_s: float) -> dict[str, list[str]]:
    """Return module and arguments by name. The parts of `check` that take long have commands of their own."""
    found = {"check": ["benchmarks.check", "--out", str(folder / f"check-{device.type}.json")]}
    for part in results.APART:
        if device.type == "cuda" or part != "flex":
            out = folder / f"check_{part}-{device.type}.json"
            found[f"check {part}"] = ["benchmarks.check", "--parts", part, "--out", str(out)]
    for verb in ("speed", "capacity", "planner"):
        found[verb] = [f"benchmarks.{verb}", "--out", str(folder), "--budget-s", str(budget_s)]
    return found


def main() -> int:
    parser = argparse.ArgumentParser("gpu.sh all", description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--budget-s", type=float, default=420.0, help="seconds that each of speed, capacity and planner may take")
    parser.add_argument("--out", help="folder for the results; absent: $OUT, else benchmarks/results")
    options = parser.parse_args()
    device = results.device_or_exit(options.device, "all")
    end_with_children()
    folder = results.folder(options.out)
    status = {}
    for name, words in commands(device, folder, options.budget_s).items():
        results.say(f"==== {name}")
        status[name] = run([sys.executable, "-m", *words, "--device", device.type], LIMIT_S)
    results.say("\n".join(f"{name:15s} {'ok' if code == 0 else f'exit {code}'}" for name, code in status.items()))
    return max(map(abs, status.values()))


if __name__ == "__main__":
    sys.exit(main())
