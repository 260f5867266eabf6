from hypothesis import given
from hypothesis import strategies as st

from ds_memo.plan import greedy, verify
from ds_memo.plan.dsa import Problem, lower_bound, peak, sections


@st.composite
def problems(draw, most=12, longest=12, largest=20):
    n = draw(st.integers(1, most))
    rows = []
    for i in range(n):
        born = draw(st.integers(0, longest - 1))
        rows.append((str(i), born, draw(st.integers(born + 1, longest)), draw(st.integers(1, largest))))
    return Problem.of(rows)


@given(problems())
def test_lower_bound_is_the_most_alive(problem):
    at = range(max(b.lifespan.upper for b in problem.buffers))
    alive = [sum(b.size for b in problem.buffers if b.lifespan.lower <= t < b.lifespan.upper) for t in at]
    assert lower_bound(problem.buffers) == max(alive)


@given(problems())
def test_buffers_share_a_section_exactly_if_alive_together(problem):
    first, last, count = sections(problem.buffers)
    assert min(first) == 0 and max(last) == count - 1
    for i, a in enumerate(problem.buffers):
        assert first[i] <= last[i]
        for j, b in enumerate(problem.buffers):
            assert (first[i] <= last[j] and first[j] <= last[i]) == a.lifespan.overlaps(b.lifespan)


@given(problems())
def test_scaling_divides_by_the_largest_unit(problem):
    large = Problem(tuple(b._replace(size=b.size * 512) for b in problem.buffers))
    scaled, unit = large.scaled()
    assert unit % 512 == 0
    assert [b.size * unit for b in scaled.buffers] == [b.size for b in large.buffers]


@given(problems())
def test_every_greedy_placement_is_valid(problem):
    buffers = problem.buffers
    order = range(len(buffers))
    for offsets in (
        greedy.first_fit(buffers, order),
        greedy.first_fit(buffers, order, best=True),
        greedy.in_time(buffers),
        greedy.in_time(buffers, back=True),
        greedy.portfolio(buffers)[0],
    ):
        assert verify.check(buffers, offsets, peak=peak(buffers, offsets), lower_bound=lower_bound(buffers)) is None


def test_first_fit_and_best_fit_differ_as_they_should():
    # Gaps of 4 (at 0) and 2 (at 6) are left by the first three.
    rows = [("a", 0, 9, 2), ("b", 0, 9, 2), ("low", 0, 5, 4), ("mid", 0, 5, 2), ("new", 5, 9, 2)]
    buffers = Problem.of([rows[2], rows[0], rows[3], rows[1], rows[4]]).buffers
    assert greedy.first_fit(buffers, range(5)) == [0, 4, 6, 8, 0]
    assert greedy.first_fit(buffers, range(5), best=True) == [0, 4, 6, 8, 6]
