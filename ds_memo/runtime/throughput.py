"""Throughput: time and tokens between optimizer steps, and MFU."""

from __future__ import annotations

import itertools
import statistics
from collections import deque

import torch
from torch import nn

from ds_memo.distributed.topology import ranks_per_sequence
from ds_memo.estimate.hardware import mfu, peak_flops
from ds_memo.hf.model_flops import model_flops

_STEPS = 20
"""The median is over so many."""


class Speed:
    def __init__(self) -> None:
        self._steps: deque[tuple[float, int]] = deque(maxlen=_STEPS + 1)
        """When the latest optimizer steps ended, and the tokens by then."""

    @property
    def before_first_step(self) -> bool:
        return not self._steps

    def stepped(self, now: float, tokens: int) -> None:
        """Note the end of an optimizer step, and the tokens so far.

        Of several optimizers (Muon beside AdamW, or one for each parameter) the first counts.
        """
        if not self._steps or tokens > self._steps[-1][1]:
            self._steps.append((now, tokens))

    def medians(self) -> tuple[float | None, float | None]:
        """Return the seconds between the ends of steps, and the tokens a second; None before there are two."""
        gaps = [(now - then, tokens - before) for (then, before), (now, tokens) in itertools.pairwise(self._steps)]
        if not gaps:
            return None, None
        return statistics.median(seconds for seconds, _ in gaps), statistics.median(tokens / seconds for seconds, tokens in gaps)


def model_flops_utilization(
    model: nn.Module | None, hidden: tuple[int, ...], tokens_per_s: float | None, device: torch.device
) -> float | None:
    """Return the MFU of this rank; None where the model's FLOPs or the device's peak are not known.

    Args:
        hidden: shape of the hidden states, (b, s, h); where ranks share a sequence, of this one's part.
    """
    if tokens_per_s is None or model is None or len(hidden) != 3 or device.type != "cuda":
        return None
    length = hidden[1] * ranks_per_sequence()
    flops, peak = model_flops(model, length), peak_flops(torch.cuda.get_device_name(device))
    return mfu(flops * tokens_per_s / length, 1.0, 1, peak) if flops and peak else None
