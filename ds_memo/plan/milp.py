"""The paper's mixed-integer program (MEMO, SIGMOD 2025, section 4.2), solved by CBC or HiGHS through python-mip.

    minimise M  subject to  A_i + S_i <= M
                            A_i + S_i <= A_j + z_ij * U          for every pair (i, j) alive together
                            A_j + S_j <= A_i + (1 - z_ij) * U
                            0 <= A_i,  0 <= M <= U,  z binary

`tight` adds four things: M >= the lower bound; U is the best known peak; the largest buffer is in the lower half (a
solution turned upside down is a solution); and the best known plan is the start. Both forms run with a gap of zero,
because the default of 1e-4 reports plans as optimal that are not.

The solver runs in a child process, because it overruns time limits (60 s took up to 138 s) and can crash. The child is
killed at the deadline and dies with its parent. Its values are floats, so only their vertical order is used, and the
offsets are derived again as integers.
"""

from __future__ import annotations

import ctypes
import json
import math
import os
import signal
import subprocess
import sys
import time
from bisect import bisect_right
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from ds_memo.plan.dsa import Buffer, Offset, lower_bound, peak

SOLVERS = {"cbc": "CBC", "highs": "HiGHS"}
MARGIN = 0.25  # seconds for the child to start and to end


class MilpFailed(Exception):
    """The child gave no answer: the solver is missing, crashed, or ran past its deadline."""


class MilpAnswer(NamedTuple):
    offsets: list[Offset] | None  # the best plan found, exact integers
    bound: int  # no plan has a smaller peak, within the solver's float precision


def pairs(buffers: Sequence[Buffer]) -> list[tuple[int, int]]:
    """Return all (i, j), i < j, that are alive at the same time."""
    order = sorted(range(len(buffers)), key=lambda i: buffers[i].lifespan.lower)
    alive: list[int] = []
    out = []
    for i in order:
        alive = [j for j in alive if buffers[j].lifespan.upper > buffers[i].lifespan.lower]
        out += [(min(i, j), max(i, j)) for j in alive]
        alive.append(i)
    return out


def count_pairs(buffers: Sequence[Buffer]) -> int:
    """Return the number of pairs, in O(n log n)."""
    deaths = sorted(b.lifespan.upper for b in buffers)
    births = sorted(b.lifespan.lower for b in buffers)
    return sum(i - bisect_right(deaths, t) for i, t in enumerate(births))


def stack(buffers: Sequence[Buffer], order: Sequence[int]) -> list[Offset]:
    """Return offsets with every buffer as low as those before it in `order` allow."""
    offsets = [-1] * len(buffers)
    for i in order:
        span = buffers[i].lifespan
        below = (j for j, b in enumerate(buffers) if offsets[j] >= 0 and b.lifespan.overlaps(span))
        offsets[i] = max((offsets[j] + buffers[j].size for j in below), default=0)
    return offsets


def solve_milp(
    buffers: Sequence[Buffer],
    seconds: float,
    *,
    solver: str = "cbc",
    start: Sequence[Offset] | None = None,
    tight: bool = True,
) -> MilpAnswer:
    """Solve in a child process that lives at most `seconds`.

    Args:
        solver: "cbc" or "highs".
        start: A known plan; `tight` needs one.
        tight: False for the paper's program unchanged.

    Raises:
        MilpFailed: There is no answer; the message says why.
    """
    if tight and start is None:
        raise ValueError("tight=True needs a start")
    deadline = time.monotonic() + seconds
    bound = lower_bound(buffers)
    job = {
        "parent": os.getpid(),
        "solver": SOLVERS[solver],
        "seconds": max(0.1, 0.8 * seconds - MARGIN),  # CBC overruns, and a killed child's solution is lost
        "sizes": [b.size for b in buffers],
        "pairs": pairs(buffers),
        "cap": peak(buffers, start) if tight and start is not None else sum(b.size for b in buffers),
        "lower_bound": bound if tight else 0,
        "start": list(start) if tight and start is not None else None,
    }
    lines = _run_child(json.dumps(job), deadline)
    try:
        answer = json.loads(lines)
    except ValueError:
        raise MilpFailed(f"{solver} brought back no answer") from None
    if "failed" in answer:
        raise MilpFailed(answer["failed"])
    offsets = None
    if answer["addresses"] is not None:
        offsets = stack(buffers, sorted(range(len(buffers)), key=answer["addresses"].__getitem__))
    found = answer["bound"]
    if found is not None and math.isfinite(found):
        bound = max(bound, math.ceil(found - 1e-6 * max(1.0, abs(found))))
    return MilpAnswer(offsets, bound)


def child_command() -> list[str]:
    """Return the command that runs `child` with this package on sys.path in place of the working directory."""
    root = str(Path(__file__).resolve().parents[2])
    return [sys.executable, "-c", f"import sys; sys.path[0] = {root!r}; from ds_memo.plan.milp import child; child()"]


def _run_child(job: str, deadline: float) -> str:
    """Return the child's answer, which it writes to a file of its own: CBC prints to stdout."""
    log, late = b"", False
    with open(os.memfd_create("answer"), "w+b") as answer:
        with subprocess.Popen(
            [*child_command(), str(answer.fileno())],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, pass_fds=[answer.fileno()],
        ) as process:  # fmt: skip
            try:
                log, _ = process.communicate(job.encode(), max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                late = True
            finally:
                process.kill()
        answer.seek(0)
        text = answer.read().decode()
    if text:
        return text
    if late:
        raise MilpFailed("the solver ran past its time limit and was stopped")
    last, code = log.decode(errors="replace").strip().splitlines(), process.returncode
    how = signal.Signals(-code).name if code < 0 else f"exit status {code}"
    raise MilpFailed(f"the solver's process ended without an answer ({how}{': ' + last[-1] if last else ''})")


# ---- below: in the child


def child() -> None:
    """Read a job from stdin, write the answer to the descriptor named last on the command line."""
    job = json.loads(sys.stdin.buffer.read())
    _die_with_parent(job["parent"])
    try:
        answer = _solve(job)
    except Exception as e:  # any error: the parent falls back and says why
        answer = {"failed": f"{type(e).__name__}: {e}"}
    with os.fdopen(int(sys.argv[-1]), "w") as out:
        json.dump(answer, out)
    os._exit(0)  # the solver's own clean-up can hang


def _die_with_parent(parent: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
        if os.getppid() != parent:
            os._exit(1)


def _solve(job: dict) -> dict:
    import mip

    sizes, cap = job["sizes"], job["cap"]
    n = len(sizes)
    model = mip.Model(sense=mip.MINIMIZE, solver_name=job["solver"])
    model.verbose = 0
    model.threads = 1
    start = job["start"]
    tallest = max(range(n), key=sizes.__getitem__) if start else -1
    if start and 2 * start[tallest] > cap - sizes[tallest]:
        start = [cap - a - s for a, s in zip(start, sizes, strict=True)]
    height = model.add_var("M", lb=job["lower_bound"], ub=cap)
    address = [model.add_var(f"A{i}", lb=0, ub=(cap - s) / 2 if i == tallest else cap - s) for i, s in enumerate(sizes)]
    above = {(i, j): model.add_var(f"z{i}_{j}", var_type=mip.BINARY) for i, j in job["pairs"]}
    for (i, j), z in above.items():
        model += address[i] + sizes[i] <= address[j] + z * cap
        model += address[j] + sizes[j] <= address[i] + (1 - z) * cap
    for a, s in zip(address, sizes, strict=True):
        model += a + s <= height
    model.objective = height
    model.max_mip_gap = 0.0
    model.max_mip_gap_abs = 0.99  # sizes are integers, so optimal peaks are too
    if start:
        # CBC ignores a start of addresses alone: it needs the binaries.
        model.start = (
            [(height, float(cap))]
            + [(address[i], float(a)) for i, a in enumerate(start)]
            + [(z, 1.0 if start[i] > start[j] else 0.0) for (i, j), z in above.items()]
        )
    model.optimize(max_seconds=job["seconds"])
    found = model.num_solutions > 0
    return {
        "addresses": [a.x for a in address] if found else None,
        "bound": model.objective_bound,
    }
