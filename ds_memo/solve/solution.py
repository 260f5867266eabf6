"""The solver's answer for one rank, and what is predicted of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ds_memo.placement import Placement, PlacementKind
from ds_memo.solve.memory import device_bytes_by_part, swapped_bytes
from ds_memo.solve.placement_kinds import Kinds, swapped
from ds_memo.solve.run_costs import RunCosts
from ds_memo.solve.schedule import Schedule


@dataclass(frozen=True)
class Solution:
    """The solver's answer for one rank."""

    alpha: float
    """Share of rows on the host, of all swapped layer calls."""
    placements: tuple[Placement, ...]
    """By layer call, in the order of the forward."""
    step_s: float
    """Predicted seconds of a forward and backward, with head and loss."""
    d2h_stall_s: float
    h2d_stall_s: float
    host_bytes: int
    """Predicted bytes of host blocks in host memory, at most."""
    device_bytes_by_part: Mapping[str, int]
    """Predicted bytes at the peak, beyond parameters, gradients and optimizer states, by ds_memo.solve.memory.PARTS."""
    binding: str
    """The constraint that set alpha or the residents, one sentence."""
    nvme_bytes: int = 0
    """Predicted bytes that a step writes to files. It reads no more than that."""
    nvme_stall_s: float = 0.0

    @property
    def device_bytes(self) -> int:
        return sum(self.device_bytes_by_part.values())

    @property
    def kinds(self) -> tuple[PlacementKind, ...]:
        return tuple(placement.kind for placement in self.placements)

    @property
    def no_recompute(self) -> bool:
        """True if everything fits: no layer is checkpointed at all."""
        return all(placement.kind is PlacementKind.NO_RECOMPUTE for placement in self.placements)

    def calls(self, *kinds: PlacementKind) -> list[int]:
        """Return the layer calls whose placement is of one of these kinds."""
        return [call for call, placement in enumerate(self.placements) if placement.kind in kinds]


def judged(run: RunCosts, alpha: float, kinds: Kinds, binding: str, files: int = 0) -> Solution:
    """Return the placements with their predicted times and bytes. Budgets are not checked.

    Args:
        files: the swapped blocks of the first so many layers go on to files.
    """
    schedule = Schedule(run, kinds)
    step, host_bytes = schedule.at(alpha, files), swapped_bytes(run, kinds, alpha)
    here = [Placement(kind, alpha, tiles=run.tiles) for kind in PlacementKind]
    in_files = [Placement(kind, alpha, tiles=run.tiles, nvme=True) for kind in PlacementKind]
    filed = {call for call in swapped(kinds) if call < files}
    return Solution(
        alpha=alpha,
        placements=tuple((in_files if call in filed else here)[kind] for call, kind in enumerate(kinds)),
        step_s=step.seconds,
        d2h_stall_s=step.d2h_stall_s,
        h2d_stall_s=step.h2d_stall_s,
        host_bytes=min(host_bytes, run.host_budget) if files else host_bytes,
        device_bytes_by_part=device_bytes_by_part(run, kinds, alpha),
        binding=binding,
        nvme_bytes=sum(schedule.blocks(alpha)[:files]),
        nvme_stall_s=step.nvme_stall_s,
    )
