"""Exchanges of 16 emulated ranks of two nodes: `python -m tests.benchmarks.emulated_exchanges` prints seconds and bytes; JSON."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from benchmarks import emulated_ranks
from benchmarks.emulated_order import Unordered
from benchmarks.emulated_process import run_emulated, without_values
from benchmarks.emulated_time import Clock, keeping_time
from ds_memo.estimate import hardware
from ds_memo.sequence.attention import attend
from ds_memo.sequence.exchange import blocks, gather, move, to_heads
from ds_memo.sequence.masks import Mask
from ds_memo.sequence.parts import SequenceParts, contiguous, even
from ds_memo.sequence.ranks import ranks_of

RANKS, RANK, TOKENS, HEADS = 16, 3, 65536, 32
PACKED, BORDER = [0, 1000, TOKENS], 1000
"""Documents of one row, by cu_seqlens."""
aten = torch.ops.aten


def exchanges(clock: Clock) -> dict[str, Any]:
    """Return (seconds, bytes by kind and way) of each."""
    emulated_ranks.among(RANKS, clock, RANK)
    in_eights, in_rows = ranks_of(dist.group.WORLD, 8), ranks_of(dist.group.WORLD, 2)
    found: dict[str, Any] = {}

    def time(name: str, do: Callable[[], Any]) -> Any:
        do()  # once, so that no block is made below
        torch.cuda.synchronize()
        emulated_ranks.sent.clear()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        result = do()
        end.record()
        end.synchronize()
        found[name] = [begin.elapsed_time(end) / 1e3, {" ".join(way): n for way, n in emulated_ranks.sent.items() if n}]
        return result

    x = torch.empty(1, TOKENS, 32, 128, device="cuda", dtype=torch.bfloat16)
    time("heads", lambda: to_heads(x, blocks(32, 8), in_eights.ulysses_group))
    time("uneven heads", lambda: to_heads(x[:, :, :12], blocks(12, 8), in_eights.ulysses_group))
    time("heads of all", lambda: to_heads(x, blocks(32, 16), dist.group.WORLD))
    time("gather", lambda: gather(x[:, :, :1].contiguous(), 1, SequenceParts(in_eights, RANKS * TOKENS)))
    have, want = contiguous(even(RANKS * TOKENS, RANKS)), SequenceParts(in_rows, RANKS * TOKENS).all_pieces
    time("move", lambda: move(x, have, want, dist.group.WORLD))
    for name, ranks in (("ring of nodes", in_eights), ("ring", in_rows)):
        time(name, lambda ranks=ranks: _around(ranks.ring_group, x))  # type: ignore[misc]
    a = torch.empty(16384, 16384, device="cuda", dtype=torch.bfloat16)
    time("product", lambda: a @ a)
    time("product, ring of nodes", lambda: _around(in_eights.ring_group, x, lambda: a @ a))
    four = dist.new_group(list(range(4)), timeout=timedelta(minutes=5))
    time("timeout", lambda: dist.all_reduce(x, group=four))

    for name, waits in (("ordered", True), ("races", False)):
        with Unordered() as unordered:
            _around(in_eights.ring_group, x, waits=waits)
            x.zero_()
        found[name] = list(unordered.races)

    q, k = (torch.empty(1, heads, TOKENS, 128, device="cuda", dtype=torch.bfloat16, requires_grad=True) for heads in (HEADS, 8))
    emulated_ranks.most_received.clear()
    out = time("ring attention", lambda: attend(nn.Identity(), q, k, k, Mask(), SequenceParts(in_rows, RANKS * TOKENS))[0])
    time("ring attention, backward", lambda: out.backward(out, retain_graph=True))
    found["received"] = {str(dtype): nbytes for dtype, nbytes in emulated_ranks.most_received.items()}

    host = torch.arange(2 * RANKS).view(RANKS, 2)
    dist.all_to_all_single(come := torch.empty_like(host), host)
    found["host"] = come.tolist()

    q, k = (torch.empty(TOKENS, heads, 128, device="cuda", dtype=torch.bfloat16) for heads in (HEADS, 8))
    borders = torch.tensor(PACKED, device="cuda", dtype=torch.int32)
    for name, left, causal in (("packed", None, True), ("window", 127, False), ("without limits", None, False)):
        sides = {"window_size_left": left, "window_size_right": None if left is None else 0}
        how = (borders, borders, TOKENS, TOKENS, 0.0, causal)
        out, lse, *states = time(name, lambda how=how, sides=sides: aten._flash_attention_forward(q, k, k, *how, False, **sides))
        for_backward = (out, q, k, k, out, lse, *how, *states[:2])
        time(f"{name}, backward", lambda given=for_backward, sides=sides: aten._flash_attention_backward(*given, **sides))
    for dtype in (torch.bfloat16, torch.float32):
        q = torch.empty(1, 4, 4096, 128, device="cuda", dtype=dtype)
        out, lse, *_ = aten._scaled_dot_product_efficient_attention(q, q, q, None, True, 0.0, True)
        found[str(dtype)] = [list(out.shape), list(lse.shape), str(lse.dtype)]
    return found


def _around(group: dist.ProcessGroup, x: torch.Tensor, meanwhile: Callable[[], Any] = lambda: None, waits: bool = True) -> None:
    """Send to the next rank of a ring, and wait for what comes from the one before."""
    ranks, number = dist.get_world_size(group), dist.get_rank(group)
    onward, back = (dist.get_global_rank(group, (number + step) % ranks) for step in (1, -1))
    ops = [dist.P2POp(dist.isend, x, onward, group), dist.P2POp(dist.irecv, torch.empty_like(x), back, group)]
    works = dist.batch_isend_irecv(ops)
    meanwhile()
    for work in works:
        if waits:
            work.wait()


def main(*emulated: str) -> int:
    if not emulated:
        return run_emulated("tests.benchmarks.emulated_exchanges", ["--emulated"], 80)
    without_values()
    with keeping_time(hardware.load("h200")) as clock:
        print(json.dumps(exchanges(clock)))
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
