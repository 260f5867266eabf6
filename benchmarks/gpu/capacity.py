"""The longest sequence that each rival can train within the same device and host memory.

    bash benchmarks/gpu.sh capacity [--workloads gpt7b] [--device-gib 16] [--host-gibs 32 2] [--rivals …|all]
                                    [--lengths 106496 204800] [--device cuda|cpu] [--out DIR]

Per rival and host budget a process of its own doubles the length until it does not fit, then closes in until what fits and what
does not are within a sixteenth. A length fits if whole steps run: two during the search (ds_memo's first leaves more memory
alone than later ones), and at the end as many as planned addresses need, and one more. ds_memo and the rivals
that get furthest come first. With `--lengths` each rival tries these instead, in full, so that step times compare: the emulator
knows where each one ends.

On CUDA the device budget is PyTorch's own limit of this process, and host memory that a rival pins beyond the host budget counts
as not fitting. A CPU only tries the harness. The smaller host budget is the case where host memory binds.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from benchmarks import results
from benchmarks.child import found_by_child, tell
from benchmarks.open_slab import held_open
from benchmarks.rivals import MIXERS_WHOLE, PLANNED, RIVALS, SWAPPING, Budget, Installed
from benchmarks.speed import add_common, make_budget
from benchmarks.timing import Memory, Trainer, clear, does_not_fit, use_expandable
from benchmarks.workloads import Shape, batch, build, shapes
from ds_memo.units import GIB

CLOSE = 1 / 16
BEST = (PLANNED, "alst", "hf_offload", "deepspeed", "checkpoint")
"""Searched by default."""
ALL = tuple(name for name in dict.fromkeys((*BEST, *RIVALS)) if name not in (SWAPPING, MIXERS_WHOLE))


@dataclass
class Search:
    """The longest length that fits, by doubling and halving.

    Args:
        grain: lengths are multiples of it.
        start: where to begin.
        most: not beyond.
    """

    grain: int
    start: int
    most: int
    fits: list[int] = field(default_factory=list)
    shortest_that_fails: int | None = None

    @property
    def longest(self) -> int:
        return max(self.fits, default=0)

    def lengths(self) -> Iterator[int]:
        """Yield lengths to try; the caller passes each result to :meth:`learn` before it takes the next."""
        return iter(self._next, None)

    def learn(self, length: int, fits: bool) -> None:
        """Note a result; the latest for a length counts."""
        if fits:
            self.fits.append(length)
        else:
            self.fits = [shorter for shorter in self.fits if shorter < length]
            self.shortest_that_fails = min(length, self.shortest_that_fails or length)

    def _next(self) -> int | None:
        low, high = self.longest, self.shortest_that_fails
        if high is None:
            length = 2 * low if low else self.start
            return length if length <= self.most else None
        if not low:
            return self._rounded(high / 2) or None
        if high - low <= max(self.grain, low * CLOSE):
            return None
        middle = self._rounded((low + high) / 2)
        return middle if low < middle < high else None

    def _rounded(self, length: float) -> int:
        return int(length) // self.grain * self.grain


def probe(shape: Shape, length: int, rival: str, budget: Budget, model: torch.nn.Module, warm_up: int = 1) -> dict[str, Any]:
    """Run steps of one length; return if they fit, the seconds of the last, and the norm of the gradients before it.

    Args:
        warm_up: steps before the one that is timed; at least 1.
    """
    device = budget.device
    found: dict[str, Any] = {"length": length, "steps": warm_up + 1}
    try:
        trainer = Trainer(model, batch(shape, length, device))
        with RIVALS[rival].on(model, budget) as installed:
            memory = Memory(device)
            for _ in range(warm_up - 1):
                trainer.step(installed)
            found["gradient_norm"] = trainer.gradient_norm(installed)
            found["step_s"] = trainer.seconds(installed)
            found |= memory.read(warm_up + 1, lambda: trainer.step(installed))
            found["report"] = results.plain(installed.report())
        if (pinned := found.get("pinned_by_torch_peak", 0)) > budget.host_bytes:
            raise MemoryError(f"{pinned} bytes of host memory pinned, {budget.host_bytes} allowed")
        found["fits"] = True
    except Exception as error:
        if not does_not_fit(error):
            raise
        found |= {"fits": False, "why": f"{type(error).__name__}: {str(error)[:300]}"}
    for parameter in model.parameters():
        parameter.grad = None
    clear(device)
    return found


def begin(shape: Shape, rival: str, budget: Budget) -> tuple[torch.nn.Module, int]:
    """Limit this process to the budget, load the libraries, and return a model and the grain of its lengths."""
    device, cuda = budget.device, budget.device.type == "cuda"
    if cuda:
        whole = torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, budget.device_bytes / whole))  # of the current device
        use_expandable(RIVALS[rival].expandable, device)
    model = build(shape, device)
    grain = 1024 if cuda else 8
    Trainer(model, batch(shape, grain, device)).step(Installed())
    return model, grain


def search_here(
    shape: Shape,
    rival: str,
    budget: Budget,
    tell: Callable[[dict[str, Any]], None],
    lengths: Sequence[int] = (),
) -> None:
    """Search for one rival in this process, and tell the result of each length.

    Args:
        lengths: tried in full, instead of a search.
    """
    model, grain = begin(shape, rival, budget)
    search = Search(grain, start=8 * grain, most=1 << 22)
    warm_up = RIVALS[rival].warm_up

    def tried(length: int, steps: int) -> bool:
        found = probe(shape, length, rival, budget, model, steps)
        search.learn(length, found["fits"])
        tell(found)
        return found["fits"]

    if lengths:
        tried(search.start, min(1, warm_up))  # as a search begins: layers are profiled where there is room
    for length in lengths:
        tried(length, warm_up)
    while not lengths:
        for length in search.lengths():
            tried(length, min(1, warm_up))
        if not search.longest or warm_up <= 1 or tried(search.longest, warm_up):
            return


def longest(probes: list[dict[str, Any]]) -> dict[str, Any] | None:
    """Return the longest probe that fits; the last probe of a length counts."""
    last_words = {found["length"]: found for found in probes}
    return max((found for found in last_words.values() if found["fits"]), key=lambda found: found["length"], default=None)


def search_apart(
    shape: Shape, rival: str, budget: Budget, lengths: Sequence[int] = ()
) -> tuple[list[dict[str, Any]], str | None]:
    """Search in a process of its own, which may run out of memory; its probes until then count.

    Returns:
        The probes, and why it ended early if it did.
    """
    arguments = {"child": rival, "workloads": shape.name, "device": budget.device.type}
    arguments |= {"host-bytes": budget.host_bytes, "device-bytes": budget.device_bytes}
    words = [f"--{name}={value}" for name, value in arguments.items()]
    words += ["--lengths", *map(str, lengths)] if lengths else []
    return found_by_child("benchmarks.capacity", *words)


def measure(run: results.Run, shape: Shape, rivals: list[str], budgets: list[Budget], lengths: Sequence[int] = ()) -> None:
    """Search with every rival at every budget.

    Args:
        lengths: that every rival trains instead of a search.
    """
    rows: list[dict[str, Any]] = []
    for rival, budget in itertools.product(rivals, budgets):
        name = f"capacity: {rival} at {budget.host_bytes / GIB:.3g} GiB"
        probes, why = run.attempt(name, search_apart, shape, rival, budget, lengths) or ([], "it broke")
        best = longest(probes)
        fails = min((found["length"] for found in probes if not found["fits"]), default=None)
        row: dict[str, Any] = {"workload": shape.name, "rival": rival, "host_bytes": budget.host_bytes}
        row |= {"device_bytes": budget.device_bytes, "longest": best and best["length"], "fails_at": fails}
        row |= {"step_s": best and best["step_s"], "ended_early": why, "probes": probes}
        rows.append(row)
        run.found["rivals"].append(row)
        if why and why.startswith("exit"):
            run.failures.append(f"{name}: {why}")
        run.save()
        text = f"{best['length']} tokens, {best['step_s']:.3g} s a step" if best else "no length fits"
        results.say(f"    host {budget.host_bytes / GIB:6.3g} GiB  {rival:22s} {text}{f' ({why[:60]})' if why else ''}")
    run.failures += unlike(rows)


def unlike(rows: list[dict[str, Any]]) -> list[str]:
    """Return the lengths at which rivals' gradients have other norms than most."""
    norms: dict[int, dict[str, float]] = {}
    for row in rows:
        for found in row["probes"]:
            if found["fits"]:
                norms.setdefault(found["length"], {})[row["rival"]] = found["gradient_norm"]
    return [failure for length, of in norms.items() for failure in results.unlike(of, f"capacity, {length} tokens")]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser("gpu.sh capacity", description=__doc__.splitlines()[0])
    add_common(parser)
    parser.add_argument("--host-gibs", type=float, nargs="+", help="host budgets, one after the other; absent: 32 and 2")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--host-bytes", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--device-bytes", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    names = options.workloads or ["gpt7b"]
    if options.child:
        device = torch.device(options.device)
        with held_open(Budget(device, options.host_bytes, options.device_bytes)) as budget:
            search_here(shapes(device)[names[0]], options.child, budget, tell, options.lengths)
        return 0
    device = results.device_or_exit(options.device, "capacity")
    cuda = device.type == "cuda"
    device_gib = options.device_gib or (16.0 if cuda else 0.004)
    hosts = options.host_gibs or ([32.0, 2.0] if cuda else [0.5, 0.001])
    rivals = list(ALL if "all" in options.rivals else options.rivals or BEST)
    run = results.Run("capacity", device, options.out, vars(options))
    run.found["rivals"] = []
    whole = make_budget(run, device, max(hosts), device_gib)  # the machine may have to grow first
    budgets = [replace(whole, host_bytes=int(gib * GIB)) for gib in hosts]
    for name in names:
        results.say(f"{name}: {device_gib:.3g} GiB of device memory")
        run.attempt(name, measure, run, shapes(device)[name], rivals, budgets, options.lengths)
    return run.finish()


if __name__ == "__main__":
    sys.exit(main())
