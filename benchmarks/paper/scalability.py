"""The paper's scalability, estimated: the longest sequence that 8 to 64 GPUs train on together, by Ulysses × ring and by Ulysses
alone: python -m benchmarks.scalability [HARDWARE] [KERNEL]"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator
from dataclasses import replace

from benchmarks.known_models import MODELS
from ds_memo.estimate import hardware
from ds_memo.estimate.estimate import estimate, longest
from ds_memo.estimate.model import load
from ds_memo.estimate.question import Estimate, Question
from ds_memo.units import short

GPUS = (8, 16, 32, 64)


def cells(answer: Estimate | None) -> list[str]:
    if answer is None or answer.step_s is None:
        return ["–"] * 5
    kernels = ", ".join(kernel.name for kernel in answer.attention)
    return [short(answer.question.seq_length), str(answer.layout), f"{answer.step_s:,.0f}", f"{answer.mfu:.1%}", kernels]


def rows(question: Question) -> Iterator[list[str]]:
    """Yield, for each number of GPUs, the longest sequence of each way, and Ulysses alone at the first one's length."""
    for gpus in GPUS:
        own = replace(question, gpus=gpus, sp=gpus)
        sp = min(gpus, question.model.heads)
        alone = replace(own, sp=sp, ulysses=sp)
        most = longest(own)[0]
        same = None if most is None else estimate(replace(alone, seq_length=most.question.seq_length))
        verdict = "–" if same is None else same.status if same.step_s is None else f"{same.step_s:,.0f}"
        yield [str(gpus), *cells(most), *cells(longest(alone)[0]), verdict]


def main(name: str = "a800", kernel: str | None = None) -> None:
    """Print the table.

    Args:
        kernel: of attention, as memo.attention names it; None: PyTorch's choice.
    """
    question = Question(load(str(MODELS / "llama3-8b.json")), hardware.load(name).attending_with(kernel), 8, 1024)
    print(f"Estimated, not measured: llama3-8b (32 heads, 8 for keys) on {name}, one sequence, memo")
    columns = ("longest", "layout", "step s", "MFU", "attention")
    ways = [f"{column}, {way}" for way in ("Ulysses × ring", "Ulysses alone") for column in columns]
    head = ["GPUs", *ways, "Ulysses alone at the first length, s"]
    for row in itertools.chain((head, ["---"] * len(head)), rows(question)):
        print(f"| {' | '.join(row)} |", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
