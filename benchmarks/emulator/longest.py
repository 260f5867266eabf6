"""The longest length of ds_memo and of each rival in equal memory, on the emulator: the tables of docs/benchmarks.md.

    export DS_MEMO_CUDA_TORCH=/path/to/python
    python -m benchmarks.longest [--hybrids] [-o FILE.json]

Each search is a process of its own (`python -m benchmarks.emulator capacity`), and so is each length that ds_memo trains with
nothing set (`… step`). `--hybrids` searches models of which most layers have no attention; there ds_memo trains once more where
its layers without attention, run whole, end. What the file has is not run again: name a new one to run all, in 25 minutes. No
figure is a GPU's.
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
from benchmarks.rivals import MIXERS_WHOLE, PLANNED

ROOT = Path(__file__).parents[2]
SOLVED = {
    "llama8b 16/64": 204_800,
    "llama8b 24/115": 360_448,
    "llama8b 24/16": 294_912,
    "llama8b 40/64": 622_592,
    "gpt7b 20/48": 245_760,
}
"""Width, GiB of the device and of the host; the tokens that ds_memo is to train with nothing set."""
HYBRIDS = ("qwen3next 16/64", "nemotronh 16/64", "qwen3next 24/115", "nemotronh 24/115")
RIVALS = ("async_offload", "trl", "axolotl", "alst, axolotl", "alst, async", "alst", "upipe", "ds_memo, tiles")
BESIDE = ("alst", "upipe")
"""Rivals whose longest length ds_memo's is divided by."""
RIVALS_OF_HYBRIDS = ("hf_offload", MIXERS_WHOLE, PLANNED)


def emulate(*words: str) -> Any:
    """Run a verb of the emulator and return what it found."""
    command = [sys.executable, "-m", "benchmarks.emulator", *words, "--json"]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, cwd=ROOT)
    return json.loads(done.stdout.splitlines()[-1])


def measure(name: str, row: dict[str, Any], save: Callable[[], None]) -> None:
    """Run all that the row does not have."""
    workload, _, gib = name.partition(" ")
    device, host = gib.split("/")
    memory = ["--device-gib", device, "--host-gib", host]
    searched = row.setdefault("rivals", {})
    for rival in RIVALS_OF_HYBRIDS if name in HYBRIDS else RIVALS:
        if rival not in searched:
            searched |= emulate("capacity", workload, *memory, "--rivals", rival)["rivals"]
            save()
    if name in SOLVED and "solved" not in row:
        memo = json.dumps({"host_memory_gib": int(host)})
        words = ["step", workload, str(SOLVED[name]), f"--device-gib={device}", f"--memo={memo}"]
        row["solved"] = {"tokens": SOLVED[name], "steps": emulate(*words)}
    if name in HYBRIDS and "where whole mixers end" not in row:
        words = ["--rivals", PLANNED, "--lengths", str(searched[MIXERS_WHOLE]["longest"])]
        row["where whole mixers end"] = emulate("capacity", workload, *memory, *words)["rivals"][PLANNED]
    save()


def table(rows: dict[str, Any]) -> list[str]:
    """Return the rows as docs/benchmarks.md has them."""
    names = [*(f"`{rival}`" for rival in RIVALS[:-1]), "tiles", "solved", "its step, s", *(f"solved / `{r}`" for r in BESIDE)]
    lines = []
    for name, row in rows.items():
        lengths = {rival: row["rivals"][rival]["longest"] for rival in RIVALS}
        tokens, last = row["solved"]["tokens"], row["solved"]["steps"][-1]
        cells = [*(f"{lengths[rival]:,}" for rival in RIVALS), f"{tokens:,}", f"{last['ms'] / 1e3:.1f}"]
        lines.append([*name.replace("/", " ").split(), *cells, *(f"{tokens / lengths[rival]:.2f}" for rival in BESIDE)])
    return results.markdown(("width", "device GiB", "host GiB", *names), lines)


def table_of_hybrids(rows: dict[str, Any]) -> list[str]:
    """Return the rows as docs/benchmarks.md has them."""
    lines = []
    for name, row in rows.items():
        offload, whole, ours = (row["rivals"][rival] for rival in RIVALS_OF_HYBRIDS)
        lengths = [found["longest"] for found in (ours, whole, offload)]
        ratios = ", ".join(f"{lengths[0] / length:.1f}" for length in lengths[1:])
        steps = " / ".join(f"{found['step_s'] * 1e3:,.0f}" for found in (row["where whole mixers end"], whole))
        lines.append([*name.split(), *(f"{n:,}" for n in lengths), ratios, steps])
    head = ("width", "device / host GiB", "ds_memo", "layers without attention whole", "`hf_offload`", "ratios")
    return results.markdown((*head, "step there, ms"), lines)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser("python -m benchmarks.longest", description=__doc__.splitlines()[0])
    parser.add_argument("--hybrids", action="store_true", help="models of which most layers have no attention")
    parser.add_argument("-o", "--output", type=Path, metavar="FILE.json", help="default: a file of benchmarks/results")
    options = parser.parse_args(arguments)
    output = options.output or results.FOLDER / f"{'hybrids' if options.hybrids else 'lengths'}-emulated.json"
    found: dict[str, Any] = {
        "emulated": "bytes are real, times are a table's: no result of a GPU",
        "hardware": "h200",
        "rows": {},
    }
    found["rows"] = {}
    if output.exists():
        found |= json.loads(output.read_text())
    for name in HYBRIDS if options.hybrids else SOLVED:
        results.say(name)
        measure(name, found["rows"].setdefault(name, {}), lambda: results.write(output, found, unfinished=True))
    found.pop("unfinished", None)
    results.write(output, found, unfinished=False)
    results.say("\n".join((table_of_hybrids if options.hybrids else table)(found["rows"])))
    return 0


if __name__ == "__main__":
    sys.exit(main())
