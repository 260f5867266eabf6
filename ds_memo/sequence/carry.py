"""How functions that mix tokens, other than attention, run on a tile of a sequence: they go on where the tile before ended.

A convolution gets its k-1 inputs before the tile, a scan the state behind them. The tables of ds_memo.sequence.mixers name the
arguments.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F

from ds_memo.remat.checkpoint import CannotTile
from ds_memo.sequence.mixers import CONVOLUTIONS, FUSED, SCANS, Call

SHORT_STEP = 2.0**-60
"""Time step in which no state decays: exp(SHORT_STEP · A) is 1 in float32 and in float64. A power of two rounds nothing."""


class Carry:
    """What the caught functions of a tile get from the tile before, and leave for the next, in the order of their calls.

    Args:
        given: what the tile before left; None: the tile is its sequence's first.
    """

    def __init__(self, given: Sequence[torch.Tensor] | None) -> None:
        self._given = given
        self.left: list[torch.Tensor] = []

    def run(self, name: str, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Run a function that the tables know on the tile. Convolution and scan in one return None: models then call the two.

        Raises:
            CannotTile: it has a state or documents already.
        """
        if name in FUSED:
            return None
        call = Call.of(function, args, kwargs)
        own = CONVOLUTIONS[name].states if name in CONVOLUTIONS else (SCANS[name].state, SCANS[name].final)
        for argument, value in call.values.items():
            if argument in ("cu_seqlens", "seq_idx") and value is not None:
                raise CannotTile(f"its {name} gets {argument} (packed documents), which is of all tokens")
            if argument in own and value is not None and value is not False:
                raise CannotTile(f"its {name} gets {argument}, as where a cache is used. Set use_cache=False")
        return (self._scan if name in SCANS else self._convolve)(name, call)

    def _next(self) -> torch.Tensor | None:
        return None if self._given is None else self._given[len(self.left)]

    def with_halo(self, x: torch.Tensor, reach: int) -> torch.Tensor:
        """Return a convolution's inputs (b, channels, tokens) behind those of the tile before."""
        given, x = self._next(), x.transpose(1, 2)
        x = torch.cat([x.new_zeros(x.shape[0], reach, x.shape[2]) if given is None else given, x], 1)
        self._leave(x[:, x.shape[1] - reach :])
        return x.transpose(1, 2)

    def _convolve(self, name: str, call: Call) -> torch.Tensor:
        row = CONVOLUTIONS[name]
        reach = call.values[row.weight].shape[-1] - 1
        return call.run(call.values | {row.x: self.with_halo(call.values[row.x], reach)})[..., reach:]

    def _scan(self, name: str, call: Call) -> Any:
        how, given = SCANS[name], self._next()
        if how.state is None:
            out, state = selective_scan(call, given)
        else:
            out, state = call.run(call.values | {how.state: given} | ({how.final: True} if how.final else {}))
        self._leave(state)
        return (out, None) if how.two else out

    def _leave(self, tensor: torch.Tensor) -> None:
        self.left.append(tensor.clone(memory_format=torch.contiguous_format))  # what it is a part of has all tokens of the tile


def selective_scan(call: Call, given: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Run Mamba-1's scan from a state (b, channels, n). Return its output, and the state behind it.

    Its kernel takes no state, and gives the last one no gradient. So n tokens before the tile's write the state, one entry of n
    each, and n tokens behind them read it. All is in float32, as states are inside the kernel.
    """
    values = call.values
    x, dt, to_state, from_state = (values[name].float() for name in ("hidden_states", "dt", "B", "C"))
    if values.get("delta_bias") is not None:
        dt = dt + values["delta_bias"].float()[:, None]
    if values.get("delta_softplus"):
        dt = F.softplus(dt)
    entries = to_state.shape[1]
    each = torch.eye(entries, dtype=x.dtype, device=x.device).expand(len(x), -1, -1)
    none, nothing = torch.zeros_like(each), x.new_zeros(*x.shape[:2], entries)
    step = nothing + SHORT_STEP
    parts = [(x, dt, to_state, from_state), (nothing, step, none, each)]
    if given is not None:
        parts.insert(0, (given, step, each / SHORT_STEP, none))
    tokens = {name: torch.cat(tensors, 2) for name, *tensors in zip(("hidden_states", "dt", "B", "C"), *parts, strict=True)}
    out = call.run(values | tokens | {"delta_bias": None, "delta_softplus": False, "z": None})
    out, state = out[..., -entries - x.shape[2] : -entries], out[..., -entries:]
    if values.get("z") is not None:
        out = out * F.silu(values["z"].float())
    return out.to(values["hidden_states"].dtype), state
