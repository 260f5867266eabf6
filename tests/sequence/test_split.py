from __future__ import annotations

import pytest

from ds_memo.sequence.ulysses_size import ulysses_size


@pytest.mark.parametrize(
    ("ranks", "heads", "key_heads", "on_node", "trade"),
    [
        (8, 32, 8, 8, 8),
        (16, 32, 8, 8, 8),
        (64, 32, 8, 8, 8),
        (4, 32, 1, 8, 4),  # one key head serves all
        (8, 128, 128, 8, 8),
        (16, 16, 16, 16, 16),
        (4, 6, 6, 8, 2),
        (5, 12, 4, 8, 1),  # none divides: a ring, inside a node, too
        (4, 32, 8, 1, 1),  # a node each: a ring
        (8, 6, 2, 8, 2),
        (2, 1, 1, 2, 1),
        (1, 32, 8, 8, 1),
    ],
)
def test_as_many_ranks_trade_heads_as_can(ranks: int, heads: int, key_heads: int, on_node: int, trade: int) -> None:
    assert ulysses_size(ranks, heads, key_heads, on_node) == trade
