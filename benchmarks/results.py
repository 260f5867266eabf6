"""Results: one JSON per run, with versions, device and commit, and one archive of details."""

from __future__ import annotations

import json
import math
import os
import sys
import tarfile
import time
import traceback
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.environment import environment

FOLDER = Path(__file__).parent / "results"
VERBS = ("first", "check", "speed", "capacity", "planner")
APART = ("allocator", "flex", "tiles", "tiles_float32")
"""Parts of `check` that run where --parts names them: their processes import everything, or wait for a compiler."""
NO_TIME = "no time left"
ARCHIVE_MOST = 12 << 20
"""Bytes of details: transfers from the machine are limited."""


def device_or_exit(name: str, verb: str) -> torch.device:
    device = torch.device(name)
    if device.type == "cuda" and not torch.cuda.is_available():
        print(f"{verb}: no CUDA device here; --device cpu tries the harness itself", file=sys.stderr)
        raise SystemExit(2)
    return device


def say(line: str) -> None:
    print(line, flush=True)


def plain(value: Any) -> Any:
    """Return the value as JSON has it: no NaN, no infinity, no tuples or paths."""
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value if isinstance(value, (str, int, float, bool, type(None))) else str(value)


def folder(out: str | None) -> Path:
    found = Path(out or os.environ.get("OUT") or FOLDER)
    found.mkdir(parents=True, exist_ok=True)
    return found


def write(path: Path, found: dict[str, Any], unfinished: bool) -> None:
    """Replace a verb's file, so that a reader never sees half of it."""
    content = plain(found | ({"unfinished": True} if unfinished else {}))
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(content, indent=1, allow_nan=False) + "\n")
    temporary.replace(path)


class Run:
    """One run of a verb. Its file exists from the beginning, marked "unfinished", and is updated after every part.
    So a run that is ended from outside leaves its parts.

    Args:
        out: the file, if it ends in .json; else its folder.
    """

    def __init__(self, verb: str, device: torch.device, out: str | None, settings: dict[str, Any] | None = None) -> None:
        here = environment(device)
        stamp = here["time"].replace(":", "").replace("-", "")[:15]
        given = out is not None and out.endswith(".json")
        self.path = Path(out) if given else folder(out) / f"{verb}-{device.type}-{stamp}.json"
        self.failures: list[str] = []
        settings = settings and {name: value for name, value in settings.items() if name != "out"}  # a path of this machine
        self.found: dict[str, Any] = {"verb": verb, "environment": here, "settings": settings, "failures": self.failures}
        self._begin = time.perf_counter()
        self.save()

    def seconds(self) -> float:
        return time.perf_counter() - self._begin

    def save(self, unfinished: bool = True, **parts: Any) -> None:
        """Add parts and write the file."""
        self.found |= {**parts, "seconds": self.seconds()}
        write(self.path, self.found, unfinished)

    def attempt(self, name: str, part: Callable[..., Any], *arguments: Any) -> Any:
        """Return a part's result; None if it raised, which is noted as a failure."""
        try:
            return part(*arguments)
        except Exception as error:
            traceback.print_exc()
            self.failures.append(f"{name}: {type(error).__name__}: {str(error)[:500]}")
            return None

    def finish(self, details: Path | None = None) -> int:
        """Write the final file, update the table if it is in the same folder, and return the exit status.

        Args:
            details: a folder that goes into an archive of the file's name.
        """
        if details is not None and any(details.iterdir()):
            archive = self.path.with_suffix(".tar.gz")
            if (left_out := self.attempt("details", pack, details, archive)) is not None:
                self.found |= {"details": archive.name, "details_left_out": left_out}
        self.save(unfinished=False)
        say(f"written to {self.path}")
        if self.path.parent == FOLDER:
            from benchmarks.table import update

            update()
        say("\n".join(self.failures) if self.failures else f"{self.found['verb']}: no failures")
        return 1 if self.failures else 0


def pack(details: Path, archive: Path, most: int = ARCHIVE_MOST) -> list[str]:
    """Archive files while there is room, small ones first (traces are large); return the names of the others."""
    left_out = []
    with tarfile.open(archive, "w:gz") as into:
        for path in sorted(details.iterdir(), key=lambda path: path.stat().st_size):
            most -= len(zlib.compress(path.read_bytes()))
            if most < 0:
                left_out.append(path.name)
            else:
                into.add(path, path.name)
    return left_out


def end(result: Any, failures: list[str], path: Path | None) -> int:
    """Write the result of a command that is no verb, if `path` is given, and return the exit status."""
    if path is not None:
        path.write_text(json.dumps(result, indent=1) + "\n")
    say("\n".join(failures) or "all bars met")
    return 1 if failures else 0


def unmeasured(claim: str, why: str) -> dict[str, Any]:
    """Return a bar without a measurement: not held, and named in the table."""
    return {"claim": claim, "value": None, "bar": None, "held": False, "why": why.strip().split("\n")[-1][:200]}


def say_claims(claims: list[dict[str, Any]]) -> None:
    for claim in claims:
        if claim["value"] is None:
            say(f"      MISSED {claim['claim']}: {claim['why']}")
            continue
        margin = f", {claim['margin']:.2g} more is noise" if "margin" in claim else ""
        verdict = "held  " if claim["held"] else "MISSED"
        say(f"      {verdict} {claim['claim']}: {claim['value']:.4g} (bar {claim['bar']:g}{margin})")
