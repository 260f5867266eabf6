"""Groups of heads, for which attention's backward runs one after another."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Heads:
    """One of several groups of neighbouring heads."""

    number: int
    groups: int

    def of(self, tensor: torch.Tensor, token_dim: int | None) -> torch.Tensor:
        """Return the group's part of a tensor (b, s, heads, d) or (b, heads, s, d)."""
        return tensor if self.groups == 1 else self.along(tensor, 3 - token_dim)  # type: ignore[operator]

    def along(self, tensor: torch.Tensor, dim: int) -> torch.Tensor:
        """Return the group's part of a tensor whose heads lie along `dim`."""
        size = tensor.shape[dim] // self.groups
        return tensor.narrow(dim, self.number * size, size)
