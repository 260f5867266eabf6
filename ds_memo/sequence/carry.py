"""How functions that mix tokens, other than attention, run on a tile of a sequence: they go on where the tile before ended.

A convolution gets its k-1 inputs before the tile, a scan the state behind them. Where ranks share the sequence, their tiles are
one stretch of it: a convolution gets its halo from the rank before, and a scan runs on all tokens of the stretch and some heads,
whose states its rank carries. The tables of ds_memo.sequence.mixers name the arguments.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F

from ds_memo.remat.layer_call import CannotTile
from ds_memo.sequence import exchange
from ds_memo.sequence.mixers import CONVOLUTIONS, FUSED, SCANS, MixerCall, Scan, Spread, on_heads, one_by_one
from ds_memo.sequence.parts import SequenceParts, concatenated

SHORT_STEP = 2.0**-60
"""Time step in which no state decays: exp(SHORT_STEP · A) is 1 in float32 and in float64. A power of two rounds nothing."""


class Carry:
    """What the caught functions of a tile get from the tile before, and leave for the next, in the order of their calls.

    Args:
        given: what the tile before left; None: the tile is its sequence's first.
        stretch: the tile and those of the ranks that share the sequence; None: each rank has whole sequences.
    """

    def __init__(self, given: Sequence[torch.Tensor] | None, stretch: SequenceParts | None = None) -> None:
        self._given = given
        self._stretch = stretch
        self.left: list[torch.Tensor] = []

    def run(self, name: str, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Run a function that the tables know on the tile. Convolution and scan in one return None: models then call the two.

        Raises:
            CannotTile: it has a state or documents already.
        """
        if name in FUSED:
            return None
        call = MixerCall.of(function, args, kwargs)
        own = CONVOLUTIONS[name].states if name in CONVOLUTIONS else (SCANS[name].state, SCANS[name].final)
        for argument, value in call.values.items():
            if argument in ("cu_seqlens", "seq_idx") and value is not None:
                raise CannotTile(f"its {name} gets {argument} (packed documents), which is of all tokens")
            if argument in own and value is not None and value is not False:
                raise CannotTile(f"its {name} gets {argument}, as where a cache is used. Set use_cache=False")
        return (self._scan if name in SCANS else self._convolve)(name, call)

    def _next(self) -> torch.Tensor | None:
        return None if self._given is None else self._given[len(self.left)]

    def _leave(self, tensor: torch.Tensor) -> None:
        self.left.append(tensor.clone(memory_format=torch.contiguous_format))  # what it is a part of has all tokens of the tile

    # ---- convolutions

    def _convolve(self, name: str, call: MixerCall) -> torch.Tensor:
        row = CONVOLUTIONS[name]
        if self._stretch is not None:
            call.refuse_unknown(name, dict.fromkeys((row.x, row.weight, "bias")), row.states)
        x, gathered = self.with_halo(call.values[row.x], call.values[row.weight].shape[-1] - 1)
        return gathered(call.run(call.values | {row.x: x}))

    def with_halo(self, x: torch.Tensor, reach: int) -> tuple[torch.Tensor, Callable[[torch.Tensor], torch.Tensor]]:
        """Return a convolution's inputs (b, channels, tokens) behind those before the tile, and what takes the tile's outputs."""
        given, tokens, by_token = self._next(), x.shape[2], x.transpose(1, 2)
        before = by_token.new_zeros(x.shape[0], reach, x.shape[1]) if given is None else given
        behind = torch.cat([before, by_token], 1)
        if self._stretch is not None:
            spread = Spread(x, reach, self._stretch, self._halo(behind, reach, self._stretch))
            return spread.x, spread.gathered
        self._leave(behind[:, tokens:])
        return behind.transpose(1, 2), lambda y: y[..., reach : reach + tokens]

    def _halo(self, behind: torch.Tensor, reach: int, stretch: SequenceParts) -> torch.Tensor:
        """Return the tokens before this rank's tile, and leave those that end the stretch to the first rank's next tile.

        What other ranks carry is zeros that no rank wants: so frames and graphs are alike on all.

        Args:
            behind: what the tile before left, and the tile.
        """
        ranks, length = range(stretch.ranks.size), stretch.length
        have = [((-reach * (rank + 1), -reach * rank), *stretch.pieces_of(rank)) for rank in ranks]
        ends = [length - reach if rank == 0 else length for rank in ranks]
        want = [((start - reach, start), (end, end + reach)) for ((start, _),), end in zip(stretch.all_pieces, ends, strict=True)]
        halo, left = exchange.move(behind, have, want, stretch.ranks.group).split(reach, 1)
        self._leave(left)
        return halo

    # ---- scans

    def _scan(self, name: str, call: MixerCall) -> Any:
        how, given = SCANS[name], self._next()
        if self._stretch is None:
            out, state = _run_from(call, call.values, how, {}, given)
            self._leave(state)
            return (out, None) if how.two else out
        states: list[torch.Tensor] = []

        def run(values: dict[str, Any], parts: SequenceParts) -> torch.Tensor:
            """Run a document at a time: kernels that can be told of documents take no states."""
            step = functools.partial(_run_from, call, values, how)
            out, states[:] = one_by_one(values, how, parts, step, given)
            return out

        out = on_heads(name, call, how, self._stretch, run)
        self._leave(concatenated(states, 0) if states else call.values[how.lead].new_zeros(1))  # a rank may have no heads
        return out


def _run_from(
    call: MixerCall, values: Mapping[str, Any], how: Scan, tokens: Mapping[str, Any], state: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Run a scan from a state. Return its output, and the state behind it.

    Args:
        values, tokens: the call's arguments, and those of them that are of these tokens.
    """
    if how.state is None:
        return selective_scan(call, {**values, **tokens}, state)
    return call.run({**values, **tokens, how.state: state} | ({how.final: True} if how.final else {}))


def selective_scan(call: MixerCall, values: Mapping[str, Any], given: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Run Mamba-1's scan from a state (b, channels, n). Return its output, and the state behind it.

    Its kernel takes no state, and gives the last one no gradient. So n tokens before the tile's write the state, one entry of n
    each, and n tokens behind them read it. All is in float32, as states are inside the kernel.
    """
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
    with torch.autocast(x.device.type, enabled=False):  # PyTorch's own reads states by a product
        out = call.run({**values, **tokens, "delta_bias": None, "delta_softplus": False, "z": None})
    out, state = out[..., -entries - x.shape[2] : -entries], out[..., -entries:]
    if values.get("z") is not None:
        out = out * F.silu(values["z"].float())
    return out.to(values["hidden_states"].dtype), state
