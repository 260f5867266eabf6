"""Files in and out: the paper's text trace, and the plan as JSON.

A trace file:

    phase L0.f
    malloc 6 268435456
    free 6

Blank lines and lines that begin with # are skipped. A file without any phase line is one phase called step. A tensor
that is never freed lives to the end of the iteration.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, fields
from pathlib import Path

from ds_memo.errors import brief, quoted
from ds_memo.files import read_bounded
from ds_memo.plan import verify
from ds_memo.plan.bilevel import PhaseReport, Plan, Slot
from ds_memo.plan.errors import MalformedInput, PlanError
from ds_memo.plan.phases import PHASE_WORDS, PassPart, PhaseName, parse_phase
from ds_memo.plan.trace import UNIT, Phase, Request, Trace

SCHEMA = "ds_memo.plan/2"
MAX_SIZE = 2**63
MOST_TEXT_BYTES = 1 << 26
"""Bytes of a trace or a plan."""


def _size(text: str, source: str, line: int) -> int:
    words = "a size in bytes, 0 to 2^63 - 1"
    try:
        size = int(text)
    except ValueError:
        raise MalformedInput(source, line, brief(text), words) from None
    if not 0 <= size < MAX_SIZE:
        raise MalformedInput(source, line, text, words)
    return size


def _read(path: str | Path) -> str:
    """Return the text with "\\n" as line end and without a byte order mark."""
    try:
        return read_bounded(path, MOST_TEXT_BYTES).decode("utf-8-sig").replace("\r\n", "\n")
    except UnicodeDecodeError as e:
        raise MalformedInput(str(path), 0, f"byte {e.object[e.start]:#04x} at {e.start}", "UTF-8 text") from None
    except OSError as e:
        raise PlanError(f"{quoted(str(path), 400)}: {e.strerror}") from None


def _phase(name: str, source: str, line: int) -> PhaseName:
    try:
        return parse_phase(name)
    except ValueError:
        raise MalformedInput(source, line, f"phase {brief(name)}", PHASE_WORDS) from None


# ---- traces


def read_trace(path: str | Path) -> Trace:
    """Read a text trace. Raises MalformedInput with file and line."""
    return parse_trace(_read(path), str(path))


def parse_trace(text: str, source: str = "trace") -> Trace:
    """Read a text trace from a string; `source` is for messages."""
    if text and not text.endswith("\n"):
        last = text.count("\n") + 1
        raise MalformedInput(source, last, brief(text.rsplit("\n", 1)[-1]), "a whole line (the file ends inside this one)")
    requests: list[Request] = []
    marks: list[tuple[PhaseName, int]] = []
    born: dict[str, int] = {}  # id -> line
    freed: dict[str, int] = {}
    for line, raw in enumerate(text.split("\n"), 1):
        words = raw.split()
        if not words or words[0].startswith("#"):
            continue
        match words:
            case ["phase", name]:
                if requests and not marks:
                    raise MalformedInput(source, line, "the first phase after requests", "a phase line before any request")
                marks.append((_phase(name, source, line), len(requests)))
            case ["malloc", i, size]:
                if i in born:
                    raise MalformedInput(source, line, f"malloc of {i}, allocated in line {born[i]}", "a new id")
                requests.append(Request(i, _size(size, source, line)))
                born[i] = line
            case ["free", i]:
                if i not in born:
                    raise MalformedInput(source, line, f"free of {i}, never allocated", "the id of an earlier malloc")
                if i in freed:
                    raise MalformedInput(source, line, f"free of {i}, freed in line {freed[i]}", "a tensor that is alive")
                freed[i] = line
                requests.append(Request(i, None))
            case _:
                raise MalformedInput(source, line, brief(raw.strip()), "'phase NAME', 'malloc ID SIZE' or 'free ID'")
    if not requests:
        raise MalformedInput(source, 0, "no requests", "at least one malloc")
    return make_trace(requests, marks)


def make_trace(requests: Sequence[Request], marks: Sequence[tuple[PhaseName, int]], notes: Sequence[str] = ()) -> Trace:
    """Make a trace from requests and marks: (phase name, index of its first request)."""
    marks = list(marks) or [(PassPart.STEP, 0)]
    ends = [first for _, first in marks[1:]] + [len(requests)]
    phases = tuple(Phase(name, first, end) for (name, first), end in zip(marks, ends, strict=True))
    return Trace(tuple(requests), phases, tuple(notes))


# ---- plans


def plan_to_json(plan: Plan) -> str:
    """Return the plan as JSON with one line per phase and per slot, for readers and diffs."""
    whole = {f.name: getattr(plan, f.name) for f in fields(plan)}
    lists = {
        "phases": [asdict(p) for p in whole.pop("phases")],
        "slots": [s._asdict() for s in whole.pop("slots")],
    }
    head = json.dumps({"schema": SCHEMA, **whole}, indent=1)[:-2]
    parts = []
    for key, rows in lists.items():
        body = ",\n".join("  " + json.dumps(row) for row in rows)
        parts.append(f' "{key}": [\n{body}\n ]' if rows else f' "{key}": []')
    return head + ",\n" + ",\n".join(parts) + "\n}\n"


def read_plan(path: str | Path) -> Plan:
    return plan_from_json(_read(path), str(path))


def plan_from_json(text: str, source: str = "plan") -> Plan:
    """Read a plan that plan_to_json wrote.

    Raises:
        MalformedInput: Another schema, a wrong field, or two tensors that overlap in time and address.
    """
    try:
        data = json.loads(text)
    except json.JSONDecodeError as e:
        raise MalformedInput(source, e.lineno, e.msg.lower(), "a plan as JSON") from None
    except RecursionError:
        raise MalformedInput(source, 0, "brackets within brackets without end", "a plan as JSON") from None
    except ValueError as e:  # digits without end
        raise MalformedInput(source, 0, str(e), "a plan as JSON") from None
    schema = data.pop("schema", None) if isinstance(data, dict) else None
    if schema != SCHEMA:
        raise MalformedInput(source, 0, f"schema {brief(schema)}", f"{SCHEMA!r}: make the plan anew with ds-memo plan")
    try:
        data["slots"] = tuple(Slot(**row) for row in data["slots"])
        data["phases"] = tuple(PhaseReport(**row) for row in data["phases"])
        data["notes"], data["unpacked"] = tuple(data["notes"]), tuple(data["unpacked"])
        plan = Plan(**data)
        _check_fields(plan)
    except (KeyError, TypeError, ValueError) as e:
        raise MalformedInput(source, 0, str(e), f"the fields of {SCHEMA}") from None
    buffers, offsets = [slot.buffer() for slot in plan.slots], [slot.offset for slot in plan.slots]
    wrong = verify.check(buffers, offsets, peak=plan.peak, lower_bound=plan.lower_bound, alignment=UNIT)
    if wrong is not None:
        raise MalformedInput(source, 0, ": ".join(wrong), "a plan that ds-memo plan wrote")
    return plan


_TYPES = {"int": (int,), "str": (str,), "bool": (bool,), "float": (int, float), "int | None": (int, type(None))}


def _check_fields(plan: Plan) -> None:
    """Check the fields of the plan, its phases and slots by their annotations. Raises ValueError."""
    for row in (plan, *plan.phases, *plan.slots):
        for name, annotation in type(row).__annotations__.items():
            annotation = getattr(annotation, "__forward_arg__", annotation)  # of a NamedTuple
            value = getattr(row, name)
            if annotation in _TYPES and type(value) not in _TYPES[annotation]:
                raise ValueError(f"{name} {brief(value)}")
            if isinstance(value, (int, float)) and not -MAX_SIZE < value < MAX_SIZE:
                raise ValueError(f"{name} {brief(value)}")
    phases = range(len(plan.phases))
    if not all(slot.phase in phases and slot.death_phase in phases and slot.birth >= 0 for slot in plan.slots):
        raise ValueError("a slot of a phase or time that is not there")
    if not all(0 <= phase.first <= phase.end for phase in plan.phases):
        raise ValueError("a phase that ends before it begins")
