"""Errors of the planner's input. The command line turns them into exit code 2."""

from __future__ import annotations

from ds_memo.errors import MemoError, quoted


class PlanError(MemoError):
    """Base of all planner errors."""


class MalformedInput(PlanError):
    """A line (or element) of a file that does not parse.

    Args:
        source: File name, or another name for the text.
        line: 1-based line number; 0 for the file as a whole.
        seen: The text that was read.
        expected: The text that belongs there.
    """

    def __init__(self, source: str, line: int, seen: str, expected: str):
        name = quoted(source, 400)
        where = f"{name}:{line}" if line else name
        super().__init__(f"{where}: read {quoted(seen)}, expected {expected}")
        self.source, self.line, self.seen, self.expected = source, line, seen, expected


class UnsafePickle(PlanError):
    """A pickle that builds something other than plain containers."""


class TooLarge(PlanError):
    """All sizes together reach 2^62: the solvers add them up in 64 bits."""


class TracesDiffer(PlanError):
    """Traces of one run, of other sequence lengths, that do not match."""


class InvalidPlan(PlanError):
    """The verifier refused a plan. `name` is one of verify.ERRORS."""

    def __init__(self, name: str, detail: str):
        super().__init__(f"{name}: {detail}")
        self.name, self.detail = name, detail
