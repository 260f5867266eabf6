import os
import re
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path

import pytest
from hypothesis import given, settings

from ds_memo.errors import MemoWarning
from ds_memo.plan import milp, solve, verify
from ds_memo.plan.dsa import Problem, peak
from tests.plan.instances import GAP, GAP_BEST, GAP_BOUND, best_peak
from tests.plan.test_dsa import problems
from tests.processes import assert_gone, processes_with

pytestmark = pytest.mark.processes


# The example of google/minimalloc.
EXAMPLE = Problem.of([("b1", 0, 3, 4), ("b2", 3, 9, 4), ("b3", 0, 9, 4), ("b4", 9, 21, 4), ("b5", 0, 21, 4)])
SOLVERS = ["cbc", pytest.param("highs", marks=pytest.mark.skipif(find_spec("highspy") is None, reason="no highspy"))]


@pytest.mark.parametrize("solver", SOLVERS)
def test_the_papers_program_alone_finds_the_optimum(solver):
    """The formulation alone: no greedy, no tightening, no start."""
    for problem, best in ((GAP, GAP_BEST), (EXAMPLE, 12)):
        answer = milp.solve_milp(problem.buffers, 30, solver=solver, tight=False)
        assert peak(problem.buffers, answer.offsets) == best == answer.bound
        assert verify.check(problem.buffers, answer.offsets, peak=best) is None


@pytest.mark.parametrize("solver", SOLVERS)
def test_the_tightened_program_keeps_the_optimum(solver):
    worst = [sum(b.size for b in GAP.buffers[:i]) for i in range(len(GAP))]
    answer = milp.solve_milp(GAP.buffers, 30, solver=solver, start=worst)
    assert peak(GAP.buffers, answer.offsets) == answer.bound == GAP_BEST


@given(problem=problems(most=6, longest=6, largest=5))
@settings(max_examples=5)
def test_random_small_programs(problem):
    answer = milp.solve_milp(problem.buffers, 30, tight=False)
    assert peak(problem.buffers, answer.offsets) == best_peak(problem.buffers)


def test_pairs():
    expected = {
        (i, j) for j, b in enumerate(GAP.buffers) for i, a in enumerate(GAP.buffers[:j]) if a.lifespan.overlaps(b.lifespan)
    }
    assert set(milp.pairs(GAP.buffers)) == expected
    assert milp.count_pairs(GAP.buffers) == len(expected)


# ---- the child process


def child(code: str):
    """Return a child command that runs `code` in place of the solver."""
    return lambda: [sys.executable, "-c", code]


MISSING = """
import sys
sys.modules["mip"] = None
sys.path[0] = {root!r}
from ds_memo.plan.milp import child
child()
"""
BROKEN = {
    "missing": (MISSING.format(root=str(Path(milp.__file__).parents[2])), "ModuleNotFoundError|ImportError"),
    "crashing": ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", "SIGSEGV"),
    "exiting": ("import sys; print('no licence'); sys.exit(3)", "exit status 3: no licence"),
    "hanging": ("import time; time.sleep(60)", "ran past its time limit"),
    "babbling": ("import os, sys; os.write(int(sys.argv[-1]), b'{')", "brought back no answer"),
}


@pytest.mark.parametrize("way", BROKEN)
def test_a_broken_solver_falls_back_with_a_warning_and_a_verified_plan(monkeypatch, way):
    code, why = BROKEN[way]
    monkeypatch.setattr(milp, "child_command", child(code))
    monkeypatch.setattr("ds_memo.plan.solver._search", lambda *_: None)  # so that the MIP is reached
    problem = Problem.of((b.id, *b.lifespan, b.size * 512) for b in GAP.buffers)
    began = time.monotonic()
    with pytest.warns(MemoWarning, match="MIP .cbc. failed, the plan is from greedy"):
        found = solve(problem, solver="cbc", seconds=2)
    assert time.monotonic() - began < 30  # a half of what the hanging one takes
    assert verify.check(problem.buffers, found.offsets, peak=found.peak) is None
    assert not found.proven
    (note,) = found.notes
    assert re.search(why, note), note


def test_the_mip_proves_that_no_placement_reaches_the_lower_bound(monkeypatch):
    monkeypatch.setattr("ds_memo.plan.solver._search", lambda *_: None)
    found = solve(GAP, solver="cbc", seconds=20)
    assert (found.peak, found.lower_bound, found.bound, found.proven) == (GAP_BEST, GAP_BOUND, GAP_BEST, True)
    assert found.notes == ()


PARENT = """
import sys
sys.path.insert(0, {root!r})
from ds_memo.plan import milp
real = milp.child_command()
milp.child_command = lambda: [sys.executable, "-c", real[-1].replace("; child()", {stall!r})]
from ds_memo.plan.dsa import Problem
try:
    milp.solve_milp(Problem.of([("a", 0, 2, 1), ("b", 1, 3, 2)]).buffers, 60, tight=False)
except milp.MilpFailed as e:
    print("FAILED", e)
"""
# The child works for ever, as a solver in a long loop does.
STALL = """
import time
import ds_memo.plan.milp as m
def work(job):
    open({mark!r}, "w").close()
    while True: time.sleep(0.01)
m._solve = work
child()"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_the_child_dies_with_its_parent(tmp_path, marker):
    mark = tmp_path / "working"
    stall = "\n" + STALL.format(mark=str(mark))
    code = PARENT.format(root=str(Path(milp.__file__).parents[2]), stall=stall)
    parent = subprocess.Popen([sys.executable, "-c", code], env=os.environ | {marker: "1"})
    while not mark.exists():
        assert parent.poll() is None
        time.sleep(0.05)
    assert len(processes_with(marker)) == 2
    parent.kill()
    parent.wait()
    assert_gone(marker)
