"""State that lazy logits share with their views, as tensors share a storage: an expression, and values once they exist.

A change in place that ops.py knows makes another content for all of the memory. Views are made from it anew, so they follow.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch.utils.weak import TensorWeakRef

from ds_memo.errors import MemoError
from ds_memo.logits.lazy_value import LazyValue
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

    def change(self, new: LazyValue) -> bool:
        """Have all rows and columns be others. Return False if these are some of them: then the logits must be real."""
        old = self.content
        if (new.rows, new.vocabulary) != (old.rows, old.vocabulary):
            return False
        maps = tuple(each.reshape(old.leading) for each in new.maps)  # views keep the order of rows
        self.content = replace(new, maps=maps, chosen={})
        self.changes += 1
        return True


class View(NamedTuple):
    """How lazy logits are made from others whose memory they share."""

    of: Any
    """The other lazy logits."""
    content: Callable[[LazyValue], LazyValue]
    values: Callable[[torch.Tensor], torch.Tensor]
