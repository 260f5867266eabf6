"""One kind of layer, measured at a few lengths and extrapolated to others. No torch. For t tokens in sequences of s:

bytes kept, times    a + b·t; attention's time is b·t + c·t·s. The longest two samples give the lines; a shorter one checks them.
                     Where attention was measured alone, at more tokens, its line goes through that sample.
                     One sample alone gives lines through the origin
peak bytes           the larger of two such lines: gradients of weights dominate at few tokens, activations at many. The
                     longest two samples give it
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ds_memo.solve.run_costs import LayerCosts, Output, PeakBytes


@dataclass(frozen=True, kw_only=True)
class LayerSample(LayerCosts):
    """The costs of one kind of layer at the length at which they were measured. Seconds and bytes are those of one rank."""

    batch: int
    length: int
    """Tokens of each sequence on this rank."""
    all_gemms_s: float
    """Part of the forward in all GEMMs."""
    gemm_flops: int
    """FLOPs of all GEMMs in the forward."""
    attention_flops: int
    """FLOPs of attention in the forward, counted as causal."""

    @property
    def tokens(self) -> int:
        return self.batch * self.length


@dataclass(frozen=True)
class AttentionSample:
    """Attention alone. Fields as LayerSample's."""

    batch: int
    length: int
    attention_s: float
    attention_backward_s: float

    @property
    def tokens(self) -> int:
        return self.batch * self.length


PEAKS = ("working", "working_at_0", "working_without_attention")
"""Fields of LayerCosts with peak device bytes."""


def extrapolate(
    samples: Sequence[LayerSample], batch: int, length: int, spread: float, alone: AttentionSample | None = None
) -> LayerCosts:
    """Return the costs of a call with `batch` sequences of `length` tokens.

    Args:
        samples: lines go through the last two.
        spread: ranks that share a sequence, relative to the profile. Under Ulysses a rank has all tokens of some heads in
            attention and some tokens of all heads elsewhere, so attention's c·t·s counts the whole sequence.
        alone: attention at more tokens than the last sample's; None: it was not measured alone.
    """
    tokens, samples = batch * length, samples[-2:]
    of_attention_s: Sequence[LayerSample | AttentionSample] = samples if alone is None else (samples[-1], alone)

    def line(of: Callable[[LayerSample], float]) -> float:
        return _line([(sample.tokens, of(sample)) for sample in samples], tokens)

    def attention(of: Callable[[LayerSample | AttentionSample], float]) -> float:
        return _attention([(sample.tokens, sample.length, of(sample)) for sample in of_attention_s], tokens, spread * length)

    def peaks(name: str) -> PeakBytes:
        passes = (lambda sample: getattr(sample, name).forward), (lambda sample: getattr(sample, name).backward)
        return PeakBytes(*(math.ceil(line(of)) for of in passes))

    latest = samples[-1].outputs
    attention_s, attention_backward_s = attention(lambda it: it.attention_s), attention(lambda it: it.attention_backward_s)
    forward_s = line(lambda it: it.forward_s - it.attention_s) + attention_s
    of_attention = [output.born for output in latest if output.role == "attention"]

    def born(index: int) -> float:
        """Return when an output is made, as a share of the forward. Attention grows faster than the rest, so outputs before it
        move to the front and outputs after it to the back."""
        behind = sum(born <= latest[index].born for born in of_attention) / max(1, len(of_attention))
        rest = line(lambda it: it.outputs[index].born * it.forward_s - behind * it.attention_s)
        return min(1.0, max(0.0, (rest + behind * attention_s) / forward_s)) if forward_s else 1.0

    def output(index: int, like: Output) -> Output:
        if like.role == "gemm":
            return Output("gemm", round(line(lambda it: it.outputs[index].rows)), like.row_bytes, born(index))
        # Never split: how its bytes fall into rows does not matter.
        return Output(like.role, 1, round(line(lambda it: it.outputs[index].nbytes)), born(index))

    return LayerCosts(
        outputs=tuple(output(index, like) for index, like in enumerate(latest)),
        forward_s=forward_s,
        backward_s=line(lambda it: it.backward_s - it.attention_backward_s) + attention_backward_s,
        replay_s=line(lambda it: it.replay_s),
        gemm_s=line(lambda it: it.gemm_s),
        attention_s=attention_s,
        no_recompute_bytes=round(line(lambda it: it.no_recompute_bytes)),
        attention_backward_s=attention_backward_s,
        working=peaks("working"),
        working_at_0=peaks("working_at_0"),
        working_without_attention=peaks("working_without_attention"),
    )


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
