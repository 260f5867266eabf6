"""The longest sequence that 1, 8 and 64 H100 train on, estimated, and the step that it takes: python -m benchmarks.what_fits

Attention runs by PyTorch's choice: cuDNN's kernel, and FlashAttention-2 for heads of more than 4 Mi tokens on a rank.
Model states stay on the device where that fits; else the optimizer, then all states, are offloaded.
"""

from __future__ import annotations

from benchmarks.known_models import MODELS
from benchmarks.results import markdown
from ds_memo.estimate import hardware
from ds_memo.estimate.estimate import longest
from ds_memo.estimate.model import load
from ds_memo.estimate.question import Estimate, Question
from ds_memo.units import short

NAMES = ("llama3-8b", "qwen3-14b", "qwen3-32b")
GPUS = (1, 8, 64)


def farthest(name: str, gpus: int) -> Estimate | None:
    """Return the estimate of the longest sequence, with as little offloaded as is needed."""
    for offload in ("none", "optimizer", "all"):
        question = Question(load(str(MODELS / f"{name}.json")), hardware.load("h100"), gpus, 1024, sp=gpus, offload=offload)
        if (found := longest(question)[0]) is not None:
            return found
    return None


def cell(answer: Estimate | None) -> str:
    if answer is None or answer.step_s is None:
        return "–"
    again, layers = answer.placed["attention_recomputed"], len(answer.placements)
    attention = "attention twice" if again else "attention once"
    if 0 < again < layers:
        attention += f" in {again} of {layers} layers"
    hours = answer.step_s / 3600
    step = f"{hours * 60:.0f} min" if hours < 1.5 else f"{hours:.1f} h"
    offload = {"none": "", "optimizer": ", optimizer offloaded", "all": ", all states offloaded"}[answer.question.offload]
    return f"{short(answer.question.seq_length)} in {step}, {attention}{offload}"


def main() -> None:
    print(*markdown(("H100", *NAMES), ((gpus, *(cell(farthest(name, gpus)) for name in NAMES)) for gpus in GPUS)), sep="\n")


if __name__ == "__main__":
    main()
