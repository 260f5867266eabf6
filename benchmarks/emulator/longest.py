"""The longest length of ds_memo and of each rival in equal memory, on the emulator: the table of docs/benchmarks.md.

    export DS_MEMO_CUDA_TORCH=/path/to/python
    python -m benchmarks.longest [-o FILE.json]

Each search is a process of its own (`python -m benchmarks.emulator capacity`), and so is each length that ds_memo trains with
nothing set (`… step`). What the file has is not run again: name a new one to run all, in 25 minutes. No figure is a GPU's.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks import results

ROOT = Path(__file__).parents[2]
ROWS = {
    ("llama8b", 16, 64): 204_800,
    ("llama8b", 24, 115): 360_448,
    ("llama8b", 24, 16): 278_528,
    ("llama8b", 40, 64): 524_288,
    ("gpt7b", 20, 48): 212_992,
}
"""Width, GiB of the device and of the host, and the tokens that ds_memo is to train with nothing set."""
TILES = "ds_memo, tiles"
COLUMNS = ("async_offload", "trl", "alst, async", "alst", "upipe", TILES)
BESIDE = ("alst", "upipe")
"""Rivals whose longest length ds_memo's is divided by."""


def emulate(*words: str) -> Any:
    """Run a verb of the emulator and return what it found."""
    command = [sys.executable, "-m", "benchmarks.emulator", *words, "--json"]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, cwd=ROOT)
    return json.loads(done.stdout.splitlines()[-1])


def measure(workload: str, device: int, host: int, tokens: int, row: dict[str, Any], save: Callable[[], None]) -> None:
    """Run all that the row does not have."""
    searched = row.setdefault("rivals", {})
    for rival in COLUMNS:
        if rival not in searched:
            memory = ["--device-gib", str(device), "--host-gib", str(host)]
            searched |= emulate("capacity", workload, *memory, "--rivals", rival)["rivals"]
            save()
    if "solved" not in row:
        memo = json.dumps({"host_memory_gib": host})
        row["solved"] = {
            "tokens": tokens,
            "steps": emulate("step", workload, str(tokens), f"--device-gib={device}", f"--memo={memo}"),
        }
        save()


def table(rows: dict[str, Any]) -> list[str]:
    """Return the rows as docs/benchmarks.md has them."""
    names = [
        *(f"`{rival}`" for rival in COLUMNS[:-1]),
        "tiles",
        "solved",
        "its step, s",
        *(f"solved / `{rival}`" for rival in BESIDE),
    ]
    lines = [f"| width | device GiB | host GiB | {' | '.join(names)} |", "|---" * (len(names) + 3) + "|"]
    for name, row in rows.items():
        lengths = {rival: row["rivals"][rival]["longest"] for rival in COLUMNS}
        tokens, last = row["solved"]["tokens"], row["solved"]["steps"][-1]
        cells = [*(f"{lengths[rival]:,}" for rival in COLUMNS), f"{tokens:,}", f"{last['ms'] / 1e3:.1f}"]
        cells += [f"{tokens / lengths[rival]:.2f}" for rival in BESIDE]
        lines.append(f"| {' | '.join([*name.replace('/', ' ').split(), *cells])} |")
    return lines


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser("python -m benchmarks.longest", description=__doc__.splitlines()[0])
    parser.add_argument("-o", "--output", type=Path, default=results.FOLDER / "lengths-emulated.json", metavar="FILE.json")
    options = parser.parse_args(arguments)
    found: dict[str, Any] = {
        "emulated": "bytes are real, times are a table's: no result of a GPU",
        "hardware": "h200",
        "rows": {},
    }
    if options.output.exists():
        found |= json.loads(options.output.read_text())
    for (workload, device, host), tokens in ROWS.items():
        name = f"{workload} {device}/{host}"
        results.say(name)
        row = found["rows"].setdefault(name, {})
        measure(workload, device, host, tokens, row, lambda: results.write(options.output, found, unfinished=True))
    found.pop("unfinished", None)
    results.write(options.output, found, unfinished=False)
    results.say("\n".join(table(found["rows"])))
    return 0


if __name__ == "__main__":
    sys.exit(main())
