import json
import pickle

import pytest

from ds_memo.plan import (
    errors,
    plan_from_json,
    plan_to_json,
    plan_trace,
    read_trace,
)
from ds_memo.plan.formats import parse_trace
from ds_memo.plan.phases import LayerPass, PassPart
from ds_memo.plan.snapshot import read_snapshot
from tests.plan.instances import TRACES


@pytest.mark.parametrize("path", TRACES, ids=lambda p: p.stem)
def test_nothing_of_a_trace_is_lost(path):
    trace = read_trace(path)
    lines = []
    for phase in trace.phases:
        lines.append(f"phase {phase.name}")
        for r in trace.requests[phase.first : phase.end]:
            lines.append(f"free {r.id}" if r.size is None else f"malloc {r.id} {r.size}")
    assert "\n".join(lines) + "\n" == path.read_text()


def test_a_trace_without_phases_is_one_step():
    trace = parse_trace("# a comment\n\nmalloc a 5\nfree a\n")
    assert [p.name for p in trace.phases] == [PassPart.STEP]
    (tensor,) = trace.tensors()
    assert tensor == ("a", 5, 0, 1, 0, 0, 0) and tensor.transient


def test_the_names_of_phases():
    """All phases of a training step (ds_memo.planned_alloc.runtime), and the halves that other tools' traces may have."""
    names = ["embed", "L0.f", "head", "L0.b", "reduce", "step", "end", "embed.f", "head.f", "head.b", "embed.b"]
    trace = parse_trace("".join(f"phase {n}\nmalloc {n} 1\n" for n in names))
    assert [str(phase.name) for phase in trace.phases] == names
    assert [phase.name for phase in trace.phases][:4] == [PassPart.EMBED, LayerPass(0, False), PassPart.HEAD, LayerPass(0, True)]


def test_skeletal_and_never_freed():
    trace = parse_trace("phase L0.f\nmalloc a 1\nmalloc b 2\nphase L0.b\nfree a\n")
    a, b = trace.tensors()
    assert (a.transient, a.death, b.transient, b.death, b.k) == (False, 2, False, 3, 1)


BAD_TRACES = [
    ("phase L0.f\nfree 7\n", 2, "free of 7"),
    ("malloc a 1\nfree a\nfree a\n", 3, "freed in line 2"),
    ("malloc a 1\nmalloc a 1\n", 2, "allocated in line 1"),
    ("malloc a -1\n", 1, "-1"),
    (f"malloc a {2**63}\n", 1, str(2**63)),
    ("phase L0.x\n", 1, "'L0.x'"),
    ("malloc a 1\nphase L0.f\n", 2, "before any request"),
    ("malloc a 1\nmalloc b 10", 2, "'malloc b 10'"),
    ("", 0, "no requests"),
    ("phase " + "L" * 10**6 + "\nmalloc a 1\n", 1, "expected a phase"),
]


@pytest.mark.parametrize("text, line, words", BAD_TRACES, ids=lambda x: str(x)[:20])
def test_bad_traces(text, line, words):
    with pytest.raises(errors.MalformedInput) as caught:
        parse_trace(text, "t.txt")
    assert caught.value.line == line and words in str(caught.value) and "expected" in str(caught.value)
    assert str(caught.value).startswith(f"t.txt:{line}:" if line else "t.txt:") and len(str(caught.value)) < 1000


def test_plans_round_trip():
    plan = plan_trace(parse_trace(f"{TRACES[0].read_text()}malloc empty 0\n"))
    text = plan_to_json(plan)
    assert plan_from_json(text) == plan
    assert text.count("\n") > len(plan.slots)


@pytest.mark.parametrize(
    "change, words",
    [
        (lambda t: t[: len(t) // 2], "expected a plan as JSON"),
        (lambda t: t.replace("ds_memo.plan/2", "ds_memo.plan/0"), "schema 'ds_memo.plan/0'"),
        (lambda t: t.replace('"peak"', '"pique"', 1), "pique"),
        (lambda t: "[" * 100_000, "brackets within brackets"),
    ],
)
def test_bad_plans(change, words):
    text = plan_to_json(plan_trace(parse_trace("malloc a 5\nfree a\n")))
    with pytest.raises(errors.MalformedInput, match=words):
        plan_from_json(change(text))


@pytest.mark.parametrize(
    "where, junk",
    [
        *((("slots", 0, name), junk) for name in ("offset", "birth", "phase", "requested") for junk in ("a", None, -1, 10**30)),
        (("slots", 1, "offset"), 0),
        (("slots", 0, "phase"), 7),
        (("peak",), float("nan")),
        (("lower_bound",), 1),
        (("proven",), "no"),
        (("phases", 0, "name"), 5),
        (("phases", 0, "first"), -1),
        (("phases", 0, "end"), -1),
        (("notes",), 5),
        (("slots",), [[]]),
    ],
)
def test_a_plan_that_was_edited(where, junk):
    """Its types are checked, and that no two tensors overlap, because later steps trust it."""
    data = json.loads(plan_to_json(plan_trace(parse_trace("malloc a 5\nmalloc b 5\nfree a\nfree b\n"))))
    owner = data
    for name in where[:-1]:
        owner = owner[name]
    owner[where[-1]] = junk
    with pytest.raises(errors.MalformedInput):
        plan_from_json(json.dumps(data))


# ---- snapshots


def snapshot(*events, devices=1, device=0):
    traces = [[] for _ in range(devices)]
    traces[device] = [{"action": a, "addr": p, "size": s, "stream": 0, "time_us": 1, "frames": []} for a, p, s in events]
    return {"segments": [], "device_traces": traces, "allocator_settings": {}, "external_annotations": []}


@pytest.fixture
def dump(tmp_path):
    def write(data) -> str:
        path = tmp_path / "run.pickle"
        path.write_bytes(data if isinstance(data, bytes) else pickle.dumps(data))
        return str(path)

    return write


def test_a_snapshot_becomes_a_trace(dump):
    path = dump(
        snapshot(
            ("free_completed", 0x900, 64),  # from before the recording
            ("segment_alloc", 0x100, 2**21), ("alloc", 0x100, 1000), ("alloc", 0x800, 24),
            ("free_requested", 0x100, 1000), ("free_completed", 0x100, 1000), ("alloc", 0x100, 512), ("snapshot", 0, 0),
            devices=2, device=1,
        )
    )  # fmt: skip
    trace = read_snapshot(path)
    assert [(x.size, x.birth, x.death) for x in trace.tensors()] == [(1000, 0, 2), (24, 1, 4), (512, 3, 4)]
    assert trace.notes == ("1 frees of memory from before the recording were left out",)
    plan = plan_trace(trace)
    assert plan.proven and plan.peak == 1536 and trace.notes[0] in plan.notes


class _Attack:
    def __reduce__(self):
        import os

        return os.system, ("echo owned",)


@pytest.mark.parametrize(
    "data, error, words",
    [
        (_Attack(), errors.UnsafePickle, "system"),
        ({"device_traces": [[_Attack()]]}, errors.UnsafePickle, "system"),
        (b"", errors.MalformedInput, "expected a whole pickle"),
        (pickle.dumps(snapshot(("alloc", 1, 1)))[:-40], errors.MalformedInput, "exhausted before end of frame"),
        (snapshot(), errors.MalformedInput, "device_traces"),
        (snapshot(("alloc", 1, 5), ("alloc", 1, 5)), errors.MalformedInput, "in use"),
        (snapshot(("free_completed", 1, 5)), errors.MalformedInput, "no alloc"),
    ],
    ids=range(7),
)
def test_bad_snapshots(dump, data, error, words):
    with pytest.raises(error, match=words):
        read_snapshot(dump(data))
