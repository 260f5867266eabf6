import shutil

import pytest
from hypothesis import given, settings

from ds_memo.errors import MemoWarning
from ds_memo.plan import fit, native, read_csv, solve, verify
from ds_memo.plan.dsa import Problem, lower_bound
from ds_memo.plan.search import search
from tests.plan.instances import CAPACITY, MINIMALLOC, a_second_at_most, best_peak, dense
from tests.plan.test_dsa import problems
from tests.processes import python

HAS_COMPILER = any(shutil.which(c) for c in ("c++", "g++", "clang++"))
ENGINES = ["python", pytest.param("c++", marks=pytest.mark.skipif(not HAS_COMPILER, reason="no C++ compiler"))]
needs_compiler = pytest.mark.skipif(not HAS_COMPILER, reason="no C++ compiler")


@pytest.mark.parametrize("engine", ENGINES)
@given(problem=problems(most=6, longest=6, largest=5))
@settings(max_examples=150, deadline=None)
def test_finds_the_optimum_and_proves_that_there_is_no_better(engine, problem):
    best = best_peak(problem.buffers)
    answer = search(problem.buffers, best, 10, engine=engine)
    assert verify.check(problem.buffers, answer.offsets, capacity=best) is None
    less = search(problem.buffers, best - 1, 10, engine=engine)
    assert less.offsets is None and less.proven


@needs_compiler
@given(problem=problems(most=14, longest=14, largest=9))
@settings(max_examples=150, deadline=None)
def test_both_engines_visit_the_same_nodes(problem):
    for capacity in (lower_bound(problem.buffers), lower_bound(problem.buffers) + 1):
        plain, compiled = (search(problem.buffers, capacity, 60, engine=e, max_nodes=2000) for e in ("python", "c++"))
        assert plain._replace(engine="c++") == compiled


@needs_compiler
@pytest.mark.parametrize("shape", [{}, {"trim": 0.2}, {"trim": 0.1, "drop": 0.1}, {"pinwheels": 0.5}])
def test_both_engines_visit_the_same_nodes_on_dense_packings(shape):
    for n in (20, 60, 100):
        buffers = dense(n, seed=n, **shape).buffers
        plain, compiled = (search(buffers, CAPACITY, 60, engine=e, max_nodes=1500) for e in ("python", "c++"))
        assert plain._replace(engine="c++") == compiled


@needs_compiler
@pytest.mark.parametrize("path", MINIMALLOC, ids=lambda p: p.name[0])
def test_minimalloc_challenging(path):
    problem = read_csv(path)
    found = fit(problem, CAPACITY, seconds=10)
    assert found is not None, "not solved within 10 s"
    assert verify.check(problem.buffers, found.offsets, capacity=CAPACITY) is None


@needs_compiler
@pytest.mark.parametrize("shape", [{}, {"pinwheels": 0.5}, {"drop": 0.02}])
@pytest.mark.parametrize("n", [150, 250])
def test_dense_packings(n, shape):
    problem = dense(n, seed=3, **shape)
    assert fit(problem, CAPACITY, seconds=10) is not None


@needs_compiler
def test_what_fits_by_construction_is_never_called_impossible():
    """A jump back, a dead state or dominance that cut off a solution would show here."""
    solved = 0
    for seed in range(150):
        shape = {"trim": seed % 4 * 0.1, "drop": seed % 3 * 0.05, "pinwheels": seed % 5 * 0.2}
        problem = dense(10 + seed % 50, seed, **shape)
        answer = search(problem.buffers, CAPACITY, 5, max_nodes=20_000)
        assert answer.offsets is not None or not answer.proven
        solved += answer.offsets is not None
    assert solved > 140


def test_equal_buffers_do_not_multiply_the_search():
    # 12 equal buffers and room for 11: without the rule for twins 12! orders would be tried.
    problem = Problem.of([(str(i), i % 2, 2 + i % 2, 3) for i in range(12)])
    answer = search(problem.buffers, 35, 10, engine="python")
    assert answer.offsets is None and answer.proven and answer.nodes < 100


def test_deep_recursion():
    n = 4000
    problem = Problem.of([(str(i), 0, 1, 1) for i in range(n)])
    answer = search(problem.buffers, n, 20)
    assert sorted(answer.offsets) == list(range(n))


@pytest.mark.parametrize("engine", ENGINES)
def test_keeps_its_time_limit(engine):
    hard = dense(150, seed=1002, trim=0.2)
    with a_second_at_most():
        answer = search(Problem(tuple(b._replace(size=b.size + 1) for b in hard.buffers)).buffers, CAPACITY, 0.3, engine=engine)
    assert answer.offsets is None


NO_COMPILER = """
import warnings
from ds_memo.plan import solve
from ds_memo.plan.dsa import Problem
problem = Problem.of([("a", 0, 4, 3), ("b", 3, 9, 4), ("c", 0, 9, 4), ("d", 9, 21, 4), ("e", 0, 21, 4), ("f", 2, 5, 1)])
from ds_memo.plan import search, native
try:
    native.load()
except native.Unavailable as e:
    print("unavailable:", e)
with warnings.catch_warnings(record=True) as seen:
    warnings.simplefilter("always")
    answer = search.search(problem.buffers, 16, 10)
print(answer.engine, answer.offsets is not None, len(seen), seen[0].message)
"""


@pytest.mark.parametrize("cxx", ["/nonexistent/c++", "false"])
def test_without_a_compiler_it_says_so_and_goes_on_in_python(tmp_path, cxx):
    run = python("-c", NO_COMPILER, CXX=cxx, XDG_CACHE_HOME=str(tmp_path))
    lines = run.stdout.splitlines()
    assert lines[0].startswith("unavailable: "), run.stderr
    assert lines[1].startswith("python True 1 ds_memo: exact search runs in Python")


def test_the_result_says_that_python_was_used(monkeypatch):
    monkeypatch.setattr(native, "_loaded", None)
    monkeypatch.setenv("CXX", "/nonexistent/c++")
    problem = dense(40, seed=2)
    with pytest.warns(MemoWarning, match="runs in Python"):
        found = solve(problem, solver="search", seconds=20)
    assert found.peak == CAPACITY and "exact search ran in Python: no compiler" in found.notes
