"""Faults that negative controls put into the product."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from ds_memo.spans import Span


def put_in(patch: pytest.MonkeyPatch, owner: Any, name: str, fault: Callable[..., Any]) -> None:
    """Call `fault` in place of a function of a class or module. Its first argument is the right function."""
    right = getattr(owner, name)
    patch.setattr(owner, name, lambda *args, **named: fault(right, *args, **named))


def a_token_late(right: Callable[..., Any], tensor: torch.Tensor, spans: Sequence[Span], dim: int) -> Any:
    """Slice every tile but the last one token too late, in place of ``tiles.layer.parts``."""
    found = right(tensor, spans, dim)
    for number, span in enumerate(spans):
        if span.tokens.stop < tensor.shape[dim]:
            rows = tensor if dim == 0 else tensor[span.rows]
            found[number] = rows.narrow(dim, span.tokens.start + 1, span.size[1])
    return found
