"""One point of `speed`: every rival at one length of a workload, in turns.

In a turn a rival is put on a model, warmed up and timed. Each turn has a process of its own (child.py). All rivals are warmed up
by as many steps, and every other round of turns goes through them backwards: a card that is held to a power limit is slower when
it is warm.
"""

from __future__ import annotations

import json
import statistics
import tempfile
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks import results, streams
from benchmarks.child import found_by_child, tell
from benchmarks.emulated_process import is_emulated
from benchmarks.open_slab import held_open
from benchmarks.predict import hardware_of, in_words, predict
from benchmarks.rivals import INPUT_OFFLOAD, OURS, PLANNED, RIVALS, SWAPPING, Budget, Installed, Rival
from benchmarks.timing import Memory, Trainer, clear, does_not_fit, solution, use_expandable
from benchmarks.workloads import batch, build, shapes
from ds_memo.hf.model_flops import model_flops

WARM_UP = max(rival.warm_up for rival in RIVALS.values())
"""Steps of every rival before it is timed."""
NEEDED = (PLANNED, "none", "checkpoint", *INPUT_OFFLOAD, SWAPPING)
"""Rivals of `speed` where no lengths are given."""
URGENT = (*NEEDED, "checkpoint+attention", "axolotl", "alst")
"""Order of the rivals, then the others: a run may be ended from outside."""

Rows = dict[str, dict[str, Any]]
"""What was found of each rival, by its name. "out" says why there is no more of it."""


@dataclass(frozen=True)
class Turn:
    """One turn of a rival at a point."""

    workload: str
    length: int
    steps: int
    """Steps that are timed."""
    first: bool
    """Memory, gradients and the rival's report are taken, too."""
    predicts: bool
    """ds_memo and the estimator predict the step, before it is timed."""
    watches: bool
    """The streams of one more step are analysed."""


Take = Callable[[Rival, Turn, Budget], dict[str, Any]]
"""Takes a turn and returns what was found: keys of the rival's row, of the point, "flops" of a step, and "failures"."""


def run_point(
    workload: str,
    length: int,
    rivals: list[Rival],
    budget: Budget,
    turns: int = 1,
    steps: int = 3,
    keep: Callable[[dict[str, Any]], Any] = lambda point: None,
    *,
    take: Take,
) -> dict[str, Any]:
    """Measure one point: raw samples, memory and reports of every rival.

    Args:
        turns: of each rival.
        steps: timed in a turn.
        keep: called with the point after every turn.
        take: `take_turn`, or what takes it in a process of its own.
    """
    rivals = sorted(rivals, key=urgency)
    rows: Rows = {rival.name: {"samples_s": []} for rival in rivals}
    failures: list[str] = []
    point: dict[str, Any] = {"workload": workload, "length": length, "layers": shapes(budget.device)[workload].layers}
    point |= {"rivals": rows, "failures": failures, "host_budget": budget.host_bytes, "device_budget": budget.device_bytes}
    predicted = next((rival for rival in rivals if rival.name in OURS), None)
    ours = (rival for rival in rivals if rival.name in (*OURS, SWAPPING))
    watched = max(ours, key=lambda rival: rival.name == SWAPPING, default=None)
    for number in range(turns):
        taking = [rival for rival in rivals if "out" not in rows[rival.name]]
        for rival in taking[::-1] if number % 2 else taking:
            row, last = rows[rival.name], number == turns - 1
            turn = Turn(workload, length, steps, not number, not number and rival is predicted, last and rival is watched)
            found = take(rival, turn, budget)
            failures += [f"{workload} {length}: {failure}" for failure in found.pop("failures")]
            point |= {part: found.pop(part) for part in ("predicted", "streams") if part in found}
            flops = found.pop("flops")
            found |= {name: row.get(name, []) + found[name] for name in ("samples_s", "dropped_s") if name in found}
            row |= found
            _sum_up(row, flops)
            keep(point)
    norms = {name: row["gradient_norm"] for name, row in rows.items() if "gradient_norm" in row}
    failures += results.unlike(norms, f"{workload} {length}")
    return point


def take_in_child(module: str, *arguments: str) -> Take:
    """Return what takes a turn in a process that runs this module with these arguments, `--child` and what `answer` reads."""

    def take(rival: Rival, turn: Turn, budget: Budget) -> dict[str, Any]:
        limits = {"host_bytes": budget.host_bytes, "device_bytes": budget.device_bytes, "cache_dir": budget.cache_dir}
        asked = {"rival": rival.name, "turn": asdict(turn), "device": str(budget.device), **limits}
        told, why = found_by_child(module, *arguments, "--child", json.dumps(asked))
        found = {"flops": 0.0, "failures": [], **{key: value for part in told for key, value in part.items()}}
        if why is not None:
            found |= {"out": why, "failures": [*found["failures"], f"{rival.name}: {why}"]}
        if "predicted" in found:
            results.say(f"      predicted: {in_words(found['predicted'])}")
        return found

    return take


def answer(asked: str) -> int:
    """Take the turn that the parent asks for, and tell it what was found; called in the child."""
    given = json.loads(asked)
    rival, turn, device = RIVALS[given.pop("rival")], Turn(**given.pop("turn")), torch.device(given.pop("device"))
    tell(take_turn(rival, turn, Budget(device, **given)))
    return 0


def take_turn(rival: Rival, turn: Turn, budget: Budget) -> dict[str, Any]:
    """Put a rival on a model, time it, and take it off."""
    device, shape = budget.device, shapes(budget.device)[turn.workload]
    trainer = Trainer(build(shape, device), batch(shape, turn.length, device))
    found: dict[str, Any] = {"flops": model_flops(trainer.model, turn.length) or 0.0, "failures": []}

    def part(name: str, work: Callable[[], Any]) -> None:
        """Run a part; one that raises leaves the rival's numbers alone."""
        try:
            use_expandable(False, device)
            found[name] = work()
        except Exception as error:
            traceback.print_exc()
            found[name] = {"skipped": f"{type(error).__name__}: {str(error)[:300]}"}
            found["failures"].append(f"{name}: {found[name]['skipped']}")
        clear(device)

    with held_open(budget):
        if turn.predicts:  # before anything is timed
            part("predicted", lambda: predict(trainer, turn.length, budget, hardware_of(device)))
        try:
            use_expandable(rival.expandable, device)
            with rival.on(trainer.model, budget) as installed:
                found |= _visit(trainer, installed, turn)
        except Exception as error:
            found["out"] = f"{type(error).__name__}: {str(error)[:300]}"
            if not does_not_fit(error):
                traceback.print_exc()
                found["failures"].append(f"{rival.name} broke: {found['out']}")
        if turn.watches and "out" not in found and device.type == "cuda" and not is_emulated():  # the profiler wants a driver
            part("streams", lambda: watch_streams(trainer, rival, budget))
    clear(device)  # autograd's thread may still free the last graph, and would abort the process as it ends
    return found


def _visit(trainer: Trainer, installed: Installed, turn: Turn) -> dict[str, Any]:
    """Time steps under one solution. If it changes meanwhile, drop the samples and take them again, twice at most."""
    found: dict[str, Any] = {}
    for tries in (3, 2, 1):
        for _ in range(WARM_UP):
            trainer.step(installed)
        before, memory = installed.report(), Memory(trainer.ids.device)
        samples, after = [trainer.seconds(installed) for _ in range(turn.steps)], installed.report()
        if settled := solution(before) == solution(after):
            break
        if tries > 1:
            found["dropped_s"] = found.get("dropped_s", []) + samples
    found["samples_s"] = samples
    if not settled:
        found["unsettled"] = True
    if not turn.first:
        return found
    found["memory"] = memory.read(turn.steps, lambda: trainer.step(installed))
    if not is_emulated():  # it has no values
        found["gradient_norm"] = trainer.gradient_norm(installed)
    if "stall_s" in after:
        found["stall_s_per_step"] = {name: (s - before["stall_s"][name]) / turn.steps for name, s in after["stall_s"].items()}
    return found | {"report": results.plain(after)}


def _sum_up(row: dict[str, Any], flops: float) -> None:
    """Add the median and TFLOP/s; a rival that broke in a later turn gets none."""
    row.pop("median_s", None), row.pop("tflops", None)
    if row["samples_s"] and "out" not in row:
        row["median_s"] = statistics.median(row["samples_s"])
        row["tflops"] = flops / row["median_s"] / 1e12


def urgency(rival: Rival) -> int:
    return URGENT.index(rival.name) if rival.name in URGENT else len(URGENT)


def watch_streams(trainer: Trainer, rival: Rival, budget: Budget) -> dict[str, Any]:
    """Profile one step and return its streams' analysis."""
    with rival.on(trainer.model, budget) as installed, tempfile.TemporaryDirectory() as folder:
        for _ in range(rival.warm_up):
            trainer.step(installed)
        return streams.analyse(streams.spans_of(streams.traced(lambda: trainer.step(installed), Path(folder) / "trace.json")))
