"""Architectures whose layers run in tiles of tokens, why the others do not, and the gradients of all against stock's.

    python -m benchmarks.tile_models [--markdown docs/tiles_models.md] [NAME ...]

Every causal language model of the installed Transformers that can be made small (tests/architectures.py) runs in float32, as
`RUNS` says, and without random numbers. It prints a line for each: tiled and all layers, the largest relative difference of a
gradient and of the loss, seconds, reasons. Bar: TOLERANCE. The exit status is 1 if one is above it.
"""

from __future__ import annotations

import argparse
import copy
import re
import sys
import time
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

import ds_memo
from tests import architectures
from tests.models import poisoned_memory

TOLERANCE = 1e-4
"""Largest relative difference of a gradient, in float32. Recurrences over 64 tokens amplify rounding more, and their chunks are
others in tiles: above it the bar is ROUNDINGS times the change that one bit of the weights makes in stock. In float64 they differ
by 1e-13 (tests/tiles/test_chain.py)."""
ROUNDINGS = 8
NOISE = 1e-7
"""Share of the largest gradient, float32's resolution: below it a gradient is what was left of terms that cancel."""


@dataclass(frozen=True)
class Run:
    """Steps of a model that is attached once."""

    config: dict[str, Any]
    batches: tuple[tuple[int, int], ...]
    """Sequences and length of each."""


_ALL = {"resident_layers": 0, "plan": {"enabled": False}}
RUNS = (
    Run({**_ALL, "alpha": 0.0, "tile_tokens": 16, "head_groups": 1}, ((2, 41), (2, 41))),
    Run({**_ALL, "alpha": 0.5, "tile_tokens": 16, "head_groups": 2}, ((2, architectures.HIDDEN),) * 2),
    Run({**_ALL, "alpha": 0.5, "tile_tokens": 4, "head_groups": 2}, ((5, 5),)),
)
"""41 and 5 tokens give a ragged tile. A second batch of the same size follows recipes. Sizes that are equal name no dimension."""


@dataclass(frozen=True)
class Verdict:
    """What the sweep found about one architecture."""

    name: str
    layers: int
    tiled: int
    """Number of layers that run in tiles."""
    reasons: tuple[str, ...]
    """Why the others run whole."""
    difference: float
    """Largest of a gradient, relative to its norm."""
    loss_difference: float
    bar: float
    """For `difference`."""
    worst: str = ""
    """The parameter with the largest difference, and where."""

    @property
    def right(self) -> bool:
        return self.difference <= self.bar and self.loss_difference <= TOLERANCE


def verdict(name: str, runs: Iterable[Run] = RUNS, device: torch.device | str = "cpu") -> Verdict:
    """Compare an architecture in tiles with stock."""
    model = without_random_numbers(architectures.build(name)).to(device)
    worst, wrong, loss_off, bar, layers, tiled, reasons = 0.0, "", 0.0, TOLERANCE, 0, [], set()
    for run in runs:
        stock, attached = copy.deepcopy(model), copy.deepcopy(model)
        handle = ds_memo.attach(attached, run.config)
        try:
            for batch in run.batches:
                want_loss, want = step(stock, batch)
                with poisoned_memory():
                    loss, found = step(attached, batch)
                off, at = differs(found, want)
                loss_off = max(loss_off, abs(loss - want_loss) / abs(want_loss))
                if not off <= TOLERANCE:
                    bar = max(bar, ROUNDINGS * differs(step(one_bit_off(model), batch)[1], want)[0])
                if not off <= worst:
                    worst, wrong = off, f"{at} with {run.config}, {batch}"
            report = handle.report()
        finally:
            handle.detach()
        layers = report["layers"]
        tiled.append(len(report["tiles"]["layers"]))
        reasons = reasons or {general(reason) for reason in report["tiles"]["not_tiled"].values()}
    return Verdict(name, layers, min(tiled), tuple(sorted(reasons)), worst, loss_off, bar, wrong)


def without_random_numbers(model: nn.Module) -> nn.Module:
    """Switch off what draws random numbers in training: tiles draw others than stock."""
    configs = [module.config for module in model.modules() if hasattr(module, "config")]
    for owner in [*model.modules(), *configs]:
        for name, value in list(vars(owner).items()):
            if ("drop" in name or "jitter" in name) and isinstance(value, float):
                setattr(owner, name, 0.0)
        if isinstance(owner, nn.Dropout):
            owner.p = 0.0
        if isinstance(owner, nn.Linear):
            owner.training = False  # a router that samples its experts
    return model


def one_bit_off(model: nn.Module) -> nn.Module:
    """Return a copy whose weights are off by about the last bit of a float32."""
    model, generator = copy.deepcopy(model), torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in model.parameters():
            noise = torch.randn(weight.shape, generator=generator).to(weight.device)
            weight.mul_(1 + torch.finfo(torch.float32).eps * noise)
    return model


def step(model: nn.Module, batch: tuple[int, int]) -> tuple[float, dict[str, torch.Tensor | None]]:
    """Return the loss and the gradients of a step; None: the parameter has none."""
    generator = torch.Generator().manual_seed(batch[1])
    ids = torch.randint(3, architectures.VOCAB, batch, generator=generator).to(next(model.parameters()).device)
    torch.manual_seed(0)
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    found = {name: None if p.grad is None else p.grad.double() for name, p in model.named_parameters()}
    model.zero_grad()
    return float(loss), found


def differs(found: dict[str, torch.Tensor | None], want: dict[str, torch.Tensor | None]) -> tuple[float, str]:
    """Return the largest relative difference of a gradient, and its name."""
    norms = {name: float(gradient.norm()) for name, gradient in want.items() if gradient is not None}
    least = NOISE * max(norms.values())
    worst, at = 0.0, ""
    for name, gradient in found.items():
        if (gradient is None) != (want[name] is None):
            return float("inf"), f"{name} has {'no' if gradient is None else 'a'} gradient"
        if gradient is None or norms[name] <= least >= float(gradient.norm()):
            continue
        off = float((gradient - want[name]).norm()) / max(norms[name], least)
        if not off <= worst:
            worst, at = off, name
    return worst, at


def general(reason: str) -> str:
    """Leave what differs among sizes out of a reason."""
    reason = re.sub(r"its \w+ (?=multiplies|makes)", "its attention ", reason)
    return re.sub(r"\d+", "#", re.sub(r"(a tile of it raises).*", r"\1 an error", reason))


def group(one: Verdict) -> str:
    """Return the page's row of an architecture."""
    if one.tiled == one.layers:
        return "all in tiles"
    which = "some in tiles; of the others" if one.tiled else "whole"
    return f"{which}: {'; '.join(one.reasons) or 'they are not called'}"


def page(found: Sequence[Verdict]) -> str:
    """Return the page of the documentation."""
    rows: dict[str, list[Verdict]] = {}
    for one in found:
        rows.setdefault(group(one), []).append(one)
    lines = [
        "# Models in tiles",
        "",
        "This page shows which models of Transformers run in tiles of tokens (`memo.tile_tokens`), and why the others do not. A",
        "layer runs in tiles if nothing mixes its tokens but one call of attention, and convolutions and scans that can",
        "[go on from tile to tile](tiles.md#layers-without-attention). Any other layer runs whole, with the same gradients. The",
        "report names both kinds under `tiles`, with the reasons.",
        "",
        f"`python -m benchmarks.tile_models` compared {len(found)} causal language models with stock, small and in float32. The",
        "last column is the largest relative difference of a gradient: up to 4e-5 but for gated delta rules (Qwen3-Next and",
        "kin), where one bit of the weights changes stock's gradients as much. Attention in code of its own (ALiBi, rotary",
        "embeddings by an older interface) cannot be caught at a function, and no model's forward is written anew here.",
        "",
        "| layers | models | difference |",
        "|---|---|---|",
    ]
    for row, members in sorted(rows.items(), key=lambda item: (item[0].split(maxsplit=1)[0], -len(item[1]))):
        names = ", ".join(one.name for one in members)
        lines.append(f"| {row} | {names} | {max(one.difference for one in members):.0e} |")
    return "\n".join(lines) + "\n"


def groups_of(text: str) -> dict[str, str]:
    """Return the row of each architecture that a page shows."""
    rows = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| ")]
    return {name: row for row, names, *_ in rows[1:] for name in names.split(", ")}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="model types; default: all")
    parser.add_argument("--markdown", type=Path, help="write the page there")
    args = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    found = []
    for name in args.names or architectures.NAMES:
        if name in architectures.NOT_COMPARED:
            print(f"{name:24} not compared: {architectures.NOT_COMPARED[name]}", flush=True)
            continue
        began = time.perf_counter()
        one = verdict(name)
        found.append(one)
        numbers = f"{one.tiled}/{one.layers} {one.difference:.1e} {one.loss_difference:.1e} {time.perf_counter() - began:5.1f} s"
        print(
            f"{name:24} {numbers} {'; '.join(one.reasons)}{'' if one.right else f'  WRONG: {one.worst}, bar {one.bar:.1e}'}",
            flush=True,
        )
    if args.markdown:
        args.markdown.write_text(page(found))
    return int(not all(one.right for one in found))


if __name__ == "__main__":
    sys.exit(main())
