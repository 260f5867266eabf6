"""The solution of one kind of pass, by the layers of the model.

The solver knows the layer calls that keep something; the model has other layers too. So a call has two numbers.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from ds_memo.memory.device import DeviceBudget
from ds_memo.placement import FULL_RECOMPUTE, NO_RECOMPUTE, Placement, PlacementKind
from ds_memo.shapes import HiddenShape, HiddenShapes
from ds_memo.solve.run_costs import RunCosts
from ds_memo.solve.solution import Solution


@dataclass(frozen=True)
class PassSolution:
    """The placements of one kind of pass. A call's number: first one call of each of the model's layers, then the second, …"""

    solution: Solution
    run: RunCosts
    solved: tuple[int, ...]
    """Indices of the layers that it was solved for: those that are called and keep something."""
    layers: int
    """Number of the model's layers."""
    shapes: HiddenShapes
    shape: HiddenShape
    """The shape of the hidden states that come into the last layer."""
    device: DeviceBudget
    """The device's budget at that time."""
    empty_frames: bool = False
    """True if layers have frames also where none of them is checkpointed: ds_memo.deepspeed.run_ahead_limit hears of these."""

    def number(self, call: int) -> int:
        """Return the number of a call that was solved for."""
        return call // len(self.solved) * self.layers + self.solved[call % len(self.solved)]

    @cached_property
    def placements(self) -> tuple[Placement, ...]:
        """Return the placement of each layer call before a backward, by number."""
        calls = len(self.run.layers) // len(self.solved) * self.layers
        if self.solution.no_recompute:
            return (replace(NO_RECOMPUTE, empty_frame=self.empty_frames),) * calls
        placements = [FULL_RECOMPUTE] * calls
        for call, placement in enumerate(self.solution.placements):
            no_recompute = placement.kind is PlacementKind.NO_RECOMPUTE
            placements[self.number(call)] = replace(placement, empty_frame=no_recompute)
        return tuple(placements)

    @cached_property
    def kinds(self) -> dict[int, PlacementKind]:
        """Return the kind of each call that was solved for, by number."""
        return {self.number(call): kind for call, kind in enumerate(self.solution.kinds)}

    @cached_property
    def stored_bytes(self) -> tuple[int, ...]:
        """Return the stored bytes of each call, host or device, by number."""
        stored = [0] * len(self.placements)
        for call, (layer, placement) in enumerate(zip(self.run.layers, self.solution.placements, strict=True)):
            stored[self.number(call)] = layer.stored_bytes(placement)
        return tuple(stored)

    @cached_property
    def host_blocks(self) -> tuple[int, ...]:
        """Return the bytes of each call's host block, of the calls that were solved for."""
        return tuple(layer.host_bytes(p) for layer, p in zip(self.run.layers, self.solution.placements, strict=True))

    def host_bytes(self, first: int, end: int) -> int:
        """Return the bytes in host memory of every layer's calls from `first` to before `end`; files hold the rest."""
        calls = slice(first * len(self.solved), end * len(self.solved))
        placed = zip(self.host_blocks[calls], self.solution.placements[calls], strict=True)
        return sum(nbytes for nbytes, placement in placed if not placement.nvme)

    def predicted(self) -> dict[str, Any]:
        """Return what the solver expects of a pass; bytes and seconds of this rank."""
        solution = self.solution
        return {
            "layers_s": solution.step_s,
            "d2h_stall_s": solution.d2h_stall_s,
            "h2d_stall_s": solution.h2d_stall_s,
            "nvme_stall_s": solution.nvme_stall_s,
            "nvme_bytes": solution.nvme_bytes,
            "host_bytes": solution.host_bytes,
            "device_bytes": solution.device_bytes,
            "device_budget": self._device_budget(),
            "device_bytes_by_part": dict(solution.device_bytes_by_part),
            "beside_bytes": self.run.non_layer_bytes(),
            "stored_bytes_per_layer": list(self.stored_bytes),
        }

    def _device_budget(self) -> dict[str, Any]:
        """Return the account of the device's bytes that it was solved for, which exceed a budget that nothing fits in."""
        budget, device = self.run.device_budget, self.device
        why = device.why if budget <= device.nbytes else f"nothing fits with {device.why}"
        withheld = max(0, device.free - device.to_come - budget)
        return {"solved_for": budget, "free": device.free, "to_come": device.to_come, "withheld": withheld, "why": why}
