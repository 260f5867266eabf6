"""Rig of the tests of groups: inputs that are computed again are compared with the forward's, to the bit."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn

from ds_memo.tiles.layer import TiledCall
from ds_memo.tiles.slices import part
from tests.faults import put_in
from tests.models import FP32, Outcome
from tests.tiles import rig

LAYERS = 4
"""In groups of three at most the second and the third compute their inputs: the last one stores its own, which makes room."""


@contextmanager
def inputs_compared() -> Iterator[list[str]]:
    """Compare each input that is computed again with the forward's. Yield the layers' names, one for each tile of them."""
    forwards: weakref.WeakKeyDictionary[TiledCall, torch.Tensor] = weakref.WeakKeyDictionary()
    names: list[str] = []

    def forward(right: Callable[..., Any], call: TiledCall, hidden: torch.Tensor) -> Any:
        forwards[call] = hidden.detach().clone()
        return right(call, hidden)

    def take_hidden(right: Callable[..., Any], call: TiledCall, number: int, hidden: torch.Tensor) -> None:
        want = part(forwards[call], call._spans[number], 1)
        assert hidden.dtype == want.dtype and torch.equal(hidden, want), (
            f"the input of {call._tiled.layer.name}, tile {number}, differs"
        )
        names.append(call._tiled.layer.name)
        right(call, number, hidden)

    with pytest.MonkeyPatch.context() as patch:
        put_in(patch, TiledCall, "forward", forward)
        put_in(patch, TiledCall, "take_hidden", take_hidden)
        yield names


def compare(
    model: nn.Module,
    drive: Callable[[nn.Module, int], Outcome] = rig.drive,
    steps: int = 2,
    tolerance: float = FP32,
    computed: int = 2,
    **settings: Any,
) -> dict[str, Any]:
    """Drive a stock copy and a copy in groups of three through the same steps, and compare each. Return the last report.

    Args:
        computed: layers of which inputs must be computed again.
    """
    with inputs_compared() as names:
        report = rig.compare(model, drive, steps, tolerance, **{"input_every": 3, **settings})
    assert len(set(names)) == computed, set(names)
    return report
