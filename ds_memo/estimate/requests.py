"""Memory requests of one layer: its ops as Transformers runs them, and the peaks that follow.

Sizes are bytes of one token in bf16; all grow with the tokens, so one layer at one length is enough. tests/estimate checks them
against real layers and recorded traces. Layers whose residual skips attention and MLP at once are counted as the usual kind.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

from ds_memo.estimate.model import Model
from ds_memo.estimate.tape import INPUT, Op, Tape, most_alive
from ds_memo.plan import plan_trace
from ds_memo.plan.phases import LayerPass
from ds_memo.plan.trace import Phase, Request, Trace
from ds_memo.solve.costs import Working

ATTENDED = "attended"
"""Name of attention's output."""
_TOKENS = 1 << 14
"""Tokens of a trace: so many that rounding to 512 bytes does not matter."""


@lru_cache(maxsize=256)
def layer_tape(model: Model, mlp: Op | None = None) -> Tape:
    """Return a layer's ops.

    Args:
        mlp: one op in place of all ops of the MLP or the experts. It reads what they read.
    """
    hidden, width, kv = 2 * model.hidden, 2 * model.attention_width, 2 * model.kv_width
    ops: list[Op] = []

    def norm(wanted: bool, name: str, reads: str) -> str:
        """Add a norm if wanted; return the name of its output, else of its input."""
        if not wanted:
            return reads
        ops.append(_norm(model, name, reads, hidden))
        return name

    into = norm(model.pre_norms, "norm1", INPUT)
    ops += _attention(model, into, width, kv)
    ops.append(Op("o", hidden, (ATTENDED,), (ATTENDED,), holds=(into,), kind="gemm"))
    attended = norm(model.post_norms, "o_norm", "o")
    ops.append(Op("residual", hidden, (INPUT, attended), adds=True))
    into = norm(model.pre_norms, "norm2", "residual")
    more, parts = _mlp_or_experts(model, into) if mlp is None else ([replace(mlp, reads=(into,), saves=(into,))], [mlp.name])
    ops += more
    parts = [norm(model.post_norms, f"{part}_norm", part) for part in parts]
    ops.append(Op("output", hidden, ("residual", *parts), adds=True))
    return Tape(tuple(ops))


@lru_cache(maxsize=64)
def mlp_tape(model: Model) -> Tape:
    """Return the ops of the MLP or the experts alone, from their input to their output."""
    ops, parts = _mlp_or_experts(model, INPUT)
    return Tape((*ops, Op("mlp", 2 * model.hidden, tuple(parts), adds=True)) if len(parts) > 1 else tuple(ops))


def head_tape(model: Model) -> Tape:
    """Return the ops before attention, and a last one that takes its operands: a tile's part up to attention."""
    ops = layer_tape(model).ops
    at = _attention_index(ops)
    return Tape((*ops[:at], Op("operands", 2 * model.hidden, ops[at].reads, holds=ops[at + 1].holds, adds=True, moved=0.0)))


def tail_tape(model: Model) -> Tape:
    """Return a first op that gives attention's output, ATTENDED, and the ops behind attention."""
    ops = layer_tape(model).ops
    return Tape((Op(ATTENDED, 2 * model.attention_width, (), kind="attention"), *ops[_attention_index(ops) + 1 :]))


def _attention_index(ops: Sequence[Op]) -> int:
    return next(index for index, op in enumerate(ops) if op.kind == "attention")


def _mlp_or_experts(model: Model, into: str) -> tuple[list[Op], list[str]]:
    """Return the ops, and the names of the outputs that the layer adds to the residual."""
    hidden, mlp = 2 * model.hidden, []
    experts = _experts(model, into, hidden) if model.experts else []
    if not experts or model.shared_ffn:
        mlp = _mlp(model, into, hidden, 2 * (model.shared_ffn if experts else model.ffn))
    if model.shared_gate:
        weighted = ("down", "weight")
        gate = [Op("weight", 2, (into,), (into,), kind="gemm"), Op("weighted_down", hidden, weighted, weighted)]
        return [*mlp, *experts, *gate], [experts[-1].name, gate[-1].name]
    ops = [*mlp, *experts] if model.shared_first else [*experts, *mlp]
    return ops, [part[-1].name for part in (experts, mlp) if part]


def _norm(model: Model, name: str, reads: str, nbytes: float) -> Op:
    """Return a norm. RMSNorm saves float32 values and the factor of its weight; LayerNorm and fused kernels save their input."""
    if model.fused or model.fused_norms or not model.rms:
        return Op(name, nbytes, (reads,), (reads,))
    if model.float_weights:
        moved: dict[str, Any] = {"moved": 20 * nbytes, "moved_back": 52 * nbytes}
        return Op(name, nbytes, (reads,), inner=4 * nbytes, temporary=2 * nbytes, back=8 * nbytes, **moved)
    moved = {"moved": 18 * nbytes, "moved_back": 46 * nbytes}
    return Op(name, nbytes, (reads,), inner=3 * nbytes, temporary=2 * nbytes, back=7 * nbytes, **moved)


def _attention(model: Model, into: str, width: float, kv: float) -> list[Op]:
    sizes, used = {"q": width, "k": kv, "v": kv}, {"q": "q", "k": "k", "v": "v"}
    if model.fused_qkv:
        ops = [Op("qkv", width + 2 * kv, (into,), (into,), kind="gemm")]
        used = dict.fromkeys(used, "qkv")
    else:
        ops = [Op(name, size, (into,), (into,), kind="gemm") for name, size in sizes.items()]
    for name in ("q", "k") if model.qk_norm else ():
        norm = _norm(model, f"{name}_norm", used[name], sizes[name])
        ops.append(replace(norm, views=(("qkv", sizes[name]),)))
        used[name] = f"{name}_norm"
    queries = used["q"]
    for name in ("q", "k") if model.rotary else ():
        size = sizes[name]
        view = (("qkv", size),)
        held = (queries,) if name == "k" else ()  # both are arguments of one function
        rotated = Op(f"{name}_rotated", size, (used[name],), holds=held, temporary=2 * size, back=2 * size, views=view)
        if model.fused:
            rotated = replace(rotated, temporary=0.0, back=0.0)
        else:  # several kernels
            moved, moved_back = (12, 20) if model.fused_qkv else (10, 16)
            rotated = replace(rotated, moved=moved * size, moved_back=moved_back * size)
        ops.append(rotated)
        used[name] = f"{name}_rotated"
    reads = tuple(dict.fromkeys(used.values()))
    back = 2 * width + (2 * width if kv < width else 0)  # dq in float32; dk and dv of every head before groups are summed
    view = (("qkv", sum(sizes[name] for name in sizes if used[name] == "qkv")),)
    saves = (*reads, ATTENDED)
    copied = 2 * width if model.fused_qkv and model.rotary else 0.0  # attention's output has the queries' strides
    attended = Op(ATTENDED, width + 4 * model.heads, reads, saves, back=back, views=view, kind="attention", moved=copied)
    return [*ops, attended]


def _mlp(model: Model, into: str, hidden: float, ffn: float) -> list[Op]:
    down = Op("down", hidden, ("product",), ("product",), holds=(into,), kind="gemm")
    if not model.gated:
        return [
            Op("up", ffn, (into,), (into,), kind="gemm"),
            _activation(model, "product", ffn, "up"),
            replace(down, holds=(into, "o")),
        ]
    if model.fused:
        parts = {"gate_up": 2 * ffn} if model.fused_gate else {"gate": ffn, "up": ffn}
        gemms = [Op(name, size, (into,), (into,), kind="gemm") for name, size in parts.items()]
        return [*gemms, Op("product", ffn, tuple(parts), tuple(parts)), down]
    if model.fused_gate:
        half = (("gate_up", ffn),)
        return [
            Op("gate_up", 2 * ffn, (into,), (into,), kind="gemm"),
            replace(_activation(model, "activated", ffn, "gate_up"), views=half),
            Op("product", ffn, ("activated", "gate_up"), ("activated", "gate_up"), views=half, moved_back=6 * ffn),
            down,
        ]
    return [
        Op("gate", ffn, (into,), (into,), kind="gemm"),
        _activation(model, "activated", ffn, "gate"),
        Op("up", ffn, (into,), (into,), kind="gemm"),
        Op("product", ffn, ("activated", "up"), ("activated", "up"), moved_back=6 * ffn),
        down,
    ]


def _activation(model: Model, name: str, ffn: float, reads: str) -> Op:
    inner = 0.0 if model.fused else model.activation_saves * ffn
    moved: dict[str, Any] = {"moved": 6 * inner, "moved_back": 9 * inner} if inner else {}
    return Op(name, ffn, (reads,), (reads,), inner=inner, back=ffn if inner else 0.0, **moved)


def _experts(model: Model, into: str, hidden: float) -> list[Op]:
    """Return Transformers' grouped GEMMs, as of 5.23 (before, masks took up to two fifths more). Tokens are copied to each expert
    they visit, multiplied, weighted, sorted back and summed."""
    visits, experts = model.experts_per_token, model.experts
    routed, ffn = visits * hidden, visits * 2 * model.ffn
    wide, summed = (2 * routed, 2 * hidden) if model.float_routes else (routed, 0.0)
    inner = (2 if model.gated else 1) * ffn
    router = Op("router", 2 * experts, (into,), (into,), kind="choice")
    if model.float_router:
        router = replace(router, nbytes=4 * experts, saves=(), inner=2 * hidden, moved=3 * hidden, moved_back=3 * hidden)
    return [
        router,
        Op("scores", 4 * experts, ("router",), ("scores",), temporary=4 * experts),
        Op("chosen", 12 * visits, ("scores",), kind="choice", no_gradient=True),
        Op("order", 16 * visits, ("chosen",), kind="choice", no_gradient=True),
        Op("routed", routed, (into, "order"), inner=8 * visits, back=routed, moved=2 * routed),
        Op("gate_up", inner, ("routed",), ("routed",), kind="gemm"),
        Op("expert", ffn, ("gate_up",), ("gate_up",), inner=ffn if model.gated else 0, **_expert_moves(model, ffn)),
        Op("expert_out", routed, ("expert",), ("expert",), kind="gemm"),
        Op("weighted", wide, ("expert_out",), ("expert_out",), inner=2 * visits, back=wide, moved_back=2 * routed + 4 * wide),
        Op("sorted_back", wide, ("weighted",), inner=8 * visits, back=wide, moved_back=3 * wide),
        Op("mixed", hidden, ("sorted_back",), holds=(into, "routed", "expert_out"), temporary=summed),
    ]


def _expert_moves(model: Model, ffn: float) -> dict[str, Any]:
    """Return the extra traffic of gate and up, halves of one tensor whose gradients are concatenated."""
    return {"moved": 5 * ffn, "moved_back": 13 * ffn} if model.gated else {}


def kept(model: Model, gemms: bool = True, attention: bool = True) -> frozenset[str]:
    """Return the outputs that ds_memo keeps: those the backward needs and a replay without GEMMs or attention does not make."""
    tape = layer_tape(model)
    last = max(i for i, op in enumerate(tape.ops) if op.saves or op.inner)
    read = {name for op in tape.ops[: last + 1] for name in op.reads}
    kinds = {"choice"} | ({"gemm"} if gemms else set()) | ({"attention"} if attention else set())
    needed = read | tape.saved
    return frozenset({INPUT} | {op.name for op in tape.ops if op.kind in kinds and op.name in needed})


@lru_cache(maxsize=256)
def _working(model: Model, gemms: bool, attention: bool) -> tuple[float, float]:
    tape, hidden, supplied = layer_tape(model), 2 * model.hidden, kept(model, gemms, attention)
    forward = most_alive(tape.forward(supplied))
    return hidden + forward, hidden + most_alive(tape.backward(supplied))


def working(model: Model, tokens: float, gemms: bool = True, attention: bool = True) -> Working:
    """Return the peak bytes of a layer's forward, and of its replay and backward, as a profile measures them.

    The forward counts its input and kept outputs. The backward counts the layer's output and its gradient, not kept outputs.

    Args:
        gemms, attention: True if their outputs are kept.
    """
    return Working(*(round(per_token * tokens) for per_token in _working(model, gemms, attention)))


@lru_cache(maxsize=256)
def _tile(model: Model) -> tuple[float, float]:
    """Return the bytes of a token of a tile: in the MLP's forward, and in its repetition with its backward."""
    tape, output = mlp_tape(model), 2 * model.hidden
    return most_alive(tape.forward({INPUT})), output + most_alive(tape.backward({INPUT}))


def tiled_working(model: Model, tokens: float) -> Working:
    """Return the peak bytes of a layer whose MLP is DeepSpeed's TiledMLP, under checkpointing with its input on the host.

    A tile has as many tokens as the hidden states are wide. The forward joins the tiles' outputs. The backward makes the whole
    gradient of the MLP's input first, then runs tile by tile.
    """
    hidden, share = 2 * model.hidden, min(1.0, model.hidden / tokens)
    there, back = (share * nbytes for nbytes in _tile(model))
    mlp = Op("mlp", hidden, (INPUT,), temporary=max(hidden, there - hidden), back=back)
    tape = layer_tape(model, mlp)
    forward = hidden + most_alive(tape.forward({INPUT}))
    backward = hidden + most_alive(tape.backward({INPUT}, frees_gradient=True))
    return Working(round(forward * tokens), round(backward * tokens))


def saved_bytes(model: Model, tokens: float) -> float:
    """Return the bytes that autograd saves of a layer."""
    return layer_tape(model).saved_bytes * tokens


def layer_trace(model: Model, tokens: int) -> Trace:
    """Return the requests of a layer's forward and backward for transients alone: saved activations are kept elsewhere."""
    tape = layer_tape(model)
    everything = frozenset({INPUT, *(op.name for op in tape.ops)})
    saved = tape.saved | {tape.ops[-1].name}
    forward = [r for r in tape.forward(kept=saved) if r[0] not in saved]
    backward = tape.backward(everything, replays=False)
    requests = [
        Request(f"{phase}.{name}", None if nbytes is None else int(nbytes * tokens))
        for phase, some in (("f", forward), ("b", backward))
        for name, nbytes in some
        if not name.endswith(".inner")
    ]
    n = sum(1 for r in requests if r.id.startswith("f."))
    phases = Phase(LayerPass(0, backward=False), 0, n), Phase(LayerPass(0, backward=True), n, len(requests))
    return Trace(tuple(requests), phases)


@lru_cache(maxsize=256)
def _peak_per_token(model: Model) -> float:
    return plan_trace(layer_trace(model, _TOKENS), solver="greedy").peak / _TOKENS


def transient_bytes(model: Model, tokens: float) -> float:
    """Return the bytes of the arena for one layer's transients where all that autograd saves is kept."""
    return _peak_per_token(model) * tokens
