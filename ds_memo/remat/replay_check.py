"""Compare a layer's first replay with its forward: a few values of each tensor that autograd saves.

Random numbers from a generator that no attribute holds, the clock, or a global switch make a replay compute something else.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._C import _DisableTorchDispatch
from torch.utils.checkpoint import _StopRecomputationError

_VALUES = 64
"""Values of a tensor that are compared."""
_SEEDS = 2
"""Integers that may be an attention kernel's seed and offset. cuDNN's leaves them unwritten where it drops nothing, so that a
replay that runs the kernel again finds something else there."""
_MOST_OFF = 0.05
"""Share of them that may differ: an activation's input goes to the other side of its kink."""
DIFFERS = (
    "its replay computes other values than its forward did, so gradients are wrong, as under torch.utils.checkpoint: it draws "
    "random numbers from a generator that memo does not see, or reads what has changed since. Let the layer hold the generator, "
    "or leave it without recompute"
)


class ReplayCheck:
    """Values of the tensors that autograd saved in a call.

    Args:
        warn: called if the replay's differ.
    """

    def __init__(self, warn: Callable[[str], None]) -> None:
        self._warn = warn
        self._taken: list[torch.Tensor] | None = []
        """None: compared."""

    def sample(self, tensor: torch.Tensor) -> None:
        if self._taken is not None:
            self._taken.append(_some_of(tensor))

    def skip(self, number: int) -> None:
        """Take nothing of a number of tensors. The forward saved them out of order."""
        if self._taken is not None:
            self._taken += [torch.empty(0)] * number

    def around(self, replay: Callable[..., Any]) -> Callable[..., Any]:
        """Return `replay` wrapped so that its first run is compared."""

        def run(*args: Any) -> Any:
            if self._taken is None:
                return replay(*args)
            taken, self._taken = self._taken, None
            pack, unpack = torch._C._autograd._top_saved_tensors_default_hooks(False)
            again: list[torch.Tensor] = []

            def taking_pack(tensor: torch.Tensor) -> Any:
                again.append(_some_of(tensor))
                return pack(tensor)

            try:
                with torch.autograd.graph.saved_tensors_hooks(taking_pack, unpack):
                    out = replay(*args)
            except _StopRecomputationError:
                self._compare(taken, again)
                raise
            self._compare(taken, again)
            return out

        return run

    def _compare(self, taken: list[torch.Tensor], again: list[torch.Tensor]) -> None:
        if _differ(taken, again):
            self._warn(DIFFERS)


def _some_of(tensor: torch.Tensor) -> torch.Tensor:
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter) or not torch._C._has_storage(tensor) or not tensor.numel():
        return torch.empty(0)
    if tensor.numel() <= _SEEDS and not tensor.is_floating_point():
        return torch.empty(0)
    with _DisableTorchDispatch(), torch.no_grad():
        reach = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        step = max(1, reach // _VALUES)
        return tensor.detach().as_strided((reach // step + 1,), (step,), tensor.storage_offset()).clone()


def _differ(taken: list[torch.Tensor], again: list[torch.Tensor]) -> bool:
    """Return True if more than a few values of any tensor differ. Rows of a GEMM may be off in their last bits."""
    with torch.no_grad():
        shares = [_share_off(a, b) for a, b in zip(taken, again, strict=False) if a.shape == b.shape and a.numel()]
        return bool(shares) and bool(torch.stack([share.to(shares[0].device) for share in shares]).max() > _MOST_OFF)


def _share_off(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    if not a.is_floating_point():
        return (a != b).float().mean()
    within = torch.finfo(a.dtype).eps ** 0.5
    return (~torch.isclose(a.float(), b.float(), within, within * a.float().abs().nanmean(), equal_nan=True)).float().mean()
