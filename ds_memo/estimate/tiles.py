"""A layer in tiles of tokens, by formula: what its parts hold and how long they take. See docs/tiles.md.

peak bytes   a · tokens + b · tokens of a tile + weight gradients: a tape of the ops before attention and one of those behind it
seconds      those of the whole layer, and more: elementwise ops before attention again, copies, sums of weight gradients

Launches of kernels are not modelled, here as elsewhere: tiles of few tokens look faster than they are.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache

from ds_memo.estimate.costs import Costs
from ds_memo.estimate.layout import Layout
from ds_memo.estimate.model import Model
from ds_memo.estimate.requests import ATTENDED, head_tape, kept, layer_tape, tail_tape
from ds_memo.estimate.tape import INPUT, Op, most_alive
from ds_memo.estimate.traffic import head_traffic, traffic
from ds_memo.head_groups import HeadGroup, head_groups, most_head_groups
from ds_memo.placement import Tiles
from ds_memo.profile.tile_sample import PARTS, Cut, working_of
from ds_memo.solve.costs import LayerCosts, Output, TileCosts

LEAST_TOKENS = 1024
"""Fewer tokens than these make no tile."""
_MOST_GROUPS = 8
_SUM, _ROUNDED = 4, 2
"""Bytes of a weight's gradient while tiles add to it, and afterwards."""
_ADDED, _SETTLED = 8, 6
"""Bytes through device memory for each weight: to add one more tile's gradient, and to round the sum."""


def tilings(costs: Costs) -> Iterator[Tiles]:
    """Yield the tiles that layers may run in, longest first, with as many groups of heads as can be."""
    model, layout = costs.model, costs.layout
    if layout.tp > 1 or layout.cp > 1:
        return  # attention's own parallelism: ds_memo has none of it
    groups = most_head_groups(model.kv_heads, model.heads, layout.sp, _MOST_GROUPS)
    doublings = max(0, math.ceil(math.log2(costs.tokens / LEAST_TOKENS)))
    for doubled in reversed(range(doublings)):
        yield Tiles(LEAST_TOKENS << doubled, groups)


def tiled_layer(costs: Costs, tiles: Tiles) -> LayerCosts:
    """Return a layer of ds_memo in tiles."""
    whole, model = costs.memo_layer(), costs.model
    cut = Cut.of(1, max(1, round(costs.tokens)), tiles.tokens)
    if cut.tiles == 1:
        return whole
    of_parts = [parts(model, costs.layout, tiles.head_groups, stored) for stored in (True, False)]
    working, working_at_0 = (working_of([part.nbytes(cut) for part in found.values()]) for found in of_parts)

    hidden, width, kv = 2 * model.hidden, 2 * model.attention_width, 2 * model.kv_width
    weights, qkv = _weights(model), _head_weights(model)
    before, all_ops = head_traffic(model), traffic(model)
    gathered = 2 * (width + 2 * kv)  # read and written
    rows, differs = max(1, round(costs.tokens)), costs.layout.sp > 1

    def moved_s(of_token: float, of_weights: float) -> float:
        """Return the seconds of bytes per token, and of the sums of this many weights."""
        return costs.moved_s(costs.tokens * of_token + (_ADDED * (cut.tiles - 1) + _SETTLED) * of_weights)

    heads_again_s = moved_s(before.forward, 0)
    gathered_again_s = heads_again_s + costs.gemm_s(qkv) + moved_s(gathered, 0)
    tails_s = costs.gemm_s(model.active_layer_parameters - qkv) + moved_s(all_ops.forward + 2 * hidden, 0)
    forward_s = whole.forward_s + heads_again_s + moved_s(gathered + 2 * hidden, 0)
    copied = gathered + 2 * (2 * width + hidden)
    tails_backward_s = 2 * costs.gemm_s(model.active_layer_parameters - qkv) + whole.gemm_s
    tails_backward_s += moved_s(all_ops.replay + all_ops.backward - before.backward + copied - 3 * hidden, weights - qkv)
    heads_backward_s = 2 * costs.gemm_s(qkv) + moved_s(before.forward + before.backward + 3 * hidden, qkv)
    again_s = heads_again_s + moved_s(copied, weights)
    if differs:  # the backward begins with what comes before attention, and trades heads once more
        traded_again_s = _keys_again(model, costs.layout.sp, tiles.head_groups) * costs.layer.exchange
        forward_s += traded_again_s
        again_s += gathered_again_s + costs.layer.exchange + 3 * traded_again_s

    born = max(0.0, 1 - tails_s / forward_s)
    outputs: list[Output] = []
    for output in whole.outputs:
        if output.kind == "attention":  # the result, and the log-sum-exp
            outputs.append(Output("attention", rows, width, born))
            outputs.append(Output("attention", rows, output.nbytes // rows - width, born))
        else:
            outputs.append(output if output.kind == "input" else replace(output, born=born))
    return replace(
        whole,
        outputs=tuple(outputs),
        forward_s=forward_s,
        backward_s=whole.backward_s + again_s,
        working=working,
        working_at_0=working_at_0,
        working_without_attention=working_at_0.with_attention(whole.attention_bytes),
        in_tiles=TileCosts(cut.tiles, tails_backward_s, heads_backward_s, gathered_again_s, differs, whole.working),
    )


@dataclass(frozen=True)
class PartBytes:
    """Peak bytes of one part of a layer in tiles."""

    of_token: float
    """Tensors of all tokens."""
    of_tile: float = 0.0
    """Transients, for each token of a tile."""
    of_weights: float = 0.0
    """Gradients of weights, whatever the length."""
    first_of_token: float = 0.0
    """Tensors of all tokens at another moment, before any tile."""

    def nbytes(self, cut: Cut) -> float:
        in_tiles = self.of_token * cut.tokens + self.of_tile * cut.of_tile + self.of_weights
        return max(in_tiles, self.first_of_token * cut.tokens)


@lru_cache(maxsize=256)
def parts(model: Model, layout: Layout, groups: int, stored: bool = False) -> dict[str, PartBytes]:
    """Return the peak bytes of each of PARTS, by ds_memo.solve.costs.Working's rules.

    Args:
        stored: True if all GEMM outputs are kept. They count in the forward.

    In the forward, attention runs next to the input and its operands. In the backward, the incoming gradient, which becomes the
    outgoing one, the gradient of attention's output and the operands stand on the device; the output itself is counted where a
    layer's placement is known (ds_memo/solve/memory.py).
    """
    hidden, width, kv = 2 * model.hidden, 2 * model.attention_width, 2 * 2 * model.kv_width
    operands, weights, qkv = width + kv, _weights(model), _head_weights(model)
    head, tail = head_tape(model), tail_tape(model)
    attention = next(op for op in layer_tape(model).ops if op.kind == "attention")
    choices = kept(model, gemms=False, attention=False) - {INPUT}
    chosen = sum(op.nbytes for op in tail.ops if op.name in choices)
    statistics = attention.nbytes - width  # log-sum-exp
    gemms = kept(model) - kept(model, gemms=False) if stored else frozenset()
    of_head, of_tail = (sum(op.nbytes for op in tape.ops if op.name in gemms) for tape in (head, tail))
    head_there = most_alive(head.forward(gemms)) - of_head
    tail_there = most_alive(tail.forward({ATTENDED, *gemms})) - of_tail - width + hidden
    head_back = most_alive(head.backward({INPUT, *gemms})) + operands
    tail_back = most_alive(tail.backward({INPUT, ATTENDED, *choices, *gemms})) + hidden
    experts = weights - _dense_weights(model)

    behind = hidden + width + operands
    forward, backward, again = operands + width + statistics, behind + attention.back + operands + statistics, 0.0
    if layout.sp > 1:
        forward, again, backward = _traded(model, layout.sp, groups, attention)
        forward, again, backward = forward + operands, again + hidden + operands, backward + behind
    elif groups > 1:  # copies of the group's operands, output and its gradient; the gradients of the group before
        backward = behind + (attention.back + 3 * operands + 2 * width + statistics) / groups
    result = width if layout.sp > 1 else 0.0  # made again, of the kernel's output
    found = (
        PartBytes(hidden + operands + of_head, head_there),
        PartBytes(hidden + forward + of_head),
        PartBytes(2 * hidden + width + statistics + chosen + of_head + of_tail + result, tail_there),
        PartBytes(behind + result, max(tail_back, head_back), _SUM * (weights - qkv) + _ROUNDED * experts, first_of_token=again),
        PartBytes(backward, 0.0, _ROUNDED * (weights - qkv)),
        PartBytes(hidden + operands, head_back, _ROUNDED * (weights - qkv) + _SUM * qkv),
    )
    return dict(zip(PARTS, found, strict=True))


def _traded(model: Model, ranks: int, groups: int, attention: Op) -> tuple[float, float, float]:
    """Return the bytes of a token that attention takes under Ulysses, beside its arguments and its frame.

    Returns:
        In the forward; where its result is made again, of the kernel's output; in the backward.

    A group's operands, its output and the gradients of both exist before and after all-to-alls. Kernels take heads one after
    another in memory, and a copy is made if a rank has several. The forward has the outputs of all groups. The backward adds the
    gradients of keys and values up in float32: inside of a kernel that gets heads which share keys, and over groups that do. A
    rehearsal of eight ranks measured these (docs/parallel.md).
    """
    width, statistics = 2 * model.attention_width, attention.nbytes - 2 * model.attention_width
    group, local_kv, kv = _group(model, ranks, groups), 4 * model.kv_width, _traded_keys(model, ranks)
    of_group, of_keys = width / groups, kv / group.of_keys
    heads = model.heads // ranks // groups
    if groups == 1:
        again = 4 * width + kv
        return again + width + 2 * statistics, again, attention.back + 3 * (width + kv) + width + statistics
    copied = 2 * of_group if heads > 1 else 0.0
    again = width + 3 * of_group + of_keys + copied
    backward = 2 * of_group + 2 * (of_group + of_keys) + 2 * of_group + copied + statistics / groups
    if heads > group.key_heads // group.of_keys:
        backward += 2 * of_group + of_keys / 2
    if group.of_queries > 1:
        backward += 2 * local_kv / group.of_keys
    return again + width + 2 * statistics, again, backward


def _keys_again(model: Model, ranks: int, groups: int) -> float:
    """Return what is traded more because groups share keys, as a share of what is traded for all heads at once."""
    kv = _traded_keys(model, ranks)
    return (_group(model, ranks, groups).of_queries - 1) * kv / (4 * model.attention_width + kv)


def _group(model: Model, ranks: int, groups: int) -> HeadGroup:
    """Return one of a layer's groups of heads."""
    return next(head_groups(groups, model.kv_heads, model.heads, ranks))


def _traded_keys(model: Model, ranks: int) -> float:
    """Return the bytes of a token's keys and values as ranks trade them: each rank gets one head at least."""
    return 4 * model.kv_width * max(1.0, ranks / model.kv_heads)


def _weights(model: Model) -> int:
    return model.layer_parameters


def _head_weights(model: Model) -> int:
    """Return the number of weights of queries, keys and values."""
    return model.hidden * (model.attention_width + 2 * model.kv_width)


def _dense_weights(model: Model) -> int:
    """Return the number of weights whose gradients a GEMM adds up; those of experts are made first."""
    matrices = 3 if model.gated else 2
    return _weights(model) - matrices * model.hidden * model.ffn * model.experts
