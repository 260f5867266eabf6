"""One op for attention that Transformers runs eagerly, because F.scaled_dot_product_attention has no soft cap and no sinks.

Such a model's configuration names the attention and the masks of this file from now on. The op is that of sequence parallelism
(ds_memo.sequence), on one rank: it makes no matrix of tokens × tokens, and memo keeps its output and log-sum-exp. What it cannot
do exactly is left to the model's own eager function, with a warning.
"""

from __future__ import annotations

import copy
import functools
import math
import sys
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.masking_utils import eager_mask

from ds_memo.hf.kernels import ATTENTION
from ds_memo.hf.sequence_tables import tensors_in
from ds_memo.remat.diagnostics import has_compiled
from ds_memo.sequence.attention import HARMLESS, attend
from ds_memo.sequence.masks import Mask
from ds_memo.sequence.parts import SequenceParts
from ds_memo.sequence.ranks import ALONE

_COMPARED = {"flint", "gemma2", "gpt_oss", "granite_swa", "granitemoe_swa", "mimo_v2_flash", "vaultgemma"}
"""Model types whose gradients were compared. Another may change its mask itself where it is a tensor (DeepSeek-V4)."""
_FEW = 48
"""Tokens on which both functions are compared."""
_CLOSE = 1e-4
"""Relative difference of a token's output that eager functions, which take their softmax in float32, may have."""
_PAIRS = 1 << 20
"""Pairs of query and key that are read of a long mask, to see if it is what it was taken for."""
_IGNORED = {*HARMLESS, "cu_seq_lens_q", "cu_seq_lens_k"}
"""Tensors among an attention function's arguments that eager functions do not read."""
_WHY = "_ds_memo_why"
"""Attribute of a mask of tokens × tokens: the reason for it."""


class _Name(str):
    """Name of our functions in Transformers' tables. Copies and pickles of a configuration say "eager", as before."""

    def __reduce__(self) -> tuple[Any, ...]:
        return str, ("eager",)


_NAME = _Name("ds_memo_attention")
_ways: weakref.WeakKeyDictionary[nn.Module, tuple[dict[str, str], Callable[[str], None]]] = weakref.WeakKeyDictionary()
"""By each module of an attached model, how its attention runs, by class, and what warns the user. Other models that share its
configuration run eagerly."""


def use_one_op(
    model: nn.Module, ways: dict[str, str], warn: Callable[[str], None], undo_with: Callable[[Callable[[], Any]], None]
) -> None:
    """Give a model whose attention is eager because Transformers has no other for it one op in its place.

    Compiled layers keep their own: a compiler fuses some of it, and takes no op of ours into its graph.

    Args:
        ways: gets, by class of attention, "one op" or why it is left to the eager function.
    """
    if has_compiled(model):
        return
    for part in model.modules():
        if not isinstance(part, PreTrainedModel) or part.config.model_type not in _COMPARED:
            continue
        caps = getattr(part.config, "attn_logit_softcapping", None)  # up to 5.17 Gemma 2 takes sdpa, which leaves them out
        if part.config._attn_implementation != "eager" or (part._supports_sdpa and not caps):
            continue
        AttentionInterface.register(_NAME, _attend)
        AttentionMaskInterface.register(_NAME, _mask)
        undo_with(functools.partial(setattr, part.config, ATTENTION, "eager"))
        setattr(part.config, ATTENTION, _NAME)
        for module in part.modules():
            _ways[module] = ways, warn
            undo_with(functools.partial(_forget, weakref.ref(module)))


def _forget(module: weakref.ref[nn.Module]) -> None:
    if (gone := module()) is not None:
        _ways.pop(gone, None)


# ---- attention


@torch.compiler.disable(reason='memo runs its op for eager attention here; with "attention": "eager" layers compile')
def _attend(
    module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention_mask: Any = None, **kwargs: Any
) -> Any:
    """Stand for eager attention in Transformers' table."""
    eager = _eager_of(type(module))
    if module in _ways:
        ways, warn = _ways[module]
        why = _why_eager(eager, module, (query, key, value), attention_mask, kwargs)
        ways[type(module).__name__] = why or "one op"
        if why is None:
            return attend(module, query, key, value, attention_mask, attention_mask.parts, **kwargs)
        warn(
            f"{type(module).__name__} runs Transformers' eager attention, which makes a matrix of tokens × tokens and runs again "
            f"in each backward: {why}"
        )
    dense = attention_mask.dense() if isinstance(attention_mask, Mask) else attention_mask
    return eager(module, query, key, value, dense, **kwargs)


def _eager_of(kind: type[nn.Module]) -> Callable[..., Any]:
    """Return the eager function in the file of a module's class, or of the class that it is derived from."""
    files = (sys.modules[one.__module__] for one in kind.__mro__)
    return next(file.eager_attention_forward for file in files if hasattr(file, "eager_attention_forward"))


def _why_eager(
    eager: Callable[..., Any],
    module: nn.Module,
    qkv: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    mask: Any,
    kwargs: dict[str, Any],
) -> str | None:
    """Return why a call is left to the eager function; None: the op computes the same."""
    if not isinstance(mask, Mask):
        return getattr(mask, _WHY, "the model was given a mask of its own")
    if qkv[0].shape[2] != qkv[1].shape[2]:
        return "there are keys of earlier tokens (a cache)"
    if kwargs.get("dropout") and module.training:
        return f"it drops {kwargs['dropout']:.0%} of attention's weights; set the model's attention_dropout to 0"
    if kwargs.get("output_attentions") or getattr(getattr(module, "config", None), "output_attentions", False):
        return "output_attentions asks for that matrix"
    for name, given in kwargs.items():
        if isinstance(given, torch.Tensor) and name != "s_aux" and name not in _IGNORED:
            return f"{name}, a tensor of shape {tuple(given.shape)}, is not known to memo's"
    if qkv[0].is_meta:  # no values
        return None
    plain = {name: given for name, given in kwargs.items() if isinstance(given, (bool, int, float, str, type(None)))}
    sizes = (*(x.shape[1] for x in qkv), *(x.shape[3] for x in qkv))
    if not _are_alike(eager, module, sizes, tuple(sorted(plain.items())), kwargs.get("s_aux")):
        return "on a few tokens its function returns other values than memo's"
    return None


_alike: dict[Any, bool] = {}


def _are_alike(
    eager: Callable[..., Any], module: nn.Module, sizes: tuple[int, ...], plain: tuple[Any, ...], sinks: torch.Tensor | None
) -> bool:
    """Compare both functions on a few random tokens, in float64 on the CPU, once for a class and its settings.

    Logits go from much smaller than sinks to much larger than caps. The module's own parameters (sinks) are drawn, too.
    """
    key = eager, type(module), sizes, plain, sinks is None
    if key not in _alike:
        draw = functools.partial(torch.randn, dtype=torch.float64, device="cpu", generator=torch.Generator().manual_seed(0))
        alone = copy.copy(module)
        own = {name: parameter for name, parameter in module._parameters.items() if parameter is not None}
        drawn = {name: draw(parameter.shape) for name, parameter in own.items()}
        alone._parameters = {**module._parameters, **drawn}  # type: ignore[assignment]
        given = dict(plain)
        if sinks is not None:
            given["s_aux"] = next((drawn[name] for name in own if own[name].data_ptr() == sinks.data_ptr()), draw(sinks.shape))
        with torch.no_grad(), _disable_current_modes():
            q, k, v = (draw(1, heads, _FEW, size) for heads, size in zip(sizes[:3], sizes[3:], strict=True))
            q *= draw(_FEW, 1).mul_(2).exp_()
            hidden = torch.full_like(q[:, :1, :, :1].expand(-1, -1, -1, _FEW), torch.finfo(q.dtype).min).triu_(1)
            want = eager(alone, q, k, v, hidden, **given)[0].double()
            got = attend(alone, q, k, v, Mask(), _parts(_FEW, ((0,),)), **given)[0]
            off = (want - got).norm(dim=-1) if want.shape == got.shape else want.new_tensor(math.inf)
        _alike[key] = bool((off <= _CLOSE * want.norm(dim=-1).clamp(min=_CLOSE)).all())
    return _alike[key]


# ---- masks


def _mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    mask_function: Callable[..., Any],
    attention_mask: torch.Tensor | None = None,
    local_size: int | None = None,
    **others: Any,
) -> Any:
    """Stand for eager masks in Transformers' table."""
    given = {"attention_mask": attention_mask, "mask_function": mask_function, **others}
    dense = functools.partial(eager_mask, batch_size, q_length, kv_length, **given)
    found: Mask | str
    if q_length != kv_length or others.get("q_offset", 0) != 0 or others.get("kv_offset", 0) != 0:
        found = "there are keys of earlier tokens (a cache)"
    elif attention_mask is not None and not attention_mask.all():
        found = "attention_mask pads its batch; pack sequences in place of padding them, with position_ids that start again"
    else:
        found = _interval(mask_function, batch_size, q_length, local_size, dense)
    if isinstance(found, Mask):
        return found
    if (mask := dense()) is not None:
        setattr(mask, _WHY, found)
    return mask


def _interval(
    mask_function: Callable[..., Any], rows: int, length: int, window: int | None, dense: Callable[[], Any]
) -> Mask | str:
    """Read a mask where tokens see the one before, or not (documents, chunks), and compare it with what that makes of it.

    All queries of up to 1,024 tokens are compared, a few of more.
    """
    read = list(tensors_in(mask_function))
    device = read[0].device if read else torch.device("cpu")
    rows = rows if read else 1
    row, token = torch.arange(rows, device=device)[:, None], torch.arange(length, device=device)
    seen = torch.as_tensor(mask_function(row, 0, token[1:], token[:-1]), device=device).expand(rows, length - 1)
    borders = torch.cat([torch.ones_like(row, dtype=torch.bool), ~seen], 1)
    both = bool(mask_function(0, 0, token[:1], token[1:2]).all()) if length > 1 else False
    few = max(8, min(length, _PAIRS // (rows * length)))
    query = torch.linspace(0, length - 1, min(few, length), device=device).round().long()
    document = borders.cumsum(1)
    want = document[:, query, None] == document[:, None]
    if not both:
        want &= token <= query[:, None]
    if window is not None:
        want &= token > query[:, None] - window
    got = torch.as_tensor(mask_function(row[..., None], 0, query[:, None], token), device=device)
    if not torch.equal(got.expand_as(want), want):
        return "its mask is neither causal nor a window, in documents or not"
    starts = tuple(tuple(of_row.nonzero().flatten().tolist()) for of_row in borders.cpu())
    kind = "both" if both else "window" if window is not None else "causal"
    return Mask(kind, window or 0, parts=_parts(length, starts), dense=dense)


@functools.lru_cache(maxsize=16)
def _parts(length: int, documents: tuple[tuple[int, ...], ...]) -> SequenceParts:
    """Return a layout on this rank alone. Cached: calls of the same documents have the same plans."""
    return SequenceParts(ALONE, length, documents)
