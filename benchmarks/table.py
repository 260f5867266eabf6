"""The tables of benchmarks/README.md, made from the JSON files of CUDA machines in benchmarks/results.

    bash benchmarks/gpu.sh table [FILE …]     copies FILEs (brought from the machine) into benchmarks/results first; archives of
                                              details among them stay where they are

Nothing between the two markers is typed by hand; without a result there is a sentence that says so.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

from benchmarks.results import FOLDER, VERBS
from benchmarks.rivals import PLANNED
from ds_memo.units import GIB

README = Path(__file__).parent / "README.md"
BEGIN, END = "<!-- results: made by `bash benchmarks/gpu.sh table` -->", "<!-- end of results -->"
NONE_YET = "There is no result of a CUDA machine yet.\n"


def load(folder: Path) -> list[tuple[str, dict[str, Any]]]:
    """(file name, result) of every run on a CUDA device, oldest first."""
    found = []
    for path in folder.glob("*.json"):
        data = json.loads(path.read_text())
        if isinstance(data, dict) and data.get("verb") in VERBS and "cuda" in data["environment"]:
            found.append((path.name, data))
    return sorted(found, key=lambda item: item[1]["environment"]["time"])


def render(results: list[tuple[str, dict[str, Any]]]) -> str:
    """Markdown: one line per run, then one per point and length of the latest runs."""
    if not results:
        return NONE_YET
    lines = ["| run | device | torch | commit | what came out |", "|---|---|---|---|---|"]
    for name, data in results:
        here = data["environment"]
        cells = (f"[{data['verb']}](results/{name})", here["device"], here["torch"], (here["commit"] or "?")[:8], summary(data))
        lines.append(f"| {' | '.join(cells)} |")
    speed = [data for _, data in results if data["verb"] == "speed"]
    if speed:
        lines += ["", *_points(speed), *_kernels(speed)]
    capacity = [data for _, data in results if data["verb"] == "capacity"]
    if capacity:
        lines += ["", *_longest(capacity)]
    return "\n".join(lines) + "\n"


def summary(data: dict[str, Any]) -> str:
    """Return a run's result as one cell."""
    failures = data.get("failures", [])
    verdict = f"{len(failures)} failures" if failures else "no failures"
    if data.get("unfinished"):
        verdict = f"ended from outside, {verdict} until then"
    parts = [data, *data.get("points", ()), *data.get("runs", ())]
    held = [claim for part in parts for claim in part.get("claims", ())]
    if held:
        verdict += f", {sum(claim['held'] for claim in held)} of {len(held)} bars held"
        if noisy := sum(claim["held"] and "margin" in claim and claim["value"] > claim["bar"] for claim in held):
            verdict += f" ({noisy} within noise)"
    if nothing := [f"{claim['claim']} ({claim['why']})" for claim in held if "why" in claim]:
        verdict += f"; not measured: {', '.join(nothing)}".replace("|", "/")
    points, dropped = (
        ", ".join(f"{point['workload']} {_short(point['length'])}" for point in data.get(key, ()) if "length" in point)
        for key in ("points", "dropped")
    )
    return "; ".join(part for part in (points, f"dropped for time: {dropped}" if dropped else "", verdict) if part)


def _points(runs: list[dict[str, Any]]) -> list[str]:
    latest: dict[tuple[Any, ...], dict[str, Any]] = {}  # other rivals are another comparison
    for run in runs:
        for point in run.get("points", ()):
            device = point.get("device_budget") or 0
            latest[point["workload"], point["length"], point["host_budget"], device, tuple(sorted(point["rivals"]))] = point
    rivals = list(dict.fromkeys(name for point in latest.values() for name in point["rivals"]))
    lines = ["Median milliseconds of a step:", ""]
    lines.append(f"| workload | tokens | host GiB | device GiB | {' | '.join(rivals)} | predicted of {PLANNED} |")
    lines.append("|---" * (len(rivals) + 5) + "|")
    for (workload, length, host, device, _), point in sorted(latest.items()):
        cells = [f"{host / GIB:.0f}", f"{device / GIB:g}" if device else "all"]
        cells += [_step(point["rivals"].get(name)) for name in rivals]
        lines.append(f"| {workload} | {_short(length)} | {' | '.join(cells)} | {_predicted(point)} |")
    return lines


def _kernels(runs: list[dict[str, Any]]) -> list[str]:
    """Attention at each length, of the latest run that has it; the kernel that PyTorch picks is marked."""
    points = next((run["attention"]["points"] for run in reversed(runs) if (run.get("attention") or {}).get("points")), [])
    if not points:
        return []
    names = list(dict.fromkeys(name for point in points for name in point["kernels"]))
    lines = ["", 'Attention, TFLOP/s forward / backward (**picked** where "attention" is absent):', ""]
    lines += [f"| tokens | {' | '.join(names)} |", "|---" * (len(names) + 1) + "|"]
    for point in points:
        cells = []
        for name in names:
            row = point["kernels"].get(name, {})
            rates = f"{row['forward_tflops']:.0f} / {row['backward_tflops']:.0f}" if "forward_tflops" in row else "–"
            cells.append(f"**{rates}**" if name == point["picked"] else rates)
        lines.append(f"| {_short(point['length'])} | {' | '.join(cells)} |")
    return lines


def _longest(runs: list[dict[str, Any]]) -> list[str]:
    lines = ["Longest trainable length:", "", "| workload | device GiB | host GiB | rival | tokens | step s |", "|---" * 6 + "|"]
    for run in runs:
        for row in run.get("rivals", ()):
            what = (row["workload"], f"{row['device_bytes'] / GIB:.0f}", f"{row['host_bytes'] / GIB:.0f}", row["rival"])
            step = row.get("step_s")
            end = (_length(row), "–" if step is None else f"{step:.2f}")
            lines.append(f"| {' | '.join((*what, *end))} |")
    return lines


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
    reasons = {
        "no time": "no time",
        "void": "void",
        "is not installed": "not installed",
        "not tried": "not tried: host",
        "OutOfMemoryError": "out of memory",
        "out of memory": "out of memory",
        "NothingFits": "does not fit",
        "MemoError": "does not fit",
        "MemoryError": "out of memory",
        "OverBudget": "out of memory",
    }
    return next((short for said, short in reasons.items() if said in out), "broke")


def _short(tokens: int) -> str:
    return f"{tokens // 1024}K" if tokens % 1024 == 0 else str(tokens)


def update(readme: Path = README, folder: Path = FOLDER) -> None:
    """Write the tables between the markers.

    Raises:
        ValueError: the markers are not there.
    """
    text = readme.read_text()
    if text.count(BEGIN) != 1 or text.count(END) != 1 or text.index(BEGIN) > text.index(END):
        raise ValueError(f"{readme}: the lines {BEGIN!r} and {END!r} must be there once each, in this order")
    before, rest = text.split(BEGIN)
    readme.write_text(f"{before}{BEGIN}\n{render(load(folder))}{END}{rest.split(END)[1]}")


def main(arguments: list[str]) -> int:
    for name in arguments:
        path = Path(name)
        if path.name.endswith(".tar.gz"):
            continue
        try:
            data = json.loads(path.read_text())
            good = isinstance(data, dict) and data.get("verb") in VERBS and "environment" in data
        except (OSError, ValueError) as error:
            print(f"table: {name} cannot be read: {error}", file=sys.stderr)
            return 2
        if not good:
            print(f"table: {name} is no result of {', '.join(VERBS)}", file=sys.stderr)
            return 2
        if path.resolve().parent != FOLDER.resolve():
            shutil.copy(path, FOLDER / path.name)
    update()
    print(f"written to {README}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
