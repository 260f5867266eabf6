"""Sequence parallelism of a Hugging Face model: where tokens enter and leave its text decoder.

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
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map
from transformers import PreTrainedModel

from ds_memo.errors import MemoError
from ds_memo.hf.caches import earlier_tokens
from ds_memo.hf.rotary import seen_by_rotary
from ds_memo.hf.sequence_tables import FIELD, MODELS, find_documents_at_the_entrance, take_over
from ds_memo.sequence.catch_mixers import catch_mixers
from ds_memo.sequence.documents import RankPart, describe_part, documents_of
from ds_memo.sequence.exchange import move
from ds_memo.sequence.parts import PARTS, Pieces, SequenceParts, contiguous, even
from ds_memo.sequence.ranks import SequenceRanks

_NOT_TEXT = ("pixel_", "image", "video", "audio", "input_features", "input_values")
"""Begins of a forward's arguments that are no text."""
_KNOWN = 8
"""Forwards whose parts are remembered, so that the next one of the same lengths and documents has the same object."""
_FOLLOWS = {"deepstack_visual_embeds": "visual_pos_masks"}
"""Arguments of decoders with a row for each token that is True in another argument."""


class Decoder:
    """The text decoder of a sequence-parallel model.

    Args:
        model: the whole model. Its configuration names another attention from now on.
    """

    def __init__(self, model: nn.Module, ranks: SequenceRanks) -> None:
        self.ranks = ranks
        base = next((module for module in model.modules() if isinstance(module, PreTrainedModel)), None)
        if base is None:
            raise MemoError(
                f"{FIELD}: {type(model).__name__} is no Hugging Face model, whose attention and masks are known; use one"
            )
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
        self._known: dict[Any, SequenceParts] = {}
        self._positions: torch.Tensor | None = None
        """Those that the model was called with. Some do not hand them on."""
        self._ids: torch.Tensor | None = None
        """Its input_ids: the decoder may get embeddings alone."""
        self._mask: Any = None
        """Its attention_mask: outer modules may make another one of it."""
        self._leaving: list[tuple[list[Pieces], list[Pieces]]] = []
        """Pieces as ranks hold them inside, and as a caller does, of the forward under way."""
        self._awaiting: set[SequenceParts] = set()
        """Parts of forwards with gradients since the latest backward."""
        self._was_backward = False
        self.is_off = False
        if catch_mixers(self.module) and getattr(base, "_use_kernels", False):
            raise MemoError(
                f"{FIELD}: {type(base).__name__} was loaded with use_kernels=True, and kernels may take the place of layers "
                "that mix tokens. Load it without"
            )
        find_documents_at_the_entrance()
        for module in (*self._modules, *around):
            if (config := getattr(module, "config", None)) is not None:
                take_over(config, f"{ranks.ulysses}x{ranks.ring}")
        base.register_forward_pre_hook(self._before_model, with_kwargs=True)
        MODELS.update(dict.fromkeys(around, self))
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

    def _hold(self, parts: SequenceParts | None) -> None:
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
            raise MemoError(
                f"{FIELD} {self.ranks.size}: {type(module).__name__} was called without input_ids or inputs_embeds; pass one"
            )
        if earlier_tokens(given):
            raise MemoError(
                f"{FIELD} {self.ranks.size}: a cache is of whole sequences; use for generation a model that is not in parts"
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
            by_rank = [describe_part(rows, length, of_text if of_text is not None and of_text.dim() == 2 else None, padding)]
            if self._rotary is not None and positions is not None:
                pieces = itertools.chain(*contiguous(even(length, self.ranks.size)))
                self._refuse_lengths([int(positions[..., start:stop].max()) + 1 for start, stop in pieces])
        else:
            if positions is None and self._takes_positions:
                raise MemoError(
                    f"{FIELD} {self.ranks.size}: the model was called without position_ids. Each rank must be given its part of "
                    "each sequence, not a batch of its own, and position_ids say so. Let UlyssesSPDataLoaderAdapter or "
                    "ds_memo's split cut batches that have them"
                )
            if positions is not None and positions.dim() != 2:
                raise MemoError(
                    f"{FIELD} {self.ranks.size}: position_ids have the shape {tuple(positions.shape)}; expected (rows, tokens), "
                    "since this rank's part has positions of one axis"
                )
            by_rank = self._from_all(describe_part(rows, length, positions, padding))
            self._refuse_lengths([one.longest for one in by_rank])
        if positions is None and any(0 in row for row in by_rank[0].flips) and not self._has_rotary:
            raise MemoError(
                f"{FIELD} {self.ranks.size}: rows begin with padding, and {type(module).__name__} may count the tokens behind it "
                "from the padding or not. Pass position_ids"
            )
        parts = self._parts(by_rank)
        if parts is not vars(module)[PARTS]:
            self._hold(parts)
        self._await_backward(parts)
        callers = contiguous(even(length, self.ranks.size) if self.takes_whole else [one.length for one in by_rank])
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

    def _await_backward(self, parts: SequenceParts) -> None:
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

    def _moved(self, value: Any, length: int, callers: list[Pieces], parts: SequenceParts) -> Any:
        if not (isinstance(value, torch.Tensor) and value.dim() > 1 and value.shape[1] == length):
            return value
        return move(value, callers, parts.all_pieces, self.ranks.group)

    def _from_all(self, local: RankPart) -> list[RankPart]:
        by_rank: list[Any] = [None] * self.ranks.size
        dist.all_gather_object(by_rank, local, group=self.ranks.host_group)
        if any(one.rows != local.rows for one in by_rank):
            came = ", ".join(f"{one.rows} x {one.length} on rank {rank}" for rank, one in enumerate(by_rank))
            raise MemoError(
                f"{FIELD} {self.ranks.size}: the ranks of a sequence came with batches of unequal size (rows x tokens: {came}); "
                "expected as many rows. Let UlyssesSPDataLoaderAdapter or ds_memo's split cut batches"
            )
        return by_rank

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

    def _own(self, given: dict[str, Any], rows: int, length: int, parts: SequenceParts) -> dict[str, Any]:
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
        by_rank: list[Any] = [None] * self.ranks.size
        dist.all_gather_object(by_rank, (*tokens.shape[:2], read), group=self.ranks.host_group)
        if len(set(by_rank)) > 1:
            came = ", ".join(f"{rows} x {length} on rank {rank}" for rank, (rows, length, _) in enumerate(by_rank))
            raise MemoError(
                f"{FIELD} {self.ranks.size}: the ranks of a sequence came with other batches (rows x tokens: {came}); a model "
                "that reads more than text takes whole sequences, the same on all of them. Let ds_memo's split send batches "
                "(whole=True)"
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

    def _parts(self, by_rank: Sequence[RankPart]) -> SequenceParts:
        key = sum(one.length for one in by_rank), documents_of(by_rank)
        if key not in self._known:
            if len(self._known) == _KNOWN:
                del self._known[next(iter(self._known))]
            self._known[key] = SequenceParts(self.ranks, *key)
        return self._known[key]


def _text_decoder(base: PreTrainedModel) -> nn.Module:
    """Return the module that runs a model's layers on embedded text."""
    found = base.get_decoder()
    inner = [module for module in base.children() if isinstance(module, PreTrainedModel)]
    # get_decoder knows no name of Llama-4's, and takes ModernBERT's output head for one.
    return inner[0] if len(inner) == 1 and (found is base or not isinstance(found, PreTrainedModel)) else found


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
