"""A profile as plain data: samples of layers at a few lengths, and bandwidths. No torch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from ds_memo.placement import Tiles
from ds_memo.profile.layer_sample import AttentionSample, LayerSample, extrapolate
from ds_memo.profile.tile_sample import TileSample, in_tiles
from ds_memo.solve.run_costs import LayerCosts, RunCosts


@dataclass(frozen=True)
class LayerProfile:
    """One kind of layer at several lengths."""

    name: str
    """Name of the first such layer."""
    samples: tuple[LayerSample, ...]
    """One; two, through which lines go; or these and before them a shorter one that checks the lines."""
    attention: AttentionSample | None = None
    """Attention alone, at more tokens; None: not measured."""
    in_tiles: tuple[TileSample, ...] = ()
    """Empty: it cannot run in tiles, or was not measured so."""
    not_tiled: str = ""
    """Why."""

    @property
    def check(self) -> LayerSample | None:
        return self.samples[0] if len(self.samples) > 2 else None

    def at(self, batch: int, length: int) -> LayerCosts:
        """Return the costs that were measured at this length, else extrapolated ones."""
        measured = (sample for sample in self.samples if (sample.batch, sample.length) == (batch, length))
        return next(measured, None) or self.costs(batch, length)

    def costs(self, batch: int, length: int, spread: float = 1.0, tiles: Tiles | None = None) -> LayerCosts:
        """Extrapolate the layer to any length; see :func:`extrapolate`.

        Args:
            tiles: None: it runs whole.
        """
        whole = extrapolate(self.samples, batch, length, spread, self.attention)
        if tiles is None or not self.in_tiles or length <= tiles.tokens:
            return whole
        return in_tiles(whole, self.in_tiles, batch, length, tiles)

    def seconds(self) -> list[dict[str, Any]]:
        """Return what was measured: whole, attention alone, and in tiles. For display only."""
        whole = ("forward_s", "attention_s", "backward_s", "attention_backward_s", "replay_s", "gemm_s")
        found = [{"length": sample.length} | {name: getattr(sample, name) for name in whole} for sample in self.samples]
        found += [asdict(self.attention)] if self.attention else []
        tiled = ({"length": sample.length, "tile_tokens": sample.tile_tokens} | sample.by_part() for sample in self.in_tiles)
        return [*found, *tiled]

    def off(self) -> float:
        """Return the relative error of the lines' seconds at the check; inf if a size is off by more than 1 %."""
        if (check := self.check) is None:
            return 0.0
        if len({len(sample.outputs) for sample in self.samples}) > 1:
            return math.inf
        here = self.costs(check.batch, check.length)
        if [output.role for output in here.outputs] != [output.role for output in check.outputs]:
            return math.inf
        kept, predicted = (sum(output.nbytes for output in outputs) for outputs in (check.outputs, here.outputs))
        for got, want in ((predicted, kept), (here.no_recompute_bytes, check.no_recompute_bytes)):
            if abs(got - want) > 0.01 * want:
                return math.inf
        seconds = check.forward_s + check.backward_s
        return abs(here.forward_s + here.backward_s - seconds) / seconds if seconds else 0.0


@dataclass(frozen=True)
class RunProfile:
    """The measurements of a run."""

    key: dict[str, Any]
    """Everything the measurements depend on."""
    method: str
    kinds: tuple[LayerProfile, ...]
    layers: tuple[int | None, ...]
    """The kind of each layer, in model order; None: the layer was not called, or keeps nothing."""
    d2h_bytes_per_s: float
    h2d_bytes_per_s: float
    ranks_copying: int
    """Ranks of the node that copied at once."""
    ranks_per_sequence: int = 1
    """Ranks that shared a sequence; `length` is one rank's share."""
    measured: dict[str, Any] = field(default_factory=dict, compare=False)
    """Date, duration, and memory at that time; for display only."""

    def called(self, at: Sequence[Any]) -> list[int]:
        """Return the indices of the layers whose kinds are called and measured.

        Args:
            at: by kind; None: the kind is not called.
        """
        return [index for index, kind in enumerate(self.layers) if kind is not None and at[kind] is not None]

    def last(self, at: Sequence[Any]) -> Any:
        """Return the entry of `at` (by kind) for the last layer that is called."""
        return at[self.layers[self.called(at)[-1]]]

    def costs(
        self,
        at: Sequence[tuple[int, int] | None],
        host_budget: int,
        device_budget: int,
        ranks_per_sequence: int | None = None,
        tiles: Tiles | None = None,
    ) -> RunCosts:
        """Return the solver's input: the layers that are called, at any length of a rank's share.

        Args:
            at: by kind, batch and length; None: not called.
            ranks_per_sequence: ranks that share a sequence in the run; absent: as measured.
            tiles: how layers run that can run in tiles; None: all run whole.
        """
        spread = (ranks_per_sequence or self.ranks_per_sequence) / self.ranks_per_sequence
        pairs = zip(self.kinds, at, strict=True)
        kinds = [kind.costs(*here, spread=spread, tiles=tiles) if here else None for kind, here in pairs]
        return RunCosts(
            layers=tuple(kinds[self.layers[index]] for index in self.called(at)),
            d2h_bytes_per_s=self.d2h_bytes_per_s,
            h2d_bytes_per_s=self.h2d_bytes_per_s,
            host_budget=host_budget,
            device_budget=device_budget,
            tiles=tiles,
        )

    def tilings(self, at: Sequence[tuple[int, int] | None]) -> list[Tiles]:
        """Return the tiles that calls of these sizes may run in, with as many groups of heads as can be, longest tiles first.

        Args:
            at: as in `costs`.
        """
        tiled = [(kind.in_tiles, here) for kind, here in zip(self.kinds, at, strict=True) if here and kind.in_tiles]
        if not tiled:
            return []
        groups = min(sample.most_groups for samples, _ in tiled for sample in samples)
        least, longest = min(samples[0].tile_tokens for samples, _ in tiled) // 2, max(length for _, (_, length) in tiled)
        tokens = [least << doubled for doubled in reversed(range(longest.bit_length()))]
        return [Tiles(of_tile, groups) for of_tile in tokens if of_tile < longest]
