"""The planner on long traces: never worse than greedy, in time and memory that grow with their length."""

import signal
import subprocess
import sys
import time
from itertools import count

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ds_memo.plan import greedy, plan_trace, search, solve, verify
from ds_memo.plan.dsa import Buffer, Lifespan, Problem, peak
from ds_memo.plan.formats import make_trace
from ds_memo.plan.phases import LayerPass
from ds_memo.plan.trace import Request, Trace, rounded
from tests.ops.compiling import lacks
from tests.plan.instances import flat, layered
from tests.plan.test_bilevel import traces
from tests.processes import python


def swept(trace: Trace) -> int:
    """Return the peak of one sweep over everything."""
    buffers = [Buffer(t.id, Lifespan(t.birth, t.death), rounded(t.size)) for t in trace.tensors() if t.size]
    return peak(buffers, greedy.in_time(buffers))


def instructions(work) -> int:
    """Count the instructions of the planner's own code that a call runs."""
    seen = count()

    def tracer(frame, event, _):
        if "ds_memo" not in frame.f_code.co_filename:
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        if event == "opcode":
            next(seen)
        return tracer

    before = sys.gettrace()
    sys.settrace(tracer)
    try:
        work()
    finally:
        sys.settrace(before)
    return next(seen)


# ---- never worse than greedy


@given(traces(), st.sampled_from(["greedy", "search", "cbc"]), st.sampled_from([1e-9, 0.05]))
@settings(max_examples=50)
def test_no_limit_is_too_short_for_greedys_plan(trace, solver, seconds):
    plan = plan_trace(trace, solver=solver, seconds=seconds)
    assert plan.lower_bound <= plan.peak <= swept(trace)


@pytest.mark.parametrize("solver", ["greedy", "cbc"])
@pytest.mark.parametrize("make", [layered, flat])
def test_a_long_trace_in_no_time(make, solver):
    trace = make(20_000)
    plan = plan_trace(trace, solver=solver, seconds=0.01)
    assert plan.peak <= swept(trace) < 1.2 * plan.lower_bound
    assert plan.seconds < 0.22 or "the time limit is 0.01 s" in plan.notes[-1]
    assert all(phase.peak >= phase.lower_bound > 0 for phase in plan.phases)


def test_a_problem_in_no_time():
    problem = Problem.of([(str(i), i, i + 5, 1 + i % 3) for i in range(1000)])
    assert solve(problem, seconds=1e-9).peak < 20


# ---- growth


def stairs(phases: int) -> Trace:
    """Return a trace whose skeletal tensors come late in each phase: every block is unpacked, each by itself."""
    requests, marks = [], []
    for p in range(phases):
        marks.append((LayerPass(p, False), len(requests)))
        requests += [Request(f"t{p}", 512 * 2 * (phases - p)), Request(f"t{p}", None), Request(f"s{p}", 512 * 2)]
        requests += [Request(f"u{p}", 512), Request(f"u{p}", None)]
    return make_trace(requests, marks)


def test_every_unpacked_block_costs_the_same():
    few, many = stairs(60), stairs(240)
    least = instructions(lambda: plan_trace(few, solver="greedy"))
    assert instructions(lambda: plan_trace(many, solver="greedy")) < 8 * least
    assert len(plan_trace(many, solver="greedy").unpacked) > 60, "or there is nothing to see"


def test_first_fit_is_for_few_buffers(monkeypatch):
    asked = []
    first_fit = greedy.first_fit
    monkeypatch.setattr(greedy, "first_fit", lambda buffers, *args: asked.append(len(buffers)) or first_fit(buffers, *args))
    plan = plan_trace(flat(2 * greedy.FIRST_FIT_MOST + 10), solver="greedy", seconds=20)
    assert max(asked, default=0) <= greedy.FIRST_FIT_MOST
    assert any(f"first fit left out: {len(plan.slots)} buffers" in note for note in plan.notes)


def test_exact_search_is_for_few_buffers_and_sections(monkeypatch):
    problem = Problem.of([(str(i), i, i + 50, 1 + i % 7) for i in range(search.MOST + 1)])
    found = solve(problem, solver="search", seconds=5)
    assert found.notes == (f"exact search left out: {search.MOST + 1} buffers, more than {search.MOST}",)
    monkeypatch.setattr(search, "MOST_COVERED", 100)
    assert "the buffers cover" in search.too_large(Problem.of([(str(i), i, i + 50, 1) for i in range(60)]).buffers)
    assert not search.too_large(problem.buffers[:2])


MEMORY = """
import resource
from ds_memo.plan import plan_trace
from tests.plan.instances import flat
trace = flat(60_000)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
plan_trace(trace, solver="search", seconds=5)
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024 // len(trace.requests))
"""


@pytest.mark.processes
def test_bytes_a_request():
    run = python("-c", MEMORY)
    assert run.returncode == 0, run.stderr
    assert int(run.stdout.split()[-1]) < 1000


def test_a_wrong_slot_among_many_is_found():
    plan = plan_trace(layered(10_000), solver="greedy", seconds=5)
    buffers, offsets = [s.buffer() for s in plan.slots], [s.offset for s in plan.slots]
    assert verify.check(buffers, offsets, peak=plan.peak, lower_bound=plan.lower_bound) is None
    top = max(range(len(buffers)), key=lambda i: offsets[i] + buffers[i].size)
    offsets[top] -= 512
    assert verify.check(buffers, offsets)[0] == "bad_overlap"


# ---- time


SEARCHING = """
from ds_memo.plan.search import search
from tests.plan.instances import CAPACITY, dense
hard = dense(450, seed=1, trim=0.2)
print("begun", flush=True)
search(hard.buffers, CAPACITY, 600)
"""


@pytest.mark.processes
@pytest.mark.skipif(bool(lacks()), reason=str(lacks()))
def test_ctrl_c_ends_the_search():
    with subprocess.Popen([sys.executable, "-c", SEARCHING], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as child:
        try:
            assert child.stdout.readline() == b"begun\n"
            time.sleep(2)
            assert child.poll() is None
            child.send_signal(signal.SIGINT)
            _, err = child.communicate(timeout=120)
            assert b"KeyboardInterrupt" in err and child.returncode
        finally:
            child.kill()
