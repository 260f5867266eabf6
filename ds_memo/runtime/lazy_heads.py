"""The output heads of an attached model: each returns lazy logits, also one that takes another's place later."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from torch import nn

from ds_memo.logits.lazy_head import LazyHead, heads_of, owners_of_heads
from ds_memo.runtime.module_patches import ModulePatches


class LazyHeads:
    """Makes a model's output heads lazy.

    Args:
        model: it is not kept alive.
        heads: filled with its heads.
        patches: of the model.
        make: makes the lazy head of a module.
    """

    def __init__(
        self, model: nn.Module, heads: list[LazyHead], patches: ModulePatches, make: Callable[[nn.Module], LazyHead]
    ) -> None:
        self._owners = [weakref.ref(owner) for owner in owners_of_heads(model)]
        self._heads = heads
        self._patches = patches
        self._make = make
        self._undo: dict[LazyHead, Callable[[], None]] = {}
        self.find()

    def find(self, *_: Any) -> None:
        """Look for heads that took the place of others (resize_token_embeddings, PEFT); a forward pre-hook."""
        now = list(heads_of(owner for ref in self._owners if (owner := ref()) is not None))
        known = [head.module() for head in self._heads]
        if len(known) == len(now) and all(a is b for a, b in zip(known, now, strict=True)):
            return
        for head in [head for head in self._heads if head.module() not in now]:
            self._heads.remove(head)
            head.keep_values()
            self._undo.pop(head)()
        for module in now:
            if module not in known:
                head = self._make(module)
                self._heads.append(head)
                self._undo[head] = self._patches.forward(module, head)
        self._heads.sort(key=lambda head: now.index(head.module()))
