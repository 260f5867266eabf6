"""Planned addresses in training: the requests that get theirs, and the arena's size against other ways to allocate.

    python -m benchmarks.addresses [--layers 8] [--alpha 0.5] [--json PATH]

A GPT and a Llama shape at small scale train on this CPU with AdamW, once with PyTorch's allocator and once with the op. Printed:

    per iteration   requests of 64 KiB and more inside planned phases, and how many of them got their planned address;
                    bar: 99 % from the third iteration on. Loss and every gradient are compared to the bit
    arena           bytes, the plan's peak, and the lower bound: the most that is alive at once
    compared with   the bytes that PyTorch would reserve for the same requests (simulated, caching_allocator.py), natively and
                    with expandable segments (whose segments of 20 MiB weigh heavily at this scale); and the bytes of a plan
                    with two fixed rounding buffers, in which kept outputs and reloads of odd and even layers live
"""

from __future__ import annotations

import argparse
import copy
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

import ds_memo
from benchmarks import results
from benchmarks.caching_allocator import simulate
from benchmarks.timing import served
from benchmarks.workloads import small_models
from ds_memo.plan import plan_trace
from ds_memo.plan.phases import LayerPass
from ds_memo.plan.trace import Phase, Trace, rounded
from ds_memo.planned_alloc.request_log import RequestLog
from ds_memo.runtime.handle import MemoHandle

BAR, ITERATIONS, TOKENS = 0.99, 6, (2, 512)


def train(model: nn.Module, handle: MemoHandle) -> list[dict[str, Any]]:
    """Loss, gradients and counts of every iteration."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    rows = []
    for number in range(ITERATIONS):
        before = handle.report()["plan"]
        ids = torch.randint(0, 512, TOKENS, generator=torch.Generator().manual_seed(number))
        optimizer.zero_grad()
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        grads = [parameter.grad.clone() for parameter in model.parameters()]
        optimizer.step()
        between = served(before, handle.report()["plan"]) if before else {}
        counts = {"hit": between["hits"], **between["misses"]} if between else {}
        rows.append({"loss": loss.item(), "grads": grads, "counts": counts})
    return rows


def with_fixed_regions(log: RequestLog, trace: Trace, layers: list[Any]) -> int:
    """Bytes of a plan in which kept outputs and reload buffers of every second layer share one fixed region."""
    names = [visit.phase for visit in log.visits]
    buffers = {layer.latest.layout.buffer_bytes for layer in layers}
    inside: set[str] = set()
    kept: Counter[str] = Counter()
    for v, visit in enumerate(log.visits):
        its = visit.phase if isinstance(visit.phase, LayerPass) else None
        for k, (size, death) in enumerate(zip(visit.sizes, log.deaths[v], strict=True)):
            dies_in = names[death[0]] if death[0] < len(names) else None
            # An output is freed when the layer after the next begins.
            if its and not its.backward and dies_in == its._replace(layer=its.layer + 2):
                inside.add(f"{v}:{k}")
                kept[str(its)] += rounded(size)
            elif its and its.backward and size in buffers:
                inside.add(f"{v}:{k}")
                kept[f"reload {its}"] = size
    requests, phases = [], []
    for phase in trace.phases:
        first = len(requests)
        requests += [request for request in trace.requests[phase.first : phase.end] if request.id not in inside]
        phases.append(Phase(phase.name, first, len(requests)))
    rest = plan_trace(replace(trace, requests=tuple(requests), phases=tuple(phases)))
    return 2 * max(kept.values(), default=0) + rest.peak


def measure(name: str, model: nn.Module, alpha: float) -> dict[str, Any]:
    config = {"alpha": alpha, "resident_layers": 2}
    runs = {}
    for planned in (False, True):
        twin = copy.deepcopy(model)
        handle = ds_memo.attach(twin, {**config, "plan": {"enabled": planned}})
        runs[planned] = train(twin, handle)
        if planned:
            report, addresses = handle.report()["plan"], handle._session.addresses
            trace = addresses.log.trace()
            fixed = with_fixed_regions(addresses.log, trace, handle._session.layers)
        handle.detach()
    failures = []
    print(f"{name}: alpha {alpha}, {len(trace.requests)} requests a pass")
    for number, (with_op, without) in enumerate(zip(runs[True], runs[False], strict=True), 1):
        counts = with_op["counts"]
        share = counts["hit"] / max(1, sum(counts.values()))
        equal = with_op["loss"] == without["loss"] and all(map(torch.equal, with_op["grads"], without["grads"]))
        verdict = "" if number < 3 else "met" if share >= BAR else "MISSED"
        print(f"    iteration {number}: {counts}, loss and gradients {'bit-identical' if equal else 'DIFFERENT'} {verdict}")
        if not equal or verdict == "MISSED":
            failures.append(f"{name} iteration {number}: {counts}, equal {equal}")
    rows = {
        "arena": report["arena"],
        "plan's peak": report["peak"],
        "lower bound": report["lower_bound"],
        "two fixed rounding buffers": fixed,
        "native (simulated)": simulate(trace, iterations=2).reserved,
        "expandable segments (simulated)": simulate(trace, expandable=True, iterations=2).reserved,
    }
    for label, nbytes in rows.items():
        print(f"    {label:32s} {nbytes:12,d} bytes  {nbytes / report['lower_bound']:.3f} of the lower bound")
    if report["arena"] != report["peak"]:
        failures.append(f"{name}: arena {report['arena']}, peak {report['peak']}")
    return {"bytes": rows, "counts": [row["counts"] for row in runs[True]], "failures": failures}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--alpha", type=float, default=0.5)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    result = {
        name: measure(name, model, options.alpha)
        for name, model in small_models(512, options.layers, hidden=256, heads=2, kv_heads=1, llama_ffn=896).items()
    }
    return results.end(result, [failure for part in result.values() for failure in part["failures"]], options.json)


if __name__ == "__main__":
    sys.exit(main())
