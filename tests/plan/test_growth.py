"""The planner on long traces: never worse than greedy, in time and memory that grow with their length."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ds_memo.plan import greedy, plan_trace, search, solve
from ds_memo.plan.dsa import Buffer, Lifespan, Problem, peak
from ds_memo.plan.trace import Trace, rounded
from tests.plan.instances import flat, layered
from tests.plan.test_bilevel import traces


def swept(trace: Trace) -> int:
    """Return the peak of one sweep over everything."""
    buffers = [Buffer(t.id, Lifespan(t.birth, t.death), rounded(t.size)) for t in trace.tensors() if t.size]
    return peak(buffers, greedy.in_time(buffers))


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


# ---- growth


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


# ---- time
