"""Chosen: the solver's answer for one kind of pass, as settings of the model's layers.

The solver knows the layer calls that keep something; the model has other layers beside them. So a call has two numbers.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

from ds_memo.placement import Home, Places
from ds_memo.remat.checkpoint import FULL_RECOMPUTE, Setting
from ds_memo.shapes import HiddenShape, HiddenShapes
from ds_memo.solve.costs import RunCosts
from ds_memo.solve.solver import Homes


@dataclass(frozen=True)
class Chosen:
    """The setting of one kind of pass."""

    homes: Homes
    run: RunCosts
    solved: tuple[int, ...]
    """Indices of the layers that it was solved for: those that are called and keep something."""
    layers: int
    """Of the model."""
    shapes: HiddenShapes
    shape: HiddenShape
    """Of what comes into the last layer."""
    paced: bool = False
    """Layers tell the engine when they run, also where none of them is checkpointed (ds_memo.deepspeed.run_ahead_limit)."""

    def number(self, call: int) -> int:
        """Of a call that was solved for, its number among all: first one call of each layer, then the second of each, …"""
        return call // len(self.solved) * self.layers + self.solved[call % len(self.solved)]

    @cached_property
    def settings(self) -> tuple[Setting, ...]:
        """By these numbers, of all layer calls before a backward."""
        calls = len(self.run.layers) // len(self.solved) * self.layers
        if self.homes.plain:
            return (Setting(checkpointed=False, keeps_pace=self.paced),) * calls
        settings = [FULL_RECOMPUTE] * calls
        for call, home in enumerate(self._homes):
            settings[self.number(call)] = _setting(home, self.homes.alpha)
        return tuple(settings)

    @cached_property
    def places(self) -> Places:
        """By these numbers."""
        return Places(*(frozenset(map(self.number, calls)) for calls in self.homes.places))

    @cached_property
    def stored_bytes(self) -> tuple[int, ...]:
        """By these numbers, what each call keeps, wherever."""
        stored = [0] * len(self.settings)
        for call, (layer, home) in enumerate(zip(self.run.layers, self._homes, strict=True)):
            if not home.plain:
                stored[self.number(call)] = layer.stored_bytes(home.alpha(self.homes.alpha), keeps_attention=not home.dropped)
        return tuple(stored)

    def host_bytes(self, first: int, end: int) -> int:
        """Of the blocks of every layer's calls from `first` to before `end`."""
        calls, swapped = range(first * len(self.solved), end * len(self.solved)), self.homes.places.swapped(len(self.run.layers))
        dropped = self.homes.places.dropped
        return sum(
            self.run.layers[call].host_bytes(self.homes.alpha, keeps_attention=call not in dropped)
            for call in swapped
            if call in calls
        )

    def predicted(self) -> dict[str, Any]:
        """What the solver expects of a pass; bytes and seconds of this rank."""
        homes = self.homes
        return {
            "layers_s": homes.step_s,
            "d2h_stall_s": homes.d2h_stall_s,
            "h2d_stall_s": homes.h2d_stall_s,
            "host_bytes": homes.host_bytes,
            "device_bytes": homes.device_bytes,
            "beside_bytes": self.run.beside(),
            "stored_bytes_per_layer": list(self.stored_bytes),
        }

    @property
    def _homes(self) -> list[Home]:
        return self.homes.places.homes(len(self.run.layers))


def _setting(home: Home, alpha: float) -> Setting:
    if home.plain:
        return Setting(checkpointed=False, keeps_pace=True)
    if home.resident:
        return Setting(resident=True)
    return Setting(resident=home.lean, alpha=home.alpha(alpha), keeps_attention=not home.dropped)
