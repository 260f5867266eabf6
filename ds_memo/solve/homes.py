"""Who lives where: which layers are resident, and which share of the others' rows the host can hold.

Without a profile only the host's size is known, so alpha here is PAPER part 1 without its bandwidth constraint.
"""

from __future__ import annotations


def place_residents(layers: int, residents: int) -> frozenset[int]:
    """Indices of the resident layers: the last two first (their backward starts at once), the others spread evenly."""
    last = range(layers - min(residents, 2, layers), layers)
    rest, room = max(0, min(residents, layers) - len(last)), layers - len(last)
    return frozenset(last) | {(2 * i + 1) * room // (2 * rest) for i in range(rest)}


def alpha_for_host(budget: int, swapped_layers: int, whole_bytes: int, row_bytes: int) -> float:
    """The largest alpha with swapped_layers · (whole_bytes + alpha · row_bytes) ≤ budget, at most 1; below 0: none fits.

    Args:
        budget: bytes this rank may use on the host.
        swapped_layers: layers that are not resident.
        whole_bytes: bytes of a layer that go to the host whatever alpha is (input, attention output).
        row_bytes: bytes of the outputs that alpha splits.
    """
    if swapped_layers == 0 or row_bytes == 0:
        return 1.0 if swapped_layers * whole_bytes <= budget else -1.0
    return min(1.0, (budget / swapped_layers - whole_bytes) / row_bytes)
