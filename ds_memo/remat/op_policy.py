"""The op policy: which ops' outputs are kept for the backward, and how a GEMM's rows split.

An op in no table here is recomputed, which costs little time per byte.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import Any

import torch
from torch._ops import OpOverload
from torch.utils._pytree import tree_leaves, tree_map

aten = torch.ops.aten


def _ops(*names: str) -> set[OpOverload]:
    """Return the aten ops of these names; "name.overload" where it is not the default."""
    parts = (name.partition(".") for name in names)
    return {getattr(getattr(aten, packet), overload or "default") for packet, _, overload in parts}


def _present(*names: str) -> set[OpOverload]:
    """Return those that the installed torch has."""
    return _ops(*(name for name in names if hasattr(aten, name)))


GROUPED = _present("_grouped_mm", "_scaled_grouped_mm", "_scaled_grouped_mm_v2")
SCALED = _present("_scaled_mm", "_scaled_mm_v2", "_scaled_grouped_mm", "_scaled_grouped_mm_v2")
"""Products in fp8. Their third operand has the left operand's scales."""

GEMM = _ops("mm", "addmm") | GROUPED | SCALED
"""Products: output row i depends only on row i of the left operand, so any rows can be computed separately."""

GROUPED_NAMES = {"transformers::grouped_mm_fallback"}
"""Grouped products by name. Transformers compiles this one where PyTorch's own does not fit: on a CPU, or in fp32."""

QUANTIZED_NAMES = {"bitsandbytes::gemm_4bit"}
"""Products with a packed weight, whose shape (n, k) is the third operand. The left operand has any number of dimensions."""

BATCHED = _ops("bmm", "baddbmm")
"""Batched products. Those with a weight as an operand (experts by einsum) are GEMMs, whose rows are those of all matrices in
order. The others may be attention written by hand: they are recomputed and not counted."""

ADDS = _ops("addmm", "baddbmm")
"""Products whose first operand is added."""

ATTENTION = _ops(
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_cudnn_attention",
    "_scaled_dot_product_efficient_attention",
    "_flash_attention_forward",
) | _present("_cudnn_attention_forward", "_efficient_attention_forward")
"""Quadratic in the length: saved with the log-sum-exp and never recomputed, as in MEMO (SIGMOD 2025)."""

ATTENTION_NAMES = {
    "torch_attn::_varlen_attn",  # torch.nn.attention.varlen; the aten op inside it is not seen
    "flash_attn::_flash_attn_forward",  # flash-attn 2, torch.library custom ops
    "flash_attn::_flash_attn_varlen_forward",
    "flash_attn_3::_flash_attn_forward",  # flash-attn 3 (hopper/flash_attn_interface.py)
    "flash_attn_3::fwd",
    "ds_memo::attention",  # of the meta device (ds_memo/estimate)
    "ds_memo::cudnn_attention",  # ds_memo/remat/cudnn.py
    "ds_memo::sequence_attention",  # ds_memo/sequence
}
"""Attention ops by name: they exist only once their package, or that part of torch, is imported."""

CHOICE = _ops("topk", "argmax", "argmin", "max.dim", "min.dim", "sort", "sort.stable")
"""A router's choice, or a codebook's nearest entry. Recomputed values could flip it, so the choice and all rows of the GEMM that
it reads are kept."""

EMPTY = _ops("empty.memory_format", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided")
FILLED = _ops("full", "full_like", "new_full", "new_ones", "new_zeros", "ones", "ones_like", "zeros", "zeros_like")
BLANK = EMPTY | FILLED
"""Ops that make memory which a kernel PyTorch does not show (a Triton launch) may then fill or add to. In FILLED memory the
changed values reveal the write."""

SAFE_SOFTMAX = aten._safe_softmax.default
"""PyTorch's scaled_dot_product_attention calls it where it has no kernel."""
SOFTMAX = {aten._softmax.default, SAFE_SOFTMAX}
"""Sign of attention that cannot be kept: softmax over materialised scores, see `materialises_scores`."""

OVERWRITES = _ops("bernoulli_.float", "copy_", "normal_", "uniform_")
"""In-place ops that do not read what they overwrite: F.dropout on a CPU is empty_like(x).bernoulli_(1 - p). Not zero_ and fill_:
a kernel PyTorch does not show may add to that."""

VIEWS = _ops("view", "_unsafe_view", "detach", "alias")
"""Ops that may stand between a product and its bias without reading it."""


class OpKind(enum.Enum):
    GEMM = enum.auto()
    BATCHED = enum.auto()
    ATTENTION = enum.auto()
    CHOICE = enum.auto()
    MUTATES = enum.auto()
    PLAIN = enum.auto()


_KINDS: dict[int, tuple[OpKind, OpOverload]] = {}
"""By id, because hashing an OpOverload runs Python. Holding the op keeps its id from being reused."""


def kind_of(func: OpOverload) -> OpKind:
    """Return an op's kind by the tables above, classified once per process."""
    known = _KINDS.get(id(func))
    if known is None:
        known = _KINDS[id(func)] = (_classify(func), func)
    return known[0]


def materialises_scores(func: OpOverload, scores: torch.Tensor) -> bool:
    """Return True for a softmax over the scores of attention. A router's has a row for each token, and no other dimension."""
    return func in SOFTMAX and scores.dim() > 2


def _classify(func: OpOverload) -> OpKind:
    if _is_higher_order(func):
        return OpKind.PLAIN
    if func in GEMM or func.name() in GROUPED_NAMES | QUANTIZED_NAMES:
        return OpKind.GEMM
    if func in BATCHED:
        return OpKind.BATCHED
    if func in ATTENTION or func.name() in ATTENTION_NAMES:
        return OpKind.ATTENTION
    if func in CHOICE:
        return OpKind.CHOICE
    return OpKind.MUTATES if is_mutating(func) else OpKind.PLAIN


def is_grouped(func: OpOverload) -> bool:
    """Return True for a product of groups of rows, each with a matrix of its own."""
    return func in GROUPED or func.name() in GROUPED_NAMES


def is_attention(func: Any) -> bool:
    """Return True for an attention kernel. FlexAttention is one in a compiled graph, where it is an op of its own."""
    if _is_higher_order(func):
        return isinstance(func, torch._ops.HigherOrderOperator) and func.name() == "flex_attention"
    return kind_of(func) is OpKind.ATTENTION


def is_mutating(func: Any) -> bool:
    """Return True if the op writes to an argument in place."""
    return not _is_higher_order(func) and (func._schema.is_mutable or _is_collective_in_place(func))


def _is_higher_order(func: Any) -> bool:
    """Return True for torch.cond, flex_attention and the like. Their inner ops are not observed; each replay reruns them."""
    return not isinstance(func, OpOverload)


def _is_collective_in_place(func: OpOverload) -> bool:
    """Return True for in-place collectives of torch.distributed, with which tensor parallelism sums its products.

    They write to their first argument, but their schema does not say so.
    """
    return func.namespace == "c10d" and func._opname.endswith("_")


def overwrites_all(func: OpOverload, args: Sequence[Any]) -> bool:
    """Return True if the op overwrites all of args[0]'s memory without reading it."""
    if func not in OVERWRITES or not torch._C._has_storage(args[0]):  # a sparse tensor has none
        return False
    return args[0].nbytes == args[0].untyped_storage().nbytes()


def chooses_by(func: OpOverload, args: Sequence[Any]) -> Sequence[Any]:
    """Return the operands whose values decide the shape of the op's result, or the branch taken.

    Recomputed values may differ in the last bit and change that, like a router's choice.
    """
    if func is aten.index.Tensor:
        return [index for index in args[1] if index is not None and index.dtype in (torch.bool, torch.uint8)]
    if func is aten.masked_select.default:
        return args[1:2]
    if _is_higher_order(func):
        return args[:1] if func.name() == "cond" else ()
    return args if _tells_of_values(func) else ()


def reads_values(func: OpOverload, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    """Return True if the op's inputs must be right in the replay even if nothing computed from them is saved.

    The result steers Python or decides shapes (item, nonzero), or it goes to the host (tolist), or there is none (an assertion).
    """
    if _is_higher_order(func):
        return True
    if _tells_of_values(func):
        return True
    if func is aten._to_copy.default:
        device = kwargs.get("device")
        return bool(args) and device is not None and device.type == "cpu" and args[0].device.type != "cpu"
    return not func._schema.returns and not func._schema.is_mutable


def may_read_values(func: OpOverload) -> bool:
    """Return True if :func:`reads_values` does for some operands."""
    return reads_values(func, (), {}) or func is aten._to_copy.default


def _tells_of_values(func: OpOverload) -> bool:
    """Return True if a shape (nonzero, unique) or a Python number (item, equal) depends on the operands' values."""
    tags = func.tags
    return torch.Tag.dynamic_output_shape in tags or torch.Tag.data_dependent_output in tags or func is aten.equal.default


def written_tensors(func: OpOverload, args: Sequence[Any], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """Return the arguments that a mutating op writes to, lists flattened."""
    if _is_collective_in_place(func):
        return [leaf for leaf in tree_leaves(args[0]) if isinstance(leaf, torch.Tensor)]
    written: list[torch.Tensor] = []
    for position, parameter in enumerate(func._schema.arguments):
        if parameter.alias_info is not None and parameter.alias_info.is_write:
            value = args[position] if position < len(args) else kwargs.get(parameter.name)
            values = value if isinstance(value, (list, tuple)) else [value]
            written.extend(item for item in values if isinstance(item, torch.Tensor))
    return written


def splits_by_rows(func: OpOverload, args: Sequence[Any], out: torch.Tensor) -> bool:
    """Return True for dense operands and a dense output whose rows are those of the left operand."""
    return type(out) is torch.Tensor and out.numel() > 0 and out.is_contiguous() and rows_are_lefts(func, args, out)


def rows_are_lefts(func: OpOverload, args: Sequence[Any], out: torch.Tensor) -> bool:
    """Return True for dense operands and an output whose rows are those of the left operand."""
    if not are_dense(args):  # a sparse operand has no rows
        return False
    if is_grouped(func) and (args[0].dim() != 2 or args[1].dim() != 3):
        return False
    return func not in SCALED or all(_splits(scale, out.shape[0]) for scale in tree_leaves(args[2]))


def _splits(scale: torch.Tensor, rows: int) -> bool:
    """Return True for one scale, or one or more for each row. Scales of blocks of rows, and swizzled ones, do not split."""
    return scale.numel() == 1 or (scale.dtype is torch.float32 and scale.dim() <= 2 and scale.shape[0] == rows)


def as_rows(product: torch.Tensor) -> torch.Tensor:
    """Return a product as (rows, n): that of a batch has the rows of all its matrices, in order."""
    return product if product.dim() == 2 else product.flatten(0, -2)


def are_dense(args: Sequence[Any]) -> bool:
    """Return True if no operand is a sparse matrix."""
    return all(arg.layout is torch.strided for arg in args if isinstance(arg, torch.Tensor))


def adds_bias_to(func: OpOverload, args: Sequence[Any], product: torch.Tensor) -> bool:
    """Return True if this op adds one bias (n) in place to all rows of `product` (m, n). The two then count as one GEMM.

    Linears without addmm do so: DeepSpeed's memory-efficient one under ZeRO-3, F.linear of a strided input.
    """
    return (
        func is aten.add_.Tensor
        and args[0].data_ptr() == product.data_ptr()
        and args[0].numel() == product.numel()
        and args[0].is_contiguous()
        and isinstance(args[1], torch.Tensor)
        and args[1].shape == product.shape[1:]
    )


def gemm_flops(func: OpOverload, args: Sequence[Any], out: torch.Tensor) -> int:
    """Return the FLOPs of a product: 2 m n k, times the batch."""
    return 2 * out.numel() * _left(func, args).shape[-1]


def product_shape(func: OpOverload, args: Sequence[Any]) -> tuple[int, ...]:
    """Return the shape of a product."""
    columns = args[2][0] if func.name() in QUANTIZED_NAMES else right_operand(func, args).shape[-1]
    return (*_left(func, args).shape[:-1], columns)


def empty_output(func: OpOverload, args: Sequence[Any], shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Return uninitialised memory in place of a product that is never read."""
    return _left(func, args).new_empty(shape, dtype=dtype)


def _left(func: OpOverload, args: Sequence[Any]) -> torch.Tensor:
    """Return the left operand of a product; before it stands what is added."""
    return args[1] if func in ADDS else args[0]


def right_operand(func: OpOverload, args: Sequence[Any]) -> torch.Tensor:
    """Return the right operand of a product."""
    return args[2] if func in ADDS else args[1]


def compute_rows(func: OpOverload, args: Sequence[Any], kwargs: dict[str, Any], first: int, out: torch.Tensor) -> None:
    """Compute rows `first:` of a GEMM into the same rows of `out` (m, n). Leave the rows before them alone."""
    if func in BATCHED:
        _compute_batched_rows(func, args, kwargs, first, out)
        return
    rest = out[first:]
    if func is aten.mm.default:
        left, right = args
        aten.mm.out(left[first:], right, out=rest)
    elif func is aten.addmm.default:
        bias, left, right = args
        per_row = bias.dim() == 2 and bias.shape[0] == out.shape[0] and bias.shape[0] > 1
        aten.addmm.out(bias[first:] if per_row else bias, left[first:], right, out=rest, **kwargs)
    else:
        left, *others = args
        if func in SCALED:
            others[1] = tree_map(lambda scale: _rest_of(scale, first), others[1])
        if is_grouped(func):
            # Rows are sorted by expert, and `offs` are the group ends: groups that end before `first` become empty.
            offs = [argument.name for argument in func._schema.arguments].index("offs") - 1
            others[offs] = (others[offs] - first).clamp(min=0)
            rest.copy_(func(left[first:], *others, **kwargs))
        elif func.name() in QUANTIZED_NAMES:
            rest.copy_(func(as_rows(left)[first:], *others, **kwargs))
        else:
            func.overloadpacket.out(left[first:], *others, out=rest, **kwargs)


def _rest_of(scale: torch.Tensor, first: int) -> torch.Tensor:
    """Return the scales of rows `first:`, dense in the order of the whole. One scale of all rows stays."""
    if scale.numel() == 1:
        return scale
    by_column = scale.dim() == 2 and scale.stride(0) == 1
    return scale[first:].t().contiguous().t() if by_column else scale[first:]


def _compute_batched_rows(func: OpOverload, args: Sequence[Any], kwargs: dict[str, Any], first: int, out: torch.Tensor) -> None:
    """Do the same for a batched product: the rest of the matrix that row `first` lies in, then the whole ones behind it."""
    *added, left, right = args
    out = out.view(*left.shape[:2], -1)
    added = [bias.expand_as(out) for bias in added]
    matrix, row = divmod(first, left.shape[1])
    for matrices, rows in ((slice(matrix, matrix + 1), slice(row, None)), (slice(matrix + 1, None), slice(None))):
        if left[matrices].shape[0]:
            parts = [*(bias[matrices, rows] for bias in added), left[matrices, rows], right[matrices]]
            func.overloadpacket.out(*parts, out=out[matrices, rows], **kwargs)
