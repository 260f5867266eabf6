"""How functions that mix tokens, other than attention, run on a tile of a sequence: they go on where the tile before ended.

A convolution gets its k-1 inputs before the tile, a scan the state behind them. The tables of ds_memo.sequence.mixers name the
arguments.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from ds_memo.remat.checkpoint import CannotTile
from ds_memo.sequence.mixers import CONVOLUTIONS, FUSED, SCANS, Call


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
            CannotTile: it takes no state, or has a state or documents already.
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
        given = None if self._given is None else self._given[len(self.left)]
        return (self._scan if name in SCANS else self._convolve)(name, call, given)

    def _convolve(self, name: str, call: Call, given: torch.Tensor | None) -> torch.Tensor:
        row = CONVOLUTIONS[name]
        x, reach = call.values[row.x].transpose(1, 2), call.values[row.weight].shape[-1] - 1
        x = torch.cat([x.new_zeros(x.shape[0], reach, x.shape[2]) if given is None else given, x], 1)
        self._leave(x[:, x.shape[1] - reach :])
        return call.run(call.values | {row.x: x.transpose(1, 2)})[..., reach:]

    def _scan(self, name: str, call: Call, given: torch.Tensor | None) -> Any:
        how = SCANS[name]
        if how.state is None:
            raise CannotTile(f"its {name} takes no state of the tokens before a tile")
        out, state = call.run(call.values | {how.state: given} | ({how.final: True} if how.final else {}))
        self._leave(state)
        return (out, None) if how.two else out

    def _leave(self, tensor: torch.Tensor) -> None:
        self.left.append(tensor.clone(memory_format=torch.contiguous_format))  # what it is a part of has all tokens of the tile
