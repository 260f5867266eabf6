"""Throughput: time and tokens between optimizer steps, and MFU."""

from __future__ import annotations

import itertools
import statistics
from collections import deque
from typing import NamedTuple

import torch
from torch import nn

from ds_memo.distributed.topology import ranks_per_sequence
from ds_memo.estimate.hardware import mfu, peak_flops
from ds_memo.hf.model_flops import model_flops

_STEPS = 20
"""Latest steps, of which the median is over the settled ones."""


class _Step(NamedTuple):
    ended: float
    tokens: int
    unsettled: int


class Speed:
    """Times of a model's optimizer steps. A step is settled if nothing was profiled, analysed, solved for or planned in it."""

    def __init__(self) -> None:
        self.steps = 0
        """Optimizer steps so far."""
        self._latest: deque[_Step] = deque(maxlen=_STEPS + 1)

    def stepped(self, now: float, tokens: int, unsettled: int = 0) -> None:
        """Note the end of an optimizer step.

        Of several optimizers (Muon beside AdamW, or one for each parameter) the first counts.

        Args:
            tokens: so far.
            unsettled: profiles, analyses, solutions and plans that were made so far.
        """
        if not self._latest or tokens > self._latest[-1].tokens:
            self.steps += 1
            self._latest.append(_Step(now, tokens, unsettled))

    def medians(self) -> tuple[float | None, float | None]:
        """Return the seconds between the ends of steps, and the tokens a second: medians over the settled steps among the
        latest. A new length in each batch settles none: then over all of these, once there are _STEPS. None before that."""
        steps = list(itertools.pairwise(self._latest))
        settled = [(before, step) for before, step in steps if step.unsettled == before.unsettled]
        if not settled and len(steps) == _STEPS:
            settled = steps
        if not settled:
            return None, None
        gaps = [(step.ended - before.ended, step.tokens - before.tokens) for before, step in settled]
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
    length = hidden[1] * ranks_per_sequence(model)
    flops, peak = model_flops(model, length), peak_flops(torch.cuda.get_device_name(device))
    return mfu(flops * tokens_per_s / length, 1.0, 1, peak) if flops and peak else None
