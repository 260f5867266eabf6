"""How the ranks that share a sequence are split into Ulysses × ring. No torch.

Elements that a rank sends forward, per layer and token of its part; H query and K key heads of d elements, P = u · r ranks:

    Ulysses     (2·H + 2·max(K, u))·d · (u - 1) / u        all-to-alls, which nothing hides
    ring        2·max(K, u)·d · (r - 1)                     while attention of the keys before runs

A step of the ring sends 4·max(K, u)·d bytes a token and computes 2·(s/r)·H·d FLOPs for it (causal, zigzag). So it is hidden once
(s/r)·H / max(K, u) > 2·FLOPs/s ÷ bytes/s: on H100, for Llama-3-8B, from s/r = 1 Ki inside a node, 8 Ki across nodes. All-to-alls
are fast inside a node alone. So as many ranks as can trade heads, inside a node, and a ring for what is left.
"""

from __future__ import annotations


def ulysses_size(ranks: int, heads: int, key_heads: int, ranks_on_node: int) -> int:
    """Return how many of the ranks that share a sequence trade heads.

    It is the largest divisor of `ranks` by which heads and key heads divide, and whose ranks are in one node. Heads that do not
    divide are not traded, even inside a node: attention would take ceil(H/u)·u/H times as long, which at length is more than
    what nothing hides of a ring (12 heads on 5 H100: from 8 Ki tokens).

    Args:
        ranks: to a sequence. Groups are of neighbours, numbered node by node.
    """
    divisors = [size for size in range(1, ranks + 1) if ranks % size == 0]
    inside = [size for size in divisors if ranks_on_node % size == 0 or ranks <= ranks_on_node]
    return max(size for size in inside if heads % size == 0 and (key_heads % size == 0 or size % key_heads == 0))
