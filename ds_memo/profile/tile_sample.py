"""Samples of a layer that runs in tiles, and what it costs in other tiles and at other lengths. No torch.

Three samples tell the lines of each part of a tiled layer: few tokens; more tokens in such tiles; the same in larger tiles.

seconds      a + b·tiles + c·tokens: short GEMMs, sums of weight gradients and the host's work come once for each tile. Attention
             is as in the layer that runs whole
peak bytes   a + b·tokens + c·tokens of a tile: weight gradients, tensors of all tokens, transients of a tile
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from ds_memo.placement import Tiles
from ds_memo.solve.run_costs import LayerCosts, Output, PeakBytes, TileCosts
from ds_memo.spans import longest, number_of_spans

PARTS = ("pre", "attention", "post", "post_backward", "attention_backward", "pre_backward")
"""Parts of a layer in tiles, in order: before attention, attention, after it; the backward in the opposite order."""
SAMPLES = 3


Peak = tuple[int, int]
"""The most device bytes at once in a part, without the layer's frame in the backward: if no GEMM output is stored; and if all are
stored on the device, with them in the forward, without them in the backward."""


@dataclass(frozen=True)
class TileSample:
    """One kind of layer in tiles, measured at one length. Seconds and bytes are those of one rank."""

    batch: int
    length: int
    tile_tokens: int
    """As asked for."""
    result_differs: bool
    """As in :class:`ds_memo.solve.run_costs.TileCosts`. What the backward begins with is then in "post_backward"."""
    seconds: tuple[float, ...]
    """Seconds of each of PARTS, if no GEMM output is stored."""
    peaks: tuple[tuple[Peak, ...], ...]
    """Peaks of each of PARTS, in 1, 2, 4, … groups of heads, as many as attention can be divided into."""
    carried_bytes: int = 0
    """Bytes that a tile keeps of what the tile before left: states of scans, inputs of convolutions."""

    @property
    def most_groups(self) -> int:
        return 1 << len(self.peaks) - 1

    def peaks_in(self, groups: int) -> tuple[Peak, ...]:
        """Return the peaks of each part in the most of the groups measured that are not more than these."""
        return self.peaks[min(groups.bit_length(), len(self.peaks)) - 1]

    def by_part(self) -> dict[str, float]:
        return {f"{part}_s": seconds for part, seconds in zip(PARTS, self.seconds, strict=True)}

    @property
    def cut(self) -> Cut:
        return Cut.of(self.batch, self.length, self.tile_tokens)


@dataclass(frozen=True)
class Cut:
    """Sizes of a call in tiles."""

    tokens: int
    """Tokens of the call."""
    tiles: int
    of_tile: int
    """Tokens of the longest tile."""

    @classmethod
    def of(cls, batch: int, length: int, tile_tokens: int) -> Cut:
        rows, tokens = longest(batch, length, tile_tokens)
        return cls(batch * length, number_of_spans(batch, length, tile_tokens), rows * tokens)


def in_tiles(
    whole: LayerCosts,
    samples: Sequence[TileSample],
    batch: int,
    length: int,
    tiles: Tiles,
) -> LayerCosts:
    """Return the costs of a layer in tiles.

    Args:
        whole: costs of the same call without tiles.
        samples: SAMPLES of them.
    """
    cut = Cut.of(batch, length, tiles.tokens)
    pre, _, post, post_backward, _, pre_backward = range(len(PARTS))
    cuts = [sample.cut for sample in samples]
    seconds = [_plane(of_part, _by_tiles, cuts, cut) for of_part in zip(*(sample.seconds for sample in samples), strict=True)]
    in_groups = zip(*(sample.peaks_in(tiles.head_groups) for sample in samples), strict=True)
    of_bytes = [zip(*of_part, strict=True) for of_part in in_groups]
    peaks, stored = zip(*([_plane(b, _by_tokens, cuts, cut) for b in of_part] for of_part in of_bytes), strict=True)
    forward_s = seconds[pre] + whole.attention_s + seconds[post]
    backward_s = seconds[post_backward] + whole.attention_backward_s + seconds[pre_backward]
    differs = samples[0].result_differs  # then pre runs again as a part of "post_backward"
    born = (forward_s - seconds[post]) / forward_s if forward_s else 1.0
    carried = Output("input", 1, samples[0].carried_bytes * (cut.tiles - batch))  # a sequence's first tile has none
    return replace(
        whole,
        outputs=(
            *(output if output.role == "input" else replace(output, born=born) for output in whole.outputs),
            *([carried] if carried.nbytes else []),
        ),
        forward_s=forward_s,
        backward_s=max(0.0, backward_s - whole.gemm_s - whole.replay_s),
        working=working_of(stored),
        working_at_0=working_of(peaks),
        working_without_attention=working_of(peaks).plus(0, whole.attention_bytes),
        in_tiles=TileCosts(
            cut.tiles,
            post_backward_s=max(0.0, seconds[post_backward] - differs * seconds[pre]),
            pre_backward_s=seconds[pre_backward],
            pre_again_s=seconds[pre],
            result_differs=differs,
            working_whole=whole.working,
        ),
    )


def working_of(peaks: Sequence[float]) -> PeakBytes:
    """Return the peak bytes of a layer by those of its PARTS."""
    forward, (post, attention, pre) = peaks[:3], peaks[3:]
    return PeakBytes(round(max(forward)), round(max(post, attention, pre)), round(max(post, pre)))


def _by_tiles(cut: Cut) -> tuple[int, int]:
    return cut.tiles, cut.tokens


def _by_tokens(cut: Cut) -> tuple[int, int]:
    return cut.of_tile, cut.tokens


def _plane(values: Sequence[float], by: Callable[[Cut], tuple[int, int]], cuts: Sequence[Cut], at: Cut) -> float:
    """Return a + b·x + c·t at a cut, through the values at three.

    All of a, b, c are at least 0, and the value at the second cut is kept: noise must not make a longer call cheaper, or a short
    one free.

    Args:
        by: returns x and t. Of the last two cuts t is the same.
    """
    (few, few_tokens), (many, tokens), (other, _) = map(by, cuts)
    at_few, at_many, at_other = values
    b = _between(0.0, (at_many - at_other) / (many - other), at_many / many) if many != other else 0.0
    rest = at_many - b * many
    c = _between(0.0, (rest - at_few + b * few) / (tokens - few_tokens), rest / tokens)
    x, t = by(at)
    return rest - c * tokens + b * x + c * t


def _between(least: float, value: float, most: float) -> float:
    return max(least, min(value, most))
