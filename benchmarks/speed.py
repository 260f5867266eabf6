"""Step time and memory of every rival at every length, side by side in one run.

    bash benchmarks/gpu.sh speed [--workloads gpt7b llama8b ulysses8] [--lengths 65536 …] [--rivals …] [--host-gib X]
                                 [--budget-s 420] [--device cuda|cpu] [--out DIR]

Per point (workload, length): a rival is put on the model, warmed up, timed, taken off, and the next has its turn; then all of
them again, as far as the time goes. Points run from short to long; those that the time budget does not hold are dropped and
named. A rival that runs out of memory is written down as such. At the shortest point of a workload every rival's gradients are
compared with those of no checkpointing, and the bar is what stock itself is off by when its GEMMs sum in other orders. Samples
during which ds_memo changed its setting are dropped and taken again (`dropped_s`; `unsettled` where it did not come to rest).

"ds_memo, swapping" keeps two layers on the device whatever there is room for, as the paper does: where everything fits, ds_memo
itself is plain training, and its speed would say nothing of swapping.

--host-gib lowers the host budget of ds_memo and of the paper's MEMO: host-bound points. A virtual machine whose memory grows as
it is used is made to grow first (benchmarks/host.py).

Details go into one archive beside the JSON: profiles, streams, traces as far as they are small.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks import attention, results, streams
from benchmarks import host as host_memory
from benchmarks.attention import HEADS
from benchmarks.noise import distance, noise
from benchmarks.predict import hardware_of, predict
from benchmarks.rivals import GIB, INPUT_OFFLOAD, OURS, RIVALS, SWAPPING, Budget, Installed, Rival
from benchmarks.timing import Memory, Trainer, clear, does_not_fit, homes, timed, use_expandable
from benchmarks.workloads import Shape, batch, build, shapes, step_flops, tokens_of
from ds_memo.profile.bandwidth import measure_bandwidth

ASSUMED_FLOPS = {"cuda": 3e14, "cpu": 3e9}
"""Per second, until the first step has been timed."""
DEAR_S = 3.0
"""Steps longer than this are not run with every allocator; the planned and the native one tell the story."""
AT_LEAST_S = 60.0
"""That the first point may take, whatever time there is."""
MOST_NOISE = 0.03
"""No samples excuse more than this; the bar beside no checkpointing allows as much."""
ALLOCATORS = ("paper, expandable", "ds_memo", "ds_memo, expandable")
URGENT = (OURS[-1], "none", "checkpoint", *INPUT_OFFLOAD, SWAPPING, "checkpoint+attention", "paper, planned", "paper")
"""In this order, and then the others: what a point cannot do without comes before its time is over."""


def visits(step_s: float) -> tuple[int, int]:
    """How often each rival has its turn at a point, and how many steps are timed then."""
    if step_s < 0.5:
        return 3, 3
    return (2, 3) if step_s < 1.5 else (2, 2)


def cost_s(rivals: Iterable[Rival], step_s: float) -> float:
    """What a point takes; recomputing rivals are a third longer, installing takes a while, and so do prediction and trace."""
    turns, steps = visits(step_s)
    return 12 * step_s + sum(turns * (rival.warm_up + steps) * step_s * 1.35 + turns * 0.5 * min(1.0, step_s) for rival in rivals)


def run_point(
    model: nn.Module,
    shape: Shape,
    length: int,
    rivals: list[Rival],
    budget: Budget,
    rate: float,
    compare: bool,
    folder: Path,
    until: float = math.inf,
) -> dict[str, Any]:
    """One point: raw samples, memory and reports of every rival.

    Args:
        rate: FLOP/s that a step is expected to reach.
        compare: the gradients too.
        folder: for the profile, the trace and the picture of the streams.
        until: no turn begins later, by time.perf_counter().
    """
    trainer = Trainer(model, batch(shape, length, budget.device))
    budget = replace(budget, ranks=shape.ranks, layer_forward_s=trainer.layer_forward_s(shape.layers))
    rows: dict[str, dict[str, Any]] = {rival.name: {"samples_s": [], "turns_s": []} for rival in rivals}
    point: dict[str, Any] = {"workload": shape.name, "length": length, "rows_of_this_rank": tokens_of(shape, length)}
    point |= {"rivals": rows, "failures": [], "layers": shape.layers}
    point |= {"layer_forward_s": budget.layer_forward_s, "host_budget": budget.host_bytes}

    def part(name: str, work: Callable[[], Any]) -> None:
        """One that breaks takes no rival's numbers with it."""
        if time.perf_counter() >= until:
            point[name] = {"skipped": "no time left"}
            return
        use_expandable(False, budget.device)
        try:
            point[name] = work()
        except Exception as error:
            traceback.print_exc()
            point[name] = {"skipped": f"{type(error).__name__}: {str(error)[:300]}"}
            point["failures"].append(f"{shape.name} {length}: {name}: {point[name]['skipped']}")
        clear(budget.device)

    if any(rival.name in OURS and rival.missing() is None for rival in rivals):  # before anything is timed
        part("predicted", lambda: predict(trainer, shape, length, budget, folder, hardware_of(budget.device)))
    turns, steps = visits(step_flops(shape, length) / rate)
    for turn in range(turns):
        for rival in sorted(rivals, key=_urgency):
            if broke := _turn(trainer, rival, budget, rows, steps, until):
                point["failures"].append(f"{shape.name} {length}: {rival.name} broke: {broke}")
        ours = [rival for rival in rivals if rival.name in (*OURS, SWAPPING) and rows[rival.name]["samples_s"]]
        if turn == 0 and compare:
            part("gradients", lambda: gradients(trainer, rivals, budget, rows))
        if turn == 0 and ours:
            part("streams", functools.partial(watch_streams, trainer, ours[-1], budget, folder, f"{shape.name}-{length}"))
    use_expandable(False, budget.device)
    for row in rows.values():
        if row["samples_s"] and "out" not in row:
            row["median_s"] = statistics.median(row["samples_s"])
            row["tflops"] = step_flops(shape, length) / row["median_s"] / 1e12
    return point


def _urgency(rival: Rival) -> int:
    return URGENT.index(rival.name) if rival.name in URGENT else len(URGENT)


def _turn(
    trainer: Trainer, rival: Rival, budget: Budget, rows: dict[str, dict[str, Any]], steps: int, until: float
) -> str | None:
    """Put a rival on the model, time it, take it off; what becomes of it is in its row.

    Returns:
        What broke, if it was not for want of memory.
    """
    row = rows[rival.name]
    if "out" in row:
        return None
    begin = time.perf_counter()
    if begin + max(row["turns_s"], default=0.0) > until:
        if not row["turns_s"]:
            row["out"] = "not tried: no time left"
        return None
    if (missing := rival.missing() or _too_much_host(rival, rows, budget)) is not None:
        row["out"] = missing
        return None
    broke = None
    use_expandable(rival.expandable, budget.device)
    try:
        with rival.on(trainer.model, budget) as installed:
            _visit(trainer, installed, rival, steps, row, first=not row["turns_s"])
    except Exception as error:  # one that breaks takes no other's numbers with it
        row["out"] = f"{type(error).__name__}: {str(error)[:300]}"
        if not does_not_fit(error):
            traceback.print_exc()
            broke = row["out"]
    for parameter in trainer.model.parameters():  # whatever a failed step left
        parameter.grad.zero_()
    clear(budget.device)
    row["turns_s"].append(time.perf_counter() - begin)
    return broke


def watch_streams(trainer: Trainer, rival: Rival, budget: Budget, folder: Path, name: str) -> dict[str, Any]:
    """One step as the profiler sees it."""
    path = folder / f"streams-{name}.json"
    with rival.on(trainer.model, budget) as installed:
        for _ in range(rival.warm_up):
            trainer.step(installed)
        spans = streams.record(lambda: trainer.step(installed), budget.device, path.with_suffix(".trace.json"))
    clear(budget.device)
    streams.save(spans, f"{name}: {rival.says}", path)
    return streams.analyse(spans)


def _visit(trainer: Trainer, installed: Installed, rival: Rival, steps: int, row: dict[str, Any], first: bool) -> None:
    device, unplanned = trainer.ids.device, {}
    for _ in range(rival.warm_up):
        memory = Memory(device)
        trainer.step(installed)
        if first and device.type == "cuda" and not arena(report := installed.report()):
            unplanned[homes(report)] = memory.read(1, lambda: None)["device_peak"]

    def warm_up() -> None:
        for _ in range(rival.warm_up):
            trainer.step(installed)

    block = timed(installed, device, lambda: [trainer.seconds(installed) for _ in range(steps)], warm_up)
    row["samples_s"] += block.samples_s
    if block.dropped_s:
        row["dropped_s"] = row.get("dropped_s", []) + block.dropped_s
    if not block.settled:
        row["unsettled"] = True
    if not first:
        return
    row["memory"] = block.memory.read(steps, lambda: trainer.step(installed))
    if arena(block.after) and (needed := unplanned.get(homes(block.after))):
        row["memory"]["unplanned_peak"] = needed
    if "stall_s" in block.after:
        stalls = {name: seconds - block.before["stall_s"][name] for name, seconds in block.after["stall_s"].items()}
        row["stall_s_per_step"] = {name: seconds / steps for name, seconds in stalls.items()}
    row["report"] = results.plain(block.after)


def arena(report: dict[str, Any]) -> int:
    """Bytes of planned addresses; 0: there are none, as where ds_memo is plain training."""
    return (report.get("plan") or {}).get("arena") or 0


def _too_much_host(rival: Rival, rows: dict[str, dict[str, Any]], budget: Budget) -> str | None:
    """PyTorch's own offloading knows no budget, and a host that is full kills the whole run."""
    saved = rows.get("none", {}).get("memory", {}).get("device_peak")
    if rival.name != "save_on_cpu" or budget.device.type != "cuda":
        return None
    if saved is None or saved > 0.8 * budget.host_bytes:
        known = "more than the device holds" if saved is None else f"{saved / GIB:.3g} GiB"
        return f"not tried: {known} to save, {budget.host_bytes / GIB:.3g} GiB of host memory"
    return None


# ---- gradients


def gradients(trainer: Trainer, rivals: list[Rival], budget: Budget, rows: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Every rival's gradients, once it is warm, against no checkpointing; the bar: the same model with GEMMs in other orders."""
    try:
        loss, want = trainer.gradients(Installed())
        bar = noise(lambda: trainer.gradients(Installed())[1], want, next(trainer.model.parameters()).dtype)
    except (RuntimeError, MemoryError) as error:
        if not does_not_fit(error):
            raise
        return {"skipped": f"no checkpointing does not fit: {str(error)[:200]}"}
    found: dict[str, Any] = {"bar": bar, "rivals": {}, "failures": []}
    for rival in rivals:
        if "out" in rows[rival.name] or rival.name == "none":
            continue
        with rival.on(trainer.model, budget) as installed:
            for _ in range(rival.warm_up):  # layers are analysed, addresses planned
                trainer.step(installed)
            got_loss, got = trainer.gradients(installed)
        worst = max(distance(got, want).items(), key=lambda item: item[1])
        found["rivals"][rival.name] = {"worst": worst[1], "of": worst[0], "loss_equal": bool(torch.equal(loss, got_loss))}
        if not worst[1] <= bar:
            found["failures"].append(f"gradients: {rival.name} is off by {worst[1]:.2e} at {worst[0]}, bar {bar:.2e}")
        clear(budget.device)
    return found


# ---- claims


def spread(samples: list[float]) -> float:
    """Width of the middle half of the samples over their median."""
    if len(samples) < 2:
        return 0.0
    low, middle, high = statistics.quantiles(samples, n=4, method="inclusive")
    return (high - low) / middle


def claims(point: dict[str, Any]) -> list[dict[str, Any]]:
    """The bars of the issue that this point can speak to: name, measured, bar, held.

    Where two ways train that may be equally fast, they are told apart no further than their samples tell: `margin`, the middle
    halves of both (root of the sum of squares), is beside the bar, and MOST_NOISE at most.
    """
    rows = {name: row for name, row in point["rivals"].items() if "median_s" in row}
    our_row = next((rows[name] for name in reversed(OURS) if name in rows), None)  # planned is what a user gets
    if our_row is None:
        return []
    ours, found = our_row["median_s"], []

    def say(name: str, value: float, bar: float, at_most: bool, **margin: float) -> None:
        held = value <= bar + margin.get("margin", 0.0) if at_most else value >= bar
        found.append({"claim": name, "value": value, "bar": bar, **margin, "held": held})

    if "none" in rows:
        say("step / no checkpointing", ours / rows["none"]["median_s"], 1.03, at_most=True)
        if SWAPPING in rows:
            say("step / no checkpointing, swapping", rows[SWAPPING]["median_s"] / rows["none"]["median_s"], 1.03, at_most=True)
    long = 65536 <= point["length"] <= 262144
    for name in ("checkpoint", *INPUT_OFFLOAD):
        if long and name in rows:
            say(f"{name} / step", rows[name]["median_s"] / ours, 1.20, at_most=False)
    others = {name: row["median_s"] for name, row in rows.items() if name not in (*OURS, SWAPPING, "none")}
    if others:
        best = min(others, key=others.get)
        margin = min(MOST_NOISE, math.hypot(spread(our_row["samples_s"]), spread(rows[best]["samples_s"])))
        say(f"step / best rival ({best})", ours / others[best], 1.0, at_most=True, margin=margin)
    for name in OURS:
        host = rows.get(name, {}).get("report", {}).get("host")
        if host:
            say(f"host slab / budget, {name}", host["slab"] / host["budget"], 1.0, at_most=True)
    for name in (*OURS, SWAPPING):
        row = rows.get(name, {})
        memory = row.get("memory", {})
        if not arena(row.get("report", {})) or "cuda_mallocs_per_step" not in memory:
            continue
        calls = memory["cuda_mallocs_per_step"] + memory["cuda_frees_per_step"]
        say(f"cudaMalloc and cudaFree a step, {name}", calls, 0.0, at_most=True)
        if "unplanned_peak" in memory:  # the peak with a plan has the arena in it, however large
            over = memory["device_reserved_peak"] / memory["unplanned_peak"]
            say(f"reserved / requested without a plan, {name}", over, 1.02, at_most=True)
    return found


# ---- the whole run


def measure(
    names: list[str],
    lengths: list[int] | None,
    rivals: list[Rival],
    budget: Budget,
    budget_s: float,
    unfinished: Path,
    details: Path,
    say: Callable[[str], None],
    more: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """All points that the time budget holds.

    Args:
        unfinished: the file that a run which is ended from outside leaves behind.
        details: a folder for what each point writes beside.
        more: what was measured before, for that file.
    """
    begin = time.perf_counter()
    table = shapes(budget.device)
    wanted = [(table[name], length) for name in names for length in lengths or table[name].lengths]
    wanted.sort(key=lambda point: step_flops(*point))
    dtype = torch.bfloat16 if budget.device.type == "cuda" else torch.float32
    rate, slower = ASSUMED_FLOPS[budget.device.type], 1.0
    points, dropped, failures = [], [], []
    compared: set[str] = set()
    for shape, length in wanted:
        step_s = step_flops(shape, length) / rate
        taking = [rival for rival in rivals if step_s < DEAR_S or rival.name not in ALLOCATORS]
        began = time.perf_counter()
        left = budget_s - (began - begin)
        needs = cost_s(taking, step_s) * slower
        if points and needs > left:
            dropped.append({"workload": shape.name, "length": length, "needs_s": needs, "left_s": max(0.0, left)})
            say(f"{shape.name} {length}: dropped, needs about {needs:.0f} s and {max(0.0, left):.0f} s are left")
            continue
        say(f"{shape.name}, {length} tokens")
        until = began + max(left, AT_LEAST_S)
        try:
            model = build(shape, budget.device, dtype)
            compare = shape.name not in compared
            point = run_point(model, shape, length, taking, budget, rate, compare, details, until)
        except Exception as error:
            traceback.print_exc()
            failures.append(f"{shape.name} {length}: {type(error).__name__}: {str(error)[:500]}")
            continue
        finally:
            model = None
            clear(budget.device)
        compared.add(shape.name)
        point["claims"] = claims(point)
        point["seconds"] = time.perf_counter() - began
        points.append(point)
        unfinished.write_text(json.dumps(results.plain((more or {}) | {"points": points})) + "\n")
        _print(point, say)
        slower = max(1.0, point["seconds"] / cost_s(taking, step_s))  # locking host memory, above all
        fast = [row["tflops"] for row in point["rivals"].values() if "tflops" in row]
        rate = max(fast, default=rate / 1e12) * 1e12
    unfinished.unlink(missing_ok=True)
    failures += [failure for point in points for failure in (*point["failures"], *point.get("gradients", {}).get("failures", ()))]
    return {"points": points, "dropped": dropped, "failures": failures, "seconds": time.perf_counter() - begin}


def _print(point: dict[str, Any], say: Callable[[str], None]) -> None:
    for name, row in point["rivals"].items():
        if "median_s" not in row:
            say(f"    {name:22s} {row['out'][:110]}")
            continue
        spread = (max(row["samples_s"]) - min(row["samples_s"])) / row["median_s"]
        text = f"    {name:22s} {row['median_s'] * 1e3:10.1f} ms ±{50 * spread:4.1f} %  {row['tflops']:7.3g} TFLOP/s"
        say(text + f"  device {row['memory']['device_peak'] / GIB:7.3f} GiB")
    results.say_claims(point["claims"])
    if point.get("predicted"):
        said = point["predicted"]
        layers = (said.get("solver") or {}).get("layers_s")
        text = (
            said.get("skipped")
            or said.get("why")
            or f"alpha {said['alpha']:.3g}, {said['resident_layers']} resident, layers {layers * 1e3:.1f} ms"
        )
        say(f"      predicted: {text}" + (f", step {said['step_s'] * 1e3:.1f} ms" if said.get("step_s") else ""))
    if "hidden_share" in point.get("streams", ()):
        seen = point["streams"]
        hidden = ", ".join(f"{row} {share:.1%} hidden" for row, share in seen["hidden_share"].items() if share is not None)
        say(f"      streams: compute busy {seen['compute_share']:.1%} of {seen['span_s'] * 1e3:.1f} ms; {hidden or 'no copies'}")
    if "rivals" in point.get("gradients", {}):
        worst = max((row["worst"] for row in point["gradients"]["rivals"].values()), default=0.0)
        say(f"      gradients off by at most {worst:.2e}, bar {point['gradients']['bar']:.2e}")


def make_budget(device: torch.device, host_gib: float | None, device_gib: float | None = None) -> Budget:
    host = host_memory.budget(host_gib, device)
    rate = measure_bandwidth(device, device.type == "cuda", min(host, GIB))[0]
    device_bytes = None if device_gib is None else int(device_gib * GIB)
    return Budget(device, host, device_bytes=device_bytes, bandwidth=rate)


def add_common(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--workloads", nargs="+", choices=["gpt7b", "llama8b", "ulysses8"])
    parser.add_argument("--rivals", nargs="+", choices=[*RIVALS, "all"], default=["all"])
    parser.add_argument("--host-gib", type=float, help="host budget of ds_memo and of the paper's MEMO")
    parser.add_argument("--budget-s", type=float, default=420.0, help="seconds that the whole may take")
    parser.add_argument("--out", help="folder for the result; absent: $OUT, else benchmarks/results")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser("gpu.sh speed", description=__doc__.splitlines()[0])
    add_common(parser)
    parser.add_argument("--lengths", type=int, nargs="+", help="tokens; absent: all of a workload")
    parser.add_argument("--device-gib", type=float, help="device budget that ds_memo is told; absent: all there is")
    parser.add_argument("--no-attention", action="store_true", help="leave the attention kernels out")
    options = parser.parse_args(arguments)
    device = results.device_or_exit(options.device, "speed")
    rivals = list(RIVALS.values()) if "all" in options.rivals else [RIVALS[name] for name in options.rivals]
    names = options.workloads or ["gpt7b", "llama8b", "ulysses8"]
    folder = results.folder(options.out)
    begin = time.perf_counter()
    kernels = None
    if not options.no_attention:
        heads = HEADS if device.type == "cuda" else 2
        kernels = attention.measure(device, attention.lengths_for(device), heads)
        clear(device)
    with tempfile.TemporaryDirectory() as cache, tempfile.TemporaryDirectory() as made:
        details, unfinished = Path(made), folder / "speed-unfinished.json"
        # Profiles in the cache are of this run, not of one before.
        budget = replace(make_budget(device, options.host_gib, options.device_gib), cache_dir=cache)
        left = options.budget_s - (time.perf_counter() - begin)
        found = measure(names, options.lengths, rivals, budget, left, unfinished, details, results.say, {"attention": kernels})
        found |= {"attention": kernels, "settings": vars(options)}
        return results.write("speed", device, found, options.out, details)


if __name__ == "__main__":
    sys.exit(main())
