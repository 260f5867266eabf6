"""The longest sequence that 1, 8 and 64 H100 train on, estimated, and the step that it takes: python -m benchmarks.what_fits

Several GPUs share one sequence, so attention has the rates of FlashAttention-2, which such ranks run; one GPU those of cuDNN's.
Model states stay on the device where that fits; else the optimizer, then all states, are offloaded.
"""

from __future__ import annotations

from benchmarks.published_runs import MODELS, machine
from ds_memo.estimate.estimate import longest
from ds_memo.estimate.model import load
from ds_memo.estimate.question import Estimate, Question
from ds_memo.units import short

NAMES = ("llama3-8b", "qwen3-14b", "qwen3-32b")
GPUS = (1, 8, 64)


def farthest(name: str, gpus: int) -> Estimate | None:
    """Return the estimate of the longest sequence, with as little offloaded as is needed."""
    hardware = machine("cudnn" if gpus == 1 else "fa2")
    for offload in ("none", "optimizer", "all"):
        question = Question(load(str(MODELS / f"{name}.json")), hardware, gpus, 1024, sp=gpus, offload=offload)
        if (found := longest(question)[0]) is not None:
            return found
    return None


def cell(answer: Estimate | None) -> str:
    if answer is None or answer.step_s is None:
        return "–"
    again = answer.placed["attention_recomputed"]
    minutes = answer.step_s / 60
    step = f"{minutes / 60:.1f} h" if minutes > 90 else f"{minutes:.0f} min"
    offload = "" if answer.question.offload == "none" else f", {answer.question.offload} offloaded"
    layers = sum(answer.placed.values())
    return f"{short(answer.question.seq_length)} in {step}{offload}, attention twice in {again} of {layers} layers"


def main() -> None:
    print("| H100 | " + " | ".join(NAMES) + " |\n|---" + "|---" * len(NAMES) + "|")
    for gpus in GPUS:
        print(f"| {gpus} | " + " | ".join(cell(farthest(name, gpus)) for name in NAMES) + " |", flush=True)


if __name__ == "__main__":
    main()
