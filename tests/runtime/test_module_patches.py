"""What modules are given is called, held against Transformers' own switches, left out of copies, and undone in reverse."""

from __future__ import annotations

import copy
import gc
import weakref
from typing import Any

import pytest
from torch import nn

from ds_memo.runtime.module_patches import ModulePatches


class Doubles(nn.Module):
    def forward(self, x: int) -> int:
        return 2 * x


def through(calls: list[str], name: str) -> Any:
    def run(forward: Any, *args: Any, **kwargs: Any) -> Any:
        calls.append(name)
        return forward(*args, **kwargs)

    return run


def test_a_plain_layer_comes_through_until_it_is_undone() -> None:
    layer, patches, calls = Doubles(), ModulePatches(), []
    patches.layer(layer, through(calls, "first"))
    patches.layer(layer, through(calls, "second"))
    assert layer(3) == 6 and calls == ["second", "first"]
    patches.undo()
    assert layer(3) == 6 and len(calls) == 2 and "forward" not in vars(layer)
    patches.undo()  # nothing is left to undo


def test_undone_in_reverse() -> None:
    patches, order = ModulePatches(), []
    for number in range(3):
        patches.undo_with(lambda number=number: order.append(number))
    patches.undo()
    assert order == [2, 1, 0]


def test_copies_are_plain() -> None:
    layer, patches, calls = Doubles(), ModulePatches(), []
    patches.layer(layer, through(calls, "ours"))
    patches.before_forward(layer, lambda module, args, kwargs: calls.append("before"))
    patches.after_forward(layer, lambda module, args, output: calls.append("after"))
    assert copy.deepcopy(layer)(3) == 6 and calls == []
    assert layer(3) == 6 and calls == ["before", "ours", "after"]
    patches.undo()


def test_a_hook_after_a_forward_that_raised() -> None:
    layer, patches, calls = Doubles(), ModulePatches(), []
    patches.after_forward(layer, lambda module, args, output: calls.append("always"), always=True)
    patches.after_forward(layer, lambda module, args, output: calls.append("else"))
    with pytest.raises(TypeError):
        layer(None)
    assert calls == ["always"]
    patches.undo()


def test_nothing_is_kept_alive() -> None:
    layer, patches = Doubles(), ModulePatches()
    patches.layer(layer, through([], ""))
    gone = weakref.ref(layer)
    del layer
    gc.collect()
    assert gone() is None
    patches.undo()
