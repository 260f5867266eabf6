"""An assertion of `gpu.sh first`: what is measured, its bar, and what to do where it fails."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

PASS, FAIL, SKIPPED, NOT_JUDGED = "pass", "FAIL", "skipped", "not judged"
VALUES, TIMES, DRIVER = "values", "times", "driver"
"""What an assertion rests on that the emulator lacks. Without a driver there is nothing to run."""


class Skip(Exception):
    """The assertion means nothing here; the message says why."""


@dataclass(frozen=True)
class Machine:
    """Where the assertions run."""

    device: torch.device
    emulated: bool

    @property
    def cuda(self) -> bool:
        return self.device.type == "cuda"

    def lacks(self, needs: frozenset[str]) -> str | None:
        """Return what the assertion needs and this machine has not, in words."""
        if self.emulated and needs:
            return f"the emulator has no {' and no '.join(sorted(needs))}"
        if not self.cuda and TIMES in needs:
            return "times of a CPU say nothing of a GPU"
        return None


@dataclass(frozen=True)
class Measured:
    """Result of an assertion."""

    text: str
    held: bool
    details: dict[str, Any] = field(default_factory=dict)


Measure = Callable[[Machine], Measured]


@dataclass(frozen=True)
class Assertion:
    """One line of `gpu.sh first`."""

    point: int
    """Number in the list of first.py."""
    name: str
    bar: str
    cure: str
    measure: Measure
    needs: frozenset[str] = frozenset()
    only_cuda: bool = False

    def run(self, machine: Machine) -> dict[str, Any]:
        """Return its row. An error is a failure."""
        begin = time.perf_counter()
        row = {"point": self.point, "name": self.name, "bar": self.bar, "measured": ""} | self._verdict(machine)
        if row["verdict"] == FAIL:
            row["cure"] = self.cure
        return row | {"seconds": time.perf_counter() - begin}

    def _verdict(self, machine: Machine) -> dict[str, Any]:
        lacks = machine.lacks(self.needs)
        if self.only_cuda and not machine.cuda:
            return {"verdict": SKIPPED, "why": "on CUDA only"}
        if machine.emulated and DRIVER in self.needs:
            return {"verdict": SKIPPED, "why": lacks}
        try:
            found = self.measure(machine)
        except Skip as skip:
            return {"verdict": SKIPPED, "why": str(skip)}
        except (Exception, SystemExit) as error:
            traceback.print_exc()
            line = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
            return {"verdict": FAIL, "measured": f"{line} ({_where(error)})"}
        row = {"measured": found.text, **({"details": found.details} if found.details else {})}
        if lacks is not None:
            return row | {"verdict": NOT_JUDGED, "why": lacks}
        return row | {"verdict": PASS if found.held else FAIL}


ASSERTIONS: list[Assertion] = []
"""All that :func:`asserts` has seen."""


def asserts(point: int, name: str, bar: str, cure: str, *needs: str, only_cuda: bool = False) -> Callable[[Measure], Measure]:
    """Decorate the function that measures an assertion."""

    def add(measure: Measure) -> Measure:
        ASSERTIONS.append(Assertion(point, name, bar, cure, measure, frozenset(needs), only_cuda))
        return measure

    return add


def _where(error: BaseException) -> str:
    """Return the line that raised."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return f"{frame.filename.rpartition('/')[2]}:{frame.lineno}"


def line(row: dict[str, Any]) -> str:
    """Format a row, with its cure behind a failure."""
    said = "; ".join(filter(None, (row["measured"], f"bar: {row['bar']}", row.get("why"))))
    text = f"{row['point']:2d}  {row['verdict']:10s}  {row['name']}: {said}"
    return text + (f"\n    cure: {row['cure']}" if "cure" in row else "")
