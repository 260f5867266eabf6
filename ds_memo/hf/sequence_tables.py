"""Attention and masks of sequence-parallel models in Transformers' tables."""

from __future__ import annotations

import functools
import inspect
import sys
import weakref
from collections.abc import Iterator
from typing import Any, Protocol

import torch
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel, masking_utils
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ds_memo.errors import MemoError
from ds_memo.sequence.attention import attend
from ds_memo.sequence.masks import Mask
from ds_memo.sequence.parts import PARTS, parts_of

FIELD = "sequence_parallel_size"
_CHECKED = 256
"""Longest part for which a mask is compared, value by value, with what it was taken for. The probe's are shorter."""
_PAIRS = 1 << 26
"""Most pairs of query and key that are read of a mask at once."""


_names: dict[str, str] = {}
"""By our names in Transformers' tables, the attention implementation before. Other models may share a configuration,
or be copies: they go on with that."""


class InParts(Protocol):
    """The decoder of a sequence-parallel model."""

    module: nn.Module
    is_off: bool
    takes_whole: bool


MODELS: weakref.WeakKeyDictionary[nn.Module, InParts] = weakref.WeakKeyDictionary()
"""Text decoders of sequence-parallel models, and the modules around them."""


def take_over(config: Any, how: str) -> None:
    """Have modules of a configuration ask for our attention and masks. Not by its property, which would tell those of towers.

    Args:
        how: ranks share a sequence. A cached profile is of one way.
    """
    before = config._attn_implementation or "eager"
    if before in _names:
        return
    name = f"ds_memo_sequence_{how}_{before.replace('flash', '')}"  # models look for "flash"
    if name not in _names:
        _names[name] = before
        attention = functools.partial(_attend, before)
        attention.ranks = _ranks  # type: ignore[attr-defined]  # see tiles.attention_call.AttentionCall.ranks
        AttentionInterface.register(name, attention)
        AttentionMaskInterface.register(name, functools.partial(_mask, before))
    config._attn_implementation_internal = name


@functools.cache
def find_documents_at_the_entrance() -> None:
    """Keep Transformers from finding the documents of a part."""
    found = masking_utils.find_packed_sequence_indices
    masking_utils.find_packed_sequence_indices = lambda positions: None if _running() else found(positions)


@torch.compiler.disable(reason="ranks that share a sequence exchange tokens here")
def _attend(
    before: str,
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Any = None,
    **kwargs: Any,
) -> Any:
    parts = parts_of(module)
    if parts is not None:
        return attend(module, query, key, value, attention_mask, parts, **kwargs)
    source = sys.modules[type(module).__module__]
    attention = source.eager_attention_forward if before == "eager" else ALL_ATTENTION_FUNCTIONS[before]
    return attention(module, query, key, value, attention_mask, **kwargs)


def _running() -> tuple[InParts, bool] | None:
    """Return the decoder of the sequence-parallel model whose forward runs, and if it is the decoder's. In a tower: None.

    Callers are asked: no interrupt can leave a wrong answer.
    """
    frame = sys._getframe(1)
    while frame is not None:
        caller = frame.f_locals.get("self")
        if isinstance(caller, PreTrainedModel):
            if (decoder := MODELS.get(caller)) is not None:
                return None if decoder.is_off else (decoder, caller is decoder.module)
            if PARTS not in vars(caller):
                return None
        frame = frame.f_back  # type: ignore[assignment]
    return None


def _ranks(module: nn.Module) -> int:
    parts = vars(module).get(PARTS)
    return 1 if parts is None else parts.ranks.ulysses


def _mask(
    before: str,
    batch_size: int,
    q_length: int,
    kv_length: int,
    mask_function: Any,
    local_size: int | None = None,
    **others: Any,
) -> Any:
    """Stand for a mask in Transformers' table."""
    running = _running()
    if running is None:
        named = {"batch_size": batch_size, "q_length": q_length, "kv_length": kv_length, "mask_function": mask_function}
        window = {} if local_size is None else {"local_size": local_size}
        known = before in ALL_MASK_ATTENTION_FUNCTIONS
        return ALL_MASK_ATTENTION_FUNCTIONS[before](**named, **window, **others) if known else None
    padding = others.get("attention_mask")
    if isinstance(padding, Mask):  # made outside of the decoder
        return padding
    decoder, is_decoder = running
    read = list(tensors_in(mask_function))
    device = read[0].device if read else torch.device("cpu")
    if any(tensor.dim() > 1 for tensor in read):
        if decoder.takes_whole and not is_decoder:
            return _table(mask_function, batch_size, q_length, device, padding)
        raise MemoError(
            f"{FIELD}: {type(decoder.module).__name__} makes a mask that depends on the tokens, and a rank has a part of them. "
            f'Use "{FIELD}": 1'
        )
    if local_size is not None:
        mask = Mask("chunk" if _borders(mask_function, 0, local_size + 1, device) else "window", local_size)
    else:
        mask = Mask("both" if torch.as_tensor(mask_function(0, 0, *torch.arange(2, device=device))) else "causal")
    if q_length <= _CHECKED:
        _compare(mask, mask_function, batch_size, q_length, device)
    return mask


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors that a mask's functions read."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, tuple | list):
        for inner in value:
            yield from tensors_in(inner)
    elif inspect.isfunction(value):
        for cell in value.__closure__ or ():
            yield from tensors_in(cell.cell_contents)


def _table(mask_function: Any, rows: int, length: int, device: torch.device, padding: torch.Tensor | None) -> Mask:
    """Read a mask of whole sequences, a few queries at a time.

    Raises:
        MemoError: keys that a query sees are not next to each other.
    """
    key, few = torch.arange(length, device=device), max(1, _PAIRS // length)
    edges: list[torch.Tensor] = []
    for row in range(rows):
        for query in key[:, None].split(few):
            seen = torch.as_tensor(mask_function(row, 0, query, key), device=device).expand(len(query), length)
            if padding is not None:
                text = padding[row].to(device).bool()
                seen = torch.where(text[query], seen & text, query == key)
            seen = seen.to(torch.uint8)
            edges.append(torch.stack([seen.argmax(1), length - 1 - seen.flip(1).argmax(1), seen.sum(1)]))
    lo, hi, count = torch.cat(edges, 1).view(3, rows, length).cpu()
    holes = (count != hi - lo + 1).nonzero()
    if len(holes):
        row, token = holes[0].tolist()
        raise MemoError(
            f"{FIELD}: the model makes a mask with holes: token {token} of row {row} sees {count[row, token]} of the tokens "
            f'{lo[row, token]} to {hi[row, token]}. Use "{FIELD}": 1'
        )
    return Mask("table", table=(lo, hi), plans={})


def _borders(mask_function: Any, row: int, length: int, device: torch.device) -> list[int]:
    """Return the tokens that do not see the one before."""
    query = torch.arange(1, length, device=device)
    seen = torch.as_tensor(mask_function(row, 0, query, query - 1)).expand(length - 1)
    return [token + 1 for token in (~seen).nonzero().flatten().tolist()]


def _compare(mask: Mask, mask_function: Any, rows: int, length: int, device: torch.device) -> None:
    """Refuse a mask that is not what it was taken for."""
    query, key = torch.arange(length, device=device)[:, None], torch.arange(length, device=device)
    for row in range(rows):
        want = key >= 0 if mask.kind == "both" else key <= query
        if mask.kind == "window":
            want = want & (key > query - mask.size)
        elif mask.kind == "chunk":  # counted from the first token that is no padding
            first = min(_borders(mask_function, row, length, device), default=0)
            want = want & ((key - first) // mask.size == (query - first) // mask.size)
        got = torch.as_tensor(mask_function(row, 0, query, key), device=device).expand(length, length)
        if not torch.equal(got, want.expand(length, length)):
            raise MemoError(
                f"{FIELD}: the model makes a mask that is no interval of keys for each query, or another one than parts of a "
                f'sequence can be given ({mask.kind} was expected). Use "{FIELD}": 1'
            )
