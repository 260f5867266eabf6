"""Contents of lazy logits: hidden states, the output head, and the ops since. Values exist for one tile of rows at a time.

A content is data without autograd; nodes.py has the graph. In names of shapes N is rows (tokens), H the hidden size, V the
vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from ds_memo.errors import MemoError
from ds_memo.remat.autocast import Autocast, autocast_as
from ds_memo.remat.layer_state import Before
from ds_memo.remat.modes import running_tiles
from ds_memo.remat.tensors import version_of
from ds_memo.remat.undo import Undoing

PerRow = Callable[..., Any]
"""fn(values, *arguments of the same rows): a tensor of results by row, or a tuple of them."""


CHANGED = (
    "logits are read or differentiated after the output head's {} were changed in place, so they would be another model's. Read "
    'them before, or set memo.kernels.cross_entropy to "whole"'
)


FREED = (
    "logits are read after the memory of the output head's weights was freed by what had gathered them. Read them before, or set "
    'memo.kernels.cross_entropy to "whole"'
)


class HeadInputs:
    """Tensors that lazy logits hold: the hidden states, and the head's parameters as they were at the call.

    Only the lazy tensors keep it alive. The graph saves the hidden states as autograd does, and uses the parameters.
    """

    def __init__(self, hidden_NH: torch.Tensor, parameters: list[nn.Parameter]) -> None:
        self.hidden_NH = hidden_NH
        self._parameters = parameters
        self._values = [parameter.detach() for parameter in parameters]  # ZeRO-3 has them gathered during the call
        self._versions = self._versions_now()
        self.sums = sums_of(hidden_NH, self._values)

    def values(self) -> list[torch.Tensor]:
        """Return the head's parameters as they were at the call.

        Raises:
            MemoError: they or the hidden states were changed since, by another than an optimizer's step, or they are freed.
        """
        if any(map(_is_freed, self._values)):
            raise MemoError(FREED)
        for what, now, then in zip(("hidden states", "weights"), self._versions_now(), self._versions, strict=True):
            if now != then:
                raise MemoError(CHANGED.format(what))
        return self._values

    def check(self) -> None:
        """Raise MemoError if hidden states or parameters were changed since the call, even by ``.data``."""
        raise_what_is_known()
        refuse_if(
            (sums_of(self.hidden_NH, self.values()) != self.sums).any(), MemoError(CHANGED.format("hidden states or weights"))
        )

    def keep_values(self) -> None:
        """Copy parameters that are about to be changed in place by an optimizer's step, or freed by FSDP2."""
        versions = self._versions[1]
        for index, (value, parameter) in enumerate(zip(self._values, self._parameters, strict=True)):
            if value.data_ptr() == parameter.data_ptr() and not _is_freed(value):
                self._values[index] = value.clone()
                versions[index] = 0 if versions[index] == version_of(value) else -1

    def _versions_now(self) -> tuple[list[int], list[int]]:
        return [version_of(self.hidden_NH)], [version_of(value) for value in self._values]


def _is_freed(value: torch.Tensor) -> bool:
    return bool(value.numel()) and not value.untyped_storage().nbytes()


def sums_of(hidden_NH: torch.Tensor, parameters: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return sum and sum of magnitudes of each, (n, 2). Changes by ``.data`` show there, which no version counts."""
    sums = []
    for each in (hidden_NH, *parameters):
        wide = torch.promote_types(each.dtype, torch.float32)
        sums += [each.sum(dtype=wide), torch.linalg.vector_norm(each, 1, dtype=wide)]
    return torch.stack(sums).nan_to_num().view(-1, 2)


_UNKNOWN: list[tuple[torch.Tensor, torch.cuda.Event, MemoError]] = []
"""Errors of which a CUDA device has not told yet if they are to be raised."""


def refuse_if(changed: torch.Tensor, error: MemoError) -> None:
    """Raise an error if a scalar is true. The host does not wait for CUDA: the error then comes with a later call."""
    if not changed.is_cuda:
        if changed:
            raise error
        return
    told = torch.zeros((), dtype=torch.bool, pin_memory=True)
    told.copy_(changed, non_blocking=True)
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(changed.device))  # after the copy: the host reads it once this has passed
    _UNKNOWN.append((told, event, error))


def raise_what_is_known() -> None:
    """Raise an error of :func:`refuse_if` that CUDA has told of since."""
    while _UNKNOWN and _UNKNOWN[0][1].query():
        told, _, error = _UNKNOWN.pop(0)
        if told:
            _UNKNOWN.clear()
            raise error


class KeptOperand:
    """A tensor that lazy logits are computed with, as it is now: a copy, or of a large one the tensor, if it does not change.

    Args:
        most: numbers that are copied.
    """

    def __init__(self, tensor: torch.Tensor, most: int) -> None:
        copies = tensor.numel() <= most
        self._tensor = tensor.clone() if copies else tensor
        self._version = version_of(self._tensor)
        self._sum = None if copies else tensor.sum(dtype=torch.float64).nan_to_num()

    def get(self) -> torch.Tensor:
        """Return it.

        Raises:
            MemoError: it was changed in place meanwhile.
        """
        if version_of(self._tensor) != self._version:
            raise self._changed()
        return self._tensor

    def check(self) -> None:
        """Raise MemoError if it was changed, even by ``.data``."""
        if self._sum is not None:
            refuse_if(self.get().sum(dtype=torch.float64).nan_to_num() != self._sum, self._changed())

    def _changed(self) -> MemoError:
        return MemoError(
            f"a tensor of {tuple(self._tensor.shape)} was changed in place after lazy logits were computed with it, and before "
            "they were read or their backward ran. Give them a clone"
        )


@dataclass(eq=False)
class HeadCall:
    """One call of an output head."""

    forward: Callable[[torch.Tensor], torch.Tensor]
    """The head's own: a function of rows, each by itself."""
    places: Sequence[tuple[dict[str, Any], str, int]]
    """Where the head's modules hold parameters: a table, the name in it, the number of the parameter."""
    before: Before | None
    """State of the head's modules at the call (PEFT's adapters may be off). None: it has none."""
    wanted: tuple[bool, ...] | None
    """True for the hidden states, then for each parameter, that needs a gradient. None: the call made no graph."""
    tile_rows: int
    sums: torch.Tensor
    """:func:`sums_of` the hidden states and parameters."""
    autocast: Autocast
    warn: Callable[[str], None]
    summed: bool = False
    """True once a loss has computed its gradients with it. They take a float32 copy of the head: other losses wait."""

    @contextmanager
    def with_parameters(self, values: list[torch.Tensor]) -> Iterator[None]:
        """Have the head compute as in its call, with these parameters: the same adapters on or off, training or not."""
        held = [dict.__getitem__(table, name) for table, name, _ in self.places]  # ZeRO-3's own would gather, on this rank alone

        def put_back() -> None:
            for (table, name, _), parameter in zip(self.places, held, strict=True):
                table[name] = parameter

        as_then = nullcontext() if self.before is None else self.before.put_in()
        with running_tiles(), as_then, Undoing(put_back), autocast_as(self.autocast):
            for table, name, number in self.places:
                table[name] = values[number]
            yield
        if any(on for _, on, _ in self.autocast):
            torch.clear_autocast_cache()  # of the casts of `values`


@dataclass(eq=False)
class LazyValue:
    """Logits of some rows of a source, and what was done to them since."""

    head_call: HeadCall
    expression: Callable[[RowTile], torch.Tensor]
    """Values of a tile, (rows, V)."""
    maps: tuple[torch.Tensor, ...]
    """Indices with the leading dimensions of the logits: [0] into the hidden states, [k] into ``operands[k - 1]``."""
    operands: tuple[torch.Tensor | OtherHead, ...]
    """Operands with values by row."""
    vocabulary: int
    dtype: torch.dtype
    device: torch.device
    moved: bool = False
    """True if the vocabulary is dimension 1, as cross_entropy wants it of three or more."""
    column: bool = False
    """True for one entry of the vocabulary, without its dimension."""
    chosen: dict[str, list[Any]] = field(default_factory=dict)
    """Choices of rows of each map, by the op's text: the same choice made twice is one."""
    kept: tuple[KeptOperand, ...] = ()
    """Tensors that the expression is computed with."""

    @property
    def leading(self) -> torch.Size:
        return self.maps[0].shape

    @property
    def rows(self) -> int:
        return self.maps[0].numel()

    @property
    def shape(self) -> tuple[int, ...]:
        if self.column:
            return tuple(self.leading)
        return (self.leading[0], self.vocabulary, *self.leading[1:]) if self.moved else (*self.leading, self.vocabulary)

    @property
    def by_rows(self) -> bool:
        """True if the vocabulary is the last dimension."""
        return not (self.moved or self.column)

    @property
    def few(self) -> int:
        """Numbers of a tensor that is small beside logits."""
        return max(8 * self.rows, self.vocabulary)

    def tiles(self) -> list[slice]:
        """Return the spans of rows that exist at once; of no rows one empty span."""
        step = self.head_call.tile_rows
        return [slice(start, min(start + step, self.rows)) for start in range(0, self.rows, step)] or [slice(0, 0)]

    def at(self, index: torch.Tensor) -> LazyValue:
        """Return the content of the rows with these indices."""
        return replace(self, maps=tuple(by_row.reshape(-1)[index] for by_row in self.maps), chosen={})

    def check(self) -> None:
        """Raise MemoError if what these are made with could not be computed as it was."""
        for kept in self.kept:
            kept.check()
        for operand in self.operands:
            if isinstance(operand, OtherHead):
                operand.inputs.check()
                operand.content.check()

    def shaped(self, by_row: torch.Tensor) -> torch.Tensor:
        """Return (rows, V) values in the shape of the logits."""
        values = by_row.reshape(self.shape if self.column else (*self.leading, *by_row.shape[1:]))
        return values.movedim(-1, 1) if self.moved else values


@dataclass(eq=False)
class OtherHead:
    """An operand that is logits of another call: a teacher's, a reference model's. No gradient goes there."""

    content: LazyValue
    inputs: HeadInputs

    def at(self, index: torch.Tensor) -> torch.Tensor:
        """Return the values of the rows with these indices."""
        few = self.content.at(index)
        head_call = few.head_call
        with torch.no_grad(), head_call.with_parameters(self.inputs.values()):
            known = {as_they_are: head_call.forward(self.inputs.hidden_NH[few.maps[0]])}
            return RowTile(few, slice(None), known).values(few.expression)


class RowTile:
    """Values of expressions for a span of rows; each is computed once.

    Args:
        known: values by expression, `as_they_are` at least. Contents of the same rows may share it.
    """

    def __init__(self, content: LazyValue, span: slice, known: dict[Any, torch.Tensor]) -> None:
        self._content = content
        self._span = span
        self._known = known

    def values(self, expression: Callable[[RowTile], torch.Tensor]) -> torch.Tensor:
        if expression not in self._known:
            self._known[expression] = expression(self)
        return self._known[expression]

    def operand(self, number: int) -> torch.Tensor:
        index = self._content.maps[number].reshape(-1)[self._span]
        operand = self._content.operands[number - 1]
        return operand.at(index) if isinstance(operand, OtherHead) else operand[index]


def as_they_are(tile: RowTile) -> torch.Tensor:
    """Return the head's own output: the expression that all others begin with."""
    return tile.values(as_they_are)


def results(
    content: LazyValue, inputs: HeadInputs, fn: PerRow, arguments: tuple, device: torch.device | None = None
) -> list[torch.Tensor]:
    """Return ``fn(values, *arguments)`` of all rows, tile by tile, without a graph.

    Args:
        arguments: tensors by row.
        device: where the results go; None: where they are.
    """
    inputs.check()
    content.check()
    head_call, index, found = content.head_call, content.maps[0].reshape(-1), None
    values = [value.detach().requires_grad_() for value in inputs.values()]  # autocast keeps the casts of leaves
    with torch.no_grad(), head_call.with_parameters(values):
        for span in content.tiles():
            tile = RowTile(content, span, {as_they_are: head_call.forward(inputs.hidden_NH[index[span]])})
            parts = as_tuple(fn(tile.values(content.expression), *(argument[span] for argument in arguments)))
            if found is None:
                found = [part.new_empty((content.rows, *part.shape[1:]), device=device) for part in parts]
            for whole, part in zip(found, parts, strict=True):
                whole[span].copy_(part)
    assert found is not None
    return found


def as_tuple(found: Any) -> tuple[torch.Tensor, ...]:
    return found if isinstance(found, tuple) else (found,)
