"""Groups of heads, for which attention runs one after another. No torch."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class HeadGroup:
    """One of several groups of heads, as many of each rank's.

    Where ranks trade heads (Ulysses), each runs attention for a block of neighbouring heads. Query heads that share a key-value
    head are neighbours. A group has some of the key-value heads; or, for more groups than these, some of the query heads of each.
    """

    number: int = 0
    groups: int = 1
    key_heads: int = 1
    """Key-value heads that a rank's kernel gets."""
    ranks: int = 1
    """Ranks among which heads are traded."""

    @property
    def of_keys(self) -> int:
        """Groups of key-value heads."""
        return math.gcd(self.groups, self.key_heads)

    @property
    def of_queries(self) -> int:
        """Groups of the query heads that share a key-value head."""
        return self.groups // self.of_keys

    @property
    def is_last_of_keys(self) -> bool:
        """True if no further group has the same key-value heads."""
        return (self.number + 1) % self.of_queries == 0

    def shares(self, tensor: torch.Tensor, dim: int) -> bool:
        """Return True if other groups have the same heads of a tensor, whose heads lie along `dim`."""
        return self.of_queries > 1 and tensor.shape[dim] <= self.ranks * self.key_heads

    def of(self, tensor: torch.Tensor, dim: int) -> torch.Tensor:
        """Return the group's heads of a tensor whose heads lie along `dim`: a view where strides allow, else a copy."""
        if self.groups == 1 or self._has_all(tensor, dim):
            return tensor
        return self._part(tensor, dim).flatten(dim, dim + 2)

    def write(self, tensor: torch.Tensor, dim: int, values: torch.Tensor) -> None:
        """Write the group's heads."""
        if self.groups == 1 or self._has_all(tensor, dim):
            tensor.copy_(values)
        else:
            part = self._part(tensor, dim)
            part.copy_(values.unflatten(dim, part.shape[dim : dim + 3]))

    def _has_all(self, tensor: torch.Tensor, dim: int) -> bool:
        """Return True for key-value heads which are fewer than the ranks: each rank's kernel gets one."""
        return tensor.shape[dim] < self.ranks

    def _part(self, tensor: torch.Tensor, dim: int) -> torch.Tensor:
        """Return a view with three dimensions for that of heads: ranks, key-value heads, query heads that share one."""
        part = tensor.unflatten(dim, (self.ranks, self.key_heads, -1))
        key_group, query_group = divmod(self.number, self.of_queries)
        keys, queries = self.key_heads // self.of_keys, part.shape[dim + 2] // self.of_queries
        part = part.narrow(dim + 1, key_group * keys, keys)
        return part.narrow(dim + 2, query_group * queries, queries) if queries else part  # a tensor of key-value heads


ALL_HEADS = HeadGroup()


def head_groups(groups: int, key_heads: int, heads: int, ranks: int) -> Iterator[HeadGroup]:
    """Yield groups in order.

    Args:
        key_heads, heads: that attention is called with.
        ranks: among which it trades them.

    Raises:
        ValueError: they do not divide so, with the numbers.
    """
    if heads % ranks or (key_heads % ranks and ranks % key_heads):
        raise ValueError(f"{ranks} ranks do not share its {heads} heads and {key_heads} key-value heads evenly")
    of_rank, own = max(1, key_heads // ranks), heads // ranks
    of_queries, shared = groups // math.gcd(groups, of_rank), own // of_rank
    if ranks == 1 and of_queries > 1:  # functions of Transformers repeat keys by a number that the module knows
        raise ValueError(f"they do not divide its {key_heads} key-value heads")
    if shared % of_queries:
        raise ValueError(f"they do not divide the {own} heads of a rank, of which {shared} share a key-value head")
    for number in range(groups):
        yield HeadGroup(number, groups, of_rank, ranks)
