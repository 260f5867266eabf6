"""One kind of layer, measured at a few lengths and extrapolated to others. No torch. For t tokens in sequences of s:

bytes kept, times    a + b·t; attention's time is b·t + c·t·s. Two samples give the lines; a third, longer one checks them.
                     One sample alone gives lines through the origin
peak bytes           the larger of two such lines: gradients of weights dominate at few tokens, activations at many. The
                     longest two samples give it
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

from ds_memo.solve.run_costs import LayerCosts, Output, PeakBytes


@dataclass(frozen=True)
class LayerSample:
    """One kind of layer, measured at one length. Seconds and bytes are those of one rank; names are those of LayerCosts."""

    batch: int
    length: int
    """Tokens of each sequence on this rank."""
    forward_s: float
    attention_s: float
    """Part of the forward in attention kernels."""
    backward_s: float
    """Without checkpointing."""
    attention_backward_s: float
    """Part of the backward in attention kernels."""
    replay_s: float
    """Seconds that the replay of a resident layer adds to the backward."""
    gemm_s: float
    """Part of the forward in the GEMMs whose rows alpha splits."""
    all_gemms_s: float
    """Part of the forward in all GEMMs."""
    gemm_flops: int
    """FLOPs of all GEMMs in the forward."""
    attention_flops: int
    """FLOPs of attention in the forward, counted as causal."""
    no_recompute_bytes: int
    """Bytes that autograd saves without ds_memo."""
    working: PeakBytes
    working_at_0: PeakBytes
    working_without_attention: PeakBytes
    outputs: tuple[Output, ...]
    """Kept outputs at this length."""

    @property
    def tokens(self) -> int:
        return self.batch * self.length


WORKING = ("working", "working_at_0", "working_without_attention")
"""Fields of a sample, and of LayerCosts, with peak device bytes."""


class Extrapolated:
    """One kind of layer, called with `batch` sequences of `length` tokens.

    Args:
        samples: through which lines are drawn.
        longest: the two that give the peak bytes.
        spread: ranks that share a sequence, relative to the profile. Under Ulysses a rank has all tokens of some heads in
            attention and some tokens of all heads elsewhere, so attention's c·t·s counts the whole sequence.
    """

    def __init__(
        self, samples: Sequence[LayerSample], longest: Sequence[LayerSample], batch: int, length: int, spread: float
    ) -> None:
        self._samples = samples
        self._longest = longest
        self._tokens = batch * length
        self._sequence = spread * length

    def costs(self) -> LayerCosts:
        latest = self._samples[-1].outputs
        return LayerCosts(
            outputs=tuple(self._output(index, output) for index, output in enumerate(latest)),
            forward_s=self._forward_s,
            backward_s=self._line(lambda sample: sample.backward_s - sample.attention_backward_s) + self.attention_backward_s,
            replay_s=self._line(lambda sample: sample.replay_s),
            gemm_s=self._line(lambda sample: sample.gemm_s),
            attention_s=self._attention_s,
            no_recompute_bytes=round(self._line(lambda sample: sample.no_recompute_bytes)),
            working=self._working("working"),
            working_at_0=self._working("working_at_0"),
            working_without_attention=self._working("working_without_attention"),
        )

    @cached_property
    def _attention_s(self) -> float:
        return self._attention(lambda sample: sample.attention_s)

    @cached_property
    def attention_backward_s(self) -> float:
        return self._attention(lambda sample: sample.attention_backward_s)

    @cached_property
    def _forward_s(self) -> float:
        return self._line(lambda sample: sample.forward_s - sample.attention_s) + self._attention_s

    def _output(self, index: int, latest: Output) -> Output:
        born = self._born(index, latest)
        if latest.role == "gemm":
            return Output("gemm", round(self._line(lambda sample: sample.outputs[index].rows)), latest.row_bytes, born)
        # Never split: how its bytes fall into rows does not matter.
        return Output(latest.role, 1, round(self._line(lambda sample: sample.outputs[index].nbytes)), born)

    def _born(self, index: int, latest: Output) -> float:
        """Return when the output is made, as a share of the forward. Attention grows faster than the rest, so outputs before it
        move to the front and outputs after it to the back."""
        if not self._forward_s:
            return 1.0
        of_attention = [output.born for output in self._samples[-1].outputs if output.role == "attention"]
        behind = sum(born <= latest.born for born in of_attention) / max(1, len(of_attention))
        rest = self._line(lambda sample: sample.outputs[index].born * sample.forward_s - behind * sample.attention_s)
        return min(1.0, max(0.0, (rest + behind * self._attention_s) / self._forward_s))

    # ---- one number of the samples, extrapolated

    def _line(self, of: Callable[[LayerSample], float], samples: Sequence[LayerSample] | None = None) -> float:
        return _line([(sample.tokens, of(sample)) for sample in samples or self._samples], self._tokens)

    def _attention(self, of: Callable[[LayerSample], float]) -> float:
        points = [(sample.tokens, sample.length, of(sample)) for sample in self._samples]
        return _attention(points, self._tokens, self._sequence)

    def _working(self, name: str) -> PeakBytes:
        forward = self._line(lambda sample: getattr(sample, name).forward, self._longest)
        return PeakBytes(math.ceil(forward), math.ceil(self._line(lambda sample: getattr(sample, name).backward, self._longest)))


def _line(points: Sequence[tuple[float, float]], x: float) -> float:
    """Return a + b·x at x, through one or two points (x, y), with a, b ≥ 0: noise must not make a longer sequence cheaper, or a
    short one free."""
    (x1, y1), (x2, y2) = points[0], points[-1]
    slope = (y2 - y1) / (x2 - x1) if x2 > x1 else math.inf
    if not 0 <= slope <= y2 / x2:
        slope = y2 / x2
    return max(0.0, y2 + slope * (x - x2))


def _attention(points: Sequence[tuple[float, float, float]], tokens: float, length: float) -> float:
    """Return b·t + c·t·s at these tokens and length, through one or two points (t, s, y), with b, c ≥ 0."""
    (t1, s1, y1), (t2, s2, y2) = points[0], points[-1]
    most = y2 / (t2 * s2)
    per_pair = (y2 / t2 - y1 / t1) / (s2 - s1) if s2 > s1 else most
    per_pair = min(max(0.0, per_pair), most)
    return tokens * (y2 / t2 - per_pair * s2) + per_pair * tokens * length
