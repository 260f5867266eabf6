"""The allocator's rules by hand-worked cases."""

import pytest
from hypothesis import given, settings

from benchmarks.caching_allocator import MIB, simulate
from ds_memo.plan import plan_trace, read_trace
from ds_memo.plan.formats import parse_trace
from tests.plan.instances import TRACES
from tests.plan.test_bilevel import traces

KIB = 1024


def reserved(text: str, **how) -> int:
    return simulate(parse_trace(text), **how).reserved


@pytest.mark.parametrize(
    "size, native, expandable",
    [
        (1, 2 * MIB, 2 * MIB),  # small pool: a buffer of 2 MiB
        (MIB, 2 * MIB, 2 * MIB),
        (MIB + 1, 20 * MIB, 20 * MIB),  # large pool: 20 MiB for anything below 10 MiB
        (10 * MIB - 512, 20 * MIB, 20 * MIB),
        (10 * MIB, 10 * MIB, 20 * MIB),  # native: from 10 MiB on the request itself, rounded up to 2 MiB
        (21 * MIB, 22 * MIB, 40 * MIB),  # expandable: pages of 20 MiB
    ],
)
def test_segment_sizes(size, native, expandable):
    assert reserved(f"malloc a {size}\n") == native
    assert reserved(f"malloc a {size}\n", expandable=True) == expandable


def test_small_requests_share_a_buffer():
    assert reserved("".join(f"malloc {i} {256 * KIB}\n" for i in range(8))) == 2 * MIB
    assert reserved("".join(f"malloc {i} {256 * KIB}\n" for i in range(9))) == 4 * MIB


def test_native_does_not_split_off_a_mebibyte_or_less():
    # 12 MiB into a free block of 13: the rest of 1 MiB stays inside, so a request of 2 MiB needs a segment of its own.
    text = f"malloc a {13 * MIB}\nfree a\nmalloc b {{}}\nmalloc c {2 * MIB}\n"
    assert reserved(text.format(13 * MIB)) == 14 * MIB + 20 * MIB
    # The segment has 14 MiB: 11 leave 3, which are split off and serve the 2.
    assert reserved(text.format(11 * MIB)) == 14 * MIB


def test_best_fit_takes_the_smallest_that_holds_it():
    a, b = 30 * MIB, 20 * MIB
    # Both segments are free; 18 MiB go into the one of 20, so that 30 still fits.
    text = f"malloc a {a}\nmalloc b {b}\nfree a\nfree b\nmalloc c {18 * MIB}\nmalloc d {a}\n"
    assert reserved(text) == 50 * MIB


def test_free_neighbours_merge():
    halves = f"malloc a {20 * MIB}\nfree a\nmalloc b {10 * MIB}\nmalloc c {10 * MIB}\nfree b\nfree c\n"
    assert reserved(halves + f"malloc d {20 * MIB}\n") == 20 * MIB


def test_fragmentation_that_expandable_segments_avoid():
    text = f"malloc a {20 * MIB}\nmalloc b {20 * MIB}\nfree a\nfree b\nmalloc c {40 * MIB}\n"
    assert reserved(text) == 80 * MIB
    assert reserved(text, expandable=True) == 40 * MIB


def test_the_expandable_end_is_kept_for_what_fits_nowhere_else():
    # Free: 30 MiB in the middle (a), 20 MiB at the end (c). 20 go to the middle although the end fits better, and
    # then 50 extend the end by 30, in pages of 20.
    text = f"malloc a {30 * MIB}\nmalloc b {10 * MIB}\nmalloc c {20 * MIB}\nfree a\nfree c\nmalloc d {20 * MIB}\n"
    assert reserved(text, expandable=True) == 60 * MIB
    assert reserved(text + f"malloc e {50 * MIB}\n", expandable=True) == 100 * MIB


@pytest.mark.slow
@given(traces())
@settings(max_examples=100)
def test_never_below_what_is_alive_and_steady_after_the_first_iteration(trace):
    for expandable in (False, True):
        once = simulate(trace, expandable=expandable)
        plan = plan_trace(trace, solver="greedy")
        assert once.reserved >= once.allocated >= plan.lower_bound
        assert simulate(trace, expandable=expandable, iterations=3).reserved >= once.reserved


@pytest.mark.parametrize("path", TRACES, ids=lambda p: p.stem)
def test_the_plan_is_never_larger_than_what_the_allocator_reserves(path):
    trace = read_trace(path)
    plan = plan_trace(trace)
    native, expandable = simulate(trace), simulate(trace, expandable=True)
    assert plan.peak == native.allocated == expandable.allocated
    assert plan.peak < expandable.reserved <= native.reserved
