"""Profile the layers of a run: every kind of them at a few lengths, and the copies of all ranks at once.

fit       the default: two short lengths give lines, a third one, twice as long, checks them; nothing runs at full length
direct    one layer at full length
unified   as direct, but refused where the lines through two short lengths say that the layer does not fit what is free. CUDA
          managed memory, which the paper used there, can hang the card past that, and below it brings nothing

The tuner and `ds-memo profile` both come here.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from functools import partial
from typing import Any

import torch

import ds_memo
from ds_memo.distributed.agree import Do, Failed, from_all_ranks, together, world_size
from ds_memo.errors import MemoError
from ds_memo.memory.device import device_budget, device_seen
from ds_memo.memory.host import ranks_on_node, seen
from ds_memo.profile.bandwidth import CopyBench
from ds_memo.profile.call import LayerCall
from ds_memo.profile.gathered_params import whole, whole_bytes
from ds_memo.profile.kinds import layer_in_words, settings_digest
from ds_memo.profile.layer import measure
from ds_memo.profile.merge_ranks import most_careful
from ds_memo.profile.sample import DEVICE_BYTES, LayerProfile, LayerSample, Profile
from ds_memo.remat.checkpoint import Layer
from ds_memo.solve.headroom import HEADROOM
from ds_memo.swap.stream_protocol import D2H, H2D
from ds_memo.units import GIB

LONGEST = 1 << 14
"""Tokens of the longest sequence that `fit` runs; kernels are as fast as they get long before."""
WIDTHS = 4
"""`fit` runs up to this many tokens per unit of the hidden states' width, if that is more than LONGEST. Up to some two widths,
most of what a layer holds at once are gradients of weights (7B: measured at 4 to 16 Ki tokens), and the longest two samples must
be beyond that."""
SHORTEST = 1 << 11
"""Tokens; below a check of this length a fit would measure nothing but overhead, so `direct` is used."""
WAKING_S = 0.3
"""Seconds of work before the first measurement on a GPU."""


def lengths_of(method: str, length: int, width: int, can_shorten: bool) -> tuple[int, ...]:
    """The lengths to measure at, shortest first: one, or two and a check.

    Args:
        length: of the run, on this rank.
        width: of the hidden states.
        can_shorten: whether a layer can be called with less.
    """
    check = min(max(LONGEST, 1 << (WIDTHS * width - 1).bit_length()), 1 << (length.bit_length() - 1))
    if method == "direct" or not can_shorten or check < SHORTEST:
        return (length,)
    return check // 4, check // 2, check if method == "fit" else length


def worth_measuring(layers: Sequence[Layer], kinds: Sequence[int], calls: Mapping[int, LayerCall]) -> dict[int, LayerCall]:
    """Of the calls by kind, those that keep anything for a backward: a gradient is wanted in such a layer or before it. A frozen
    vision tower keeps nothing, and neither does one that is called without a picture."""
    trained = (index for index, layer in enumerate(layers) if any(p.requires_grad for p in layer.parameters))
    first = next(trained, len(layers))
    last = {kind: index for index, kind in enumerate(kinds)}
    called = (kind for kind in sorted(calls) if calls[kind].tokens)
    return {kind: calls[kind] for kind in called if calls[kind].trains or last[kind] > first}


@dataclass
class Asked:
    """What is to be measured.

    Args:
        layers: all of the model, in order.
        kinds: of each layer its kind; from kinds_of.
        calls: the first of each kind; kinds without one are not measured.
        method: fit, direct or unified.
        lengths: of each call, from lengths_of; the same on all ranks, whose layers may wait for each other.
        full: of each call its full length, the least of all ranks.
        sources: of each call, the source's length to measure with; 0: it has no source, or not on all ranks.
        host_budget: bytes of this rank.
    """

    layers: Sequence[Layer]
    kinds: Sequence[int]
    calls: Mapping[int, LayerCall]
    method: str
    lengths: Mapping[int, tuple[int, ...]]
    full: Mapping[int, int]
    sources: Mapping[int, int]
    device: torch.device
    host_budget: int
    attention: str | None = None
    """As the "memo" section's, and so the next one."""
    device_memory_gib: float | None = None
    ranks_per_sequence: int = 1
    """As the layers run now."""

    def numbers(self) -> tuple[int | None, ...]:
        """Of each layer the number of its kind among those that are measured; None: it is not."""
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
            "others": call.others(apart=self.sources[kind] > 0),
            "source": self.sources[kind],
            "lengths": list(self.lengths[kind]),
        }

    def free(self) -> int:
        """Bytes that are free on the device now."""
        return device_budget(self.device, self.device_memory_gib, 0, HEADROOM)

    def key(self) -> dict[str, Any]:
        """Everything that the measurements depend on."""
        device = self.device
        cast = torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else None
        return {
            "ds_memo": ds_memo.__version__,
            "torch": torch.__version__,
            "device": torch.cuda.get_device_name(device) if device.type == "cuda" else f"cpu, {torch.get_num_threads()} threads",
            "ranks": world_size(),
            "ranks_on_node": ranks_on_node(),
            "ranks_per_sequence": self.ranks_per_sequence,
            "layers": list(self.numbers()),
            "kinds": [self._in_words(kind) for kind in self.calls],
            "autocast": str(cast),
            "method": self.method,
            "attention": self.attention,
        }


def take_profile(asked: Asked, warn: Callable[[str], None], told: Callable[[str], None] = lambda line: None) -> Profile:
    """Measure layers and copies; all ranks must call this together, and get the same profile: see `most_careful`.

    Args:
        told: called with a line about each thing measured, for people who wait.

    Raises:
        Failed: something cannot be measured on some rank. All ranks know.
    """
    begin = time.perf_counter()
    _wake(asked.device)
    kinds = measure_kinds(asked, warn, told)
    with _copy_bench(asked) as bench:  # every agreement is a start for all ranks at once
        d2h = together(partial(bench.rate, D2H))
        h2d = together(partial(bench.rate, H2D))
    told(f"copies: {d2h / 1e9:.3g} GB/s to the host, {h2d / 1e9:.3g} GB/s back")
    measured = {
        "when": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "seconds": round(time.perf_counter() - begin, 3),
        "host_memory": {**seen(), "budget_of_rank": asked.host_budget},
        "device_memory": device_seen(asked.device),
    }
    mine = Profile(
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


def measure_kinds(
    asked: Asked,
    warn: Callable[[str], None],
    told: Callable[[str], None] = lambda line: None,
    do: Do = together,
) -> tuple[LayerProfile, ...]:
    """Measure the layers, not the copies.

    Args:
        do: `together`, or `alone` on a rank whose layers wait for no other.

    Raises:
        Failed: something cannot be measured.
    """
    return tuple(_measure_kind(asked, kind, warn, told, do) for kind in asked.calls)


def _wake(device: torch.device) -> None:
    """Keep the GPU busy for a moment. An idle one runs at a sixth of its clock, and such times would stay in the cache."""
    if device.type != "cuda":
        return
    x = torch.ones(2048, 2048, dtype=torch.bfloat16, device=device)
    until = time.perf_counter() + WAKING_S
    while time.perf_counter() < until:
        for _ in range(50):
            torch.mm(x, x)
        torch.cuda.synchronize(device)


def _measure_kind(
    asked: Asked,
    kind: int,
    warn: Callable[[str], None],
    told: Callable[[str], None],
    do: Do,
) -> LayerProfile:
    call, name = asked.calls[kind], asked.calls[kind].layer.name
    module = call.layer.module()
    lengths, full, source = asked.lengths[kind], asked.full[kind], asked.sources[kind]
    number = list(asked.calls).index(kind) + 1
    gathered = whole_bytes(module)
    do(lambda: _refuse_gathering(name, gathered, device_budget(asked.device, None, 0, HEADROOM)))

    def measured(lengths: Sequence[int], source: int) -> list[LayerSample]:
        samples: list[LayerSample] = []
        for length in lengths:
            if asked.method == "unified" and len(samples) == 2:
                alike = len(samples[0].outputs) == len(samples[1].outputs)  # else experts that no token of the shorter visits
                short = LayerProfile(name, tuple(samples if alike else samples[1:]))
                do(partial(_refuse_too_long, short, call.batch, length, asked))
            sample = do(partial(measure, call, length, asked.device, asked.attention, source))
            samples.append(replace(sample, **{of: getattr(sample, of) + gathered for of in DEVICE_BYTES}))
            told(
                f"{name} (kind {number} of {len(asked.calls)}): {sample.batch} × {length:,} tokens"
                f"{f' beside {source:,}' if source else ''}, "
                f"forward {sample.forward_s * 1e3:.3g} ms, backward {sample.backward_s * 1e3:.3g} ms"
            )
        return samples

    with whole(module):
        try:
            samples = measured(lengths, source)
            half = measured(lengths[-1:], source // 2) if source > 1 else []
        except Failed as failed:  # a layer may know its length: DeepSpeed's Ulysses does, unless told that lengths vary
            if not source and (asked.method != "fit" or lengths == (full,)):
                raise
            beside = f" beside {source:,}" if source else ""
            warn(f"profile: {name} cannot be measured at {lengths[0]:,} tokens{beside} ({failed}); it is at {full:,}")
            samples, half = measured((full,), 0), []
    profile = do(lambda: _profile(name, asked.method, samples, warn))
    # If it keeps other tensors with half of the source, the two cannot be compared: what a token of it takes is not known.
    return replace(profile, half_source=half[0]) if half and len(half[0].outputs) == len(profile.taken[-1].outputs) else profile


def _profile(name: str, method: str, samples: list[LayerSample], warn: Callable[[str], None]) -> LayerProfile:
    if len(samples) == 1 or method == "unified":
        return LayerProfile(name, (samples[-1],))
    if len(samples[1].outputs) != len(samples[2].outputs):  # experts that no token of the shorter one visits
        warn(
            f"profile: {name} keeps other tensors at {samples[2].length} tokens than at {samples[1].length}; the longest is used"
        )
        return LayerProfile(name, (samples[2],))
    profile = LayerProfile(name, tuple(samples[:2]), samples[2])
    if profile.is_trusted():
        return profile
    off = profile.off()
    how = f"is {off:.0%} off the lines" if off < math.inf else "keeps other sizes than the lines say"
    lengths = f"{samples[0].length} and {samples[1].length}"
    warn(f"profile: {name} at {samples[2].length} tokens {how} through {lengths}; the longer two are used instead")
    return LayerProfile(name, tuple(samples[1:]))


@contextmanager
def _copy_bench(asked: Asked) -> Iterator[CopyBench]:
    benches: list[CopyBench] = []
    try:
        together(lambda: benches.append(CopyBench(asked.device, asked.host_budget)))
        yield benches[0]
    finally:
        for bench in benches:
            bench.close()


def _refuse_gathering(name: str, needed: int, free: int) -> None:
    if needed > max(0, free):
        raise MemoError(f"layer {name} has {needed / GIB:.3g} GiB of parameters, {free / GIB:.3g} GiB of the device are free")


def _refuse_too_long(profile: LayerProfile, batch: int, length: int, asked: Asked) -> None:
    costs = profile.costs(batch, length)
    needed, free = costs.working.backward + costs.frame_bytes, asked.free()
    if needed > free:
        raise MemoError(
            f'memo.profile.method: "unified" runs one layer at full length, which needs {needed / GIB:.3g} GiB where '
            f'{free / GIB:.3g} GiB are free: managed memory past that can hang the GPU. Use "fit", the default.'
        )
