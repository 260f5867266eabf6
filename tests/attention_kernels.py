"""Attention kernels of CUDA on a CPU: stand-ins with the kernels' metadata, below torch's own autograd formulas.

Shapes, strides and dtypes of the outputs are those of torch's meta kernels: None outputs, cuDNN's (b, h, s, 1) log-sum-exp, the
efficient kernel's padded one, seeds in int64 or uint64. A backward reads the forward's output, log-sum-exp and seed, as the
kernels do. What dropout drops depends on the number of the head, as with Philox.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch.library import _scoped_library
from torch.nn.attention import SDPBackend
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_map

aten = torch.ops.aten
ran: list[str] = []
"""Names of the kernels that ran, in order."""
PutLse = Callable[[int, slice, torch.Tensor], None]
LseOf = Callable[[int, slice], torch.Tensor]


def outputs_of(op: Any, *args: Any, **kwargs: Any) -> list[Any]:
    """Return uninitialised outputs as torch's meta kernel of `op` describes them."""

    def to_meta(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")

    def to_cpu(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype)

    return [to_cpu(value) for value in op(*tree_map(to_meta, args), **tree_map(to_meta, kwargs))]


# ---- the formulas, over (b, h, s, d)


def scores_of(q: torch.Tensor, k: torch.Tensor, bias: torch.Tensor | None, causal: bool, scale: float | None) -> torch.Tensor:
    scores = q @ k.transpose(-2, -1) * (q.shape[-1] ** -0.5 if scale is None else scale)
    scores = scores if bias is None else scores + bias
    return scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), -math.inf) if causal else scores


def kept_by(dropout: float, seed: int, shape: torch.Size) -> torch.Tensor | float:
    """Return 1 / (1 - dropout) where a probability is kept and 0 elsewhere, by the seed and the place in `shape`."""
    if not dropout:
        return 1.0
    generator = torch.Generator().manual_seed(seed)
    return (torch.rand(shape, generator=generator) >= dropout) / (1 - dropout)


def all_heads(q: torch.Tensor, *of_keys: torch.Tensor) -> list[torch.Tensor]:
    """Return keys and values once for each head of the queries."""
    return [x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in of_keys]


def forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: Any, dropout: float, causal: bool, scale: float | None, seed: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return attention's output and its log-sum-exp (b, h, s)."""
    k, v = all_heads(q, k, v)
    scores = scores_of(q, k, bias, causal, scale)
    lse = scores.logsumexp(-1)
    probabilities = (scores - lse.unsqueeze(-1)).exp()
    return probabilities * kept_by(dropout, seed, scores.shape) @ v, lse


def backward(
    grad: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    lse: torch.Tensor,
    dropout: float,
    causal: bool,
    scale: float | None,
    seed: int,
) -> list[torch.Tensor]:
    """Return the gradients of q, k, v and the scores, from the forward's output and log-sum-exp."""
    heads, (k, v) = k.shape[1], all_heads(q, k, v)
    probabilities = (scores_of(q, k, bias, causal, scale) - lse.unsqueeze(-1)).exp()
    kept = kept_by(dropout, seed, probabilities.shape)
    d_scores = probabilities * (grad @ v.transpose(-2, -1) * kept - (grad * out).sum(-1, keepdim=True))
    d_keys, d_values = d_scores.transpose(-2, -1) @ q, (probabilities * kept).transpose(-2, -1) @ grad
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    per_head = [x.unflatten(1, (heads, -1)).sum(2) for x in (d_keys * scale, d_values)]
    return [d_scores @ k * scale, *per_head, d_scores]


# ---- kernels


def draw(dropout: float) -> int:
    """Return a seed from the generator, which moves on only where dropout is on."""
    return int(torch.randint(1 << 30, ())) if dropout else 0


def fill(whole: torch.Tensor, value: torch.Tensor) -> None:
    """Write `value` to the begin of an output, and infinity to its padding."""
    whole.fill_(math.inf)
    whole[tuple(slice(size) for size in value.shape)].copy_(value)


def below_modes(name: str, kernel: Callable[..., Any]) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        ran.append(name)
        with _disable_current_modes(), torch.no_grad():
            return kernel(*args, **kwargs)

    return run


def _set_seed(tensor: torch.Tensor, seed: int) -> None:
    tensor.copy_(torch.full(tensor.shape, seed, dtype=torch.int64))


def _seed(tensor: torch.Tensor) -> int:
    return int(tensor.to(torch.int64).view(-1)[0])


def _as_gradients(op: Any, args: tuple, kwargs: dict[str, Any], found: list[torch.Tensor]) -> tuple[Any, ...]:
    outputs = outputs_of(op, *args, **kwargs)
    for output, value in zip(outputs, found, strict=True):
        if output is not None:
            output.copy_(value)
    return tuple(outputs)


def cudnn(q, k, v, bias, lse_too, dropout=0.0, causal=False, debug=False, *, scale=None):
    outputs = outputs_of(aten._scaled_dot_product_cudnn_attention, q, k, v, bias, lse_too, dropout, causal, debug, scale=scale)
    seed = draw(dropout)
    out, lse = forward(q, k, v, bias, dropout, causal, scale, seed)
    outputs[0].copy_(out)
    if lse_too:
        fill(outputs[1], lse.unsqueeze(-1))
    else:
        outputs[1] = None
    _set_seed(outputs[6], seed)
    return tuple(outputs)


def cudnn_backward(grad, q, k, v, out, lse, seed, offset, bias, cum_q, cum_k, max_q, max_k, dropout, causal, *, scale=None):
    assert cum_q is cum_k is None and lse.shape == (*q.shape[:3], 1)
    found = backward(grad, q, k, v, bias, out, lse.squeeze(-1), dropout, causal, scale, _seed(seed))[:3]
    args = (grad, q, k, v, out, lse, seed, offset, bias, cum_q, cum_k, max_q, max_k, dropout, causal)
    return _as_gradients(aten._scaled_dot_product_cudnn_attention_backward, args, {"scale": scale}, found)


def flash(q, k, v, dropout=0.0, causal=False, debug=False, *, scale=None):
    outputs = outputs_of(aten._scaled_dot_product_flash_attention, q, k, v, dropout, causal, debug, scale=scale)
    seed = draw(dropout)
    out, lse = forward(q, k, v, None, dropout, causal, scale, seed)
    outputs[0].copy_(out)
    fill(outputs[1], lse)
    _set_seed(outputs[6], seed)
    return tuple(outputs)


def flash_backward(grad, q, k, v, out, lse, cum_q, cum_k, max_q, max_k, dropout, causal, seed, offset, *, scale=None):
    assert cum_q is cum_k is None and lse.is_contiguous()
    found = backward(grad, q, k, v, None, out, lse, dropout, causal, scale, _seed(seed))[:3]
    args = (grad, q, k, v, out, lse, cum_q, cum_k, max_q, max_k, dropout, causal, seed, offset)
    return _as_gradients(aten._scaled_dot_product_flash_attention_backward, args, {"scale": scale}, found)


def efficient(q, k, v, bias, lse_too, dropout=0.0, causal=False, *, scale=None):
    outputs = outputs_of(aten._scaled_dot_product_efficient_attention, q, k, v, bias, lse_too, dropout, causal, scale=scale)
    seed = draw(dropout)
    out, lse = forward(q, k, v, bias, dropout, causal, scale, seed)
    outputs[0].copy_(out)
    if lse_too:
        fill(outputs[1], lse)
    _set_seed(outputs[2], seed)
    return tuple(outputs)


def efficient_backward(grad, q, k, v, bias, out, lse, seed, offset, dropout, wanted, causal=False, *, scale=None):
    assert lse.shape[-1] % 32 == 0, "the kernel reads whole blocks"
    found = backward(grad, q, k, v, bias, out, lse[..., : q.shape[2]], dropout, causal, scale, _seed(seed))
    args = (grad, q, k, v, bias, out, lse, seed, offset, dropout, list(wanted), causal)
    gradients = _as_gradients(aten._scaled_dot_product_efficient_attention_backward, args, {"scale": scale}, found)
    return tuple(gradient if asked else None for gradient, asked in zip(gradients, wanted, strict=True))


# ---- kernels of documents behind each other (cu_seqlens)


def documents(cum: torch.Tensor, *packed: torch.Tensor) -> Iterator[tuple[int, slice, list[torch.Tensor]]]:
    """Yield each document: its number, its tokens, and the parts (1, h, s, d) of packed tensors (tokens, h, d)."""
    borders = cum.tolist()
    for number, tokens in enumerate(itertools.starmap(slice, itertools.pairwise(borders))):
        yield number, tokens, [x[tokens].transpose(0, 1).unsqueeze(0) for x in packed]


def forward_packed(qkv: Sequence[torch.Tensor], cum: torch.Tensor, out: torch.Tensor, put: PutLse, *rest: Any) -> None:
    """Run each document. Write outputs to `out` (tokens, h, d), and log-sum-exps (h, s) by ``put(number, tokens, lse)``."""
    *options, seed = rest
    for number, tokens, parts in documents(cum, *qkv):
        result, lse = forward(*parts, None, *options, seed + number)
        out[tokens] = result[0].transpose(0, 1)
        put(number, tokens, lse[0])


def backward_packed(
    grad: torch.Tensor, qkv: Sequence[torch.Tensor], out: torch.Tensor, cum: torch.Tensor, lse_of: LseOf, *rest: Any
) -> tuple[torch.Tensor, ...]:
    """Return the gradients of q, k and v (tokens, h, d). A document's log-sum-exp (h, s) is ``lse_of(number, tokens)``."""
    *options, seed = rest
    gradients = tuple(map(torch.empty_like, qkv))
    for number, tokens, (grad_, *qkv_, out_) in documents(cum, grad, *qkv, out):
        found = backward(grad_, *qkv_, None, out_, lse_of(number, tokens).unsqueeze(0), *options, seed + number)
        for whole, gradient in zip(gradients, found[:3], strict=True):
            whole[tokens] = gradient[0].transpose(0, 1)
    return gradients


def flash_sequences(
    cum_q: torch.Tensor | None, cum_k: torch.Tensor | None, *tensors: torch.Tensor
) -> Iterator[tuple[int, slice, list[torch.Tensor]]]:
    """Yield each sequence of a flash call: its number, its queries where rows lie end to end, and its parts (1, h, s, d).

    Args:
        cum_q, cum_k: borders; None: each row of (b, s, h, d) is a sequence.
        tensors: keys and values first, then tensors of queries.
    """
    keys, queries = tensors[0], tensors[2]
    if cum_q is None:
        sides = [[(i * x.shape[1], (i + 1) * x.shape[1]) for i in range(x.shape[0])] for x in (queries, keys)]
        tensors = tuple(x.flatten(0, 1) for x in tensors)
    else:
        sides = [list(itertools.pairwise(cum.tolist())) for cum in (cum_q, cum_k)]
    for number, (of_queries, of_keys) in enumerate(zip(*sides, strict=True)):
        parts = [x[slice(*(of_keys if i < 2 else of_queries))].transpose(0, 1).unsqueeze(0) for i, x in enumerate(tensors)]
        yield number, slice(*of_queries), parts


def flash_bias(queries: int, keys: int, causal: bool, left: int | None, right: int | None, like: torch.Tensor) -> torch.Tensor:
    """Return what flash adds to its scores: the last query stands at the last key. None and -1: no limit."""
    ahead = torch.arange(keys) - torch.arange(queries)[:, None] - (keys - queries)
    hidden = ahead > (0 if causal else math.inf if right in (None, -1) else right)
    if left not in (None, -1):
        hidden |= ahead < -left
    return like.new_zeros(queries, keys).masked_fill_(hidden, -math.inf)


def by_rows(lse: torch.Tensor, rows: int) -> torch.Tensor:
    """Return a log-sum-exp (h, rows · s) as (rows, h, s)."""
    return lse.unflatten(1, (rows, -1)).transpose(0, 1)


def flash_packed(
    q, k, v, cum_q, cum_k, max_q, max_k, dropout, causal, debug, *, scale=None, window_size_left=None, window_size_right=None
):
    windows = {"window_size_left": window_size_left, "window_size_right": window_size_right}
    args = (q, k, v, cum_q, cum_k, max_q, max_k, dropout, causal, debug)
    outputs = outputs_of(aten._flash_attention_forward, *args, scale=scale, **windows)
    seed = draw(dropout)
    out, lse = (x.flatten(0, 1) if cum_q is None else x for x in (outputs[0], torch.empty_like(q[..., 0], dtype=torch.float)))
    for number, queries, (k_, v_, q_) in flash_sequences(cum_q, cum_k, k, v, q):
        bias = flash_bias(q_.shape[2], k_.shape[2], causal, window_size_left, window_size_right, q_)
        result, found = forward(q_, k_, v_, bias, dropout, False, scale, seed + number)
        out[queries], lse[queries] = result[0].transpose(0, 1), found[0].t().float()
    outputs[1].copy_(by_rows(lse.t(), q.shape[0]) if cum_q is None else lse.t())
    _set_seed(outputs[2], seed)
    return tuple(outputs)


def flash_packed_backward(
    grad, q, k, v, out, lse, cum_q, cum_k, max_q, max_k, dropout, causal, rng_state, unused, *, scale=None,
    window_size_left=None, window_size_right=None,
):  # fmt: skip
    assert lse.is_contiguous()
    seed, gradients = _seed(rng_state) if dropout else 0, [torch.zeros_like(x) for x in (q, k, v)]
    of_queries, *of_keys = (x.flatten(0, 1) if cum_q is None else x for x in gradients)
    lse = lse.transpose(0, 1).flatten(1) if cum_q is None else lse
    at_key = 0
    for number, queries, (k_, v_, *of_q) in flash_sequences(cum_q, cum_k, k, v, grad, q, out):
        grad_, q_, out_ = of_q
        bias = flash_bias(q_.shape[2], k_.shape[2], causal, window_size_left, window_size_right, q_)
        given = grad_, q_, k_, v_, bias, out_, lse[None, :, queries].to(q.dtype)
        dq, *found, _ = backward(*given, dropout, False, scale, seed + number)
        of_queries[queries] += dq[0].transpose(0, 1)
        for whole, gradient in zip(of_keys, found, strict=True):
            whole[at_key : at_key + k_.shape[2]] += gradient[0].transpose(0, 1)
        at_key += k_.shape[2]
    return tuple(gradients)


def cudnn_packed(
    q, k, v, bias, cum_q, cum_k, max_q, max_k, lse_too, dropout=0.0, causal=False, debug=False, *, scale=None
):  # torch has no meta kernel of it
    seed, out, lse = draw(dropout), torch.empty_like(q), q.new_empty(*q.shape[:2], 1, dtype=torch.float)

    def put(number: int, tokens: slice, found: torch.Tensor) -> None:
        lse[tokens, :, 0] = found.t()

    forward_packed((q, k, v), cum_q, out, put, dropout, causal, scale, seed)
    return out, lse, cum_q.clone(), cum_k.clone(), max_q, max_k, torch.tensor(seed), torch.tensor(0), None


def cudnn_packed_backward(
    grad, q, k, v, out, lse, seed, offset, bias, cum_q, cum_k, max_q, max_k, dropout, causal, *, scale=None
):
    rest = dropout, causal, scale, _seed(seed)
    return backward_packed(grad, (q, k, v), out, cum_q, lambda number, tokens: lse[tokens, :, 0].t(), *rest)


def efficient_packed(q, k, v, bias, cum_q, cum_k, max_q, max_k, dropout, mask, lse_too=False, **kwargs):
    outputs = outputs_of(
        aten._efficient_attention_forward, q, k, v, bias, cum_q, cum_k, max_q, max_k, dropout, mask, lse_too, **kwargs
    )
    seed = draw(dropout)
    outputs[1].fill_(math.inf)

    def put(number: int, tokens: slice, lse: torch.Tensor) -> None:
        outputs[1][number, :, : lse.shape[1]] = lse

    forward_packed((q[0], k[0], v[0]), cum_q, outputs[0][0], put, dropout, mask == 1, None, seed)
    _set_seed(outputs[2], seed)
    return tuple(outputs)


def efficient_packed_backward(
    grad, q, k, v, bias, out, cum_q, cum_k, max_q, max_k, lse, dropout, seed, offset, mask, bias_too, **kwargs
):
    def lse_of(number: int, tokens: slice) -> torch.Tensor:
        return lse[number, :, : tokens.stop - tokens.start]

    rest = dropout, mask == 1, None, _seed(seed)
    found = backward_packed(grad[0], (q[0], k[0], v[0]), out[0], cum_q, lse_of, *rest)
    return *(gradient.unsqueeze(0) for gradient in found), None


KERNELS = {
    "_scaled_dot_product_cudnn_attention": cudnn,
    "_scaled_dot_product_cudnn_attention_backward": cudnn_backward,
    "_scaled_dot_product_flash_attention": flash,
    "_scaled_dot_product_flash_attention_backward": flash_backward,
    "_scaled_dot_product_efficient_attention": efficient,
    "_scaled_dot_product_efficient_attention_backward": efficient_backward,
    "_cudnn_attention_forward": cudnn_packed,
    "_cudnn_attention_backward": cudnn_packed_backward,
    "_flash_attention_forward": flash_packed,
    "_flash_attention_backward": flash_packed_backward,
    "_efficient_attention_forward": efficient_packed,
    "_efficient_attention_backward": efficient_packed_backward,
}


# ---- what F.scaled_dot_product_attention does on CUDA


def sdpa_by(kernel: str) -> Callable[..., torch.Tensor]:
    """Return scaled_dot_product_attention as it prepares its arguments for a CUDA kernel."""

    def sdpa(q, k, v, attn_mask=None, dropout_p=0.0, is_causal=False, *, scale=None, enable_gqa=False):
        bias = attn_mask
        if bias is not None and bias.dtype is torch.bool:
            bias = torch.zeros_like(bias, dtype=q.dtype).masked_fill_(bias.logical_not(), -math.inf)
        needs_lse = torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v))
        taken = taken_of(kernel, bias)
        if taken == "flash":
            assert bias is None, "flash takes no mask"
            return aten._scaled_dot_product_flash_attention(q, k, v, dropout_p, is_causal, scale=scale)[0]
        if taken == "cudnn":
            bias = None if bias is None else bias.expand(*q.shape[:3], k.shape[2])
            return aten._scaled_dot_product_cudnn_attention(q, k, v, bias, needs_lse, dropout_p, is_causal, scale=scale)[0]
        if enable_gqa:
            k, v = all_heads(q, k, v)
        if bias is not None:  # the kernel wants rows of multiples of 16
            keys = bias.shape[-1]
            bias = F.pad(bias, (0, -keys % 16))[..., :keys].expand(*q.shape[:3], keys)
        return aten._scaled_dot_product_efficient_attention(q, k, v, bias, needs_lse, dropout_p, is_causal, scale=scale)[0]

    return sdpa


def choice_of(kernel: str) -> Callable[..., int]:
    """Return _fused_sdp_choice."""

    def choice(q, k, v, attn_mask=None, *args: Any, **kwargs: Any) -> int:
        return int(getattr(SDPBackend, f"{taken_of(kernel, attn_mask).upper()}_ATTENTION").value)

    return choice


def taken_of(kernel: str, bias: torch.Tensor | None) -> str:
    """Return the kernel that takes a call: where cuDNN is off, flash, which takes no mask, or the efficient one."""
    if kernel != "cudnn" or torch.backends.cuda.cudnn_sdp_enabled():
        return kernel
    return "flash" if bias is None else "efficient"


def packed_by(kernel: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cum: torch.Tensor, dropout: float) -> torch.Tensor:
    """Return causal attention of packed documents (tokens, h, d), called as torch's nested tensors and xFormers call it."""
    longest = int(cum.diff().max())
    if kernel == "flash":
        return aten._flash_attention_forward(q, k, v, cum, cum, longest, longest, dropout, True, False)[0]
    if kernel == "cudnn":
        return aten._cudnn_attention_forward(q, k, v, None, cum, cum, longest, longest, True, dropout, True)[0]
    with_batch = (x.unsqueeze(0) for x in (q, k, v))
    return aten._efficient_attention_forward(*with_batch, None, cum, cum, longest, longest, dropout, 1, True)[0][0]


@contextmanager
def cuda_kernels(kernel: str, **changed: Callable[..., Any]) -> Iterator[list[str]]:
    """Run attention on the CPU by the stand-ins inside the block; `kernel`: cudnn, flash or efficient.

    Args:
        changed: kernels by name in place of the stand-ins, for negative controls.

    Yields:
        The names of the kernels that ran.
    """
    ran.clear()
    with _scoped_library("aten", "IMPL") as library:
        for name, function in (KERNELS | changed).items():
            library.impl(name, below_modes(name, function), "CPU", allow_override=True)
        for key in ("AutogradCPU", "CPU"):
            library.impl("scaled_dot_product_attention", sdpa_by(kernel), key, allow_override=True)
        for key in ("Meta", "CPU"):
            library.impl("_fused_sdp_choice", choice_of(kernel), key, allow_override=True)
        yield ran
