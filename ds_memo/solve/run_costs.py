"""The solver's input: seconds, bytes and budgets of one rank, from the profiler or by formula.

output     a tensor that a layer keeps for its backward, in rows (tokens)
layer      its outputs; seconds and bytes of its forward, backward and replay
run        all layers, both bandwidths, both budgets
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Literal, NamedTuple

from ds_memo.placement import Placement, PlacementKind, Tiles, stored_rows
from ds_memo.solve.groups import without_inputs
from ds_memo.units import ALIGN, round_up

PAGE = mmap.PAGESIZE
"""Bytes; a frame's host block is whole pages (ds_memo.swap.host_pool)."""

OutputRole = Literal["input", "attention", "choice", "gemm"]


@dataclass(frozen=True)
class Output:
    """One tensor that a layer keeps.

    Alpha splits only a "gemm". "input" and "choice" (a router's) are stored whole, and "attention" too except in the last resort.
    """

    role: OutputRole
    rows: int
    row_bytes: int
    born: float = 1.0
    """Time of its birth as a share of the layer's forward: its copy to the host can start then."""

    @property
    def nbytes(self) -> int:
        return self.rows * self.row_bytes


@dataclass(frozen=True)
class PeakBytes:
    """Peak bytes of a layer on the device, without the frames of other layers."""

    forward: int = 0
    """In its forward: its input, its kept tensors and everything in between."""
    backward: int = 0
    """In its replay and backward, without its own frame."""
    tiles_backward: int = 0
    """The same without attention's backward, if the layer runs in tiles."""

    def plus(self, forward: int, backward: int) -> PeakBytes:
        """Return these bytes with others next to them."""
        return PeakBytes(self.forward + forward, self.backward + backward, self.tiles_backward + backward)


@dataclass(frozen=True)
class TileCosts:
    """Differences of a layer that runs in tiles. Each tile has a frame, and two of these are on the device at once.

    During attention's backward only one tile's input is on the device.
    """

    count: int
    """Number of tiles."""
    post_backward_s: float
    """Seconds of what follows attention in the backward, at alpha 0. All that is stored is reloaded meanwhile."""
    pre_backward_s: float
    """Seconds of what comes before attention. The input is reloaded meanwhile, once more."""
    pre_again_s: float = 0.0
    """Seconds of what comes before attention, run once more as the backward begins, if attention is recomputed or if:"""
    result_differs: bool = False
    """True if attention's result is not its kernel's output (Ulysses): that is kept, in one frame, and the backward makes the
    result of it again, which is in its seconds."""
    working_whole: PeakBytes = PeakBytes()
    """Peak bytes of the layer without recompute, which runs whole."""

    def stored(self, alpha: float) -> int:
        """Return the number of tiles that are stored."""
        return int(self.count * alpha + 1e-9)


class Slowdown(NamedTuple):
    """Factors on the seconds of a layer's parts."""

    forward: float = 1.0
    """Without attention."""
    attention: float = 1.0
    backward: float = 1.0
    """Without attention's; with what is computed again."""
    attention_backward: float = 1.0


@dataclass(frozen=True, eq=False)
class LayerCosts:
    """One layer at one length. Layers that are alike are the same object, and none equals another."""

    outputs: tuple[Output, ...]
    """In order of birth."""
    forward_s: float
    backward_s: float
    """Seconds of the backward, without the replay before it."""
    replay_s: float
    """Seconds of the replay when everything is supplied: norms, activations, and so on."""
    gemm_s: float
    """Seconds that the replay takes longer when no row of a GEMM is supplied."""
    attention_s: float
    """Seconds that the replay takes longer when the attention output is not supplied either."""
    no_recompute_bytes: int
    """Bytes that autograd saves for the layer without recompute."""
    attention_backward_s: float = 0.0
    """Part of the backward in attention kernels."""
    working: PeakBytes = PeakBytes()
    """With GEMM outputs kept: resident, or at any alpha above 0."""
    working_at_0: PeakBytes = PeakBytes()
    """At alpha 0: GEMM outputs are transients of the replay."""
    working_without_attention: PeakBytes = PeakBytes()
    """At alpha 0, without the attention output."""
    in_tiles: TileCosts | None = None
    """None: it runs whole."""

    def slower(self, by: Slowdown) -> LayerCosts:
        """Return the costs with these factors on its seconds."""
        attention_s, attention_backward_s = by.attention * self.attention_s, by.attention_backward * self.attention_backward_s
        tiles, again = self.in_tiles, by.backward
        return replace(
            self,
            forward_s=by.forward * (self.forward_s - self.attention_s) + attention_s,
            backward_s=by.backward * (self.backward_s - self.attention_backward_s) + attention_backward_s,
            replay_s=again * self.replay_s,
            gemm_s=again * self.gemm_s,
            attention_s=attention_s,
            attention_backward_s=attention_backward_s,
            in_tiles=tiles
            and replace(
                tiles,
                post_backward_s=again * tiles.post_backward_s,
                pre_backward_s=again * tiles.pre_backward_s,
                pre_again_s=again * tiles.pre_again_s,
            ),
        )

    @cached_property
    def hidden_bytes(self) -> int:
        """Bytes of the hidden states that come in."""
        return next((output.nbytes for output in self.outputs if output.role == "input"), 0)

    @cached_property
    def posts_again_s(self) -> float:
        """Seconds in which tiles compute the layer's output from its input and attention's output."""
        attended = next((output.born for output in self.outputs if output.role == "attention"), 0.0) * self.forward_s
        tiles = self.in_tiles
        return self.forward_s - attended + (tiles.pre_again_s if tiles and tiles.result_differs and attended else 0.0)

    def nbytes(self, *roles: OutputRole) -> int:
        return sum(output.nbytes for output in self.outputs if output.role in roles)

    @cached_property
    def whole_bytes(self) -> int:
        """Bytes stored at any alpha."""
        return self.nbytes("input", "attention", "choice")

    @cached_property
    def split_bytes(self) -> int:
        """Bytes of which the share alpha is stored."""
        return self.nbytes("gemm")

    @cached_property
    def attention_bytes(self) -> int:
        return self.nbytes("attention")

    @cached_property
    def frame_bytes(self) -> int:
        """Device bytes of a resident layer's frame or of a reload buffer."""
        return sum(round_up(output.nbytes, ALIGN) for output in self.outputs)

    @cached_property
    def small_frame_bytes(self) -> int:
        """Device bytes of a reload buffer at alpha 0."""
        return sum(round_up(output.nbytes, ALIGN) for output in self.outputs if output.role != "gemm")

    @cached_property
    def smallest_frame_bytes(self) -> int:
        """Device bytes of a reload buffer at alpha 0 without the attention output."""
        return sum(round_up(output.nbytes, ALIGN) for output in self.outputs if output.role in ("input", "choice"))

    def host_bytes(self, placement: Placement) -> int:
        """Return the exact bytes of the frame's host block, or of those of its tiles; 0 on the device."""
        if placement.kind.on_device:
            return 0
        if self.in_tiles is None:
            return round_up(sum(round_up(nbytes, ALIGN) for nbytes in self._stored(placement)), PAGE)
        stored = self.in_tiles.stored(placement.decided_alpha)
        apart, with_gemms, without = self.tile_blocks(placement.kind)
        return apart + stored * with_gemms + (self.in_tiles.count - stored) * without

    def tile_blocks(self, kind: PlacementKind) -> tuple[int, int, int]:
        """Return the bytes of a swapped layer's host blocks in tiles: of attention's frame, if it has one; of a tile that is
        stored; of another tile."""
        assert self.in_tiles is not None
        tiles, again = self.in_tiles.count, kind.recomputes_attention
        apart = self.attention_bytes if self.in_tiles.result_differs and not again else 0
        small = (self.smallest_frame_bytes if again else self.small_frame_bytes) - apart
        small -= round_up(self.hidden_bytes, ALIGN) if kind is PlacementKind.SWAPPED_WITHOUT_INPUT else 0
        large = small + self.frame_bytes - self.small_frame_bytes
        with_gemms, without = (round_up(-(-nbytes // tiles), PAGE) for nbytes in (large, small))
        return round_up(apart, PAGE), with_gemms, without

    def stored_bytes(self, placement: Placement) -> int:
        """Return the bytes that the layer keeps, wherever, as report()["stored_bytes_per_layer"] counts them."""
        return 0 if placement.kind is PlacementKind.NO_RECOMPUTE else sum(self._stored(placement))

    def _stored(self, placement: Placement) -> Iterator[int]:
        alpha, tiles = placement.decided_alpha, self.in_tiles
        hidden = next((output for output in self.outputs if output.role == "input"), None)
        for output in self.outputs:
            if output is hidden and placement.kind is PlacementKind.SWAPPED_WITHOUT_INPUT:
                continue
            if output.role == "gemm":
                rows = stored_rows(alpha, output.rows) if tiles is None else output.rows * tiles.stored(alpha) // tiles.count
                yield rows * output.row_bytes
            elif output.role != "attention" or not placement.kind.recomputes_attention:
                yield output.nbytes


@dataclass(frozen=True)
class NvmeCosts:
    """This rank's share of the node's drives, behind its host memory."""

    budget: int
    """Bytes that may be in files."""
    write_bytes_per_s: float
    read_bytes_per_s: float
    """Bandwidths while all ranks of the node write or read at once, beside their copies."""
    most_written_per_s: float = math.inf
    """Bytes per second that may be written on average over a step: what the drives are rated for."""


@dataclass(frozen=True)
class RunCosts:
    """A whole run at one length."""

    layers: tuple[LayerCosts, ...]
    """In the order of the forward."""
    d2h_bytes_per_s: float
    h2d_bytes_per_s: float
    """Bandwidths of this rank while all ranks of the node copy at once."""
    host_budget: int
    """Bytes this rank may keep on the host."""
    device_budget: int
    """Bytes this rank may use on the device beyond parameters, optimizer states and gradients."""
    working_bytes: int = 0
    """Non-layer memory, out of the device budget, at any time of a step."""
    head_bytes: int = 0
    """Non-layer memory between the last layer's forward and its backward: logits, loss, their gradients."""
    forward_bytes: int = 0
    """Non-layer memory in the forward: gathered parameters."""
    backward_bytes: tuple[int, ...] = ()
    """Non-layer memory in each layer's backward: gradients until they are reduced. Empty: none."""
    head_s: float = 0.0
    """Seconds of head and loss, between the last layer's forward and its backward."""
    tiles: Tiles | None = None
    """How its layers run in tiles; None: they run whole."""
    nvme: NvmeCosts | None = None
    """None: host blocks stay in host memory."""
    follows: tuple[bool, ...] = ()
    """By layer: False if its input is not the output of the layer before. Empty: only the first one's is not."""

    def without_inputs(self, kinds: Sequence[PlacementKind]) -> Sequence[PlacementKind]:
        """Return the kinds with the inputs left out that its tiles compute again."""
        return self._grouped(tuple(kinds)) if self.groups_inputs else kinds

    @property
    def groups_inputs(self) -> bool:
        return self.tiles is not None and self.tiles.input_every > 1

    @cached_property
    def _grouped(self) -> Callable[[tuple[PlacementKind, ...]], tuple[PlacementKind, ...]]:
        assert self.tiles is not None
        at_0 = Placement(PlacementKind.SWAPPED, 0.0)
        tiled = [layer.in_tiles is not None for layer in self.layers]
        follows = self.follows or (False, *(True,) * (len(self.layers) - 1))
        linked = [here and below and both for here, below, both in zip(follows, [False, *tiled], tiled, strict=False)]
        inputs, blocks = zip(*((layer.hidden_bytes, layer.host_bytes(at_0)) for layer in self.layers), strict=True)
        every = self.tiles.input_every
        return lru_cache(maxsize=1 << 10)(lambda kinds: without_inputs(kinds, every, linked, inputs, blocks))

    def non_layer_bytes(self) -> dict[str, int]:
        """Return the non-layer memory in bytes, by the part of the step that needs it."""
        backward = max(self.backward_bytes, default=0)
        return {"forward": self.forward_bytes, "head": self.head_bytes, "backward": backward, "always": self.working_bytes}

    def each(self, change: Callable[[LayerCosts], LayerCosts]) -> RunCosts:
        """Return the run with `change` applied to every layer. Layers that are one object remain one: the solver relies on it."""
        changed = {layer: change(layer) for layer in set(self.layers)}
        return replace(self, layers=tuple(changed[layer] for layer in self.layers))

    def layers_alone(self) -> RunCosts:
        """Return the run without non-layer memory."""
        return replace(self, working_bytes=0, head_bytes=0, forward_bytes=0, backward_bytes=())
