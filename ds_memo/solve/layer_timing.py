"""Seconds of one layer in a schedule, as functions of alpha: more rows to copy, fewer to compute.

All are affine, or convex. In tiles they are so at shares of whole tiles, and do not change between these."""

from __future__ import annotations

from dataclasses import dataclass

from ds_memo.placement import PlacementKind
from ds_memo.solve.run_costs import LayerCosts, RunCosts, TileCosts


@dataclass(slots=True)
class Durations:
    """Those seconds of a layer that depend on alpha. A schedule reads them some thousand times: slots are fast."""

    copies_s: float
    """Copies to the host, one after another."""
    copied_s: float
    """From the begin of the layer until all copies are over, if none of other layers is before them."""
    reload_s: float
    backward_s: float
    """With the replay; in tiles, with the waits for reloads."""
    waits_s: float
    """Part of the backward in tiles that waits for reloads."""
    replay_s: float
    """Part of the backward that computes outputs again. That of a tile is not told apart."""


@dataclass(frozen=True)
class LayerTiming:
    """One layer with one kind of placement."""

    forward_s: float
    backward_s: float
    replay_s: float
    """At alpha 0."""
    saved_s: float
    """Seconds of the replay that alpha 1 saves."""
    again_s: float = 0.0
    """Part of the replay before the first tile's backward."""
    copies: tuple[tuple[float, float, float], ...] = ()
    """To the host, each (seconds after the layer began, seconds at alpha 0, additional seconds at alpha 1). Empty: the frame
    stays on the device."""
    reload_s: float = 0.0
    reload_per_alpha: float = 0.0
    ahead: bool = True
    """The reload is issued while the backward is still at the layer above."""
    tiles: TileCosts | None = None
    """Not None: a swapped frame is reloaded tile by tile, during the layer's own backward."""
    reload_input_s: float = 0.0
    reload_first_s: float = 0.0
    """Seconds to reload attention's frame behind the part before attention that a backward in tiles begins with."""
    pre_again_s: float | None = None
    """Seconds of that part; None: it does not begin with it."""
    pre_s: float = 0.0
    attended_s: float = 0.0
    """Seconds before attention, and until it is over, in a forward in tiles."""
    posts_again_s: float = 0.0
    """Seconds in which its output is computed again, for the layer above; without waits."""
    late_s: float = 0.0
    """Seconds in which its input, computed in the backward, goes to the host."""

    @classmethod
    def of(cls, layer: LayerCosts, run: RunCosts, kind: PlacementKind) -> LayerTiming:
        replay_s = 0.0 if kind is PlacementKind.NO_RECOMPUTE else layer.replay_s
        replay_s += 0.0 if kind >= PlacementKind.ON_DEVICE else layer.gemm_s
        replay_s += layer.attention_s if kind.recomputes_attention else 0.0
        tiles = None if kind is PlacementKind.NO_RECOMPUTE else layer.in_tiles
        again_s, begins_with_pre = layer.attention_s if kind.recomputes_attention else 0.0, False
        if tiles is not None and (kind.recomputes_attention or tiles.result_differs):
            again_s, begins_with_pre = again_s + tiles.pre_again_s, True
        if tiles is not None and kind.recomputes_attention and not tiles.result_differs:
            replay_s += tiles.pre_again_s
        if kind.on_device:
            posts_s = layer.posts_again_s if tiles else 0.0
            return cls(layer.forward_s, layer.backward_s, replay_s, 0.0, again_s, tiles=tiles, posts_again_s=posts_s)
        copies: list[tuple[float, float, float]] = []
        whole = split = first = late = 0
        for output in layer.outputs:
            if output.role == "input" and kind is PlacementKind.SWAPPED_WITHOUT_INPUT and not late:
                whole, late = whole + output.nbytes, output.nbytes
                continue
            born_s, seconds = output.born * layer.forward_s, output.nbytes / run.d2h_bytes_per_s
            if output.role == "gemm":
                split += output.nbytes
                copies.append((born_s, 0.0, seconds))
            elif output.role != "attention" or not kind.recomputes_attention:
                if output.role == "attention" and begins_with_pre:
                    first += output.nbytes
                else:
                    whole += output.nbytes
                copies.append((born_s, seconds, 0.0))
        attended_s = next((output.born for output in layer.outputs if output.role == "attention"), 1.0) * layer.forward_s
        return cls(
            forward_s=layer.forward_s,
            backward_s=layer.backward_s,
            replay_s=replay_s,
            saved_s=layer.gemm_s,
            again_s=again_s,
            copies=tuple(copies),
            reload_s=whole / run.h2d_bytes_per_s,
            reload_per_alpha=split / run.h2d_bytes_per_s,
            ahead=tiles is None and not kind.recomputes_attention,
            tiles=tiles,
            reload_input_s=layer.nbytes("input") / run.h2d_bytes_per_s,
            reload_first_s=first / run.h2d_bytes_per_s,
            pre_again_s=tiles.pre_again_s if tiles is not None and begins_with_pre else None,
            pre_s=max(0.0, attended_s - layer.attention_s) if tiles else 0.0,
            attended_s=attended_s if tiles else 0.0,
            posts_again_s=layer.posts_again_s if tiles else 0.0,
            late_s=late / run.d2h_bytes_per_s,
        )

    def at(self, alpha: float) -> Durations:
        alpha = self._share(alpha)
        replay_s, waits_s = self.replay_s - self.saved_s * alpha, 0.0
        backward_s = self.backward_s + replay_s
        if self.tiles is not None:
            replay_s = self.again_s
            if self.copies:
                backward_s, waits_s = self._backward_in_tiles(alpha)
        return Durations(*self.copies_at(alpha), self.reload_s + self.reload_per_alpha * alpha, backward_s, waits_s, replay_s)

    def copies_at(self, alpha: float, until: float = float("inf")) -> tuple[float, float]:
        """Return `copies_s` and `copied_s` of the copies that begin before `until`, in seconds after the layer began."""
        alpha, copies_s, copied_s = self._share(alpha), 0.0, 0.0
        for after, constant, per_alpha in self.copies:
            if after < until:
                seconds = constant + per_alpha * alpha
                copies_s += seconds
                copied_s = max(copied_s, after) + seconds
        return copies_s, copied_s

    def _share(self, alpha: float) -> float:
        """Return the share of the rows that is stored at `alpha`: in tiles, of whole ones."""
        return alpha if self.tiles is None else self.tiles.stored(alpha) / self.tiles.count

    def _backward_in_tiles(self, alpha: float) -> tuple[float, float]:
        """Return the seconds of a backward in tiles, and of its waits for reloads.

        A tile is reloaded while the one before it is computed, so each takes as long as the slower of the two. Stored tiles lie
        evenly among the others: as long as these are more, each of them stands between two of the others.
        """
        assert self.tiles is not None
        count, pre_s = self.tiles.count, self.tiles.pre_backward_s
        computed = self.tiles.post_backward_s / count, (self.tiles.post_backward_s - self.saved_s) / count
        reloaded = self.reload_s / count, (self.reload_s + self.reload_per_alpha) / count
        both_0, both_1 = max(computed[0], reloaded[0]), max(computed[1], reloaded[1])
        mixed = max(computed[0], reloaded[1]) + max(computed[1], reloaded[0])
        others = both_0 if alpha <= 0.5 else both_1
        post_s = count * (abs(1 - 2 * alpha) * others + min(alpha, 1 - alpha) * mixed)
        attention_s = self.backward_s + self.replay_s - self.tiles.post_backward_s - pre_s
        waits_s = max(0.0, self.reload_input_s - pre_s)
        if self.pre_again_s is not None:
            waits_s += max(0.0, self.reload_input_s - self.pre_again_s)
            waits_s += max(0.0, self.reload_first_s - self.pre_again_s / count)
        backward_s = post_s + attention_s + pre_s + waits_s
        return backward_s, post_s - (self.tiles.post_backward_s - self.saved_s * alpha) + waits_s

    def posts_again(self, alpha: float, late_s: float) -> tuple[float, float]:
        """Return the seconds in which tiles compute the input of the layer above, and the part of them that waits for copies.

        Args:
            late_s: in which that input goes to the host.
        """
        reload_s = self.reload_s + self.reload_per_alpha * self._share(alpha) if self.copies else 0.0
        first_s = reload_s / self.tiles.count if self.tiles is not None else 0.0
        if self.pre_again_s is not None:  # it comes before: its own inputs are reloaded, then attention's frame
            first_s += max(0.0, self.reload_first_s - self.pre_again_s / self.tiles.count)  # type: ignore[union-attr]
        seconds = max(self.posts_again_s, reload_s - first_s, late_s) + first_s
        return seconds, seconds - self.posts_again_s

    def first_pass_s(self, alpha: float) -> float:
        """Return the seconds of the pass over tiles that a backward begins with, without waits."""
        assert self.tiles is not None
        return self.tiles.post_backward_s - self.saved_s * alpha if self.pre_again_s is None else self.pre_again_s
