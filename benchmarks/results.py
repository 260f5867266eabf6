"""Results: one JSON per run, with versions, device and commit; and Markdown tables."""

from __future__ import annotations

import importlib.util
import json
import math
import os
import platform
import re
import shutil
import statistics
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterable
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch

from ds_memo.memory.host import available_bytes, memlock_limit
from ds_memo.units import GIB

FOLDER = Path(__file__).parent / "results"
VERBS = ("first", "check", "speed", "capacity")
ALIKE = 0.05
"""Share by which norms of all gradients may differ."""


def device_or_exit(name: str, verb: str) -> torch.device:
    """Return the device of a verb, for which what is compiled is built before anything is timed."""
    from ds_memo.ops import library
    from ds_memo.plan import search

    device = torch.device(name)
    lacks = None
    if device.type == "cuda" and not torch.cuda.is_available():
        lacks = "no CUDA device here; --device cpu tries the harness itself"
    else:
        try:
            library.load(device.type)
            search.load()
        except Exception as error:
            lacks = f"the allocator op cannot be built: {' '.join(str(error).split())[:1000]}"
    if lacks is not None:
        print(f"{verb}: {lacks}", file=sys.stderr)
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


def environment(device: torch.device) -> dict[str, Any]:
    """Return versions and hardware."""

    def version(name: str) -> str | None:
        if importlib.util.find_spec(name) is None:
            return None
        try:
            return getattr(importlib.import_module(name), "__version__", "present")
        except Exception as error:  # a package built for another torch fails in its own ways
            return f"{type(error).__name__}: {str(error)[:120]}"

    git = shutil.which("git")
    commit = subprocess.run([git, "rev-parse", "HEAD"], capture_output=True, text=True, check=False).stdout if git else ""
    found = {
        "time": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "commit": commit.strip() or os.environ.get("COMMIT"),  # a copy without .git is told
        "python": platform.python_version(),
        **{name: version(name) for name in ("torch", "transformers", "deepspeed", "flash_attn", "numpy")},
        "memlock_limit": memlock_limit(),
        "host_memory_gib": round(available_bytes() / GIB, 1),
    }
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        found |= {"device": properties.name, "device_memory_gib": round(properties.total_memory / GIB, 1)}
        found |= {"cuda": torch.version.cuda, "cudnn": torch.backends.cudnn.version()}
    else:
        found |= {"device": platform.processor() or platform.machine()}
    return found


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

    def finish(self) -> int:
        """Write the final file, update the table if it is in the same folder, and return the exit status."""
        self.save(unfinished=False)
        say(f"written to {self.path}")
        if self.path.parent == FOLDER:
            from benchmarks.table import update

            update()
        say("\n".join(self.failures) if self.failures else f"{self.found['verb']}: no failures")
        return 1 if self.failures else 0


def unlike(norms: dict[str, float], where: str) -> list[str]:
    """Return a failure if some rivals' gradients have other norms than most: who leaves a kernel out is fast for nothing."""
    middle = statistics.median(norms.values()) if norms else 0.0
    others = [f"{rival} {norm:.4g}" for rival, norm in norms.items() if not abs(norm - middle) <= ALIKE * middle]
    return [f"{where}: norm of all gradients: {', '.join(others)}; median {middle:.4g}"] if others else []


def markdown(head: Iterable[str], rows: Iterable[Iterable[Any]]) -> list[str]:
    """Return the lines of a table."""
    first, *lines = [f"| {' | '.join(map(str, cells))} |" for cells in (head, *rows)]
    return [first, re.sub(r"[^|]+", "---", first), *lines]
