"""One point of `speed`: every rival at one length of a workload, in turns; then streams.

A rival is put on the model, warmed up, timed, taken off, and the next has its turn. All are warmed up by as many steps, and every
other turn goes through them backwards: a card that is held to a power limit is slower when it is warm.
"""

from __future__ import annotations

import statistics
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks import results, streams
from benchmarks.emulated_process import is_emulated
from benchmarks.predict import hardware_of, in_words, predict
from benchmarks.rivals import INPUT_OFFLOAD, OURS, PLANNED, RIVALS, SWAPPING, Budget, Installed, Rival
from benchmarks.timing import Memory, Trainer, clear, does_not_fit, solution, use_expandable
from benchmarks.workloads import Shape, batch, build
from ds_memo.hf.model_flops import model_flops
from ds_memo.memory.host import available_bytes

WARM_UP = max(rival.warm_up for rival in RIVALS.values())
"""Steps of every rival before it is timed."""
NEEDED = (PLANNED, "none", "checkpoint", *INPUT_OFFLOAD, SWAPPING)
"""Rivals of `speed` where no lengths are given."""
URGENT = (*NEEDED, "checkpoint+attention", "alst")
"""Order of the rivals, then the others: a run may be ended from outside."""

Rows = dict[str, dict[str, Any]]
"""What was found of each rival, by its name. "out" says why there is no more of it."""


def run_point(
    shape: Shape,
    length: int,
    rivals: list[Rival],
    budget: Budget,
    turns: int = 1,
    steps: int = 3,
    tell: Callable[[dict[str, Any]], Any] = lambda point: None,
) -> dict[str, Any]:
    """Measure one point: raw samples, memory and reports of every rival.

    Args:
        turns: of each rival.
        steps: timed in a turn.
        tell: called with the point after the prediction, and after every turn of a rival.
    """
    device = budget.device
    trainer = Trainer(build(shape, device), batch(shape, length, device))
    flops = model_flops(trainer.model, length) or 0.0
    rivals = sorted(rivals, key=urgency)
    rows: Rows = {rival.name: {"samples_s": []} for rival in rivals}
    point: dict[str, Any] = {"workload": shape.name, "length": length, "layers": shape.layers, "rivals": rows, "failures": []}
    point |= {"host_budget": budget.host_bytes, "device_budget": budget.device_bytes}

    def part(name: str, work: Callable[[], Any]) -> None:
        """Run a part; one that raises leaves the rivals' numbers alone."""
        try:
            use_expandable(False, device)
            point[name] = work()
        except Exception as error:
            traceback.print_exc()
            point[name] = {"skipped": f"{type(error).__name__}: {str(error)[:300]}"}
            point["failures"].append(f"{shape.name} {length}: {name}: {point[name]['skipped']}")
        clear(device)

    if any(rival.name in OURS for rival in rivals):  # before anything is timed
        part("predicted", lambda: predict(trainer, length, budget, hardware_of(device)))
        results.say(f"      predicted: {in_words(point['predicted'])}")
        tell(point)
    try:
        for turn in range(turns):
            taking = [rival for rival in rivals if "out" not in rows[rival.name]]
            for rival in taking[::-1] if turn % 2 else taking:
                if broke := _turn(trainer, rival, budget, rows[rival.name], steps):
                    point["failures"].append(f"{shape.name} {length}: {rival.name} broke: {broke}")
                _sum_up(rows[rival.name], flops)
                tell(point)
        swaps = [rival for rival in rivals if rival.name in (*OURS, SWAPPING) and rows[rival.name]["samples_s"]]
        if swaps and device.type == "cuda" and not is_emulated():  # the profiler wants a driver
            seen = max(swaps, key=lambda rival: rival.name == SWAPPING)
            part("streams", lambda: watch_streams(trainer, seen, budget))
        use_expandable(False, device)
        norms = {name: row["gradient_norm"] for name, row in rows.items() if "gradient_norm" in row}
        point["failures"] += results.unlike(norms, f"{shape.name} {length}")
    except Exception as error:  # not even what comes after a turn works: the device is lost, the numbers are not
        traceback.print_exc()
        point["failures"].append(f"{shape.name} {length}: {type(error).__name__}: {str(error)[:500]}")
    return point


def _sum_up(row: dict[str, Any], flops: float) -> None:
    """Add the median and TFLOP/s; a rival that broke in a later turn gets none."""
    row.pop("median_s", None), row.pop("tflops", None)
    if row["samples_s"] and "out" not in row:
        row["median_s"] = statistics.median(row["samples_s"])
        row["tflops"] = flops / row["median_s"] / 1e12


def urgency(rival: Rival) -> int:
    return URGENT.index(rival.name) if rival.name in URGENT else len(URGENT)


def _turn(trainer: Trainer, rival: Rival, budget: Budget, row: dict[str, Any], steps: int) -> str | None:
    """Put a rival on the model, time it, take it off, and note the result in its row.

    Returns:
        The error, unless memory ran out.
    """
    if budget.slab is not None and own_pinned_bytes(trainer, rival) > available_bytes():
        budget.slab.pool.release()
    broke = None
    use_expandable(rival.expandable, budget.device)
    try:
        with rival.on(trainer.model, budget) as installed:
            _visit(trainer, installed, steps, row, first=not row["samples_s"])
    except Exception as error:  # one that breaks takes no other's numbers with it
        row["out"] = f"{type(error).__name__}: {str(error)[:300]}"
        if not does_not_fit(error):
            traceback.print_exc()
            broke = row["out"]
    for parameter in trainer.model.parameters():  # a failed step may have left gradients
        parameter.grad.zero_()
    clear(budget.device)
    return broke


def _visit(trainer: Trainer, installed: Installed, steps: int, row: dict[str, Any], first: bool) -> None:
    """Time steps under one solution. If it changes meanwhile, drop the samples and take them again, twice at most."""
    for tries in (3, 2, 1):
        for _ in range(WARM_UP):
            trainer.step(installed)
        before, memory = installed.report(), Memory(trainer.ids.device)
        samples, after = [trainer.seconds(installed) for _ in range(steps)], installed.report()
        if settled := solution(before) == solution(after):
            break
        if tries > 1:
            row["dropped_s"] = row.get("dropped_s", []) + samples
    row["samples_s"] += samples
    if not settled:
        row["unsettled"] = True
    if not first:
        return
    row["memory"] = memory.read(steps, lambda: trainer.step(installed))
    row["gradient_norm"] = trainer.gradient_norm(installed)
    if "stall_s" in after:
        row["stall_s_per_step"] = {name: (s - before["stall_s"][name]) / steps for name, s in after["stall_s"].items()}
    row["report"] = results.plain(after)


def own_pinned_bytes(trainer: Trainer, rival: Rival) -> int:
    """Return the most bytes that a rival pins through PyTorch, which rounds to powers of two."""
    config, size = trainer.model.config, next(trainer.model.parameters()).element_size()
    inputs = config.num_hidden_layers * trainer.ids.numel() * config.hidden_size * size
    return 2 * inputs if rival.name in (*INPUT_OFFLOAD, "alst") else 0


def watch_streams(trainer: Trainer, rival: Rival, budget: Budget) -> dict[str, Any]:
    """Profile one step and return its streams' analysis."""
    with rival.on(trainer.model, budget) as installed, tempfile.TemporaryDirectory() as folder:
        for _ in range(rival.warm_up):
            trainer.step(installed)
        return streams.analyse(streams.spans_of(streams.traced(lambda: trainer.step(installed), Path(folder) / "trace.json")))
