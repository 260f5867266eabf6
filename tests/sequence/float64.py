"""Models that say float32 in their code, in float64: what then remains of a difference is no rounding of float32."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch


@contextlib.contextmanager
def float64() -> Iterator[None]:
    """Turn float32 into float64, also where a model's Python file is imported inside."""
    names, cast = torch.float32, torch.Tensor.float
    torch.set_default_dtype(torch.float64)
    torch.float32 = torch.float = torch.float64
    torch.Tensor.float = torch.Tensor.double
    try:
        yield
    finally:
        torch.float32 = torch.float = names
        torch.Tensor.float = cast
        torch.set_default_dtype(names)
