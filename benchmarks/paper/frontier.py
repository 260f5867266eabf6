"""The longest sequence of Llama-3-8B on eight H100, beside UPipe's measurement: python -m benchmarks.frontier [FILE.json]

UPipe (arXiv 2602.21196) measured 5 Mi tokens and recomputes attention, as all that checkpoints whole layers. ds_memo's rows are
estimated: with host memory alone, and with drives; where no layer recomputes attention, and where some may, as in a run that sets
nothing. One row has the host memory with which no layer would at UPipe's length. Beside each step stands the same with all layers
checkpointed, MLP in tiles, and copies that hide, by the same kernel of attention: FlashAttention-3; PyTorch's choice; and that
around a ring of two. Ulysses gives a rank whole heads, and cuDNN's kernel gets at most 4 Mi tokens of one. A ring halves them.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.published_runs import answer, machine, model
from benchmarks.results import markdown
from ds_memo.attention_kernel import NAMES
from ds_memo.estimate.estimate import estimate
from ds_memo.estimate.question import OK, Estimate, Question
from ds_memo.placement import PlacementKind
from ds_memo.units import GIB

QUARTER = 1 << 18
"""Tokens; lengths are whole multiples of it."""
DRIVES = {"nvme_memory": 15000 * GIB, "nvme_write": 48e9, "nvme_read": 48e9}
UPIPE = 5 << 20
KERNEL = "flash_attn_3"
"""The kernel by which lengths and placements are found. Bytes are those of the others, too."""
KERNELS: tuple[tuple[str | None, int], ...] = ((KERNEL, 1), (None, 1), (None, 2))
"""Kernels of attention that are asked for, and the ranks of a ring."""


def fits(asked: Question, recomputes: bool) -> Estimate | None:
    """Return the estimate if it fits.

    Args:
        recomputes: layers may recompute attention.
    """
    tried = estimate(asked)
    return tried if tried.status == OK and (recomputes or not tried.placed["attention_recomputed"]) else None


def longest(asked: Question, recomputes: bool) -> Estimate | None:
    """Return the longest that fits."""
    found, low, high = None, 0, 16 << 20
    while high - low > QUARTER:
        middle = (low + high) // (2 * QUARTER) * QUARTER
        if tried := fits(replace(asked, seq_length=middle), recomputes):
            found, low = tried, middle
        else:
            high = middle
    return found


def smallest_host(asked: Question) -> Estimate | None:
    """Return the estimate with the least host memory for activations, to 16 GiB, with which no layer recomputes attention."""
    found, low, high = None, 0, 8192
    while high - low > 16:
        middle = (low + high) // 2
        if tried := fits(replace(asked, host_memory=middle * GIB), recomputes=False):
            found, high = tried, middle
        else:
            low = middle
    return found


def host_parts(found: Estimate) -> dict[str, float]:
    """Return the bytes of a node's host memory and drives by part."""
    assert found.run is not None
    stored = [pair for pair in zip(found.run.layers, found.placements, strict=True) if not pair[1].kind.on_device]
    parts = {
        "hidden states": sum(layer.nbytes("input") for layer, of in stored if of.kind is not PlacementKind.SWAPPED_WITHOUT_INPUT),
        "attention's outputs": sum(layer.attention_bytes for layer, of in stored if not of.kind.recomputes_attention),
    }
    parts["GEMM outputs"] = sum(layer.host_bytes(of) for layer, of in stored) - sum(parts.values())
    return {name: nbytes * found.question.ranks_on_node for name, nbytes in parts.items()}


def row(name: str, found: Estimate | None) -> dict[str, Any]:
    if found is None:
        return {"name": name, "tokens": 0}
    tokens = found.question.seq_length
    return {
        "name": name,
        "tokens": tokens,
        "steps": [step(found, *how) for how in KERNELS],
        "attention_recomputed": found.placed["attention_recomputed"],
        "input_computed": found.placed["input_computed"],
        "on_device": found.placed["on_device"] + found.placed["without_gemms"],
        "device_gib": found.device_total / GIB,
        "host_gib": found.host_bytes / GIB,
        "host_budget_gib": found.question.host_bytes / GIB,
        "stored_gib": {name: nbytes / GIB for name, nbytes in host_parts(found).items()},
        "nvme_gib": found.nvme_bytes / GIB,
        "nvme_tb_per_day": found.written_a_day / 1e12,
        "binding": found.binding,
    }


def step(found: Estimate, kernel: str | None, ring: int) -> dict[str, Any]:
    """Return ds_memo's step by a kernel, and the checkpointed one."""
    asked = found.question
    ours = estimate(replace(asked, hardware=asked.hardware.attending_with(kernel), sp=8, ulysses=8 // ring))
    rival = {"model": "llama3-8b", "gpus": 8, "sp": 8, "ring": ring, "kernel": kernel, "fused": True, "inputs": 3}
    rival |= {"tokens": asked.seq_length, "mlp": "tiled", "loss": "chunked"}
    (name,) = (of.name for of in ours.attention)
    return {"kernel": name, "ring": ring, "ds_memo_s": ours.step_s, "checkpointed_s": answer(rival).seconds}


def cells(found: dict[str, Any]) -> tuple[str, ...]:
    """Return a row of the table."""
    if not found["tokens"]:
        return (found["name"], "none")
    sizes = ", ".join(f"{found[f'{place}_gib']:,.0f}" for place in ("device", "host", "nvme"))
    stored = ", ".join(f"{gib:,.0f}" for gib in found["stored_gib"].values())
    steps = [f"{of['ds_memo_s']:,.0f}, {of['checkpointed_s']:,.0f} ({NAMES[of['kernel']]})" for of in found["steps"]]
    steps += [f"{found[what]} of 32" for what in ("attention_recomputed", "input_computed")]
    where = (str(found["on_device"]), sizes, f"{found['host_budget_gib']:,.0f}", stored)
    return (found["name"], f"{found['tokens'] / 2**20:.4g} Mi", *steps, *where)


def main(out: str | None = None) -> None:
    asked = Question(model("llama3-8b", fused=True), machine(KERNEL), 8, UPIPE)
    drives = replace(asked, hardware=replace(asked.hardware, **DRIVES))
    ways = [(f"{where}, {what}", node, recomputes) for what, recomputes in (("attention once", False), ("any", True))
            for where, node in (("host", asked), ("host and drives", drives))]  # fmt: skip
    rows = [row(name, longest(node, recomputes)) for name, node, recomputes in ways]
    rows += [row(f"{where}, UPipe's length", estimate(node)) for where, node in (("host", asked), ("host and drives", drives))]
    rows.append(row("larger host, UPipe's length, attention once", smallest_host(asked)))
    print("Estimated, not measured; h100.json's rates, 2,048 GiB of host memory, drives of 15,000 GiB and 48 GB/s")
    head = ("ds_memo", "tokens", "step s, checkpointed: with FlashAttention-3", "PyTorch's choice", "in a ring of two")
    head += ("layers that recompute attention", "that compute their input", "that stay on the device")
    head += ("device, host, drives GiB", "host's budget", "stored: hidden states, attention's outputs, GEMM outputs")
    print(*markdown(head, map(cells, rows)), sep="\n")
    if out:
        said = {"estimated": True, "hardware": "h100", "gpus": 8, "rows": rows}
        Path(out).write_text(json.dumps(said, indent=1) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
