"""Measurements of a run: speed and memory of a step, the progress bar, and the file of --metrics-json."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from tqdm import tqdm

import ds_memo
from ds_memo.estimate import hardware
from ds_memo.profile.live import LiveBytes


class PeakBytes:
    """The most bytes that forward and backward hold at once beyond what was there before the first step.

    Activations, gathered parameters and gradients. CUDA's allocator counts by itself; a CPU's ops are watched.

    Attributes:
        bytes: The peak over the blocks watched since it was last set to 0.
    """

    def __init__(self, device: torch.device) -> None:
        self.bytes = 0
        self._cuda = device.type == "cuda"
        self._count = LiveBytes(device)
        self._before = torch.cuda.memory_allocated() if self._cuda else 0

    @contextmanager
    def watch(self) -> Iterator[None]:
        if self._cuda:
            torch.cuda.reset_peak_memory_stats()
            yield
            now = torch.cuda.max_memory_allocated() - self._before
        else:
            self._count.reset_peak()
            with self._count:
                yield
            now = self._count.peak
        self.bytes = max(self.bytes, now)


def speed(
    engine: deepspeed.DeepSpeedEngine, seq_length: int, flops_per_sequence: float | None, seconds: float
) -> dict[str, float | None]:
    """Return the speed of one optimizer step that took these seconds."""
    tokens_per_s = engine.train_batch_size() * seq_length / seconds
    return {
        "seconds": seconds,
        "tokens_per_s": tokens_per_s,
        "tgs": tokens_per_s / dist.get_world_size(),
        "mfu": mfu(engine, flops_per_sequence, seconds),
    }


def mfu(engine: deepspeed.DeepSpeedEngine, flops_per_sequence: float | None, seconds: float) -> float | None:
    """Model FLOPs utilisation; None where the device's peak (known for 16-bit dtypes) or the model's count is not."""
    half = engine.module.dtype.itemsize == 2
    peak = hardware.peak_flops(torch.cuda.get_device_name(engine.device)) if engine.device.type == "cuda" and half else None
    if peak is None or flops_per_sequence is None:
        return None
    return hardware.mfu(engine.train_batch_size() * flops_per_sequence, seconds, dist.get_world_size(), peak)


def of_the_run(engine: deepspeed.DeepSpeedEngine, seq_length: int, sp: int) -> dict[str, Any]:
    """Return the metrics of the whole run.

    Args:
        sp: ranks that share a sequence.
    """
    memo = hasattr(engine, "memo")
    return {
        "memo": memo,
        "ranks": dist.get_world_size(),
        "sequence_parallel_size": sp,
        "device": str(engine.device.type),
        "dtype": str(engine.module.dtype).removeprefix("torch."),
        "seq_length": seq_length,
        "report": ds_memo.report(engine) if memo else None,
    }


def show(bar: tqdm, measured: dict) -> None:
    shown = {
        "loss": f"{measured['loss']:.4f}",
        "tok/s": f"{measured['tokens_per_s']:.0f}",
        "TGS": f"{measured['tgs']:.0f}",
    }
    if measured["mfu"] is not None:
        shown["MFU"] = f"{measured['mfu']:.2%}"
    bar.set_postfix(shown, refresh=False)
    bar.update()
