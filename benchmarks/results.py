"""Where results go: one JSON per run, with versions, device and commit, and one archive of details; and what they share."""

from __future__ import annotations

import json
import math
import os
import sys
import tarfile
import zlib
from pathlib import Path
from typing import Any

import torch

from benchmarks.environment import environment

FOLDER = Path(__file__).parent / "results"


ARCHIVE_MOST = 12 << 20
"""Bytes of details: what comes back from a lent machine is limited."""


def device_or_exit(name: str, verb: str) -> torch.device:
    device = torch.device(name)
    if device.type == "cuda" and not torch.cuda.is_available():
        print(f"{verb}: no CUDA device here; --device cpu tries the harness itself", file=sys.stderr)
        raise SystemExit(2)
    return device


def say(line: str) -> None:
    print(line, flush=True)


def plain(value: Any) -> Any:
    """As JSON has it: no NaN, no infinity, no tuples or paths."""
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


def write(verb: str, device: torch.device, found: dict[str, Any], out: str | None, details: Path | None = None) -> int:
    """Write <verb>-<device>-<time>.json, bring the table up to date where it lies beside it, and return the exit status.

    Args:
        details: a folder that goes into <verb>-<device>-<time>.tar.gz.
    """
    here = environment(device)
    stamp = here["time"].replace(":", "").replace("-", "")[:15]
    path = folder(out) / f"{verb}-{device.type}-{stamp}.json"
    if details is not None and any(details.iterdir()):
        archive = path.with_suffix(".tar.gz")
        found = found | {"details": archive.name, "details_left_out": pack(details, archive)}
    path.write_text(json.dumps(plain({"verb": verb, "environment": here, **found}), indent=1, allow_nan=False) + "\n")
    say(f"written to {path}")
    if path.parent == FOLDER:
        from benchmarks.table import update

        update()
    failures = found.get("failures", [])
    say("\n".join(failures) if failures else f"{verb}: no failures")
    return 1 if failures else 0


def pack(details: Path, archive: Path, most: int = ARCHIVE_MOST) -> list[str]:
    """Small files first, as far as there is room: traces are what is large. The names of the others."""
    left_out = []
    with tarfile.open(archive, "w:gz") as into:
        for path in sorted(details.iterdir(), key=lambda path: path.stat().st_size):
            most -= len(zlib.compress(path.read_bytes()))
            if most < 0:
                left_out.append(path.name)
            else:
                into.add(path, path.name)
    return left_out


def say_claims(claims: list[dict[str, Any]]) -> None:
    for claim in claims:
        margin = f", {claim['margin']:.2g} more is noise" if "margin" in claim else ""
        verdict = "held  " if claim["held"] else "MISSED"
        say(f"      {verdict} {claim['claim']}: {claim['value']:.4g} (bar {claim['bar']:g}{margin})")
