"""The tables of docs/benchmarks.md, made from the JSON files of CUDA machines in benchmarks/results.

    bash benchmarks/gpu.sh table [FILE …]     copies FILEs (brought from the machine) into benchmarks/results first

Nothing between the two markers is typed by hand.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

from benchmarks.results import FOLDER, VERBS, markdown
from benchmarks.rivals import PLANNED
from ds_memo.units import GIB

PAGE = Path(__file__).parents[1] / "docs" / "benchmarks.md"
BEGIN, END = "<!-- results: made by `bash benchmarks/gpu.sh table` -->", "<!-- end of results -->"
REASONS = {
    "no time": "no time",
    "void": "void",
    "OutOfMemoryError": "out of memory",
    "out of memory": "out of memory",
    "NothingFits": "does not fit",
    "MemoError": "does not fit",
    "MemoryError": "out of memory",
    "OverBudget": "out of memory",
}
"""Cells by what the JSON says."""


def load(folder: Path) -> list[tuple[str, dict[str, Any]]]:
    """Return (file name, result) of every run on a CUDA device, oldest first."""
    found = []
    for path in folder.glob("*.json"):
        data = json.loads(path.read_text())
        if isinstance(data, dict) and data.get("verb") in VERBS and "cuda" in data["environment"]:
            found.append((path.name, data))
    return sorted(found, key=lambda item: item[1]["environment"]["time"])


def render(results: list[tuple[str, dict[str, Any]]]) -> str:
    """Return Markdown: one line per run, then one per point and length of the latest runs."""
    rows = []
    for name, data in results:
        here = data["environment"]
        link = f"[{data['verb']}](../benchmarks/results/{name})"
        rows.append((link, here["device"], here["torch"], (here["commit"] or "?")[:8], summary(data)))
    lines = markdown(("run", "device", "torch", "commit", "what came out"), rows)
    for verb, table in (("speed", _points), ("capacity", _longest)):
        if runs := [data for _, data in results if data["verb"] == verb]:
            lines += ["", *table(runs)]
    return "\n".join(lines) + "\n"


def summary(data: dict[str, Any]) -> str:
    """Return a run's result as one cell."""
    failures = data.get("failures", [])
    verdict = f"{len(failures)} failures" if failures else "no failures"
    if data.get("unfinished"):
        verdict = f"ended from outside, {verdict} until then"
    claims = [claim for part in (data, *data.get("points", ())) for claim in part.get("claims", ())]
    if claims:
        verdict += f", {sum(claim['held'] for claim in claims)} of {len(claims)} bars held"
        if noisy := sum(claim["held"] and "margin" in claim and claim["value"] > claim["bar"] for claim in claims):
            verdict += f" ({noisy} within noise)"
    if nothing := [f"{claim['claim']} ({claim['why']})" for claim in claims if "why" in claim]:
        verdict += f"; not measured: {', '.join(nothing)}".replace("|", "/")
    points, dropped = (
        ", ".join(f"{point['workload']} {_short(point['length'])}" for point in data.get(key, ()) if "length" in point)
        for key in ("points", "dropped")
    )
    return "; ".join(part for part in (points, f"dropped for time: {dropped}" if dropped else "", verdict) if part)


def _points(runs: list[dict[str, Any]]) -> list[str]:
    latest: dict[tuple[Any, ...], dict[str, Any]] = {}  # other rivals are another comparison
    for point in (point for run in runs for point in run.get("points", ())):
        device = point.get("device_budget") or 0
        latest[point["workload"], point["length"], point["host_budget"], device, tuple(sorted(point["rivals"]))] = point
    rivals = list(dict.fromkeys(name for point in latest.values() for name in point["rivals"]))
    head = ("workload", "tokens", "host GiB", "device GiB", *rivals, f"predicted of {PLANNED}")
    rows = []
    for (workload, length, host, device, _), point in sorted(latest.items()):
        where = (workload, _short(length), f"{host / GIB:.0f}", f"{device / GIB:g}" if device else "all")
        rows.append((*where, *(_step(point["rivals"].get(name)) for name in rivals), _predicted(point)))
    return ["Median milliseconds of a step:", "", *markdown(head, rows)]


def _longest(runs: list[dict[str, Any]]) -> list[str]:
    rows = []
    for row in (row for run in runs for row in run.get("rivals", ())):
        step = "–" if row.get("step_s") is None else f"{row['step_s']:.2f}"
        gib = (f"{row[name] / GIB:.0f}" for name in ("device_bytes", "host_bytes"))
        rows.append((row["workload"], *gib, row["rival"], _length(row), step))
    head = ("workload", "device GiB", "host GiB", "rival", "tokens", "step s")
    return ["Longest trainable length:", "", *markdown(head, rows)]


def _length(row: dict[str, Any]) -> str:
    """Return the longest length as text; of a search that was cut off, "≥"."""
    if early := row.get("ended_early"):
        return f"≥ {_short(row['longest'])} ({_why(early)})" if row["longest"] else _why(early)
    return _short(row["longest"]) if row["longest"] else _why(row["why"]) if row.get("why") else "none"


def _step(row: dict[str, Any] | None) -> str:
    if row is None:
        return "–"
    if "median_s" not in row:
        return _why(row.get("out", "no time"))
    return f"{row['median_s'] * 1e3:,.0f}" + (" (unsettled)" if row.get("unsettled") else "")


def _predicted(point: dict[str, Any]) -> str:
    """Return the predicted milliseconds of a step, and their error."""
    said = point.get("predicted", {}).get("step_s")
    if said is None:
        return "–"
    took = point["rivals"].get(PLANNED, {}).get("median_s")
    return f"{said * 1e3:,.0f}" + (f" ({said / took - 1:+.1%})" if took else "")


def _why(out: str) -> str:
    """Return the reason in two or three words; the JSON has all of it."""
    return next((short for said, short in REASONS.items() if said in out), "broke")


def _short(tokens: int) -> str:
    return f"{tokens // 1024}K" if tokens % 1024 == 0 else str(tokens)


def update(page: Path = PAGE, folder: Path = FOLDER) -> None:
    """Write the tables between the markers."""
    before, rest = page.read_text().split(BEGIN)
    page.write_text(f"{before}{BEGIN}\n{render(load(folder))}{END}{rest.split(END)[1]}")


def main(arguments: list[str]) -> int:
    for path in map(Path, arguments):
        data = json.loads(path.read_text())
        if not isinstance(data, dict) or data.get("verb") not in VERBS or "environment" not in data:
            print(f"table: {path} is no result of {', '.join(VERBS)}", file=sys.stderr)
            return 2
        if path.resolve().parent != FOLDER.resolve():
            shutil.copy(path, FOLDER / path.name)
    update()
    print(f"written to {PAGE}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
