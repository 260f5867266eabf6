import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ds_memo.plan import bilevel, plan_trace, read_trace, solve, verify
from ds_memo.plan.bilevel import Plan
from ds_memo.plan.dsa import Problem
from ds_memo.plan.errors import TooLarge
from ds_memo.plan.formats import make_trace, parse_trace
from ds_memo.plan.phases import LayerPass, parse_phase
from ds_memo.plan.trace import Request, Trace
from tests.everyday import everyday
from tests.plan.instances import TRACES, a_second_at_most, dense
from tests.plan.repeat import repeat_layer

LONG = [p for p in TRACES if "_L4_" in p.name]


def reverify(plan: Plan, trace: Trace) -> None:
    """Verify from the trace and the slots alone, without the planner's own records."""
    tensors = {t.id: t for t in trace.tensors()}
    assert {s.id for s in plan.slots} == {id_ for id_, t in tensors.items() if t.size}
    for s in plan.slots:
        t = tensors[s.id]
        assert (s.phase, s.k, s.requested, s.birth) == (t.birth_phase, t.k, t.size, t.birth) and s.death == t.death
        assert s.offset % 512 == 0 and s.size % 512 == 0
    buffers = [s.buffer() for s in plan.slots]
    offsets = [s.offset for s in plan.slots]
    assert verify.check(buffers, offsets, peak=plan.peak, lower_bound=plan.lower_bound, alignment=512) is None


@pytest.mark.parametrize("path", TRACES, ids=lambda p: p.stem)
def test_the_plan_of_the_shared_traces_is_the_least(path):
    trace = read_trace(path)
    plan = plan_trace(trace)
    reverify(plan, trace)
    assert plan.kind == "bilevel" and plan.proven and plan.peak == plan.lower_bound


@pytest.mark.parametrize("path", LONG, ids=lambda p: p.stem)
def test_32_layers_take_as_many_solves_as_4(path, monkeypatch):
    """benchmarks/plan.py prints the time."""
    solves = []
    monkeypatch.setattr(bilevel, "solve", lambda *args, **kwargs: solves.append(args) or solve(*args, **kwargs))
    few = read_trace(path)
    many = repeat_layer(few, 32)
    assert [sum(isinstance(p.name, LayerPass) for p in trace.phases) for trace in (few, many)] == [8, 64]
    plan_trace(few)
    of_few, solves[:] = len(solves), []
    plan = plan_trace(many)
    assert len(solves) == of_few > 4
    reverify(plan, many)
    assert plan.peak == plan.lower_bound
    assert len({p.shape for p in plan.phases if p.name.startswith("L")}) <= 6  # first, last and the ones between, twice


def test_sizes_that_overflow_are_refused():
    with pytest.raises(TooLarge, match="less than 2\\^62"):
        plan_trace(parse_trace(f"malloc a {2**62}\n"))
    assert plan_trace(parse_trace(f"malloc a {2**61}\nmalloc b {2**60}\n")).peak == 2**61 + 2**60


def test_a_block_is_unpacked_where_it_would_raise_the_peak():
    # The transient's worst moment (t) comes when the skeletal tensor is not yet there (s, freed in the next phase).
    trace = parse_trace("phase L0.f\nmalloc t 4096\nfree t\nmalloc s 4096\nmalloc u 512\nfree u\nphase L0.b\nfree s\n")
    plan = plan_trace(trace)
    assert plan.block_bound == 8192
    assert plan.unpacked == ("L0.f",)
    assert plan.peak == plan.lower_bound == 4608 and plan.proven


def test_empty_tensors_are_left_out():
    plan = plan_trace(parse_trace("malloc b 5000\nmalloc c 0\n"))
    assert [s.id for s in plan.slots] == ["b"]


@st.composite
def traces(draw):
    """Draw traces over the usual phases, with frees anywhere later."""
    names = ["embed.f", "L0.f", "L1.f", "head.f", "head.b", "L1.b", "L0.b", "end"]
    requests, marks, alive, number = [], [], [], 0
    for name in map(parse_phase, names[: draw(st.integers(1, len(names)))]):
        marks.append((name, len(requests)))
        for _ in range(draw(st.integers(0, 8))):
            if alive and draw(st.booleans()):
                requests.append(Request(alive.pop(draw(st.integers(0, len(alive) - 1))), None))
            else:
                requests.append(Request(str(number), draw(st.integers(0, 9000))))
                alive.append(str(number))
                number += 1
    return make_trace(requests, marks)


@given(traces(), st.sampled_from(["greedy", "search"]))
@settings(max_examples=60)
def test_random_traces_give_verified_plans(trace, solver):
    plan = plan_trace(trace, solver=solver, seconds=2)
    reverify(plan, trace)
    assert plan.peak >= plan.lower_bound
    assert plan.peak == min(p for p in (plan.bilevel_peak, plan.flat_peak) if p is not None)
    if plan.peak == plan.lower_bound:
        assert plan.proven


@pytest.mark.parametrize("solver, n", everyday([("search", 300), ("cbc", 60)], [("search", 300)]))
def test_a_limit_of_one_second_is_kept(solver, n):
    hard = Problem(tuple(b._replace(size=b.size + i % 512) for i, b in enumerate(dense(n, seed=1, trim=0.2).buffers)))
    with a_second_at_most():
        found = solve(hard, solver=solver, seconds=1)
    assert verify.check(hard.buffers, found.offsets, peak=found.peak) is None
