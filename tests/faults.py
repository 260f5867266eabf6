"""Faults that negative controls put into the product."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from ds_memo.spans import Span


def put_in(patch: pytest.MonkeyPatch, owner: Any, name: str, fault: Callable[..., Any]) -> None:
    """Call `fault` in place of a function of a class or module. Its first argument is the right function."""
    right = getattr(owner, name)
    patch.setattr(owner, name, lambda *args, **named: fault(right, *args, **named))


def a_token_late(right: Callable[..., Any], tensor: torch.Tensor, span: Span, dim: int) -> Any:
    """Slice every tile but the last one token too late, in place of ``tiles.layer.part``."""
    late = span.tokens.stop < tensor.shape[dim]
    return right(tensor, Span(span.rows, slice(span.tokens.start + late, span.tokens.stop + late)), dim)
