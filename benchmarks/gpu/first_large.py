"""`gpu.sh first`, point 11: kernels on tensors of more than 2³¹ elements, compared with the same kernels on parts of them.

A kernel that counts elements in 32 bits wraps past 2³¹: 524,288 tokens of 4,096 values. Parts are far below it.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.assertions import DRIVER, VALUES, Machine, Measured, Skip, asserts
from benchmarks.timing import clear
from benchmarks.workloads import dtype_of
from ds_memo.remat.op_policy import compute_rows
from ds_memo.units import GIB

WIDTH, HEADS = 4096, 32
TOKENS = (1 << 31) // WIDTH + 128
FEW = 2048
"""Tokens of the other side of attention."""
NEEDS_GIB = 40
"""A tensor takes 4.3 GB, and attention's backward the most: 26 GB by the emulator, and flash's gradients in float32, 9 GB."""
PARTS = 8
NEAR = 0.02
"""Difference over the largest value: parts may get another kernel, or add up in another order."""

Leaves = Sequence[torch.Tensor]


def _tokens(machine: Machine) -> int:
    if not machine.cuda:
        return 256
    if not machine.emulated and (free := torch.cuda.mem_get_info(machine.device)[0] / GIB) < NEEDS_GIB:
        raise Skip(f"{free:.0f} GiB of the device are free, and it needs {NEEDS_GIB}")
    return TOKENS


def _random(machine: Machine, *shape: int) -> torch.Tensor:
    return torch.randn(shape, device=machine.device, dtype=dtype_of(machine.device))


def _grads(fn: Callable[..., torch.Tensor], leaves: Leaves, gradient: torch.Tensor) -> Leaves:
    """Return a function's output and the gradients of its arguments."""
    leaves = [leaf.detach().requires_grad_() for leaf in leaves]
    out = fn(*leaves)
    return [out.detach(), *torch.autograd.grad(out, leaves, gradient)]


def _off(got: torch.Tensor, want: torch.Tensor) -> float:
    off = float((got - want).abs().max() / want.abs().max())
    return math.inf if math.isnan(off) else off


def _measured(off: dict[str, float]) -> Measured:
    words = ", ".join(f"{name} {value:.1e}" for name, value in off.items())
    return Measured(f"off by {words}", all(value <= NEAR for value in off.values()), off)


def _of_tokens(
    machine: Machine, fn: Callable[..., torch.Tensor], inner: int, outer: int, weights: Sequence[tuple[int, ...]]
) -> dict[str, float]:
    """Compare a function of (tokens, inner) → (tokens, outer), and its gradients, with that of PARTS parts of the tokens."""
    tokens = _tokens(machine)
    x, gradient = _random(machine, tokens, inner), _random(machine, tokens, outer)
    others = [_random(machine, *shape) for shape in weights]
    out, d_x, *d_others = _grads(fn, [x, *others], gradient)
    off, sums = {"output": 0.0, "gradient": 0.0}, [torch.zeros_like(other, dtype=torch.float32) for other in others]
    for rows in torch.arange(tokens).chunk(PARTS):
        part = slice(int(rows[0]), int(rows[-1]) + 1)
        want, want_x, *want_others = _grads(fn, [x[part].clone(), *others], gradient[part].clone())
        off["output"] = max(off["output"], _off(out[part], want))
        off["gradient"] = max(off["gradient"], _off(d_x[part], want_x))
        for total, of_part in zip(sums, want_others, strict=True):
            total += of_part
    if others:
        off["weights' gradients"] = max(_off(got.float(), want) for got, want in zip(d_others, sums, strict=True))
    return off


def of_tokens(
    machine: Machine, fn: Callable[..., torch.Tensor], inner: int = WIDTH, outer: int = WIDTH, weights: Sequence = ()
) -> Measured:
    try:
        return _measured(_of_tokens(machine, fn, inner, outer, weights))
    finally:
        clear(machine.device)


def attention(machine: Machine, backend: SDPBackend) -> Measured:
    """Compare many queries on few keys, and few queries on many keys, with the first and last heads alone."""
    off: dict[str, float] = {}
    many = _tokens(machine)
    with sdpa_kernel([backend]):
        for name, queries, keys in (("queries", many, FEW), ("keys", FEW, many)):
            try:
                off[name] = _of_heads(machine, queries, keys)
            except RuntimeError as error:
                if "No available kernel" not in str(error) and "No viable backend" not in str(error):
                    raise
                raise Skip(f"PyTorch has no {backend.name} kernel for this shape") from error
            finally:
                clear(machine.device)
    return _measured(off)


def _of_heads(machine: Machine, queries: int, keys: int) -> float:
    def heads(tokens: int) -> torch.Tensor:  # as layers lay them out: the heads of a token lie together
        return _random(machine, 1, tokens, HEADS, WIDTH // HEADS).transpose(1, 2)

    leaves, gradient = [heads(queries), heads(keys), heads(keys)], heads(queries)
    got = _grads(F.scaled_dot_product_attention, leaves, gradient)
    off = 0.0
    for part in (slice(0, 2), slice(HEADS - 2, HEADS)):
        want = _grads(F.scaled_dot_product_attention, [leaf[:, part].clone() for leaf in leaves], gradient[:, part].clone())
        off = max(off, *(_off(of_all[:, part], of_part) for of_all, of_part in zip(got, want, strict=True)))
    return off


def rows_of_a_gemm(machine: Machine) -> Measured:
    """Compare a GEMM's last rows, as a replay computes them behind stored ones."""
    tokens = _tokens(machine)
    left, right = _random(machine, tokens, 128), _random(machine, 128, WIDTH)
    try:
        out = left.new_zeros(tokens, WIDTH)
        compute_rows(torch.ops.aten.mm.default, (left, right), {}, tokens - 128, out)
        stored = float(out[:-128].abs().max())
        return _measured({"last rows": _off(out[-128:], left[-128:] @ right), "rows before": stored})
    finally:
        clear(machine.device)


def _rotary(x: torch.Tensor) -> torch.Tensor:
    """Transformers' own, of 32 heads whose tokens are sequences of one token, so that all have the angles of position 1."""
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    angles = torch.arange(WIDTH // HEADS, device=x.device, dtype=x.dtype).expand(x.shape[0], 1, -1)
    heads = x.view(x.shape[0], 1, HEADS, -1).transpose(1, 2)
    return apply_rotary_pos_emb(heads, heads[:, :1], angles.cos(), angles.sin())[0].transpose(1, 2).reshape_as(x)


def _liger_norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    try:
        from liger_kernel.ops.rms_norm import LigerRMSNormFunction
    except ImportError as error:
        raise Skip(f"Liger is not installed: {error}") from error
    return LigerRMSNormFunction.apply(x, weight, 1e-5, 0.0, "llama", False)


_FUNCTIONS: dict[str, Callable[[Machine], Measured]] = {
    "PyTorch's RMSNorm": functools.partial(of_tokens, fn=lambda x, w: F.rms_norm(x, (WIDTH,), w), weights=[(WIDTH,)]),
    "PyTorch's LayerNorm": functools.partial(
        of_tokens, fn=lambda x, w, b: F.layer_norm(x, (WIDTH,), w, b), weights=[(WIDTH,), (WIDTH,)]
    ),
    "Liger's RMSNorm": functools.partial(of_tokens, fn=_liger_norm, weights=[(WIDTH,)]),
    "rotary embedding": functools.partial(of_tokens, fn=_rotary),
    "SiLU": functools.partial(of_tokens, fn=F.silu),
    "a linear with many inputs": functools.partial(of_tokens, fn=F.linear, outer=128, weights=[(128, WIDTH), (128,)]),
    "a linear with many outputs": functools.partial(of_tokens, fn=F.linear, inner=128, weights=[(WIDTH, 128), (WIDTH,)]),
    "a GEMM's last rows, computed in place": rows_of_a_gemm,
    "flash attention": functools.partial(attention, backend=SDPBackend.FLASH_ATTENTION),
    "cuDNN's attention": functools.partial(attention, backend=SDPBackend.CUDNN_ATTENTION),
}
for _name, _measure in _FUNCTIONS.items():
    asserts(
        11,
        f"{_name} past 2³¹ elements",
        f"within {NEAR:g} of its parts",
        "pass fewer tokens to a rank (sequence_parallel_size), or fewer to the kernel: memo.tile_tokens cuts all of these but "
        "attention, memo.head_groups attention. Report the kernel to its project",
        VALUES,
        *((DRIVER,) if "cuDNN" in _name else ()),
    )(_measure)
