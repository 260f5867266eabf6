"""Seconds of a step at a given alpha: the schedule of ds_memo.swap.engine.

Every time is the latest of some earlier ones plus a duration. Every duration is affine in alpha: more rows to copy, fewer to
compute. So the step is a maximum of affine functions: convex and piecewise linear in alpha, with a known slope.

    forward    an output's copy starts once it is born and the copies before it are done; a layer begins when at most one swapped
               frame below it is still being copied
    backward   begins when all copies are done; a frame's reload starts with the replay of the layer call above, its own replay
               when the reload is done
    in tiles   a layer begins when all copies of the one below it are done; its frame is reloaded during its own backward
"""

from __future__ import annotations

from dataclasses import dataclass

from ds_memo.placement import PlacementKind
from ds_memo.solve.costs import LayerCosts, RunCosts, TileCosts
from ds_memo.solve.kinds import Kinds

LEAVING = 2
"""A layer begins when fewer swapped frames than this are being copied to the host."""


@dataclass(frozen=True)
class Step:
    """One step at one alpha."""

    alpha: float
    seconds: float
    slope: float
    """Derivative of `seconds` by alpha. At a kink, that of one side."""
    d2h_stall_s: float
    """Seconds that compute waited for copies to the host."""
    h2d_stall_s: float
    """Seconds that compute waited for reloads."""
    nvme_stall_s: float = 0.0
    """Seconds that compute waited for files."""


class Schedule:
    """The steps of a run with given kinds of placements, as a function of alpha.

    Args:
        run: seconds, bytes, bandwidths.
        kinds: one per layer.
    """

    def __init__(self, run: RunCosts, kinds: Kinds) -> None:
        self.head_s = run.head_s
        legs: dict[tuple[LayerCosts, int], Leg] = {}
        self.legs = []
        for layer, kind in zip(run.layers, kinds, strict=True):
            key = layer, kind
            if key not in legs:
                legs[key] = Leg.of(layer, run, PlacementKind(kind))
            self.legs.append(legs[key])

    def at(self, alpha: float) -> Step:
        """Return the step at one alpha."""
        legs = self.legs
        now, now_slope = 0.0, 0.0
        out, out_slope = 0.0, 0.0  # when the d2h stream is done with its copies so far
        leaving: list[tuple[float, float]] = []
        d2h_stall = h2d_stall = 0.0
        for leg in legs:
            while len(leaving) >= (LEAVING if leg.tiles is None else 1):
                sent, slope = leaving.pop(0)
                if sent > now:
                    d2h_stall += sent - now
                    now, now_slope = sent, slope
            for after, constant, per_alpha in leg.copies:
                if now + after > out:
                    out, out_slope = now + after, now_slope
                out += constant + per_alpha * alpha
                out_slope += per_alpha
            now += leg.forward_s
            if leg.copies:
                leaving.append((out, out_slope))
        now += self.head_s
        for sent, slope in leaving:
            if sent > now:
                d2h_stall += sent - now
                now, now_slope = sent, slope
        back, back_slope = 0.0, 0.0
        ahead = -1  # the frame whose reload is under way
        for index in range(len(legs) - 1, -1, -1):
            leg = legs[index]
            if leg.tiles is not None and leg.copies:
                now, now_slope, stall = leg.backward_in_tiles(alpha, now, now_slope)
                h2d_stall += stall
                continue
            if leg.copies:
                if ahead != index:
                    back, back_slope = self._reload(leg, alpha, now, now_slope, back, back_slope)
                if back > now:
                    h2d_stall += back - now
                    now, now_slope = back, back_slope
                ahead = -1
            if ahead < 0:
                below = index - 1
                while below >= 0 and not legs[below].copies:
                    below -= 1
                if below >= 0 and legs[below].ahead and legs[below].tiles is None:
                    ahead = below
                    back, back_slope = self._reload(legs[below], alpha, now, now_slope, back, back_slope)
            now += leg.backward_s + leg.replay_s - leg.saved_s * alpha
            now_slope -= leg.saved_s
        return Step(alpha, now, now_slope, d2h_stall, h2d_stall)

    @staticmethod
    def _reload(leg: Leg, alpha: float, now: float, slope: float, back: float, back_slope: float) -> tuple[float, float]:
        if now > back:
            back, back_slope = now, slope
        return back + leg.reload_s + leg.reload_per_alpha * alpha, back_slope + leg.reload_per_alpha


@dataclass(frozen=True)
class Leg:
    """One layer's durations in a schedule."""

    forward_s: float
    backward_s: float
    replay_s: float
    """At alpha 0."""
    saved_s: float
    """Seconds of the replay that alpha 1 saves."""
    copies: tuple[tuple[float, float, float], ...]
    """To the host, each (seconds after the layer began, seconds at alpha 0, additional seconds at alpha 1). Empty: the frame
    stays on the device."""
    reload_s: float = 0.0
    reload_per_alpha: float = 0.0
    ahead: bool = True
    """The reload is issued while the backward is still at the layer above."""
    tiles: TileCosts | None = None
    """Tiles are reloaded while their layer runs backward."""
    reload_input_s: float = 0.0
    reload_first_s: float = 0.0
    """Seconds to reload attention's frame behind the heads that a backward in tiles begins with."""
    heads_again_s: float | None = None
    """Seconds of those heads; None: it does not begin with them."""

    @classmethod
    def of(cls, layer: LayerCosts, run: RunCosts, kind: PlacementKind) -> Leg:
        replay_s = 0.0 if kind is PlacementKind.NO_RECOMPUTE else layer.replay_s
        replay_s += 0.0 if kind >= PlacementKind.ON_DEVICE else layer.gemm_s
        replay_s += layer.attention_s if kind.recomputes_attention else 0.0
        tiles = None if kind is PlacementKind.NO_RECOMPUTE else layer.in_tiles
        begins_with_heads = tiles is not None and (kind.recomputes_attention or tiles.result_differs)
        if tiles is not None and kind.recomputes_attention and not tiles.result_differs:
            replay_s += tiles.heads_again_s
        if kind.on_device:
            return cls(layer.forward_s, layer.backward_s, replay_s, saved_s=0.0, copies=(), tiles=tiles)
        copies: list[tuple[float, float, float]] = []
        whole = split = first = 0
        for output in layer.outputs:
            born_s, seconds = output.born * layer.forward_s, output.nbytes / run.d2h_bytes_per_s
            if output.kind == "gemm":
                split += output.nbytes
                copies.append((born_s, 0.0, seconds))
            elif output.kind != "attention" or not kind.recomputes_attention:
                if output.kind == "attention" and begins_with_heads:
                    first += output.nbytes
                else:
                    whole += output.nbytes
                copies.append((born_s, seconds, 0.0))
        return cls(
            forward_s=layer.forward_s,
            backward_s=layer.backward_s,
            replay_s=replay_s,
            saved_s=layer.gemm_s,
            copies=tuple(copies),
            reload_s=whole / run.h2d_bytes_per_s,
            reload_per_alpha=split / run.h2d_bytes_per_s,
            ahead=not kind.recomputes_attention,
            tiles=tiles,
            reload_input_s=layer.nbytes("input") / run.h2d_bytes_per_s,
            reload_first_s=first / run.h2d_bytes_per_s,
            heads_again_s=tiles.heads_again_s if tiles is not None and begins_with_heads else None,
        )

    def backward_in_tiles(self, alpha: float, now: float, slope: float) -> tuple[float, float, float]:
        """Return the time and its slope after a backward in tiles that begins now, and how long it waits for reloads.

        A tile is reloaded while the one before it is computed, so each takes as long as the slower of the two. Stored tiles lie
        evenly among the others: as long as these are more, each of them stands between two of the others.
        """
        assert self.tiles is not None
        count, heads_s = self.tiles.count, self.tiles.heads_backward_s
        computed = self.tiles.tails_backward_s / count, (self.tiles.tails_backward_s - self.saved_s) / count
        reloaded = self.reload_s / count, (self.reload_s + self.reload_per_alpha) / count
        both_0, both_1 = max(computed[0], reloaded[0]), max(computed[1], reloaded[1])
        mixed = max(computed[0], reloaded[1]) + max(computed[1], reloaded[0])
        if alpha <= 0.5:
            tails_s, per_alpha = count * ((1 - 2 * alpha) * both_0 + alpha * mixed), count * (mixed - 2 * both_0)
        else:
            tails_s, per_alpha = count * ((2 * alpha - 1) * both_1 + (1 - alpha) * mixed), count * (2 * both_1 - mixed)
        attention_s = self.backward_s + self.replay_s - self.tiles.tails_backward_s - heads_s
        waits_s = max(0.0, self.reload_input_s - heads_s)
        if self.heads_again_s is not None:
            waits_s += max(0.0, self.reload_input_s - self.heads_again_s)
            waits_s += max(0.0, self.reload_first_s - self.heads_again_s / count)
        end = now + tails_s + attention_s + heads_s + waits_s
        stall = tails_s - (self.tiles.tails_backward_s - self.saved_s * alpha) + waits_s
        return end, slope + per_alpha, stall

    def first_pass(self, alpha: float) -> tuple[list[float], list[float]]:
        """Return the seconds to compute and to reload each tile in the pass that a backward in tiles begins with."""
        assert self.tiles is not None
        count, stored = self.tiles.count, self.tiles.stored(alpha)
        if self.heads_again_s is not None:
            return [self.heads_again_s / count] * count, [self.reload_input_s / count] * count
        computes, reloads = [self.tiles.tails_backward_s / count] * count, [self.reload_s / count] * count
        for number in range(stored):
            computes[number * count // stored] -= self.saved_s / count
            reloads[number * count // stored] += self.reload_per_alpha / count
        return computes, reloads
