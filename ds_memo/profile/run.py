"""Profile the layers of a run: every kind of them at a few lengths.

fit       the default: two short lengths give lines, a third one, twice as long, checks them; nothing runs at full length
direct    one layer at full length
unified   as direct, but refused where the lines through two short lengths say that the layer does not fit what is free. CUDA
          managed memory, which the paper used there, can hang the card past that, and below it brings nothing
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from ds_memo.errors import MemoError
from ds_memo.profile.layer import LayerCall, measure
from ds_memo.profile.sample import LayerProfile, LayerSample

LONGEST = 1 << 14
"""Tokens of the longest sequence that `fit` runs; kernels are as fast as they get long before."""
SHORTEST = 1 << 11
"""Tokens; below a check of this length a fit would measure nothing but overhead, so `direct` is used."""


def lengths_of(method: str, length: int, can_shorten: bool) -> tuple[int, ...]:
    """The lengths to measure at, shortest first: one, or two and a check.

    Args:
        length: of the run, on this rank.
        can_shorten: whether a layer can be called with less.
    """
    check = min(LONGEST, 1 << (length.bit_length() - 1))
    if method == "direct" or not can_shorten or check < SHORTEST:
        return (length,)
    return check // 4, check // 2, check if method == "fit" else length


@dataclass
class Asked:
    """One kind of layer to be measured."""

    name: str
    call: LayerCall


def measure_layers(
    kinds: Sequence[Asked],
    method: str,
    lengths: tuple[int, ...],
    free: Callable[[], int],
    device: torch.device,
    attention: str | None,
    warn: Callable[[str], None],
    told: Callable[[str], None] = lambda line: None,
) -> tuple[LayerProfile, ...]:
    """Measure every kind of layer.

    Args:
        lengths: from lengths_of; the same on all ranks, whose layers may wait for each other.
        free: bytes of device memory that could be had now.
        told: gets one line per thing measured, for people who wait.

    Raises:
        MemoError: a layer cannot be measured.
    """
    profiles = []
    for asked in kinds:
        samples: list[LayerSample] = []
        for length in lengths:
            if method == "unified" and len(samples) == 2:
                _refuse_too_long(LayerProfile(asked.name, tuple(samples)), asked.call.batch, length, free())
            samples.append(measure(asked.call, length, device, attention))
            told(f"{asked.name}: {samples[-1].batch} × {length} tokens, forward {samples[-1].forward_s * 1e3:.3g} ms")
        profiles.append(_profile(asked.name, method, samples, warn))
    return tuple(profiles)


def _profile(name: str, method: str, samples: list[LayerSample], warn: Callable[[str], None]) -> LayerProfile:
    if len(samples) == 1 or method == "unified":
        return LayerProfile(name, (samples[-1],))
    profile = LayerProfile(name, tuple(samples[:2]), samples[2])
    if profile.is_trusted():
        return profile
    warn(
        f"profile: {name} at {samples[2].length} tokens is {profile.off():.0%} off the lines through {samples[0].length} and "
        f"{samples[1].length}; the longer two are used instead"
    )
    return LayerProfile(name, tuple(samples[1:]))


def _refuse_too_long(profile: LayerProfile, batch: int, length: int, free: int) -> None:
    needed = profile.working_bytes(batch, length) + profile.costs(batch, length).frame_bytes
    if needed > free:
        raise MemoError(
            f'memo.profile.method: "unified" runs one layer at full length, which needs {needed / (1 << 30):.3g} GiB where '
            f'{free / (1 << 30):.3g} GiB are free: managed memory past that can hang the GPU. Use "fit", the default.'
        )
