import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ds_memo.plan import plan_trace, read_trace, verify
from ds_memo.plan.errors import TracesDiffer
from ds_memo.plan.formats import parse_trace
from ds_memo.plan.rescale import fit_sizes, rescale
from ds_memo.plan.trace import Trace
from tests.plan.instances import TRACES
from tests.plan.test_bilevel import traces

GPT_NONE = next(p for p in TRACES if p.stem == "gpt_none_L4_s16k")


def resized(trace: Trace, change) -> Trace:
    return Trace(tuple(r._replace(size=change(r.size)) if r.size is not None else r for r in trace.requests), trace.phases)


def check(plan):
    buffers, offsets = [s.buffer() for s in plan.slots], [s.offset for s in plan.slots]
    assert verify.check(buffers, offsets, peak=plan.peak, lower_bound=plan.lower_bound, alignment=512) is None


def test_fitted_sizes_are_exact_where_sizes_are_affine():
    short = parse_trace("malloc w 700\nmalloc x 1024\nfree x\n")
    long = parse_trace("malloc other 700\nmalloc ids 4096\nfree ids\n")
    sizes = fit_sizes(short, 256, long, 1024)
    assert {i: s.at(512) for i, s in sizes.items()} == {"w": 700, "x": 2048}
    assert {i: s.at(100) for i, s in sizes.items()} == {"w": 700, "x": 400}


@pytest.mark.parametrize(
    "other", ["malloc a 1\n", "malloc a 1\nmalloc b 1\nfree b\n", "phase L0.f\nmalloc a 1\nmalloc b 1\nfree a\n"]
)
def test_traces_that_do_not_line_up(other):
    with pytest.raises(TracesDiffer):
        fit_sizes(parse_trace("malloc a 1\nmalloc b 1\nfree a\n"), 1, parse_trace(other), 2)
    with pytest.raises(TracesDiffer, match="two sequence lengths"):
        fit_sizes(parse_trace(other), 1, parse_trace(other), 1)


def test_the_same_sizes_give_the_same_peak():
    plan = plan_trace(read_trace(GPT_NONE))
    again = rescale(plan, [s.requested for s in plan.slots])
    check(again)
    assert again.peak == plan.peak and again.proven and again.kind == "rescaled"


@pytest.mark.parametrize("s", [8192, 20000, 65536])
def test_other_lengths_of_a_real_trace_stay_optimal(s):
    trace = read_trace(GPT_NONE)
    fitted = fit_sizes(trace, 16384, resized(trace, lambda z: 2 * z if z > 600 else z), 32768)
    plan = plan_trace(trace)
    other = rescale(plan, [fitted[slot.id].at(s) for slot in plan.slots])
    check(other)
    assert other.peak == other.lower_bound


@pytest.mark.slow
@given(traces(), st.data())
@settings(max_examples=100)
def test_any_sizes_give_a_valid_plan_with_the_same_order(trace, data):
    plan = plan_trace(trace, solver="greedy")
    other = rescale(plan, [data.draw(st.integers(1, 5000)) for _ in plan.slots])
    check(other)
    for a, b in zip(plan.slots, other.slots, strict=True):
        for c, d in zip(plan.slots, other.slots, strict=True):
            if a.buffer().lifespan.overlaps(c.buffer().lifespan) and a.offset < c.offset:
                assert b.offset < d.offset


def test_phases_that_are_equal_at_one_length_only():
    def trace(s):
        return parse_trace(f"phase L0.f\nmalloc a {s * 512}\nfree a\nphase L1.f\nmalloc b {4096 * 512}\nfree b\n")

    plan = plan_trace(trace(4096))
    fitted = fit_sizes(trace(4096), 4096, trace(8192), 8192)
    longer = rescale(plan, [fitted[slot.id].at(16384) for slot in plan.slots])
    assert plan.phases[0].shape == plan.phases[1].shape
    assert [(phase.peak, phase.lower_bound, phase.proven) for phase in longer.phases] == [
        (16384 * 512, 16384 * 512, True),
        (4096 * 512, 4096 * 512, True),
    ]
