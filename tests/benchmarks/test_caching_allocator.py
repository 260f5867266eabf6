"""The allocator's rules by hand-worked cases."""

import pytest

from benchmarks.caching_allocator import MIB, simulate
from ds_memo.plan import plan_trace, read_trace
from ds_memo.plan.formats import parse_trace
from tests.plan.instances import TRACES


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


def story(words: str) -> str:
    """Return a trace of words such as "a20 -a": 20 MiB come as a, and go."""
    return "".join(
        f"free {word[1:]}\n" if word[0] == "-" else f"malloc {word[0]} {int(float(word[1:]) * MIB)}\n" for word in words.split()
    )


@pytest.mark.parametrize(
    "words, native, expandable",
    [
        ("a.25 b.25 c.25 d.25 e.25 f.25 g.25 h.25", 2, None),  # small requests share a buffer
        ("a.25 b.25 c.25 d.25 e.25 f.25 g.25 h.25 i.25", 4, None),
        ("a13 -a b13 c2", 14 + 20, None),  # a segment of 14: the rest of a mebibyte or less is not split off
        ("a13 -a b11 c2", 14, None),  # 3 are split off, and serve the 2
        ("a30 b20 -a -b c18 d30", 50, None),  # the best fit is the smallest that holds it
        ("a20 -a b10 c10 -b -c d20", 20, None),  # free neighbours merge
        ("a20 b20 -a -b c40", 80, 40),  # fragmentation that expandable segments avoid
        # Free: 30 in the middle (a), 20 at the end (c). 20 go to the middle although the end fits better, and
        # then 50 extend the end by 30, in pages of 20.
        ("a30 b10 c20 -a -c d20", None, 60),
        ("a30 b10 c20 -a -c d20 e50", None, 100),
    ],
)
def test_what_is_free_is_used(words, native, expandable):
    assert native is None or reserved(story(words)) == native * MIB
    assert expandable is None or reserved(story(words), expandable=True) == expandable * MIB


@pytest.mark.parametrize("path", TRACES, ids=lambda p: p.stem)
def test_the_plan_is_never_larger_than_what_the_allocator_reserves(path):
    trace = read_trace(path)
    plan = plan_trace(trace)
    native, expandable = simulate(trace), simulate(trace, expandable=True)
    assert plan.peak == native.allocated == expandable.allocated
    assert plan.peak < expandable.reserved <= native.reserved
