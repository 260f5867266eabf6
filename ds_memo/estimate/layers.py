"""A model's real layers, measured on the meta device: their shapes run, no number is computed, and a clock of prices keeps time.

The code is that of a run's own profile (ds_memo.profile): record, replay and backward by the layer's recipe, whole and in tiles.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import cache, cached_property, partial
from typing import Any, NamedTuple

import torch
from torch import nn

from ds_memo.attention_kernel import Attention
from ds_memo.estimate.hardware import Hardware, load
from ds_memo.estimate.kernels import Clock
from ds_memo.estimate.meta_kernels import ATTENTION, CatchSdpa, fuse_modules, fused_rotary
from ds_memo.estimate.mixer_kernels import mixer_kernels
from ds_memo.hf.find_layers import find_layers
from ds_memo.profile import stopwatch
from ds_memo.profile.caught_call import CaughtCall, layer_calls
from ds_memo.profile.layer import measure
from ds_memo.profile.layer_kinds import kinds_of
from ds_memo.profile.layer_sample import LayerSample
from ds_memo.profile.run_profile import LayerProfile, RunProfile
from ds_memo.profile.tile_sample import TileSample
from ds_memo.profile.tiles import measure_in_tiles
from ds_memo.remat.layer import Layer
from ds_memo.remat.layer_call import CannotTile
from ds_memo.remat.remat import LayerRun
from ds_memo.sequence.catch_mixers import calls_mixers

META = torch.device("meta")
_ANY = load("h100")
"""FLOPs know no machine."""
_LONGEST = 1 << 26
"""Tokens of the caught calls, which are cut to the length of a sample."""
_APART = 4
"""Quotient of neighbouring lengths of samples: between two, peak bytes and times are as good as linear."""
_LEAST = 1 << 10
_MANY_OPS = 300
"""Ops of the forward of a layer that loops over its tokens (a scan that ds_memo.estimate.mixer_kernels lacks)."""
_TILED = (1 << 15, 1 << 16)
"""Lengths of samples in tiles."""


class ForwardFlops(NamedTuple):
    all: float
    products: float
    """Those of products with a weight."""


class Layers:
    """The layers of a model on the meta device.

    Args:
        model: its attention implementation is ATTENTION.
        fused: see ds_memo.estimate.meta_kernels.
    """

    def __init__(self, model: nn.Module, fused: bool) -> None:
        self._model = model
        calls_mixers(model)
        self._fused = fused
        if fused:
            fuse_modules(model)
        self.found = [Layer(index, name, module) for index, (name, module) in enumerate(find_layers(model))]
        self._kinds = kinds_of(self.found)
        self._forward = cache(self._run_forward)
        self._sample = cache(self._take_sample)
        self._in_tiles = cache(self._take_in_tiles)

    def profile(self, machine: Hardware, ulysses: int, ring: int, tokens: int, tiled: bool) -> RunProfile:
        """Return a profile as one of a real run on as many ranks to a sequence.

        Args:
            tokens: of a rank, near which the samples are.
            tiled: True if layers run in tiles, too.
        """
        profiles = []
        for kind, call in self._calls.items():
            samples = tuple(self._sample(kind, length, ulysses, machine, ring) for length in self._lengths(kind, tokens))
            in_tiles = self._in_tiles(kind, ulysses, machine, ring) if tiled else ()
            profiles.append(LayerProfile(call.layer.name, samples, in_tiles=in_tiles))
        numbers = {kind: number for number, kind in enumerate(self._calls)}
        layers = tuple(numbers[kind] for kind in self._kinds)
        return RunProfile({}, "meta", tuple(profiles), layers, machine.d2h, machine.h2d, 1, ulysses * ring)

    def forward_flops(self, tokens: int) -> ForwardFlops:
        """Return the FLOPs of all layers' forward of one sequence."""
        found = {}
        for kind in self._calls:
            length = _LEAST if self._loops(kind) else tokens  # a loop's FLOPs grow with the tokens alone
            clock = self._forward(kind, length)
            found[kind] = ForwardFlops(clock.flops * tokens / length, clock.product_flops * tokens / length)
        return ForwardFlops(sum(found[kind].all for kind in self._kinds), sum(found[kind].products for kind in self._kinds))

    @cached_property
    def attention(self) -> tuple[Attention, ...]:
        """The calls of attention in all layers, those without a window first."""
        found = {call for kind in self._calls for call in self._forward(kind, _LEAST).attention}
        return tuple(sorted(found, key=lambda call: call.mask))

    @cached_property
    def _calls(self) -> dict[int, CaughtCall]:
        """The first call of each kind of layer, of _LONGEST tokens."""
        embeddings = torch.empty(1, _LONGEST, self._model.config.hidden_size, dtype=torch.bfloat16, device=META)
        given, kinds = {"inputs_embeds": embeddings, "use_cache": False}, self._kinds
        with CatchSdpa(), mixer_kernels():
            calls = layer_calls(self._instead, META, self._model, (), given, kinds, lambda calls: len(calls) > max(kinds))
        return dict(sorted(calls.items()))

    @contextmanager
    def _instead(self, run: LayerRun) -> Iterator[None]:
        """Have `run` called in place of the layers' forwards."""

        def called(layer: Layer, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            return run(layer, forward, args, kwargs)

        modules: list[Any] = [layer.module() for layer in self.found]
        for layer, module in zip(self.found, modules, strict=True):
            module.forward = partial(called, layer, module.forward)
        try:
            yield
        finally:
            for module in modules:
                del module.forward

    def _lengths(self, kind: int, tokens: int) -> tuple[int, int]:
        """Return the lengths of the samples next to a number of tokens."""
        if self._loops(kind):
            return _LEAST // 4, _LEAST // 2
        steps = max(0, int(math.log(max(tokens, 1) / _LEAST, _APART)))
        return _LEAST * _APART**steps, _LEAST * _APART ** (steps + 1)

    @contextmanager
    def _running(self, ulysses: int, ring: int, clock: Clock) -> Iterator[None]:
        ATTENTION.sp, ATTENTION.ring = ulysses, ring
        fused = fused_rotary(self._model) if self._fused else nullcontext()
        try:
            with stopwatch.keeping_time(lambda: clock.seconds), fused, CatchSdpa(), mixer_kernels(), clock:
                yield
        finally:
            ATTENTION.sp = ATTENTION.ring = 1  # of all models

    def _run_forward(self, kind: int, length: int) -> Clock:
        """Run a layer's forward alone, and count."""
        fn, args, _ = self._calls[kind].at(length)
        with torch.no_grad(), self._running(1, 1, clock := Clock(_ANY, length)):
            fn(*args)
        return clock

    def _loops(self, kind: int) -> bool:
        """Return True if a layer loops over its tokens."""
        return self._forward(kind, _LEAST).ops > _MANY_OPS

    def _take_sample(self, kind: int, length: int, ulysses: int, machine: Hardware, ring: int = 1) -> LayerSample:
        if self._loops(kind):  # it trades no heads
            ulysses = ring = 1
        with self._running(ulysses, ring, Clock(machine, length)):
            return measure(self._calls[kind], length, META)

    def _take_in_tiles(self, kind: int, ulysses: int, machine: Hardware, ring: int = 1) -> tuple[TileSample, ...]:
        """Return samples of a layer in tiles; none: it cannot run so."""
        if self._loops(kind):
            return ()
        try:
            with self._running(ulysses, ring, Clock(machine, _TILED[0])):
                return measure_in_tiles(self._calls[kind], _TILED, META)
        except CannotTile:
            return ()
