"""`ds-memo plan`: plan a request trace or a PyTorch memory snapshot."""

from __future__ import annotations

import argparse
import json
import os
import sys
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict

from ds_memo.cli.arguments import integer, number
from ds_memo.errors import quoted
from ds_memo.files import write_output
from ds_memo.plan.bilevel import Plan, plan_trace
from ds_memo.plan.errors import PlanError
from ds_memo.plan.formats import plan_to_json, read_trace
from ds_memo.plan.snapshot import SUFFIXES, read_snapshot
from ds_memo.plan.solver import SOLVERS

NAME = 40  # characters of a phase's name in the table
MOST_SECONDS = 1e6
"""Longest time limit: the system counts milliseconds of a wait in 31 bits."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "input", metavar="INPUT", help="a text trace (any suffix) or a memory snapshot (.pickle) of one training step"
    )
    parser.add_argument("-o", "--output", metavar="FILE", help="write the plan here (JSON)")
    parser.add_argument("--solver", choices=SOLVERS, default="cbc", help="how far to go (default: %(default)s)")
    parser.add_argument(
        "--time-limit", type=_seconds, default=60.0, metavar="S", help="seconds for everything (default: %(default)g)"
    )
    parser.add_argument("--capacity", type=_bytes, metavar="N", help="exit with 1 where no plan of N bytes is found")
    parser.add_argument("--json", action="store_true", help="print the summary as JSON")


def _seconds(text: str) -> float:
    return number(text, 1e-9, MOST_SECONDS, f"seconds above 0, at most {MOST_SECONDS:,.0f}")


def _bytes(text: str) -> int:
    return integer(text, 0, 2**63 - 1, "bytes, 0 to 2^63 - 1")


def run(args: argparse.Namespace) -> int:
    if args.output and os.path.realpath(args.output) == os.path.realpath(args.input):
        raise PlanError(f"-o {quoted(args.output, 400)} is the input, too")
    trace = read_snapshot(args.input) if args.input.endswith(SUFFIXES) else read_trace(args.input)
    with _bar(args) as bar:
        plan = plan_trace(trace, solver=args.solver, seconds=args.time_limit, progress=bar)
    if args.capacity is not None and plan.lower_bound > args.capacity:
        why = "that much is alive at once, so no plan can fit"
        return _does_not_fit(f"capacity {args.capacity} is below the lower bound {plan.lower_bound}: {why}")
    if args.output:
        write_output(args.output, plan_to_json(plan))
    print(json.dumps(_summary(plan), indent=1) if args.json else _table(plan))
    if args.capacity is not None and plan.peak > args.capacity:
        return _does_not_fit(f"no plan of {args.capacity} bytes found; the best has {plan.peak}")
    return 0


def _summary(plan: Plan) -> dict:
    return {
        "peak": plan.peak, "lower_bound": plan.lower_bound, "proven": plan.proven, "seconds": round(plan.seconds, 4),
        "kind": plan.kind, "method": plan.method, "bilevel_peak": plan.bilevel_peak, "flat_peak": plan.flat_peak,
        "unpacked": plan.unpacked, "slots": len(plan.slots), "notes": plan.notes,
        "phases": [asdict(p) for p in plan.phases],
    }  # fmt: skip


def _table(plan: Plan) -> str:
    head = ("phase", "tensors", "peak", "lower bound", "peak/bound", "proven", "seconds", "method")
    rows = [_row(p.name[:NAME], p.tensors, p.peak, p.lower_bound, p.proven, p.seconds, p.method) for p in plan.phases]
    rows.append(_row("all", len(plan.slots), plan.peak, plan.lower_bound, plan.proven, plan.seconds, plan.kind))
    wide = [max(len(row[c]) for row in (head, *rows)) for c in range(len(head))]
    lines = []
    for row in (head, *rows):
        cells = [row[0].ljust(wide[0])] + [x.rjust(w) for x, w in zip(row[1:-1], wide[1:-1], strict=True)]
        lines.append("  ".join([*cells, row[-1]]).rstrip())
    lines.insert(len(lines) - 1, "-" * max(map(len, lines)))
    lines.append(f"by {plan.method}; phases are their transient tensors alone, 'all' has every tensor; bytes")
    if plan.unpacked:
        lines.append(f"planned tensor by tensor at level 2: {', '.join(name[:NAME] for name in plan.unpacked)}")
    return "\n".join(lines + [f"note: {quoted(n, 400)}" for n in plan.notes])


def _row(name: str, tensors: int, peak: int, bound: int, proven: bool, seconds: float, method: str) -> tuple[str, ...]:
    ratio = f"{peak / bound:.4f}" if bound else "-"
    return (name, str(tensors), f"{peak:,}", f"{bound:,}", ratio, "yes" if proven else "no", f"{seconds:.3f}", method)


# ---- output


def _does_not_fit(why: str) -> int:
    print(f"ds-memo plan: {why}", file=sys.stderr)
    return 1


def _bar(args: argparse.Namespace) -> AbstractContextManager[_Bar | None]:
    return _Bar() if sys.stderr.isatty() and not args.json else nullcontext()


class _Bar:
    """A progress line on stderr, erased at the end: stage, best peak over the bound, time used."""

    WIDTH = 24

    def __enter__(self) -> _Bar:
        return self

    def __call__(self, stage: str, best: int, bound: int, used: float, allowed: float) -> None:
        full = min(self.WIDTH, int(self.WIDTH * used / allowed)) if allowed > 0 else self.WIDTH
        ratio = f"{best / bound:.4f}" if best > 0 and bound > 0 else "?"
        bar = "#" * full + "." * (self.WIDTH - full)
        print(f"\r{stage:<16} [{bar}] {used:6.1f}/{allowed:.0f} s  peak/bound {ratio}\x1b[K", end="", file=sys.stderr)
        sys.stderr.flush()

    def __exit__(self, *_: object) -> None:
        print("\r\x1b[K", end="", file=sys.stderr)
