import pytest
from hypothesis import given, settings

from ds_memo.errors import MemoWarning
from ds_memo.plan import plan_trace, solve, verify
from ds_memo.plan.dsa import Problem, lower_bound
from ds_memo.plan.formats import make_trace
from ds_memo.plan.phases import LayerPass
from ds_memo.plan.search import search
from ds_memo.plan.trace import Request, Trace
from tests.ops.compiling import lacks
from tests.plan.instances import CAPACITY, GAP, GAP_BEST, GAP_BOUND, MINIMALLOC, best_peak, dense, packing
from tests.plan.test_dsa import problems

needs_compiler = pytest.mark.skipif(bool(lacks()), reason=str(lacks()))


@needs_compiler
@given(problem=problems(most=6, longest=6, largest=5))
@settings(max_examples=60)
def test_finds_the_optimum_and_proves_that_there_is_no_better(problem):
    best = best_peak(problem.buffers)
    answer = search(problem.buffers, best, 10)
    assert verify.check(problem.buffers, answer.offsets, capacity=best) is None
    less = search(problem.buffers, best - 1, 10)
    assert less.offsets is None and less.proven


@needs_compiler
def test_sizes_past_32_bits():
    unit = 3 << 30
    rows = [("a", 0, 3, 2), ("b", 1, 4, 1), ("c", 2, 6, 3), ("d", 3, 7, 1), ("e", 5, 8, 2), ("f", 4, 8, 1)]
    small, large = (Problem.of((*row, size * by) for *row, size in rows) for by in (1, unit))
    best = best_peak(small.buffers)
    answer, less = (search(large.buffers, capacity, 10) for capacity in (best * unit, best * unit - 1))
    assert verify.check(large.buffers, answer.offsets, capacity=best * unit) is None
    assert less.offsets is None and less.proven and lower_bound(large.buffers) == unit * lower_bound(small.buffers)


@needs_compiler
@pytest.mark.parametrize("shape", [{}, {"trim": 0.2}, {"trim": 0.1, "drop": 0.1}, {"pinwheels": 0.5}])
def test_a_search_can_be_repeated(shape):
    """Under a limit of nodes, and across the restarts that come with it."""
    for n in (20, 60, 100):
        buffers = dense(n, seed=n, **shape).buffers
        one, two = (search(buffers, CAPACITY, 60, max_nodes=1500) for _ in range(2))
        assert one == two and one.nodes <= 1500


@needs_compiler
@pytest.mark.parametrize("path", MINIMALLOC, ids=lambda p: p.name[0])
def test_minimalloc_challenging(path):
    """Their lower bound is the capacity, which neither greedy nor CBC reaches."""
    problem = packing(path)
    found = solve(problem, seconds=10)
    assert found.peak == CAPACITY, "not solved within 10 s"
    assert verify.check(problem.buffers, found.offsets, capacity=CAPACITY) is None


@needs_compiler
@pytest.mark.parametrize("shape", [{}, {"pinwheels": 0.5}, {"drop": 0.02}])
def test_dense_packings(shape):
    assert search(dense(250, seed=3, **shape).buffers, CAPACITY, 10).offsets is not None


@needs_compiler
def test_what_fits_by_construction_is_never_called_impossible():
    """A jump back, a dead state or dominance that cut off a solution would show here."""
    solved = 0
    for seed in range(150):
        shape = {"trim": seed % 4 * 0.1, "drop": seed % 3 * 0.05, "pinwheels": seed % 5 * 0.2}
        problem = dense(10 + seed % 50, seed, **shape)
        answer = search(problem.buffers, CAPACITY, 5, max_nodes=20_000)
        assert answer.offsets is not None or not answer.proven
        assert answer.offsets is None or verify.check(problem.buffers, answer.offsets, capacity=CAPACITY) is None
        solved += answer.offsets is not None
    assert solved > 140


@needs_compiler
def test_equal_buffers_do_not_multiply_the_search():
    # 12 equal buffers and room for 11: without the rule for twins 12! orders would be tried.
    problem = Problem.of([(str(i), i % 2, 2 + i % 2, 3) for i in range(12)])
    answer = search(problem.buffers, 35, 10)
    assert answer.offsets is None and answer.proven and answer.nodes < 100


@needs_compiler
def test_deep_recursion():
    n = 4000
    problem = Problem.of([(str(i), 0, 1, 1) for i in range(n)])
    answer = search(problem.buffers, n, 20)
    assert sorted(answer.offsets) == list(range(n))


# ---- without a compiler

WITHOUT = "without the exact search: dsa_search is not available: "


def gaps(phases: int) -> Trace:
    """Return a trace with the GAP instance in each phase, in other sizes, which greedy leaves without a proof."""
    requests, marks = [], []
    for p in range(phases):
        marks.append((LayerPass(p, backward=False), len(requests)))
        events = [(b.lifespan.upper, 0, b) for b in GAP.buffers] + [(b.lifespan.lower, 1, b) for b in GAP.buffers]
        requests += [Request(f"{p}{b.id}", b.size * 512 * (p + 1) if birth else None) for _, birth, b in sorted(events)]
    return make_trace(requests, marks)


@pytest.fixture
def no_compiler(monkeypatch, tmp_path):
    monkeypatch.setattr("ds_memo.plan.search._library", None)
    monkeypatch.setenv("CXX", "/nonexistent/c++")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


@pytest.mark.processes
@pytest.mark.usefixtures("no_compiler")
@pytest.mark.parametrize("solver", ["search", "cbc"])
def test_without_a_compiler_cbc_goes_on_and_says_so(solver):
    with pytest.warns(MemoWarning, match=WITHOUT) as said:
        found = solve(GAP, solver=solver, seconds=20)
    assert len(said) == 1
    assert (found.peak, found.lower_bound, found.bound, found.proven) == (GAP_BEST, GAP_BOUND, GAP_BEST, True)
    (note,) = found.notes
    assert note.startswith("exact search left out: dsa_search is not available: ")


@needs_compiler
def test_no_warning_with_a_compiler(recwarn):
    plan = plan_trace(gaps(2), seconds=20)
    assert plan.notes == () and not recwarn.list
