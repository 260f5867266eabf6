"""Profile a run: every kind of layer at a few lengths, and the copies of all ranks at once.

fit       the default: two short lengths give lines, a third, half as long, checks them; attention runs alone near full length
direct    one layer at full length

The tuner and `ds-memo profile` both call this module.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from functools import partial
from typing import Any

import torch

import ds_memo
from ds_memo.distributed.agree import Do, Failed, from_all_ranks, on_all_ranks, world_size
from ds_memo.errors import MemoError
from ds_memo.memory.device import device_budget, device_usage
from ds_memo.memory.host import host_usage, ranks_on_node
from ds_memo.profile import stopwatch
from ds_memo.profile.attention_alone import measure_attention
from ds_memo.profile.bandwidth import SPAN, CopyBench
from ds_memo.profile.caught_call import CaughtCall
from ds_memo.profile.layer import measure
from ds_memo.profile.layer_kinds import layer_in_words, settings_digest
from ds_memo.profile.layer_sample import LayerSample
from ds_memo.profile.live import older_objects_aside
from ds_memo.profile.merge_ranks import most_careful
from ds_memo.profile.run_profile import LayerProfile, RunProfile
from ds_memo.profile.tile_sample import TileSample
from ds_memo.profile.tiles import measure_in_tiles
from ds_memo.remat.autocast import autocast_as
from ds_memo.remat.gathered_params import gathered, gathered_bytes
from ds_memo.remat.layer import Layer
from ds_memo.remat.layer_call import CannotTile
from ds_memo.solve.headroom import HEADROOM
from ds_memo.swap.stream_protocol import D2H, H2D
from ds_memo.units import GIB

LONGEST = 1 << 14
"""Tokens of the longest sequence that `fit` runs; kernels reach full speed at shorter ones."""
WIDTHS = 4
"""`fit` runs up to WIDTHS × width tokens, if that is more than LONGEST. Up to about two widths, gradients of weights dominate a
layer's peak (7B, measured at 4 to 16 Ki tokens); the longest two samples must be beyond that."""
SHORTEST = 1 << 11
"""Tokens of the shortest check; a shorter fit would measure only overhead, so `direct` is used."""


def lengths_of(method: str, length: int, width: int, can_shorten: bool) -> tuple[int, ...]:
    """Return the lengths to measure at, shortest first: one, or two and a check.

    Args:
        length: tokens of the run's sequence on this rank.
        width: width of the hidden states.
        can_shorten: True if a layer can be called with fewer tokens.
    """
    check = min(max(LONGEST, 1 << (WIDTHS * width - 1).bit_length()), 1 << (length.bit_length() - 1))
    if method == "direct" or not can_shorten or check < SHORTEST:
        return (length,)
    return check // 4, check // 2, check


def worth_measuring(layers: Sequence[Layer], kinds: Sequence[int], calls: Mapping[int, CaughtCall]) -> dict[int, CaughtCall]:
    """Return the calls, by kind, that keep something for a backward: their layer or one before it requires a gradient. A frozen
    vision tower keeps nothing, nor does one that is called without an image."""
    trained = (index for index, layer in enumerate(layers) if any(p.requires_grad for p in layer.parameters))
    first = next(trained, len(layers))
    last = {kind: index for index, kind in enumerate(kinds)}
    called = (kind for kind in sorted(calls) if calls[kind].tokens)
    return {kind: calls[kind] for kind in called if calls[kind].trains or last[kind] > first}


@dataclass
class Asked:
    """A request to `take_profile`: which layer calls to measure, and how.

    Args:
        kinds: the kind of each layer of the model, in order; from kinds_of.
        calls: the first call of each kind; kinds without one are not measured.
        method: fit or direct.
        lengths: by kind, from lengths_of; the same on all ranks, whose layers may wait for each other.
        full: by kind, the call's full length, the least over all ranks.
        host_budget: host bytes of this rank.
        warn: says something once and shows it in the report.
    """

    kinds: Sequence[int]
    calls: Mapping[int, CaughtCall]
    method: str
    lengths: Mapping[int, tuple[int, ...]]
    full: Mapping[int, int]
    device: torch.device
    host_budget: int
    warn: Callable[[str], None]
    attention: str | None = None
    """Field of the "memo" section."""
    ranks_per_sequence: int = 1
    """Ranks that share a sequence in this run."""
    run_length: int = 0
    """Tokens of the run's sequences on this rank, if they are more than the calls'."""
    in_tiles: bool = True
    """Measure layers in tiles, too, where two lengths are measured."""
    progress: Callable[[str], None] = lambda line: None
    """Called with a line of text after each measurement."""
    do: Do = on_all_ranks
    """`on_all_ranks`, or `on_this_rank` on a rank whose layers wait for no other rank."""

    def numbers(self) -> tuple[int | None, ...]:
        """Return, for each layer, the number of its kind among the measured ones; None: not measured."""
        numbers = {kind: number for number, kind in enumerate(self.calls)}
        return tuple(map(numbers.get, self.kinds))

    def _in_words(self, kind: int) -> dict[str, Any]:
        call = self.calls[kind]
        return {
            "layer": layer_in_words(call.layer),
            "settings": settings_digest(call.layer),
            "batch": call.batch,
            "hidden": [*call.hidden.shape[2:]],
            "dtype": str(call.hidden.dtype),
            "others": call.others(),
            "packed": call.packed,
            "lengths": list(self.lengths[kind]),
            "compiled_by": call.compiled_by,
        }

    def key(self) -> dict[str, Any]:
        """Return everything that the measurements depend on, as JSON values."""
        device = self.device
        casts = {str(cast) for call in self.calls.values() for kind, on, cast in call.autocast if on and kind == device.type}
        return {
            "ds_memo": ds_memo.__version__,
            "torch": torch.__version__,
            "device": torch.cuda.get_device_name(device) if device.type == "cuda" else f"cpu, {torch.get_num_threads()} threads",
            "ranks": world_size(),
            "ranks_on_node": ranks_on_node(),
            "ranks_per_sequence": self.ranks_per_sequence,
            "layers": list(self.numbers()),
            "kinds": [self._in_words(kind) for kind in self.calls],
            "autocast": sorted(casts),
            "method": self.method,
            "attention": self.attention,
            "in_tiles": self.in_tiles,
            "conditions": {"sustained_s": stopwatch.SUSTAINED_S, "host_span": SPAN} if device.type == "cuda" else {},
        }


def take_profile(asked: Asked) -> RunProfile:
    """Measure layers and copies. All ranks must call this together and get the same profile: see `most_careful`.

    Raises:
        Failed: a measurement failed on some rank. All ranks raise it.
    """
    begin = time.perf_counter()
    kinds = measure_kinds(asked)
    with ExitStack() as stack:  # on_all_ranks lets all ranks start at once
        bench = on_all_ranks(lambda: stack.enter_context(closing(CopyBench(asked.device, asked.host_budget))))
        d2h, h2d = (on_all_ranks(partial(bench.rate, way)) for way in (D2H, H2D))
    asked.progress(f"copies: {d2h / 1e9:.3g} GB/s to the host, {h2d / 1e9:.3g} GB/s back")
    measured = {
        "when": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "seconds": round(time.perf_counter() - begin, 3),
        "host_memory": {**host_usage(), "budget_of_rank": asked.host_budget},
        "device_memory": device_usage(asked.device),
    }
    mine = RunProfile(
        key=asked.key(),
        method=asked.method,
        kinds=kinds,
        layers=asked.numbers(),
        d2h_bytes_per_s=d2h,
        h2d_bytes_per_s=h2d,
        ranks_copying=ranks_on_node(),
        ranks_per_sequence=asked.ranks_per_sequence,
        measured=measured,
    )
    return most_careful(from_all_ranks(mine))


def measure_kinds(asked: Asked) -> tuple[LayerProfile, ...]:
    """Measure the layers, not the copies. Raises Failed if a measurement failed."""
    with older_objects_aside(asked.device):
        return tuple(_measure_kind(asked, kind) for kind in asked.calls)


def _measure_kind(asked: Asked, kind: int) -> LayerProfile:
    call, name = asked.calls[kind], asked.calls[kind].layer.name
    module = call.layer.module()
    lengths, full = asked.lengths[kind], asked.full[kind]
    number = list(asked.calls).index(kind) + 1
    nbytes = gathered_bytes(module)
    asked.do(lambda: _refuse_gathering(name, nbytes, device_budget(asked.device, None, 0, HEADROOM).nbytes))

    def measured(lengths: Sequence[int]) -> list[LayerSample]:
        samples: list[LayerSample] = []
        for length in lengths:
            sample = asked.do(partial(measure, call, length, asked.device, asked.attention, nbytes))
            samples.append(sample)
            asked.progress(
                f"{name} (kind {number} of {len(asked.calls)}): {sample.batch} × {length:,} tokens, "
                f"forward {sample.forward_s * 1e3:.3g} ms, backward {sample.backward_s * 1e3:.3g} ms"
            )
        return samples

    with gathered(module), autocast_as(call.autocast):
        try:
            samples = measured(lengths)
        except Failed as failed:  # a layer may accept one length only, as under DeepSpeed's Ulysses with fixed lengths
            if lengths == (full,):
                raise
            asked.warn(f"profile: {name} cannot be measured at {lengths[0]:,} tokens ({failed}); measured at {full:,} instead")
            samples = measured((full,))
        if asked.in_tiles and len(samples) > 1:
            asked.progress(f"{name}: now in tiles, of several lengths and groups of heads")
        in_tiles, not_tiled = _measured_in_tiles(asked, call, samples, nbytes)
        longest = max(full, asked.run_length)
        alone = asked.do(lambda: measure_attention(call, samples[-1], longest, asked.device, asked.attention))
    if alone is not None:
        both = f"{alone.attention_s * 1e3:.3g} ms and {alone.attention_backward_s * 1e3:.3g} ms"
        asked.progress(f"{name}: attention alone, {alone.batch} × {alone.length:,} tokens, {both}")
    profile = asked.do(lambda: _profile(name, samples, asked.warn))
    return replace(profile, attention=alone, in_tiles=in_tiles, not_tiled=not_tiled)


def _measured_in_tiles(
    asked: Asked, call: CaughtCall, samples: Sequence[LayerSample], gathered: int
) -> tuple[tuple[TileSample, ...], str]:
    """Return a layer's samples in tiles, or none and why.

    Args:
        samples: of the layer that runs whole.
        gathered: bytes of its parameters that ZeRO-3 has gathered.
    """
    if not asked.in_tiles or len(samples) == 1:
        return (), ""
    if call.compiled_by is not None:
        return (), "torch.compile compiles it, and layers in tiles run uncompiled"
    lengths = [sample.length for sample in samples[1:]]  # tiles are short, and in short ones gradients of weights dominate

    def measured() -> tuple[tuple[TileSample, ...], str]:
        try:
            return measure_in_tiles(call, lengths, asked.device, asked.attention, gathered), ""
        except CannotTile as reason:
            return (), str(reason)

    try:
        return asked.do(measured)
    except Failed as failed:
        return (), str(failed)


def _profile(name: str, samples: list[LayerSample], warn: Callable[[str], None]) -> LayerProfile:
    """Return a profile of samples that are on its lines: of all, or of the longest."""
    profile = LayerProfile(name, tuple(samples))
    if len(samples) == 1:
        return profile
    short, middle, long = samples
    if len(middle.outputs) != len(long.outputs):  # some experts got no token at the shorter length
        warn(f"profile: {name} keeps other tensors at {long.length} tokens than at {middle.length}; the longest is used")
        return LayerProfile(name, (long,))
    if profile.off() < math.inf:
        return profile
    lengths = f"{middle.length} and {long.length}"
    warn(f"profile: {name} keeps other sizes at {short.length} tokens than the lines through {lengths} say, which are used")
    return LayerProfile(name, (middle, long))


def _refuse_gathering(name: str, needed: int, free: int) -> None:
    if needed > max(0, free):
        raise MemoError(f"layer {name} has {needed / GIB:.3g} GiB of parameters, {free / GIB:.3g} GiB of the device are free")
