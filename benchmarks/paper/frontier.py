"""The longest sequence of Llama-3-8B on eight H100, beside UPipe's measurement: python -m benchmarks.frontier [FILE.json]

UPipe (arXiv 2602.21196) measured 5 Mi tokens and recomputes attention, as all that checkpoints whole layers. ds_memo's rows are
estimated: with host memory alone, and with drives; where no layer recomputes attention, and where some may. Beside each stands
the same step with all layers checkpointed, MLP in tiles, and copies that hide. Both have FlashAttention-3's rates.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.published_runs import answer, machine, model
from ds_memo.estimate.estimate import estimate
from ds_memo.estimate.question import OK, Estimate, Question
from ds_memo.units import GIB

QUARTER = 1 << 18
"""Tokens; lengths are whole multiples of it."""
DRIVES = {"nvme_memory": 15000 * GIB, "nvme_write": 48e9, "nvme_read": 48e9}
UPIPE, KERNEL = 5 << 20, "fa3"


def longest(asked: Question, recomputes: bool) -> Estimate | None:
    """Return the longest that fits.

    Args:
        recomputes: layers may recompute attention.
    """
    found, low, high = None, 0, 16 << 20
    while high - low > QUARTER:
        middle = (low + high) // (2 * QUARTER) * QUARTER
        tried = estimate(replace(asked, seq_length=middle))
        if tried.status == OK and (recomputes or not tried.placed["attention_recomputed"]):
            found, low = tried, middle
        else:
            high = middle
    return found


def row(name: str, found: Estimate | None) -> dict[str, Any]:
    if found is None:
        return {"name": name, "tokens": 0}
    tokens = found.question.seq_length
    rival = {
        "model": "llama3-8b",
        "gpus": 8,
        "sp": 8,
        "kernel": KERNEL,
        "fused": True,
        "mlp": "tiled",
        "loss": "chunked",
        "inputs": 3,
    }
    return {
        "name": name,
        "tokens": tokens,
        "step_s": found.step_s,
        "checkpointed_s": answer(rival | {"tokens": tokens}).seconds,
        "attention_recomputed": found.placed["attention_recomputed"],
        "device_gib": found.device_total / GIB,
        "host_gib": found.host_bytes / GIB,
        "nvme_gib": found.nvme_bytes / GIB,
        "nvme_tb_per_day": found.written_a_day / 1e12,
        "binding": found.binding,
    }


def main(out: str | None = None) -> None:
    asked = Question(model("llama3-8b", fused=True), machine(KERNEL), 8, UPIPE)
    drives = replace(asked, hardware=replace(asked.hardware, **DRIVES))
    ways = [(f"{where}, {what}", node, recomputes) for what, recomputes in (("attention once", False), ("any", True))
            for where, node in (("host", asked), ("host and drives", drives))]  # fmt: skip
    rows = [row(name, longest(node, recomputes)) for name, node, recomputes in ways]
    rows += [row(f"{where}, UPipe's length", estimate(node)) for where, node in (("host", asked), ("host and drives", drives))]
    print("Estimated, not measured; h100.json's rates, 2,048 GiB of host memory, drives of 15,000 GiB and 48 GB/s")
    head = "tokens", "step s", "checkpointed, s", "layers that recompute attention", "device, host, drives GiB"
    print(f"| ds_memo | {' | '.join(head)} |")
    print("|---|---|---|---|---|---|")
    for found in rows:
        if not found["tokens"]:
            print(f"| {found['name']} | none |")
            continue
        sizes = ", ".join(f"{found[f'{place}_gib']:,.0f}" for place in ("device", "host", "nvme"))
        numbers = f"{found['tokens'] / 2**20:.4g} Mi | {found['step_s']:,.0f} | {found['checkpointed_s']:,.0f}"
        print(f"| {found['name']} | {numbers} | {found['attention_recomputed']} of 32 | {sizes} |", flush=True)
    if out:
        said = {"estimated": True, "hardware": "h100", "kernel": KERNEL, "gpus": 8, "rows": rows}
        Path(out).write_text(json.dumps(said, indent=1) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
