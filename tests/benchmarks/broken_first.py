"""`gpu.sh first` in the emulator, with something broken on purpose: python -m tests.benchmarks.broken_first FAULT ARGS."""

from __future__ import annotations

import sys

import torch

from benchmarks import first, timing
from ds_memo.swap import pinned_segments


def unpinned() -> None:
    """The slab's memory is not page-locked."""
    pinned_segments.pin = lambda segment: None


def synchronizes() -> None:
    """A step waits for the device behind its backward, by a call that sync-debug mode does not see."""
    update = timing.Trainer._update

    def waits(trainer: timing.Trainer) -> None:
        torch.cuda.synchronize()
        update(trainer)

    timing.Trainer._update = waits


def reads_a_value() -> None:
    """A step reads a number from the device, which sync-debug mode sees."""
    update = timing.Trainer._update

    def reads(trainer: timing.Trainer) -> None:
        trainer.ids[0, 0].item()
        update(trainer)

    timing.Trainer._update = reads


def unplanned() -> None:
    """ds_memo makes a request in each step that its plan does not have."""
    step, held = timing.Trainer.step, []

    def grows(trainer: timing.Trainer, installed: object) -> None:
        step(trainer, installed)
        held.append(torch.empty(64 << 20, dtype=torch.uint8, device="cuda"))

    timing.Trainer.step = grows


if __name__ == "__main__":
    globals()[sys.argv[1]]()
    sys.exit(first.main(sys.argv[2:]))
