import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds_memo.plan import verify
from ds_memo.plan.dsa import Problem
from ds_memo.plan.errors import InvalidPlan
from tests.plan.test_dsa import problems

TWO = Problem.of([("a", 0, 2, 4), ("b", 1, 3, 8)]).buffers
CASES = {
    "bad_count": ((TWO, [0]), {}),
    "bad_buffer": ((Problem.of([("a", 3, 3, 4)]).buffers, [0]), {}),
    "bad_offset": ((TWO, [0, -8]), {}),
    "bad_capacity": ((TWO, [0, 4]), {"capacity": 11}),
    "bad_peak": ((TWO, [0, 4]), {"peak": 13}),
    "bad_bound": ((TWO, [0, 4]), {"lower_bound": 8}),
    "bad_overlap": ((TWO, [0, 3]), {}),
}


def test_a_right_plan_passes():
    assert verify.check(TWO, [0, 4], peak=12, lower_bound=12, capacity=12, alignment=4) is None


@pytest.mark.parametrize("name", verify.ERRORS)
def test_each_error_has_its_name(name):
    args, stated = CASES[name]
    found, detail = verify.check(*args, **stated)
    assert found == name and detail
    with pytest.raises(InvalidPlan, match=name):
        verify.require(*args, **stated)


def test_alignment():
    assert verify.check(TWO, [0, 6], alignment=4)[0] == "bad_offset"


def test_past_64_bits():
    assert verify.check(TWO, [0, 2**63 - 5])[0] == "bad_capacity"


@given(problems(), st.data())
def test_the_sweep_agrees_with_comparing_every_pair(problem, data):
    buffers = problem.buffers
    offsets = [data.draw(st.integers(0, 60)) for _ in buffers]
    clash = any(
        a.lifespan.overlaps(b.lifespan) and offsets[i] < offsets[j] + b.size and offsets[j] < offsets[i] + a.size
        for i, a in enumerate(buffers)
        for j, b in enumerate(buffers[:i])
    )
    found = verify.check(buffers, offsets)
    assert (found is not None) == clash
    assert found is None or found[0] == "bad_overlap"
