"""Sequence parallelism of a Hugging Face model: its attention, its masks, and where tokens enter and leave its text decoder.

A caller gives each rank its part of every sequence, one rank after another, of any lengths. At the decoder's entrance the ranks
tell each other their lengths and documents; padding is a document, too. Where these parts are not the ones that attention wants
(a ring, lengths that do not divide), tokens move there, and hidden states move back at the exit. A model with towers, for images
say, is given whole sequences on every rank. Outer modules fill in the images and make masks of whole sequences; then the entrance
takes this rank's part.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import operator
import sys
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel, masking_utils
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ds_memo.errors import MemoError
from ds_memo.hf.rotary import seen_by_rotary
from ds_memo.sequence.attention import attend
from ds_memo.sequence.catch_mixers import catch_mixers
from ds_memo.sequence.exchange import move
from ds_memo.sequence.masks import Mask
from ds_memo.sequence.parts import PARTS, Parts, Pieces, contiguous, even, parts_of
from ds_memo.sequence.ranks import SequenceRanks

FIELD = "sequence_parallel_size"
_CHECKED = 256
"""Longest part for which a mask is compared, value by value, with what it was taken for. The probe's are shorter."""
_NOT_TEXT = ("pixel_", "image", "video", "audio", "input_features", "input_values")
"""Begins of a forward's arguments that are no text."""
_KNOWN = 8
"""Forwards whose parts are remembered, so that the next one of the same lengths and documents has the same object."""

_names: dict[str, str] = {}
"""By our names in Transformers' tables, the attention implementation before. Other models may share a configuration,
or be copies: they go on with that."""


_models: weakref.WeakKeyDictionary[nn.Module, Decoder] = weakref.WeakKeyDictionary()
"""Text decoders of sequence-parallel models, and the modules around them."""
_FOLLOWS = {"deepstack_visual_embeds": "visual_pos_masks"}
"""Arguments of decoders with a row for each token that is True in another argument."""
_PAIRS = 1 << 26
"""Most pairs of query and key that are read of a mask at once."""


class Said(NamedTuple):
    """What a rank tells the others of its part of a batch."""

    rows: int
    length: int
    borders: tuple[tuple[int, ...], ...]
    """By row, tokens whose position is not the one before plus 1."""
    ends: tuple[tuple[int, int], ...]
    """By row, the first and last position."""
    longest: int
    """Largest position plus 1."""
    gap: tuple[int, int, int, int] | None
    """Where positions rise by more than 1: row, token, the position before it and its own."""
    flips: tuple[tuple[int, ...], ...] = ((),)
    """By row, tokens where padding begins or ends. Text goes before the part."""


class Decoder:
    """The text decoder of a sequence-parallel model.

    Args:
        model: the whole model. Its configuration names another attention from now on.
    """

    def __init__(self, model: nn.Module, ranks: SequenceRanks) -> None:
        self.ranks = ranks
        base = next((module for module in model.modules() if isinstance(module, PreTrainedModel)), None)
        if base is None:
            raise MemoError(f"{FIELD}: {type(model).__name__} is no Hugging Face model; its attention and masks are not known")
        if getattr(base.config, "is_encoder_decoder", False):
            raise MemoError(
                f"{FIELD}: {type(base).__name__} is an encoder and a decoder, and parts of the one do not belong to parts of the "
                f'other. Use "{FIELD}": 1'
            )
        self.module = _text_decoder(base)
        self._base = base
        self._modules = list(self.module.modules())
        around = [module for module in base.modules() if self.module in module.modules()]
        towers = set(base.modules()) - {*self._modules, *around}
        self._signature = inspect.signature(self.module.forward)
        self._outer_signature = inspect.signature(base.forward)
        has_towers = any(isinstance(module, PreTrainedModel) for module in towers)
        self.takes_whole = has_towers or any(name.startswith(_NOT_TEXT) for name in self._outer_signature.parameters)
        """True if it is given whole sequences on every rank: it reads more than text."""
        asked = self._outer_signature.parameters.values()
        self._takes_positions = any(p.name == "position_ids" or p.kind is p.VAR_KEYWORD for p in asked)
        self._has_rotary = any("rotary" in name for name, _ in self.module.named_modules())
        self._rotary = seen_by_rotary(base.config.get_text_config())
        self._known: dict[Any, Parts] = {}
        self._positions: torch.Tensor | None = None
        """Those that the model was called with. Some do not hand them on."""
        self._ids: torch.Tensor | None = None
        """Its input_ids: the decoder may get embeddings alone."""
        self._mask: Any = None
        """Its attention_mask: outer modules may make another one of it."""
        self._leaving: list[tuple[list[Pieces], list[Pieces]]] = []
        """Pieces as ranks hold them inside, and as a caller does, of the forward under way."""
        self._awaiting: set[Parts] = set()
        """Parts of forwards with gradients since the latest backward."""
        self._was_backward = False
        self.is_off = False
        if catch_mixers(self.module) and getattr(base, "_use_kernels", False):
            raise MemoError(
                f"{FIELD}: {type(base).__name__} was loaded with use_kernels=True, and kernels may take the place of layers "
                "that mix tokens. Load it without"
            )
        _find_documents_at_the_entrance()
        for module in (*self._modules, *around):
            if (config := getattr(module, "config", None)) is not None:
                _take_over(config, f"{ranks.ulysses}x{ranks.ring}")
        base.register_forward_pre_hook(self._before_model, with_kwargs=True)
        _models.update(dict.fromkeys(around, self))
        self.module.register_forward_pre_hook(self._enter, with_kwargs=True)
        self.module.register_forward_hook(self._leave)
        self._hold(None)

    def __deepcopy__(self, memo: dict) -> Decoder:
        """A copy of the model is not sequence-parallel, and copies its hooks."""
        return self

    @contextmanager
    def whole(self) -> Iterator[None]:
        """Run on whole sequences inside the block, each rank for itself and by the attention that was there before."""
        parts = vars(self.module)[PARTS]
        self.is_off = True
        self._hold(None)
        try:
            yield
        finally:
            self.is_off = False
            self._hold(parts)

    def _hold(self, parts: Parts | None) -> None:
        """Note the parts that modules run on. A layer's state under memo has them."""
        for module in self._modules:
            vars(module)[PARTS] = parts

    # ---- hooks

    def _before_model(self, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        if module is self._base:
            given = _by_name(self._outer_signature, args, kwargs)
            self._positions, self._mask = given.get("position_ids"), given.get("attention_mask")
            self._ids = given.get("input_ids")
            if given.get("labels") is not None and given.get("shift_labels") is None and not self.is_off:
                raise MemoError(
                    f"{FIELD} {self.ranks.size}: the model was called with labels, and would leave each part's last token out. "
                    "Compute the loss of logits and the batch's shifted labels (sequence.split), or pass shift_labels, too"
                )

    def _enter(self, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]] | None:
        """Learn how whole sequences lie on the ranks, and give the decoder this rank's part."""
        if module is not self.module or self.is_off:
            return None
        self._leaving.clear()  # a forward may have ended before its exit
        given = _by_name(self._signature, args, kwargs)
        tokens = given.get("input_ids") if given.get("input_ids") is not None else given.get("inputs_embeds")
        if not isinstance(tokens, torch.Tensor) or tokens.dim() < 2:
            raise MemoError(f"{FIELD} {self.ranks.size}: {type(module).__name__} was called without input_ids or inputs_embeds")
        cache = given.get("past_key_values")
        if cache is not None and cache.get_seq_length():
            raise MemoError(
                f"{FIELD} {self.ranks.size}: a cache is of whole sequences; generate with a model that is not in parts"
            )
        if given.get("cu_seq_lens_q") is not None:
            raise MemoError(
                f"{FIELD} {self.ranks.size}: the model was called with cu_seq_lens_q, but a rank holds a part of each sequence. "
                "Leave it out: position_ids that start again with each document say the same."
            )
        rows, length = tokens.shape[:2]
        positions = given.get("position_ids", self._positions)
        padding = self._padding(given.get("attention_mask"), rows, length)
        if self.takes_whole:
            self._refuse_other_batches(tokens)
            of_text = positions[0] if positions is not None and positions.dim() == 3 and len(positions) == 4 else positions
            said = [_said(rows, length, of_text if of_text is not None and of_text.dim() == 2 else None, padding)]
            if self._rotary is not None and positions is not None:
                pieces = itertools.chain(*contiguous(even(length, self.ranks.size)))
                self._refuse_lengths([int(positions[..., start:stop].max()) + 1 for start, stop in pieces])
        else:
            if positions is None and self._takes_positions:
                raise MemoError(
                    f"{FIELD} {self.ranks.size}: the model was called without position_ids. Each rank must be given its part of "
                    "each sequence, not a batch of its own, and position_ids say so. Let UlyssesSPDataLoaderAdapter or "
                    "ds_memo.deepspeed.sequence.split cut batches that have them"
                )
            if positions is not None and positions.dim() != 2:
                raise MemoError(
                    f"{FIELD} {self.ranks.size}: position_ids have the shape {tuple(positions.shape)}; expected (rows, tokens), "
                    "since this rank's part has positions of one axis"
                )
            said = self._from_all(_said(rows, length, positions, padding))
            self._refuse_lengths([one.longest for one in said])
        if positions is None and any(0 in row for row in said[0].flips) and not self._has_rotary:
            raise MemoError(
                f"{FIELD} {self.ranks.size}: rows begin with padding, and {type(module).__name__} may count the tokens behind it "
                "from the padding or not. Pass position_ids"
            )
        parts = self._parts(said)
        if parts is not vars(module)[PARTS]:
            self._hold(parts)
        self._await_backward(parts)
        callers = contiguous(even(length, self.ranks.size) if self.takes_whole else [one.length for one in said])
        if "position_ids" in self._signature.parameters:
            given["position_ids"] = torch.arange(length, device=tokens.device)[None] if positions is None else positions
        if self.takes_whole:
            given = self._own(given, rows, length, parts)
        elif callers != parts.all_pieces:
            given = {name: self._moved(value, length, callers, parts) for name, value in given.items()}
        else:  # the caller may write to theirs before a replay looks
            given = {name: value.clone() if value is positions else value for name, value in given.items()}
        if callers != parts.all_pieces:
            self._leaving.append((parts.all_pieces, callers))
        return (), given

    def _leave(self, module: nn.Module, args: tuple, output: Any) -> Any:
        """Give hidden states back as the caller's parts lie."""
        if module is not self.module or self.is_off:
            return output
        for value in tree_leaves(output):
            if isinstance(value, torch.Tensor) and value.requires_grad:
                value.register_hook(self._begin_backward)
        if not self._leaving:
            return output
        inside, callers = self._leaving.pop()
        own = vars(module)[PARTS].own

        def back(value: Any) -> Any:
            is_hidden = isinstance(value, torch.Tensor) and value.dim() == 3 and value.shape[1] == own
            return move(value, inside, callers, self.ranks.group) if is_hidden else value

        return tree_map(back, output)

    def _await_backward(self, parts: Parts) -> None:
        """Note a forward, so that a checkpoint that runs it again after another one is refused if it cannot tell them apart."""
        if self._was_backward:
            for other in self._awaiting:
                other.among_others = False
            self._awaiting.clear()
            self._was_backward = False
        if torch.is_grad_enabled():
            self._awaiting.add(parts)
        latest = {*self._awaiting, parts}  # an evaluation, too, leaves its parts to what runs again
        for other in latest:
            other.among_others = len(latest) > 1

    def _begin_backward(self, gradient: torch.Tensor) -> None:
        self._was_backward = True

    def _moved(self, value: Any, length: int, callers: list[Pieces], parts: Parts) -> Any:
        if not (isinstance(value, torch.Tensor) and value.dim() > 1 and value.shape[1] == length):
            return value
        return move(value, callers, parts.all_pieces, self.ranks.group)

    def _from_all(self, mine: Said) -> list[Said]:
        said: list[Any] = [None] * self.ranks.size
        dist.all_gather_object(said, mine, group=self.ranks.host_group)
        if any(one.rows != mine.rows for one in said):
            came = ", ".join(f"{one.rows} x {one.length} on rank {rank}" for rank, one in enumerate(said))
            raise MemoError(
                f"{FIELD} {self.ranks.size}: the ranks of a sequence came with batches of unequal size (rows x tokens: {came}); "
                "expected as many rows. Let UlyssesSPDataLoaderAdapter or ds_memo.deepspeed.sequence.split cut batches"
            )
        return said

    def _padding(self, given: Any, rows: int, length: int) -> torch.Tensor | None:
        """Return the caller's mask of padding (rows, tokens)."""
        mask = given if isinstance(given, torch.Tensor) else self._mask
        if not isinstance(mask, torch.Tensor) or mask.dim() != 2:
            return None
        if mask.shape != (rows, length):
            raise MemoError(
                f"{FIELD} {self.ranks.size}: attention_mask has the shape {tuple(mask.shape)}; expected ({rows}, {length}), as "
                "many as there are tokens"
            )
        return mask

    def _own(self, given: dict[str, Any], rows: int, length: int, parts: Parts) -> dict[str, Any]:
        """Return this rank's part of arguments with whole sequences, which may lie in dicts, lists and tuples."""

        def cut(tensor: Any, name: str) -> Any:
            if not isinstance(tensor, torch.Tensor):
                return tensor
            dim = _dim_of_tokens(tensor, rows, length)
            if dim is None:
                if tensor.dim() < 2 or name not in self._signature.parameters:
                    return tensor
                raise MemoError(
                    f"{FIELD} {self.ranks.size}: {type(self.module).__name__} was called with {name}, a tensor of shape "
                    f"{tuple(tensor.shape)}. Which of it belongs to a part of {length} tokens is not known. "
                    f'Use "{FIELD}": 1'
                )
            if parts.length > length:
                more = tensor.new_zeros(*tensor.shape[:dim], parts.length - length, *tensor.shape[dim + 1 :])
                tensor = torch.cat([tensor, more], dim)
            return parts.own_of(tensor, dim)

        found = {
            name: tree_map(functools.partial(cut, name=name), value) for name, value in given.items() if name not in _FOLLOWS
        }
        for name in _FOLLOWS.keys() & given.keys():
            images = given.get(_FOLLOWS[name])
            if images is not None:
                numbers = cut(images.flatten().cumsum(0).view_as(images) * images, name)
                found[name] = tree_map(operator.itemgetter(_rows_of(numbers)), given[name])
        return found

    def _refuse_other_batches(self, tokens: torch.Tensor) -> None:
        """Refuse ranks that were given batches of their own, as a plain data loader does, in the place of one for all."""
        ids = self._ids
        read = 0 if ids is None else int((ids * torch.arange(1, ids.numel() + 1, device=ids.device).view_as(ids)).sum())
        said: list[Any] = [None] * self.ranks.size
        dist.all_gather_object(said, (*tokens.shape[:2], read), group=self.ranks.host_group)
        if len(set(said)) > 1:
            came = ", ".join(f"{rows} x {length} on rank {rank}" for rank, (rows, length, _) in enumerate(said))
            raise MemoError(
                f"{FIELD} {self.ranks.size}: the ranks of a sequence came with other batches (rows x tokens: {came}); a model "
                "that reads more than text takes whole sequences, the same on all of them. Let "
                "ds_memo.deepspeed.sequence.split send batches (whole=True)"
            )

    def _refuse_lengths(self, lengths: Sequence[int]) -> None:
        if self._rotary is None:
            return
        kind, seen = self._rotary
        if len(set(map(seen, lengths))) > 1:
            raise MemoError(
                f'{FIELD} {self.ranks.size}: frequencies of rotary embeddings of type "{kind}" depend on the length that a rank '
                f"sees, and the parts of this sequence go up to {', '.join(map(str, lengths))}: each rank would take others. "
                f'Use "{FIELD}": 1, or a rope_type without lengths ("yarn", "linear")'
            )

    def _parts(self, said: Sequence[Said]) -> Parts:
        key = sum(one.length for one in said), _documents(said)
        if key not in self._known:
            if len(self._known) == _KNOWN:
                del self._known[next(iter(self._known))]
            self._known[key] = Parts(self.ranks, *key)
        return self._known[key]


def _text_decoder(base: PreTrainedModel) -> nn.Module:
    """Return the module that runs a model's layers on embedded text."""
    found = base.get_decoder()
    inner = [module for module in base.children() if isinstance(module, PreTrainedModel)]
    # get_decoder knows no name of Llama-4's, and takes ModernBERT's output head for one.
    return inner[0] if len(inner) == 1 and (found is base or not isinstance(found, PreTrainedModel)) else found


def _said(rows: int, length: int, positions: torch.Tensor | None, padding: torch.Tensor | None = None) -> Said:
    """Read a part's positions (rows or 1, n) and its mask of padding (rows, n). Waits for a byte per token."""
    if not length or (positions is None and padding is None):
        return Said(rows, length, ((),), ((-1, -1),), 0, None)
    codes = torch.ones(1, length, dtype=torch.uint8)
    if positions is not None:
        codes = F.pad(positions.diff(dim=1).clamp(0, 2).to(torch.uint8), (1, 0), value=1)
    if padding is not None:
        codes = codes.to(padding.device) + 4 * (padding == 0).to(torch.uint8)
    codes = codes.cpu()
    steps, padded = codes % 4, codes > 3
    before = F.pad(padded, (1, 0))[:, :-1]
    flips = _listed(padded != before) if padded.any() else ((),)
    if positions is None:
        return Said(rows, length, ((),), ((-1, -1),), 0, None, flips)
    gap = None
    leaps = ((steps == 2) & ~padded & ~before).nonzero()
    if len(leaps):
        row, token = leaps[0].tolist()
        first, second = positions[row % len(positions), token - 1 : token + 1].tolist()
        gap = row, token, first, second
    borders = _listed(steps[: len(positions)] != 1 if flips == ((),) else steps != 1)
    ends = tuple(map(tuple, positions[:, [0, -1]].tolist()))
    return Said(rows, length, borders, ends, int(positions.max()) + 1, gap, flips)  # type: ignore[arg-type]


def _listed(found: torch.Tensor) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(row.nonzero().flatten().tolist()) for row in found)


def _documents(said: Sequence[Said]) -> tuple[tuple[int, ...], ...]:
    """Return for each row of whole sequences the first token of each document. Without positions a row is one document.

    Raises:
        MemoError: positions rise by more than one from one part to the next, or there is padding inside a document.
    """
    for rank, one in enumerate(said):
        if one.gap is not None:
            row, token, before, after = one.gap
            raise MemoError(
                f"position_ids of row {row} rise from {before} to {after} at token {token} of rank {rank}'s part; expected steps "
                "of 1, or a fall where a document begins. Whether a gap is a border cannot be told: number documents without gaps"
            )
    rows = max(max(len(one.borders), len(one.flips)) for one in said)
    length = sum(one.length for one in said)
    documents = []
    for row in range(rows):
        found, flips, passed, before = {0}, set[int](), 0, None
        for rank, one in enumerate(said):
            if not one.length:
                continue
            (first, last), borders, turns = (of_rows[row % len(of_rows)] for of_rows in (one.ends, one.borders, one.flips))
            was_padding = len(flips) % 2 == 1
            flips ^= {passed + turn for turn in turns} ^ {passed} if was_padding else {passed + turn for turn in turns}
            if before is not None and first > before + 1 and not (was_padding or passed in flips):
                raise MemoError(
                    f"position_ids of row {row} rise from {before} to {first} between the parts of ranks {rank - 1} and {rank}; "
                    "expected steps of 1, or a fall where a document begins"
                )
            if before is not None and first != before + 1:
                found.add(passed)
            found.update(passed + border for border in borders)
            passed, before = passed + one.length, last if one.ends != ((-1, -1),) else None
        _refuse_holes(row, sorted(flips), found, length)
        documents.append(tuple(sorted(found | flips)))
    return tuple(documents)


def _refuse_holes(row: int, flips: Sequence[int], borders: set[int], length: int) -> None:
    """Refuse padding with text of one document on both sides: the text behind it would see the text before it."""
    for first, stop in itertools.zip_longest(flips[::2], flips[1::2], fillvalue=length):
        if first > 0 and stop < length and not any(first <= border <= stop for border in borders):
            raise MemoError(
                f"attention_mask of row {row} is 0 at tokens {first} to {stop - 1} and 1 on both sides, which position_ids count "
                f'as one document. Pad sequences at their ends, or use "{FIELD}": 1'
            )


def _dim_of_tokens(tensor: torch.Tensor, rows: int, length: int) -> int | None:
    """Return the dimension of tokens: the one behind the batch's, or the only one."""
    shape = tensor.shape
    if len(shape) == 1:
        return 0 if shape[0] == length else None
    return next((dim for dim in range(1, len(shape)) if shape[dim] == length and shape[dim - 1] in (rows, 1)), None)


def _rows_of(numbers: torch.Tensor) -> torch.Tensor:
    """Return the rows of images that go to this rank's tokens: `numbers` counts the images' tokens from 1; 0 is text."""
    return numbers[numbers > 0] - 1


def _by_name(signature: inspect.Signature, args: tuple, kwargs: dict[str, Any]) -> dict[str, Any]:
    given: dict[str, Any] = {}
    for name, value in signature.bind_partial(*args, **kwargs).arguments.items():
        if signature.parameters[name].kind is inspect.Parameter.VAR_KEYWORD:
            given |= value
        else:
            given[name] = value
    return given


# ---- Transformers' tables


def _take_over(config: Any, how: str) -> None:
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
def _find_documents_at_the_entrance() -> None:
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


def _running() -> tuple[Decoder, bool] | None:
    """Return the decoder of the sequence-parallel model whose forward runs, and if it is the decoder's. In a tower: None.

    Callers are asked: no interrupt can leave a wrong answer.
    """
    frame = sys._getframe(1)
    while frame is not None:
        caller = frame.f_locals.get("self")
        if isinstance(caller, PreTrainedModel):
            if (decoder := _models.get(caller)) is not None:
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
    read = list(_tensors_in(mask_function))
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


def _tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors that a mask's functions read."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, tuple | list):
        for inner in value:
            yield from _tensors_in(inner)
    elif inspect.isfunction(value):
        for cell in value.__closure__ or ():
            yield from _tensors_in(cell.cell_contents)


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
