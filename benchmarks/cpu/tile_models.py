"""Architectures whose layers run in tiles of tokens, why the others do not, and the gradients of all against stock's.

    python -m benchmarks.tile_models [--markdown PATH] [--json PATH] [NAME ...]

Every causal language model of the installed Transformers that can be made small (tests/architectures.py) runs in float32, without
dropout, as `RUNS` says. Bar: gradients as in tests/remat/test_architectures.py.
"""

from __future__ import annotations

import argparse
import copy
import json
import re
import time
import warnings
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

import ds_memo
from tests import architectures
from tests.models import poisoned_memory

TOLERANCE = 1e-4
"""Largest relative difference of a gradient, in float32: split sums are in another order, and layers amplify the difference."""
NOISE = 1e-8
"""Share of the largest gradient below which a gradient is zero in exact arithmetic."""


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
    """Of the layers."""
    reasons: tuple[str, ...]
    """Why the others run whole."""
    difference: float
    """Largest of a gradient, relative to its norm."""
    loss_difference: float
    wrong: str = ""
    """The parameter with the largest difference, or an error."""

    @property
    def right(self) -> bool:
        return self.difference <= TOLERANCE and self.loss_difference <= TOLERANCE


def verdict(name: str, runs: Iterable[Run] = RUNS) -> Verdict:
    """Compare an architecture in tiles with stock."""
    model = without_dropout(architectures.build(name))
    worst, wrong, loss_off, layers, tiled, reasons = 0.0, "", 0.0, 0, [], set()
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
                if not off <= worst:
                    worst, wrong = off, f"{at} with {run.config}, {batch}"
            report = handle.report()
        finally:
            handle.detach()
        layers = report["layers"]
        tiled.append(len(report["tiles"]["layers"]))
        reasons |= {general(reason) for reason in report["tiles"]["not_tiled"].values()}
    return Verdict(name, layers, min(tiled), tuple(sorted(reasons)), worst, loss_off, wrong)


def without_dropout(model: nn.Module) -> nn.Module:
    """Switch off what draws random numbers in training: tiles draw others than stock."""
    configs = [module.config for module in model.modules() if hasattr(module, "config")]
    for owner in [*model.modules(), *configs]:
        for name, value in list(vars(owner).items()):
            if "drop" in name and isinstance(value, float):
                setattr(owner, name, 0.0)
        if isinstance(owner, nn.Dropout):
            owner.p = 0.0
    return model


def step(model: nn.Module, batch: tuple[int, int]) -> tuple[float, dict[str, torch.Tensor | None]]:
    """Return the loss and the gradients of a step; None: the parameter has none."""
    generator = torch.Generator().manual_seed(batch[1])
    ids = torch.randint(3, architectures.VOCAB, batch, generator=generator)
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
    """Leave sizes out of a reason."""
    return re.sub(r"\d+", "#", reason)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="model types; default: all")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    found = []
    for name in args.names or architectures.NAMES:
        began = time.perf_counter()
        try:
            found.append(verdict(name))
        except Exception as error:
            print(f"{name:28} {type(error).__name__}: {str(error).splitlines()[0][:200]}", flush=True)
            continue
        v = found[-1]
        took = time.perf_counter() - began
        flag = "" if v.right else "  WRONG " + v.wrong
        print(
            f"{name:28} {v.tiled}/{v.layers} {v.difference:.1e} {v.loss_difference:.1e} {took:4.1f}s {'; '.join(v.reasons)}{flag}",
            flush=True,
        )
    if args.json:
        args.json.write_text(json.dumps([asdict(one) for one in found], indent=1))


if __name__ == "__main__":
    main()
