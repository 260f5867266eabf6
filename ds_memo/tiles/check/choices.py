"""Choices of experts in a layer's check: tiles choose as the whole did."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from ds_memo.remat import op_policy
from ds_memo.remat.functions import SkipsCompiled
from ds_memo.spans import Span
from ds_memo.tiles.slices import part


class Choices(SkipsCompiled):
    """Notes what the whole chooses for each token, and has tiles choose the same.

    A GEMM of another size may round otherwise. Of two experts with next to equal scores a router then takes the other one, and
    all that follows for this token differs.

    Args:
        batch, length: of the whole.
    """

    def __init__(self, batch: int, length: int) -> None:
        super().__init__()
        self._size = batch, length
        self._span: Span | None = None
        """None: the whole runs."""
        self._made: list[tuple[Any, torch.Size, torch.Tensor]] = []
        """The whole's choices: op, shape of the scores, what it chose."""
        self._next = 0
        self._scores: list[tuple[torch.Tensor, torch.Tensor]] = []
        """Scores of what tiles would have chosen, and of what they were given."""

    def of_whole(self, span: Span) -> Choices:
        """Supply a tile."""
        self._span, self._next = span, 0
        return self

    def are_alike(self, tolerance: float) -> bool:
        """Return True if tiles would have chosen the same, but for scores that are next to equal."""
        pairs = [(own.float(), given.float()) for own, given in self._scores]
        largest = [float(own[own.isfinite()].abs().amax()) if own.isfinite().any() else 0.0 for own, _ in pairs]
        return all(
            torch.allclose(*pair, tolerance, tolerance * most, equal_nan=True) for pair, most in zip(pairs, largest, strict=True)
        )

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if op_policy.kind_of(func) is not op_policy.OpKind.CHOICE:
            return out
        scores, chosen = args[0], out if isinstance(out, torch.Tensor) else out[1]
        if self._span is None:
            self._made.append((func, scores.shape, chosen.clone()))  # layers change them in place
            return out
        made, self._next = self._made[self._next : self._next + 1], self._next + 1
        dim = next((given for name, given in _arguments(func, args, kwargs or {}) if name == "dim"), None)
        if not made or made[0][0] is not func or dim is None:
            return out
        given = self._part(made[0][1], made[0][2], scores.shape, dim % scores.dim())
        if given is None or given.shape != chosen.shape:
            return out

        def at(index: torch.Tensor) -> torch.Tensor:
            kept = index.dim() == scores.dim()
            found = scores.gather(dim, index if kept else index.unsqueeze(dim))
            return found if kept else found.squeeze(dim)

        values = at(given)
        self._scores.append((at(chosen), values.clone()))
        return given if isinstance(out, torch.Tensor) else (values, given)

    def _part(self, of_whole: torch.Size, chosen: torch.Tensor, of_tile: torch.Size, dim: int) -> torch.Tensor | None:
        """Return the tile's part of what the whole chose for each token; None: it chose among tokens, or they cannot be told."""
        span = self._span
        assert span is not None
        (batch, length), (rows, tokens) = self._size, span.size
        if of_whole[:2] == (batch, length) and of_tile == (rows, tokens, *of_whole[2:]) and dim > 1:
            return part(chosen, span, 1).contiguous()
        if of_whole[0] == batch * length and of_tile == (rows * tokens, *of_whole[1:]) and dim > 0:
            return part(chosen.unflatten(0, self._size), span, 1).flatten(0, 1)
        return None


def _arguments(func: Any, args: tuple, kwargs: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    for position, argument in enumerate(func._schema.arguments):
        given = args[position] if position < len(args) else kwargs.get(argument.name, argument.default_value)
        yield argument.name, given
