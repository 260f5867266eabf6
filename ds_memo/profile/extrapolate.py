"""Extrapolate a kind of layer from its measured lengths to another. For t tokens in sequences of s:

bytes kept, times    a + b·t; attention's time is b·t + c·t·s. Two samples give the lines; a third, longer one checks them.
                     One sample alone gives lines through the origin
an encoder           a layer that attends to an encoder's states also needs bytes and time for each of their tokens. One more
                     sample with half of them (`half_source`) gives both
peak bytes           the largest of several such lines: gradients of weights dominate at few tokens, activations at many. The
                     longest two samples give it
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING, get_args

from ds_memo.solve.costs import LayerCosts, Output, OutputKind, Working

if TYPE_CHECKING:
    from ds_memo.profile.sample import LayerProfile, LayerSample

OUTPUT_KINDS = get_args(OutputKind)


class Extrapolated:
    """One kind of layer, called with `batch` sequences of `length` tokens.

    Args:
        source: tokens of the encoder's sequence that the layer attends to; 0: as many as `length`.
        spread: ranks that share a sequence, relative to the profile. Under Ulysses a rank has all tokens of some heads in
            attention and some tokens of all heads elsewhere, so attention's c·t·s counts the whole sequence.
    """

    def __init__(self, kind: LayerProfile, batch: int, length: int, source: int, spread: float) -> None:
        self._kind = kind
        self._latest = kind.samples[-1]
        self._tokens, self._source_tokens = batch * length, batch * (source or length)
        self._pairs = self._tokens * (source or length)
        self._sequence = spread * length

    def costs(self) -> LayerCosts:
        return LayerCosts(
            outputs=self._outputs,
            forward_s=self._forward_s,
            backward_s=self._line(lambda sample: sample.backward_s - sample.attention_backward_s)
            + self._attention(lambda sample: sample.attention_backward_s),
            replay_s=self._line(lambda sample: sample.replay_s),
            gemm_s=self._line(lambda sample: sample.gemm_s),
            attention_s=self._attention_s,
            plain_bytes=self._nbytes(lambda sample: sample.plain_bytes),
            working=Working(self._most("forward_bytes"), self._most("working_bytes", *OUTPUT_KINDS)),
            working_at_0=Working(
                self._most("forward_bytes_at_0"), self._most("working_bytes_at_0", "input", "attention", "choice")
            ),
            working_without_attention=Working(
                self._most("forward_bytes_at_0"), self._most("working_bytes_without_attention", "input", "choice")
            ),
        )

    @cached_property
    def _attention_s(self) -> float:
        return self._attention(lambda sample: sample.attention_s)

    @cached_property
    def _forward_s(self) -> float:
        return self._line(lambda sample: sample.forward_s - sample.attention_s) + self._attention_s

    @cached_property
    def _outputs(self) -> tuple[Output, ...]:
        return tuple(self._output(index, output) for index, output in enumerate(self._latest.outputs))

    def _output(self, index: int, latest: Output) -> Output:
        born = self._born(index, latest)
        if latest.kind == "gemm":
            return Output("gemm", self._nbytes(lambda sample: sample.outputs[index].rows), latest.row_bytes, born)
        # Never split: how its bytes fall into rows does not matter.
        return Output(latest.kind, 1, self._nbytes(lambda sample: sample.outputs[index].nbytes), born)

    def _born(self, index: int, latest: Output) -> float:
        """Return when the output is made, as a share of the forward. Attention grows faster than the rest, so outputs before it
        move to the front and outputs after it to the back."""
        if not self._forward_s:
            return 1.0
        of_attention = [output.born for output in self._latest.outputs if output.kind == "attention"]
        behind = sum(born <= latest.born for born in of_attention) / max(1, len(of_attention))
        rest = self._line(lambda sample: sample.outputs[index].born * sample.forward_s - behind * sample.attention_s)
        return min(1.0, max(0.0, (rest + behind * self._attention_s) / self._forward_s))

    # ---- one number of the samples, extrapolated

    def _line(self, of: Callable[[LayerSample], float], samples: Sequence[LayerSample] | None = None) -> float:
        each = self._for_each(of, lambda sample: sample.batch * sample.source)
        own = [(s.tokens, max(0.0, of(s) - each * s.batch * s.source)) for s in samples or self._kind.samples]
        return _line(own, self._tokens) + each * self._source_tokens

    def _attention(self, of: Callable[[LayerSample], float]) -> float:
        each = self._for_each(of, lambda sample: sample.tokens * sample.source)
        own = [(s.tokens, s.length, max(0.0, of(s) - each * s.tokens * s.source)) for s in self._kind.samples]
        return _attention(own, self._tokens, self._sequence) + each * self._pairs

    def _nbytes(self, of: Callable[[LayerSample], float]) -> int:
        return round(self._line(of))

    def _most(self, name: str, *frame: OutputKind) -> int:
        """Return a field of DEVICE_BYTES, which does not count outputs of these kinds."""
        if self._kind.half_source is None:
            return math.ceil(self._line(lambda sample: getattr(sample, name), self._kind.taken[-2:]))
        samples = (*self._kind.taken, self._kind.half_source)
        rays = [(s.tokens, s.batch * s.source, getattr(s, name) + _nbytes(s.outputs, frame)) for s in samples]
        return max(0, math.ceil(_at_most(rays, self._tokens, self._source_tokens)) - _nbytes(self._outputs, frame))

    def _for_each(self, of: Callable[[LayerSample], float], size: Callable[[LayerSample], float]) -> float:
        """Return the growth of `of` per unit of `size` that a larger source adds; 0 without `half_source`."""
        full, half = self._kind.taken[-1], self._kind.half_source
        return max(0.0, of(full) - of(half)) / (size(full) - size(half)) if half else 0.0


def _line(points: Sequence[tuple[float, float]], x: float) -> float:
    """Return a + b·x at x, through one or two points (x, y), with a, b ≥ 0: noise must not make a longer sequence cheaper, or a
    short one free."""
    (x1, y1), (x2, y2) = points[0], points[-1]
    slope = (y2 - y1) / (x2 - x1) if x2 > x1 else math.inf
    if not 0 <= slope <= y2 / x2:
        slope = y2 / x2
    return max(0.0, y2 + slope * (x - x2))


def _at_most(rays: Sequence[tuple[float, float, float]], x: float, y: float) -> float:
    """Return an upper bound at (x, y) of a function that is known at a few points (x, y, value), sorted by x / y.

    The function is a maximum of linear ones, so it is convex and scales with its arguments. (x, y) is a sum of multiples of the
    two points on either side. The same sum of their values is at least the function's value.
    """
    if x * rays[0][1] <= rays[0][0] * y:
        return rays[0][2] * y / rays[0][1]
    for (x1, y1, z1), (x2, y2, z2) in pairwise(rays):
        if x * y2 <= x2 * y:
            area = x2 * y1 - x1 * y2
            return (z1 * (x2 * y - x * y2) + z2 * (x * y1 - x1 * y)) / area
    return rays[-1][2] * x / rays[-1][0]


def _nbytes(outputs: Sequence[Output], kinds: Sequence[OutputKind]) -> int:
    return sum(output.nbytes for output in outputs if output.kind in kinds)


def _attention(points: Sequence[tuple[float, float, float]], tokens: float, length: float) -> float:
    """Return b·t + c·t·s at these tokens and length, through one or two points (t, s, y), with b, c ≥ 0."""
    (t1, s1, y1), (t2, s2, y2) = points[0], points[-1]
    most = y2 / (t2 * s2)
    per_pair = (y2 / t2 - y1 / t1) / (s2 - s1) if s2 > s1 else most
    per_pair = min(max(0.0, per_pair), most)
    return tokens * (y2 / t2 - per_pair * s2) + per_pair * tokens * length
