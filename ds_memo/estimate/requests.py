"""What one layer asks of the allocator beside what it keeps, as a trace for the planner.

One tensor per op, freed where its last reader is. What is handed from layer to layer (hidden states, their gradient) is no
transient and not in it. tests/estimate compares the peaks with traces recorded from real models.
"""

from __future__ import annotations

from functools import lru_cache

from ds_memo.estimate.model import Model
from ds_memo.plan import plan_trace
from ds_memo.plan.trace import Phase, Request, Trace


class _Phase:
    def __init__(self) -> None:
        self.requests: list[Request] = []

    def malloc(self, name: str, size: float) -> None:
        self.requests.append(Request(name, int(size)))

    def free(self, *names: str) -> None:
        self.requests += [Request(name, None) for name in names]


def layer_trace(model: Model, tokens: int, replays: bool) -> Trace:
    """A layer's forward and backward.

    Args:
        tokens: of this rank.
        replays: norms, rotary embedding and activation are made again before the backward (ds_memo), or were all kept.
    """
    unit = 2 * tokens
    hidden, width, kv = unit * model.hidden, unit * model.attention_width, unit * model.kv_width
    ffn = unit * model.active_ffn
    routed = unit * model.hidden * model.experts_per_token
    forward, backward = _Phase(), _Phase()

    def recompute(phase: _Phase) -> list[str]:
        """Elementwise outputs up to the last GEMM; returns those that the backward reads."""
        phase.malloc("norm1", hidden)
        phase.malloc("rotated", width + kv)
        phase.malloc("heads", width)  # the attention kernel's layout of q, k and v
        phase.malloc("residual", hidden)
        phase.malloc("norm2", hidden)
        if routed:
            phase.malloc("routed", routed)
        phase.malloc("activated", ffn)
        if model.gated:
            phase.malloc("product", ffn)
        return ["norm1", "rotated", "heads", "residual", "norm2", *(["routed"] if routed else []), "activated"] + (
            ["product"] if model.gated else []
        )

    forward.malloc("f.norm1", hidden)
    forward.malloc("f.rotated", width + kv)
    forward.free("f.norm1")
    forward.malloc("f.heads", width + kv)
    forward.free("f.rotated", "f.heads")
    forward.malloc("f.residual", hidden)
    forward.malloc("f.norm2", hidden)
    if routed:
        forward.malloc("f.routed", routed)
        forward.free("f.norm2")
    forward.malloc("f.activated", ffn)
    if model.gated:
        forward.malloc("f.product", ffn)
        forward.free("f.activated")
    forward.malloc("f.down", routed or hidden)
    forward.free("f.product" if model.gated else "f.activated", "f.routed" if routed else "f.norm2")
    forward.free("f.down", "f.residual")

    names = recompute(backward) if replays else []
    if routed:
        backward.malloc("d.routed_out", routed)
    backward.malloc("d.activated", ffn)
    if routed:
        backward.free("d.routed_out")
    if model.gated:
        backward.malloc("d.gate", ffn)
        backward.malloc("d.up", ffn)
        backward.free("d.activated")
    else:
        backward.malloc("d.up", ffn)
        backward.free("d.activated")
    if replays:
        backward.free(*(name for name in ("activated", "product") if name in names))
    if routed:
        backward.malloc("d.routed", routed)
    backward.malloc("d.norm2", hidden)
    backward.free("d.up", *(["d.gate"] if model.gated else []), *(["d.routed"] if routed else []))
    if replays and routed:
        backward.free("routed")
    backward.malloc("d.residual", hidden)
    backward.free("d.norm2")
    if replays:
        backward.free("norm2", "residual")
    backward.malloc("d.attended", width)
    backward.malloc("d.qkv_fp32", 2 * width)  # flash attention accumulates dq in fp32
    backward.malloc("d.qkv", width + 2 * kv)
    backward.free("d.attended", "d.qkv_fp32")
    if replays:
        backward.free("rotated", "heads")
    backward.malloc("d.projected", width + 2 * kv)
    backward.free("d.qkv")
    backward.malloc("d.norm1", hidden)
    backward.free("d.projected")
    backward.free("d.norm1", "d.residual")
    if replays:
        backward.free("norm1")
    first = len(forward.requests)
    return Trace(
        tuple(forward.requests + backward.requests),
        (Phase("L0.f", 0, first), Phase("L0.b", first, first + len(backward.requests))),
    )


@lru_cache(maxsize=256)
def _peak_per_token(model: Model, replays: bool) -> float:
    tokens = 1 << 14  # long enough that rounding to 512 bytes does not show
    return plan_trace(layer_trace(model, tokens, replays), solver="greedy").peak / tokens


def transient_bytes(model: Model, tokens: float, replays: bool) -> float:
    """The arena that the planner needs for one layer's transients; every size grows with the tokens, so one plan is enough."""
    return _peak_per_token(model, replays) * tokens
