"""What is measured of a run, as plain data: samples of layers at a few lengths, and bandwidths. No torch.

How a layer is carried over from the measured lengths to others, for t tokens in sequences of s:

bytes kept, times    a + b·t; but attention's time is b·t + c·t·s. Two samples give the lines; a third, longer one checks them.
                     One sample alone gives lines through the origin
an encoder           a layer that attends to an encoder's states also keeps and takes something for each token of those. One more
                     sample with half of them (`half_source`) says how much
most bytes at once   the largest of several such lines (with few tokens gradients of weights are most of it, with many tokens
                     activations), so the longest two samples give it
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, get_args

from ds_memo.solve.costs import LayerCosts, Output, OutputKind, RunCosts, Working

DEVICE_BYTES = (
    "working_bytes",
    "working_bytes_at_0",
    "working_bytes_without_attention",
    "forward_bytes",
    "forward_bytes_at_0",
)
"""Fields of a sample: what the layer needs of the device beside what is kept."""
OUTPUT_KINDS = get_args(OutputKind)
_OFF = 0.25
"""How far, relative, the check may be from the lines before they are not trusted."""


@dataclass(frozen=True)
class LayerSample:
    """One kind of layer, measured at one length. Seconds and bytes of one rank."""

    batch: int
    length: int
    """Tokens of each sequence on this rank."""
    source: int
    """Tokens of each sequence that the layer attends to beside its own, an encoder's; 0: none, or as many as its own."""
    forward_s: float
    attention_s: float
    """Of the forward, in attention kernels."""
    backward_s: float
    """Without checkpointing."""
    attention_backward_s: float
    """Of the backward, in attention kernels."""
    replay_s: float
    """What the replay of a resident layer adds to the backward."""
    gemm_s: float
    """Of the forward, in the GEMMs whose rows alpha splits."""
    all_gemms_s: float
    """Of the forward, in all GEMMs."""
    gemm_flops: int
    """Of all GEMMs in the forward."""
    attention_flops: int
    """Of attention in the forward, counted as causal."""
    plain_bytes: int
    """What autograd saves without ds_memo."""
    working_bytes: int
    """The most that a replay and backward hold at once beside what is kept."""
    working_bytes_at_0: int
    """The same at alpha 0, when GEMM outputs are not kept."""
    working_bytes_without_attention: int
    """The same when the attention output is not kept either."""
    forward_bytes: int
    """The most that a forward holds at once: its input, what it keeps, and everything in between."""
    forward_bytes_at_0: int
    """The same at alpha 0."""
    outputs: tuple[Output, ...]
    """At this length."""

    @property
    def tokens(self) -> int:
        return self.batch * self.length


Measured = Callable[[LayerSample], float]


@dataclass(frozen=True)
class LayerProfile:
    """One kind of layer at several lengths."""

    name: str
    """Of the first such layer."""
    samples: tuple[LayerSample, ...]
    """Shortest first."""
    check: LayerSample | None = None
    """A longer one that the lines through `samples` were held against."""
    half_source: LayerSample | None = None
    """The longest sample measured again with half of its source; None: it has no source, or that could not be varied."""

    @property
    def taken(self) -> tuple[LayerSample, ...]:
        """All of them, the longest last."""
        return self.samples if self.check is None else (*self.samples, self.check)

    def costs(self, batch: int, length: int, source: int = 0, spread: float = 1.0) -> LayerCosts:
        """The layer at any length.

        Args:
            source: tokens of each sequence that it attends to beside its own; 0: as many as its own.
            spread: how many times more ranks share a sequence than did in the profile. Under Ulysses a rank has all tokens of
                some heads in attention, and some tokens of all heads elsewhere: attention's c·t·s is of the whole sequence.
        """
        tokens, beside = batch * length, batch * (source or length)
        pairs = tokens * (source or length)

        def line(of: Measured, samples: Sequence[LayerSample] = self.samples) -> float:
            each = self._for_each(of, lambda sample: sample.batch * sample.source)
            own = [(s.tokens, max(0.0, of(s) - each * s.batch * s.source)) for s in samples]
            return _line(own, tokens) + each * beside

        def attention(of: Measured) -> float:
            each = self._for_each(of, lambda sample: sample.tokens * sample.source)
            own = [(s.tokens, s.length, max(0.0, of(s) - each * s.tokens * s.source)) for s in self.samples]
            return _attention(own, tokens, spread * length) + each * pairs

        def nbytes(of: Measured) -> int:
            return round(line(of))

        def held(name: str, *frame: OutputKind) -> int:
            if self.half_source is None:
                return math.ceil(line(lambda sample: getattr(sample, name), self.taken[-2:]))
            samples = (*self.taken, self.half_source)
            rays = [(s.tokens, s.batch * s.source, getattr(s, name) + _nbytes(s.outputs, frame)) for s in samples]
            return max(0, math.ceil(_at_most(rays, tokens, beside)) - _nbytes(outputs, frame))

        attention_s = attention(lambda sample: sample.attention_s)
        rest_s = line(lambda sample: sample.forward_s - sample.attention_s)
        latest = self.samples[-1]
        forward_s, outputs = rest_s + attention_s, []
        of_attention = [output.born for output in latest.outputs if output.kind == "attention"]
        for index, output in enumerate(latest.outputs):
            rows, row_bytes = nbytes(lambda sample, i=index: sample.outputs[i].rows), output.row_bytes
            if output.kind != "gemm":  # never split: how its bytes fall into rows does not matter
                rows, row_bytes = 1, nbytes(lambda sample, i=index: sample.outputs[i].nbytes)
            # Attention, which grows faster than the rest, moves what comes before it to the front, and what comes after it back.
            behind = sum(born <= output.born for born in of_attention) / max(1, len(of_attention))
            rest = line(lambda s, i=index, share=behind: s.outputs[i].born * s.forward_s - share * s.attention_s)
            born = (rest + behind * attention_s) / forward_s if forward_s else 1.0
            outputs.append(Output(output.kind, rows, row_bytes, min(1.0, max(0.0, born))))
        backward_s = line(lambda sample: sample.backward_s - sample.attention_backward_s)
        at_0 = held("forward_bytes_at_0")
        return LayerCosts(
            outputs=tuple(outputs),
            forward_s=forward_s,
            backward_s=backward_s + attention(lambda sample: sample.attention_backward_s),
            replay_s=line(lambda sample: sample.replay_s),
            gemm_s=line(lambda sample: sample.gemm_s),
            attention_s=attention_s,
            plain_bytes=nbytes(lambda sample: sample.plain_bytes),
            working=Working(held("forward_bytes"), held("working_bytes", *OUTPUT_KINDS)),
            working_at_0=Working(at_0, held("working_bytes_at_0", "input", "attention", "choice")),
            working_without_attention=Working(at_0, held("working_bytes_without_attention", "input", "choice")),
        )

    def _for_each(self, of: Measured, size: Measured) -> float:
        """How much `of` grows with each unit of `size` that a larger source brings; 0 without `half_source`."""
        whole, half = self.taken[-1], self.half_source
        return max(0.0, of(whole) - of(half)) / (size(whole) - size(half)) if half else 0.0

    def off(self) -> float:
        """How far the check is from the lines: the relative error of the seconds, or inf if a size is off by more than 1 %."""
        if self.check is None:
            return 0.0
        if len({len(sample.outputs) for sample in self.taken}) > 1:
            return math.inf
        here = self.costs(self.check.batch, self.check.length, self.check.source)
        kept = sum(output.nbytes for output in self.check.outputs)
        if [output.kind for output in here.outputs] != [output.kind for output in self.check.outputs]:
            return math.inf
        for got, want in ((here.nbytes(*OUTPUT_KINDS), kept), (here.plain_bytes, self.check.plain_bytes)):
            if abs(got - want) > 0.01 * want:
                return math.inf
        seconds = self.check.forward_s + self.check.backward_s
        return abs(here.forward_s + here.backward_s - seconds) / seconds if seconds else 0.0

    def is_trusted(self) -> bool:
        return self.off() <= _OFF


@dataclass(frozen=True)
class Profile:
    """What was measured of a run."""

    key: dict[str, Any]
    """Everything the measurements depend on."""
    method: str
    kinds: tuple[LayerProfile, ...]
    layers: tuple[int | None, ...]
    """For each layer of the model, in order, its kind; None: it was not called, or keeps nothing."""
    d2h_bytes_per_s: float
    h2d_bytes_per_s: float
    ranks_copying: int
    """How many ranks of the node copied at once."""
    ranks_per_sequence: int = 1
    """Whose layers were measured: `length` is a rank's share of the sequence."""
    measured: dict[str, Any] = field(default_factory=dict, compare=False)
    """For people: when, on what, how long it took, memory seen then."""

    def called(self, at: Sequence[Any]) -> list[int]:
        """Indices of the layers whose kinds are called, and measured.

        Args:
            at: by kind; None: it is not called.
        """
        return [index for index, kind in enumerate(self.layers) if kind is not None and at[kind] is not None]

    def last(self, at: Sequence[Any]) -> Any:
        """The entry of `at` (by kind) for the last layer that is called."""
        return at[self.layers[self.called(at)[-1]]]

    def costs(
        self,
        at: Sequence[tuple[int, ...] | None],
        host_budget: int,
        device_budget: int,
        ranks_per_sequence: int | None = None,
    ) -> RunCosts:
        """The layers that are called, at any length of a rank's share, for the solver.

        Args:
            at: by kind, the arguments of LayerProfile.costs (batch, length and, with an encoder, source); None: it is not called.
            ranks_per_sequence: of the run; absent: as measured.
        """
        spread = (ranks_per_sequence or self.ranks_per_sequence) / self.ranks_per_sequence
        kinds = [here and kind.costs(*here, spread=spread) for kind, here in zip(self.kinds, at, strict=True)]
        return RunCosts(
            layers=tuple(kinds[self.layers[index]] for index in self.called(at)),
            d2h_bytes_per_s=self.d2h_bytes_per_s,
            h2d_bytes_per_s=self.h2d_bytes_per_s,
            host_budget=host_budget,
            device_budget=device_budget,
        )

    def beside(self, later: Profile) -> Profile:
        """This, and what was measured later of layers that it lacks."""
        layers = tuple(
            len(self.kinds) + theirs if mine is None and theirs is not None else mine
            for mine, theirs in zip(self.layers, later.layers, strict=True)
        )
        return replace(self, kinds=(*self.kinds, *later.kinds), layers=layers)


def _line(points: Sequence[tuple[float, float]], x: float) -> float:
    """a + b·x at x, through one or two points (x, y), with a, b ≥ 0: noise must not make a longer sequence cheaper, or a short
    one free."""
    (x1, y1), (x2, y2) = points[0], points[-1]
    slope = (y2 - y1) / (x2 - x1) if x2 > x1 else math.inf
    if not 0 <= slope <= y2 / x2:
        slope = y2 / x2
    return max(0.0, y2 + slope * (x - x2))


def _at_most(rays: Sequence[tuple[float, float, float]], x: float, y: float) -> float:
    """An upper bound at (x, y) of a function that is known at a few points (x, y, value), sorted by x / y.

    The function is a maximum of linear ones, so it is convex and scales with its arguments. (x, y) is written as a sum of
    multiples of the two points on either side; the same sum of their values is no less than the function there.
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
    """b·t + c·t·s at these tokens and length, through one or two points (t, s, y), with b, c ≥ 0."""
    (t1, s1, y1), (t2, s2, y2) = points[0], points[-1]
    whole = y2 / (t2 * s2)
    per_pair = (y2 / t2 - y1 / t1) / (s2 - s1) if s2 > s1 else whole
    per_pair = min(max(0.0, per_pair), whole)
    return tokens * (y2 / t2 - per_pair * s2) + per_pair * tokens * length
