"""Request logs: compared, merged, made into traces."""

from __future__ import annotations

from ds_memo.ops.allocator import LogEvent
from ds_memo.plan import plan_trace
from ds_memo.plan.phases import LayerPass, parse_phase
from ds_memo.planned_alloc.request_log import NEVER, Position, RequestLog, Visit, read_log


def events(text: str, first_id: int = 0) -> list[LogEvent]:
    """Read events such as "L0.f +a8 +b4 -a | L0.b -b": phases, mallocs of a size, frees; letters are ids from `first_id` on."""
    out = []
    for part in text.split("|"):
        name, *requests = part.split()
        phase = parse_phase(name)
        out.append(LogEvent("enter", phase, 0, 0))
        for word in requests:
            id_ = first_id + ord(word[1]) - ord("a")
            out.append(LogEvent("malloc", phase, id_, int(word[2:])) if word[0] == "+" else LogEvent("free", None, id_, 0))
    return out


def log(text: str) -> RequestLog:
    return read_log(events(text), {})[0]


def test_a_log() -> None:
    seen = log("L0.f +a8 +b4 -a | L0.b +c2 -b")
    assert seen.visits == (Visit(LayerPass(0, backward=False), (8, 4)), Visit(LayerPass(0, backward=True), (2,)))
    assert seen.deaths == (((0, 2), (1, 1)), (NEVER,))


def test_blocks_from_before_the_pass_are_not_in_it() -> None:
    assert log("embed -x +a8 -a") == log("embed +a8 -a")


def test_the_same_requests() -> None:
    first = log("L0.f +a8 +b4 -a -b | step +c2 -c")
    assert first.repeated_by(log("L0.f +a8 -a +b4 | step +c2 -b -c"))  # other frees
    assert not first.repeated_by(log("L0.f +a8 +b5 -a -b | step +c2 -c"))
    assert not first.repeated_by(log("L0.f +a8 +b4 -a -b"))
    assert not first.repeated_by(log("L0.f +a8 +b4 -a -b | step +c2 -c +d2 -d"))
    assert not first.repeated_by(log("L0.f +a8 -a | step +c2 -c"))


def test_what_the_warm_up_leaves_behind_is_not_asked_for_again() -> None:
    warm_up = log("step +a8 +s8 +t8 +b8 -a -b")  # two optimizer states of the same size as the transient blocks
    assert warm_up.repeated_by(log("step +a8 +b8 -a -b"))
    assert not warm_up.repeated_by(log("step +a8 -a"))
    assert not log("step +a8 +s8 -a -s").repeated_by(log("step +a8 -a"))  # it was freed: no state


def test_merging_takes_the_later_death_and_the_longer_pass() -> None:
    early = log("L0.b +a8 -a +b4 -b")
    late = log("L0.b +a8 +b4 -b | step +c2 -a -c")
    for merged in (early.merged(late), late.merged(early)):
        assert merged is not None
        assert merged.visits == late.visits
        assert merged.deaths == (((1, 1), (0, 2)), ((1, 1),))
    assert early.merged(log("L0.b +a8 +b5")) is None


def test_an_escapee_is_left_out_of_the_trace_but_keeps_its_place_among_the_slots() -> None:
    seen = log("L0.f +a8192 +b4096 +c512 -a -c | L0.b +d512 -d")
    trace = seen.trace()
    assert [request.id for request in trace.requests] == ["0:0", "0:2", "0:0", "0:2", "1:0", "1:0"]
    plan = plan_trace(trace)
    slots = seen.slots({slot.id: slot.offset for slot in plan.slots}, left=-1)
    sizes = [(str(phase), [size for size, _ in visit]) for phase, visit in slots]
    assert sizes == [("L0.f", [8192, 4096, 512]), ("L0.b", [512])]
    assert slots[0][1][1] == (4096, -1)
    assert plan.peak == 8192 + 512


def test_an_escapee_that_dies_before_it_is_born_again_wraps_around() -> None:
    escaped: dict[int, Position] = {}
    first, wrapping = read_log(events("embed +a8 -a | L0.b +g512 +h512"), escaped)
    assert first.deaths[1] == (NEVER, NEVER)
    assert not wrapping and set(escaped.values()) == {(1, 0), (1, 1)}
    # g is freed in time, h after its successor was allocated
    again = [*events("embed +a8 -a", 100), LogEvent("free", None, ord("g") - ord("a"), 0), *events("L0.b +g512 +h512", 100)]
    second, wrapping = read_log([*again, LogEvent("free", None, ord("h") - ord("a"), 0)], escaped)
    assert wrapping == {(1, 0)}
    trace = second.trace(wrapping)
    assert [(request.id, request.size) for request in trace.requests[:2]] == [("1:0", 512), ("0:0", 8)]
    plan = plan_trace(trace)
    assert plan.peak == 1024  # both live from the first request to the last


def test_other_sizes() -> None:
    seen = log("L0.f +a8 +b4 -a | L0.b -b")
    assert seen.resized({"0:0": 16, "0:1": 6}) == log("L0.f +a16 +b6 -a | L0.b -b")
