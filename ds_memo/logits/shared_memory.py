"""What lazy logits share with their views, as other tensors share a storage: what they are now, and values once they exist.

A change in place that ops.py knows makes another content for all of the memory. Views are made from it anew, so they follow.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch.utils.weak import TensorWeakRef

from ds_memo.errors import MemoError
from ds_memo.logits.lazy_value import LazyValue, RowTile, as_they_are
from ds_memo.remat.tensors import version_of


class Memory:
    """Memory of logits.

    Args:
        content: all of them, row-major.
    """

    def __init__(self, content: LazyValue) -> None:
        self.content = content
        self.changes = 0
        """Changes in place."""
        self.values: torch.Tensor | None = None
        """The logits, once an op that is not known has changed them: for good."""
        self.op = ""
        """That op."""
        self.first = self.followed = -1
        """Versions of the values: as they were made, and as histories are of."""
        self.joined = False
        """True if rows were joined with others: their gradient comes by one of the tensors alone."""
        self.lazy: list[TensorWeakRef] = []
        """All that share it."""
        self.hooked = False
        """True if one of its tensors has a hook."""

    @property
    def has_changed(self) -> bool:
        """True if the values have changed since they were made."""
        return self.values is not None and version_of(self.values) != self.first

    def aliases(self) -> list[Any]:
        """Return the lazy tensors that share it now."""
        self.lazy = [ref for ref in self.lazy if ref() is not None]
        return [ref() for ref in self.lazy]

    def about_to_change(self) -> None:
        """Raise MemoError if a tensor has a hook: what PyTorch makes of it depends on how the head has made its logits."""
        if self.hooked:
            raise MemoError("lazy logits that have a hook, or a view with one, are changed in place. Register hooks on a clone")

    def change(self, new: LazyValue, view: LazyValue, columns: range, tokens: int) -> bool:
        """Change the rows and columns of a view.

        Args:
            new: what the view shall be.
            view: what it is.
            columns: its part of the vocabulary.
            tokens: of the head's call.

        Returns:
            False if this cannot be said by rows.
        """
        old = self.content
        if view.rows == old.rows and len(columns) == old.vocabulary:  # views keep the order of rows
            maps = tuple(each.reshape(old.leading) for each in new.maps)
            self.content = replace(new, maps=maps, distinct=old.distinct, chosen={})
        elif old.distinct:
            numbers = old.maps[0].new_full((tokens,), -1)
            numbers[view.maps[0].reshape(-1)] = torch.arange(view.rows, device=old.device)
            count = len(old.maps)
            all_rows = torch.arange(old.rows, device=old.device).view(old.leading)

            def expression(tile: RowTile) -> torch.Tensor:
                values, number = tile.values(old.expression), tile.operand(count)
                picked = (number >= 0).nonzero()[:, 0]
                rows, part = values[picked], slice(columns.start, columns.stop, columns.step)
                known = {as_they_are: tile.values(as_they_are)[picked], view.expression: rows[:, part]}
                changed = RowTile(new.at(number[picked]), slice(None), known).values(new.expression)
                if len(columns) < old.vocabulary:
                    whole = rows.clone()
                    whole[:, part] = changed
                    changed = whole
                return values.index_copy(0, picked, changed)

            by_row = numbers[old.maps[0].reshape(-1)]
            maps, operands, kept = (*old.maps, all_rows), (*old.operands, by_row), (*old.kept, *new.kept)
            self.content = replace(old, expression=expression, maps=maps, operands=operands, kept=kept, chosen={})
        else:
            return False
        self.changes += 1
        return True


class View(NamedTuple):
    """How lazy logits are made from others whose memory they share."""

    of: Any
    """The other lazy logits."""
    content: Callable[[LazyValue], LazyValue]
    values: Callable[[torch.Tensor], torch.Tensor]
    columns: slice = slice(None)
    """Part of the vocabulary."""
