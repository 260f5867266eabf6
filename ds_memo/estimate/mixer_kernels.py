"""Kernels of layers without attention that neither the meta device nor the benchmarks' emulator has: scans and convolutions.

Each makes the tensors that the kernel it stands for makes, and no number is computed. Its price is the FLOPs of that kernel's
products, at attention's efficiencies, and the bytes that its parts read and write, one part after another:

gated delta rule   flash-linear-attention, fla/ops/gated_delta_rule/chunk.py: its backward makes w, u, states and new values again
chunk scan         mamba-ssm (Mamba-2), mamba_ssm/ops/triton/ssd_combined.py: its backward makes the states again
convolution        causal-conv1d: the activation is inside, and its input alone is saved
all in one         mamba-ssm's mamba_split_conv1d_scan_combined, which saves the projection and the scan's output
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from ds_memo.estimate.hardware import Hardware
from ds_memo.sequence.catch_mixers import kernels_instead

NAMESPACE = "ds_memo_mixers"
_CHUNK = 64
"""Tokens of a chunk in flash-linear-attention."""
_library = torch.library.Library(NAMESPACE, "DEF")
for _schema in (
    "delta_rule(Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta, Tensor? state) -> Tensor[]",
    "delta_rule_backward(Tensor d, Tensor? dstate, Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta, Tensor A) -> Tensor[]",
    "chunk_scan(Tensor x, Tensor dt, Tensor A, Tensor B, Tensor C, int chunk, Tensor? state) -> Tensor[]",
    "chunk_scan_backward(Tensor d, Tensor? dstate, Tensor x, Tensor dt, Tensor A, Tensor B, Tensor C, int chunk) -> Tensor[]",
    "convolution(Tensor x, Tensor weight) -> Tensor",
    "convolution_backward(Tensor d, Tensor x, Tensor weight) -> Tensor[]",
    "gated_norm(Tensor x, Tensor gate) -> Tensor",
    "gated_norm_backward(Tensor d, Tensor x, Tensor gate) -> Tensor[]",
):
    _library.define(_schema)
_ops = getattr(torch.ops, NAMESPACE)
fp32 = torch.float32


class Price(NamedTuple):
    flops: float
    nbytes: float
    backward: bool


def price(func: Any, args: tuple[Any, ...]) -> Price:
    """Return what an op of this file takes."""
    name = func._schema.name.rpartition("::")[2]
    backward = name.endswith("_backward")
    given = dict(zip((argument.name for argument in func._schema.arguments), args, strict=False))
    if name.startswith("delta_rule"):
        return Price(*_delta_rule_price(given["k"], given["v"], backward), backward)
    if name.startswith("chunk_scan"):
        return Price(*_chunk_scan_price(given["x"], given["B"], given["chunk"], backward), backward)
    nbytes = given["x"].nbytes * (3 if backward else 2)
    if name.startswith("gated_norm"):  # the gate, and in the backward its gradient
        return Price(0.0, nbytes + given["gate"].nbytes * (2 if backward else 1), backward)
    return Price((4.0 if backward else 2.0) * given["x"].numel() * given["weight"].shape[-1], nbytes, backward)


def cost_s(func: Any, args: tuple[Any, ...], machine: Hardware) -> float:
    """Return the seconds of an op of this file."""
    flops, nbytes, backward = price(func, args)
    efficiency = machine.attention_backward_efficiency if backward else machine.attention_forward_efficiency
    return flops / (machine.peak * efficiency) + nbytes / (machine.device_bandwidth * machine.device_bandwidth_efficiency)


def implement(device: str) -> None:
    """Have the ops run on another device than meta."""
    for name, function in _IMPLEMENTED.items():
        _library.impl(name, function, device)


@contextmanager
def mixer_kernels() -> Iterator[None]:
    """Have the layers of models call these kernels in the block, in place of Transformers' code."""
    with kernels_instead(KERNELS):
        yield


# ---- gated delta rule: q, k (b, s, key heads, K), v (b, s, heads, V), g, beta (b, s, heads)


def _delta_rule_price(k: torch.Tensor, v: torch.Tensor, backward: bool) -> tuple[float, float]:
    K, V, C = k.shape[3], v.shape[3], _CHUNK
    heads = v.shape[0] * v.shape[1] * v.shape[2]  # of all tokens
    states = K * V / C
    if backward:
        again = 6 * K + 4 * V + C + states  # w, u; states and new values
        parts = 2 * K + 2 * V, 3 * K + 3 * V + states, 6 * K + 3 * V + 2 * states, 3 * K + 3 * V + C, 3 * K, 6 * K
        flops = C * (4 * K + 2 * V) + 4 * K * V + C * (12 * K + 10 * V + 4 * C) + 12 * K * V
        return heads * flops, heads * 2 * (again + sum(parts))
    parts = 4 * K, K + 2 * C, 3 * C, 2 * K + 2 * V + C, 2 * K + 2 * V + states, 2 * K + 2 * V + states
    return heads * (C * (6 * K + 4 * V) + 6.0 * K * V), heads * 2 * sum(parts)


def _delta_rule(q: Any, k: Any, v: Any, g: Any, beta: Any, state: Any) -> list[torch.Tensor]:
    """Return the output, the state behind it, and what is saved: q, k normalised, their factors, sums of g, and the inverse A."""
    rows, length, heads, size = v.shape
    factors = q.new_empty(2, *q.shape[:3], dtype=fp32)
    inverse = v.new_empty(rows, length, heads, _CHUNK)
    final = v.new_empty(rows, heads, k.shape[3], size, dtype=fp32)
    like = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (v, q, k))
    out, q, k = like
    return [out, final, q, k, factors, torch.empty_like(g, dtype=fp32), inverse]


def _delta_rule_backward(d: Any, dstate: Any, q: Any, k: Any, v: Any, g: Any, beta: Any, A: Any) -> list[torch.Tensor]:
    dstate = v.new_empty(v.shape[0], v.shape[2], k.shape[3], v.shape[3], dtype=fp32)
    wide = (v.new_empty(*v.shape[:3], x.shape[3]) for x in (q, k))  # a key head's gradient is a sum over its value heads
    return [*wide, *(torch.empty_like(x, memory_format=torch.contiguous_format) for x in (v, g, beta)), dstate]


def _of_delta_rule(k: torch.Tensor, v: torch.Tensor) -> list[torch.Tensor]:
    """Return what both passes make: w, u, new values, and the state at each chunk's start."""
    rows, length, heads, size = v.shape
    keys = rows, length, heads, k.shape[3]
    return [v.new_empty(*shape) for shape in (keys, v.shape, v.shape, (rows, -(-length // _CHUNK), heads, k.shape[3], size))]


class _DeltaRule(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Any, k: Any, v: Any, g: Any, beta: Any, state: Any) -> tuple[torch.Tensor, torch.Tensor]:
        made = _of_delta_rule(k, v)
        out, final, *saved = _ops.delta_rule(q, k, v, g, beta, state)
        del made
        ctx.save_for_backward(*saved, v, beta)
        ctx.has_state = state is not None
        return out, final

    @staticmethod
    def backward(ctx: Any, d: torch.Tensor, dstate: torch.Tensor) -> tuple[Any, ...]:
        q, k, _, g, inverse, v, beta = ctx.saved_tensors
        made = _of_delta_rule(k, v)  # and of the states, new values, w, k
        made += [torch.empty_like(made[index]) for index in (3, 2, 0, 0)]
        dq, dk, *found, dstate = _ops.delta_rule_backward(d.contiguous(), dstate, q, k, v, g, beta, inverse)
        del made
        of_keys = (x if x.shape == like.shape else x.unflatten(2, (like.shape[2], -1)).sum(3) for x, like in ((dq, q), (dk, k)))
        return *of_keys, *found, dstate if ctx.has_state else None


def delta_rule(
    query: Any, key: Any, value: Any, g: Any, beta: Any, initial_state: Any = None, output_final_state: bool = False, **_: Any
) -> tuple[torch.Tensor, torch.Tensor | None]:
    out, final = _DeltaRule.apply(query, key, value, g, beta, initial_state)
    return out, final if output_final_state else None


# ---- Mamba-2's chunk scan: x (b, s, heads, p), dt (b, s, heads), B, C (b, s, groups, n), A (heads)


def _chunk_scan_price(x: torch.Tensor, B: torch.Tensor, chunk: int, backward: bool) -> tuple[float, float]:
    tokens, heads, p = x.shape[0] * x.shape[1], x.shape[2], x.shape[3]
    groups, n = B.shape[2:]
    of_heads, states, scores, of_groups = heads * p, heads * p * n / chunk, groups * chunk, groups * n
    inside, to_states = heads * p * chunk, 2 * heads * p * n  # FLOPs: the causal half of a chunk; a product with the states
    products = 2 * groups * chunk * n
    begin_bytes = 10 * heads + (2 * of_heads + 2 * of_groups + 4 * states) + (4 * of_groups + 4 * scores)
    if not backward:
        nbytes = begin_bytes + 6 * states + (4 * scores + 4 * of_heads + 2 * of_groups + 2 * states)
        return tokens * (2.0 * to_states + inside + products), tokens * nbytes
    parts = (
        begin_bytes + 8 * states,
        2 * of_groups + 2 * of_heads + 4 * states,  # gradients of states
        12 * states,
        6 * of_heads + 4 * scores + 2 * of_groups + 2 * states + 4 * heads,  # of x and dt
        2 * (2 * of_heads + 6 * of_groups + 2 * states),  # of B and C
        4 * of_heads + 4 * scores + 2 * (4 * scores + 8 * of_groups),
        4 * of_heads + 4 * scores + 12 * heads,
    )
    return tokens * (5.0 * to_states + 3 * inside + 3 * products), tokens * sum(parts)


def _chunk_scan(x: Any, dt: Any, A: Any, B: Any, C: Any, chunk: int, state: Any) -> list[torch.Tensor]:
    """Return the output, the state behind it, and sums of dt · A."""
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    return [out, x.new_empty(x.shape[0], *x.shape[2:], B.shape[3], dtype=fp32), dt.new_empty(dt.shape, dtype=fp32)]


def _chunk_scan_backward(d: Any, dstate: Any, x: Any, dt: Any, A: Any, B: Any, C: Any, chunk: int) -> list[torch.Tensor]:
    dense = (torch.empty_like(given, memory_format=torch.contiguous_format) for given in (x, dt, A, B, C))
    return [*dense, x.new_empty(x.shape[0], *x.shape[2:], B.shape[3], dtype=fp32)]


def _of_chunk_scan(x: torch.Tensor, B: torch.Tensor, chunk: int, dtypes: tuple[torch.dtype, ...]) -> list[torch.Tensor]:
    """Return what a pass makes: dt and its sums in fp32, the products in each chunk, and states in each of these dtypes."""
    rows, length, heads, size = x.shape
    chunks = -(-length // chunk)
    sums = [x.new_empty(rows, heads, chunks * chunk, dtype=fp32) for _ in range(2)]
    states = [x.new_empty(rows, chunks, heads, size, B.shape[3], dtype=dtype) for dtype in dtypes]
    return [*sums, x.new_empty(rows, chunks, B.shape[2], chunk, chunk, dtype=fp32), *states]


def _run_chunk_scan(x: Any, dt: Any, A: Any, B: Any, C: Any, chunk: int, state: Any) -> list[torch.Tensor]:
    passed = _of_chunk_scan(x, B, chunk, (fp32, x.dtype))  # states of chunks, and passed on
    found = _ops.chunk_scan(x, dt, A, B, C, chunk, state)
    del passed
    return found


def _run_chunk_scan_backward(d: Any, dstate: Any, x: Any, dt: Any, A: Any, B: Any, C: Any, chunk: int) -> list[torch.Tensor]:
    most = _of_chunk_scan(x, B, chunk, (fp32, fp32, x.dtype, x.dtype))  # states, their gradients, and both in 16 bits
    del most[3:5]
    most.append(torch.empty_like(most[2]))  # gradients of the products
    found = _ops.chunk_scan_backward(d.contiguous(), dstate, x, dt, A, B, C, chunk)
    del most
    return found


class _ChunkScan(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Any, dt: Any, A: Any, B: Any, C: Any, chunk: int, D: Any, dt_bias: Any, state: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        out, final, sums = _run_chunk_scan(x, dt, A, B, C, chunk, state)
        ctx.save_for_backward(out, x, dt, sums, A, B, C, D, dt_bias)
        ctx.chunk, ctx.has_state = chunk, state is not None
        return out, final

    @staticmethod
    def backward(ctx: Any, d: torch.Tensor, dstate: torch.Tensor) -> tuple[Any, ...]:
        _, x, dt, _, A, B, C, D, dt_bias = ctx.saved_tensors
        *found, dstate = _run_chunk_scan_backward(d, dstate, x, dt, A, B, C, ctx.chunk)
        others = (None if given is None else torch.empty_like(given) for given in (D, dt_bias))
        return *found, None, *others, dstate if ctx.has_state else None


def chunk_scan(
    hidden_states: Any,
    dt: Any,
    A: Any,
    B: Any,
    C: Any,
    chunk_size: int,
    D: Any = None,
    dt_bias: Any = None,
    initial_states: Any = None,
    return_final_states: bool = False,
    **_: Any,
) -> Any:
    out, final = _ChunkScan.apply(hidden_states, dt, A, B, C, chunk_size, D, dt_bias, initial_states)
    return (out, final) if return_final_states else out


# ---- convolution: x (b, channels, s), weight (channels, taps)


class _Convolution(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        ctx.save_for_backward(x, weight, bias)
        return _ops.convolution(x, weight)

    @staticmethod
    def backward(ctx: Any, d: torch.Tensor) -> tuple[Any, ...]:
        x, weight, bias = ctx.saved_tensors
        return *_ops.convolution_backward(d, x, weight), None if bias is None else torch.empty_like(bias)


def convolution(hidden_states: torch.Tensor, weight: torch.Tensor, bias: Any = None, **_: Any) -> torch.Tensor:
    return _Convolution.apply(hidden_states, weight, bias)


# ---- convolution, chunk scan, gated norm and output projection in one


class _AllInOne(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, given: torch.Tensor, *parameters: Any) -> torch.Tensor:
        weight, _, _, A, _, _, projection, *_ = parameters
        gate, mixed, dt = _split(given, parameters)
        x, B, C = _heads(_ops.convolution(mixed.transpose(1, 2), weight).transpose(1, 2), parameters)
        out, _, _ = _run_chunk_scan(x, dt, A, B, C, parameters[-1], None)
        del x, B, C
        ctx.save_for_backward(given, out, *parameters[:8])
        ctx.sizes = parameters[8:]
        return F.linear(_ops.gated_norm(out.flatten(2), gate), projection)

    @staticmethod
    def backward(ctx: Any, d: torch.Tensor) -> tuple[Any, ...]:
        given, out, *tensors = ctx.saved_tensors
        parameters = *tensors, *ctx.sizes
        weight, bias, dt_bias, A, D, norm, projection, of_projection = tensors
        gate, mixed, dt = _split(given, parameters)
        x, B, C = _heads(_ops.convolution(mixed.transpose(1, 2), weight).transpose(1, 2), parameters)
        d_given = torch.empty_like(given)
        normed = torch.empty_like(out.flatten(2))  # made again for the projection's gradient
        d_out, _ = _ops.gated_norm_backward(d @ projection, out.flatten(2), gate)
        d_projection = d.flatten(0, 1).t() @ normed.flatten(0, 1)
        del normed
        made = _run_chunk_scan_backward(d_out.view_as(out), None, x, dt, A, B, C, parameters[-1])
        del d_out, x, B, C
        mixed = mixed.transpose(1, 2)
        _, d_weight = _ops.convolution_backward(mixed, mixed, weight)
        del made
        of_small = (None if like is None else torch.empty_like(like) for like in (bias, dt_bias, A, D, norm))
        d_bias = None if of_projection is None else torch.empty_like(of_projection)
        return d_given, d_weight, *of_small, d_projection, d_bias, *(None,) * len(ctx.sizes)


def _split(given: torch.Tensor, parameters: tuple[Any, ...]) -> tuple[torch.Tensor, ...]:
    """Return the gate, what goes into the convolution, and dt."""
    weight, heads = parameters[0], parameters[3].shape[0]
    return given.split([given.shape[2] - weight.shape[0] - heads, weight.shape[0], heads], dim=2)


def _heads(mixed: torch.Tensor, parameters: tuple[Any, ...]) -> tuple[torch.Tensor, ...]:
    """Return x, B and C."""
    size, groups, _ = parameters[8:]
    inner = parameters[3].shape[0] * size
    x, B, C = mixed.split([inner, *((mixed.shape[2] - inner) // 2,) * 2], dim=2)
    return x.unflatten(2, (-1, size)), B.unflatten(2, (groups, -1)), C.unflatten(2, (groups, -1))


def all_in_one(
    zxbcdt: Any,
    conv1d_weight: Any,
    conv1d_bias: Any,
    dt_bias: Any,
    A: Any,
    D: Any,
    chunk_size: int,
    rmsnorm_weight: Any = None,
    outproj_weight: Any = None,
    outproj_bias: Any = None,
    headdim: int = 0,
    ngroups: int = 1,
    **_: Any,
) -> torch.Tensor:
    parameters = conv1d_weight, conv1d_bias, dt_bias, A, D, rmsnorm_weight, outproj_weight, outproj_bias
    return _AllInOne.apply(zxbcdt, *parameters, headdim, ngroups, chunk_size)


_IMPLEMENTED = {
    "delta_rule": _delta_rule,
    "delta_rule_backward": _delta_rule_backward,
    "chunk_scan": _chunk_scan,
    "chunk_scan_backward": _chunk_scan_backward,
    "convolution": lambda x, weight: torch.empty_like(x),
    "convolution_backward": lambda d, x, weight: [torch.empty_like(x), torch.empty_like(weight)],
    "gated_norm": lambda x, gate: torch.empty_like(x),
    "gated_norm_backward": lambda d, x, gate: [torch.empty_like(x), torch.empty_like(x)],
}
implement("Meta")
KERNELS: Mapping[str, Any] = {
    "torch_chunk_gated_delta_rule": delta_rule,
    "chunk_gated_delta_rule": delta_rule,
    "mamba2_chunk_scan": chunk_scan,
    "mamba_chunk_scan_combined": chunk_scan,
    "causal_conv1d_fn": convolution,
    "mamba2_split_conv1d_scan_combined": all_in_one,
    "mamba_split_conv1d_scan_combined": all_in_one,
}
"""By the names under which ds_memo.sequence.mixers knows the functions that they stand for."""
