"""The first minutes on a GPU: what everything else rests on, asserted in three minutes, each failure with its cure.

    bash benchmarks/gpu.sh first [--device cuda|cpu|emulator] [--points 2 6 …] [--out FILE]

     1  which attention kernel PyTorch picks at 16K tokens, and that ds_memo never runs it again
     2  host memory is page-locked: copies are asynchronous, and issuing one takes the host microseconds
     3  GB/s of touching and locking host memory; a virtual machine may grow meanwhile
     4  GB/s of copies, alone and beside GEMMs, and how much these slow down
     5  stock's gradients repeat to the bit; if not, a difference at 7 or in `check` says nothing
     6  steady steps neither synchronize nor allocate
     7  ds_memo's gradients have stock's bits, or are within the noise of GEMMs in other orders
     8  attention with dropout: the generator is where stock leaves it
     9  all requests get their planned addresses; no kernel writes beside them
    10  host time per layer, idle compute, step and stalls against their prediction, memory outside PyTorch
    11  kernels on tensors of more than 2³¹ elements; skipped where less than 40 GiB of the device are free

A line says "pass", "FAIL" (exit status 1), "skipped", or "not judged": it ran, and this machine cannot say if it holds.
An assertion that raises is a failure, and the others still run. `--device emulator` runs all of it without a GPU
(emulator.py): bytes, calls and order are real there, and values and times are not.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import os
import sys
import tempfile
from collections.abc import Sequence

from benchmarks import first_copies, first_gradients, first_large, first_steps, results  # noqa: F401 (each adds its assertions)
from benchmarks.assertions import ASSERTIONS, FAIL, NOT_JUDGED, Assertion, Machine, line
from benchmarks.emulated_process import is_emulated, run_emulated, without_values
from benchmarks.emulated_time import keeping_time
from ds_memo.estimate import hardware

IN_ORDER = sorted(ASSERTIONS, key=lambda assertion: (assertion.measure is first_steps.sanitizer, assertion.point))
"""The sanitizer takes the longest."""
POINTS = sorted({assertion.point for assertion in ASSERTIONS})


def judge(run: results.Run, machine: Machine, assertions: Sequence[Assertion]) -> None:
    """Run the assertions, print a line for each, and keep the rows."""
    rows = run.found["assertions"] = []
    for assertion in assertions:
        row = assertion.run(machine)
        rows.append(row)
        results.say(line(row))
        if row["verdict"] == FAIL:
            run.failures.append(f"{row['point']} {row['name']}: {row['measured']}")
        run.save()
    counts = collections.Counter(row["verdict"] for row in rows)
    results.say(f"{run.seconds():.0f} s: {', '.join(f'{n} {verdict}' for verdict, n in counts.items())}")
    if lacks := sorted({row["why"] for row in rows if row["verdict"] == NOT_JUDGED}):
        results.say(f"not judged, as {', '.join(lacks)}: {', '.join(_points(rows))}")


def _points(rows: list[dict]) -> list[str]:
    return list(dict.fromkeys(f"point {row['point']} ({row['name']})" for row in rows if row["verdict"] == NOT_JUDGED))


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser("gpu.sh first", description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu", "emulator"))
    parser.add_argument("--points", type=int, nargs="+", choices=POINTS, default=POINTS, help="default: all")
    parser.add_argument("--out", help="file or folder of the result; absent: $OUT, else benchmarks/results")
    options = parser.parse_args(arguments)
    emulated = options.device == "emulator"
    if emulated and not is_emulated():
        os.environ["EMULATED_CALLS"] = "1"
        words = sys.argv[1:] if arguments is None else arguments
        return run_emulated("benchmarks.first", list(words), 139.8)
    device = results.device_or_exit("cuda" if emulated else options.device, "first")
    asked = [assertion for assertion in IN_ORDER if assertion.point in options.points]
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        if emulated:
            without_values()
            stack.enter_context(keeping_time(hardware.load("h200")))
        run = results.Run("first", device, options.out or (folder if emulated else None), vars(options))
        run.found["verb"] = "first, emulated" if emulated else "first"  # no GPU's result
        judge(run, Machine(device, emulated), asked)
        return run.finish()


if __name__ == "__main__":
    sys.exit(main())
