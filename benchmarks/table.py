"""The table of GPU runs in docs/benchmarks.md, made from the JSON files of CUDA machines in benchmarks/results.

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

PAGE = Path(__file__).parents[1] / "docs" / "benchmarks.md"
BEGIN, END = "<!-- results: made by `bash benchmarks/gpu.sh table` -->", "<!-- end of results -->"


def load(folder: Path) -> list[tuple[str, dict[str, Any]]]:
    """Return (file name, result) of every run on a CUDA device, oldest first."""
    found = []
    for path in folder.glob("*.json"):
        data = json.loads(path.read_text())
        if isinstance(data, dict) and data.get("verb") in VERBS and "cuda" in data["environment"]:
            found.append((path.name, data))
    return sorted(found, key=lambda item: item[1]["environment"]["time"])


def render(results: list[tuple[str, dict[str, Any]]]) -> str:
    """Return Markdown: one line per run."""
    rows = []
    for name, data in results:
        here = data["environment"]
        link = f"[{data['verb']}](../benchmarks/results/{name})"
        rows.append((link, here["device"], here["torch"], (here["commit"] or "?")[:8], summary(data)))
    return "\n".join(markdown(("run", "device", "torch", "commit", "what came out"), rows)) + "\n"


def summary(data: dict[str, Any]) -> str:
    """Return a run's result as one cell."""
    failures = data.get("failures", [])
    verdict = f"{len(failures)} failures" if failures else "no failures"
    if data.get("unfinished"):
        verdict = f"ended from outside, {verdict} until then"
    points = [f"{point['workload']} {_short(point['length'])}" for point in data.get("points", ())]
    return "; ".join([*([", ".join(points)] if points else ()), verdict])


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
