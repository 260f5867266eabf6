"""Agreement of ranks on a pass: what it starts from, and what all must do alike because they wait for each other in layers.

ranks that share sequences (Ulysses) or GEMMs (AutoTP)         solve from the same numbers, and plan addresses alike
ranks that meet in layers (ZeRO-3's pieces, experts)           probe, skip recompute, compute inputs, gather for tiles alike
others                                                         need not talk
"""

from __future__ import annotations

import json
import zlib
from typing import NamedTuple, NoReturn

from torch import nn

from ds_memo.autotune.pass_solution import PassSolution
from ds_memo.autotune.pending_calls import InFlight
from ds_memo.distributed import agree
from ds_memo.distributed.topology import is_experts, meet_in_layers, sharing_ranks, talk_in_layers
from ds_memo.placement import PlacementKind
from ds_memo.solve.refusals import NothingFits


class Start(NamedTuple):
    """Numbers that a pass starts from."""

    probes: bool
    """True if inputs do not tell the shapes of hidden states."""
    earlier: int
    """Calls of a layer in forwards that wait for their backward, before the pass that begins."""
    calls: int
    forwards: int
    """Those in flight, the pass among them: see InFlight."""
    reservation: int
    left: int
    share: int
    """Bytes of the host: HostBudget's properties of these names."""
    files: int

    @property
    def in_flight(self) -> InFlight:
        return InFlight(self.calls, self.forwards)


class Vote(NamedTuple):
    """Numbers by which ranks that meet in layers do the same: the greatest of each over all of them."""

    probes: int
    digest: int
    """Digest of the layers without recompute."""
    minus_digest: int
    inputs: int
    """Digest of the layers whose inputs are computed."""
    minus_inputs: int
    refused: int
    in_tiles: int

    @property
    def differs(self) -> bool:
        """True if ranks would recompute other layers."""
        return self.digest != -self.minus_digest

    @property
    def inputs_differ(self) -> bool:
        """True if ranks would compute the inputs of other layers, and gather others before these."""
        return self.inputs != -self.minus_inputs


class Ranks:
    """The ranks that train one model, as this one depends on them. See ds_memo.distributed.topology."""

    def __init__(self, model: nn.Module) -> None:
        self.meet = meet_in_layers(model)
        self.sharing = sharing_ranks(model)
        self.trade_tokens = self.meet and any(map(is_experts, model.parameters()))
        """Ranks exchange tokens for experts in layers, so all would have to run as many tiles."""
        self.may_measure_again = self.meet or not talk_in_layers(model)
        """Layers can be measured again in a later pass: with all ranks, or without making another rank wait."""

    def start_alike(self, start: Start, why_not_planned: str) -> tuple[Start, str]:
        """Return the most careful start of the ranks that share sequences or GEMMs, and why one of them plans no addresses.

        Garbage collection, other models and compilers differ between ranks. A replay on one rank alone would wait for the others.
        """
        answers = agree.meet(json.dumps([start, why_not_planned]), self.sharing)
        starts, whys = zip(*map(json.loads, answers), strict=True)
        counts, nbytes = (zip(*(by_rank[part] for by_rank in starts), strict=True) for part in (slice(4), slice(4, None)))
        why = next((f"rank {rank}: {why}" for rank, why in zip(self.sharing, whys, strict=True) if why), "")
        return Start(*map(max, counts), *map(min, nbytes)), why

    def vote(self, probes: bool, solution: PassSolution | None, refused: bool) -> Vote:
        """Return the vote of the ranks that meet in layers, which call this together, or of this rank."""
        skipping, inputs = (_digest(solution, kind) for kind in (PlacementKind.NO_RECOMPUTE, PlacementKind.SWAPPED_WITHOUT_INPUT))
        in_tiles = solution is not None and solution.run.tiles is not None
        local = Vote(probes, skipping, -skipping, inputs, -inputs, refused, in_tiles)
        return Vote(*agree.greatest(local)) if self.meet else local

    def refuse(self, refusal: NothingFits | None) -> NoReturn:
        """Raise this rank's refusal, or that of another rank, which would else be waited for without a reason.

        All ranks that meet in layers call this together.
        """
        answers = agree.from_all_ranks(refusal and (str(refusal), refusal.numbers)) if self.meet else []
        if refusal is not None:
            raise refusal
        rank, (message, numbers) = next((rank, answer) for rank, answer in enumerate(answers) if answer)
        raise NothingFits(f"rank {rank}: {message}", *numbers)


def _digest(solution: PassSolution | None, wanted: PlacementKind) -> int:
    """Return a number for the layers with placements of a kind.

    Ranks that solve for other layers (a tower that only some call) may have as many of them and not the same.
    """
    if solution is None:
        return 0
    calls = sorted(call for call, kind in solution.kinds.items() if kind is wanted)
    return zlib.crc32(repr(calls).encode()) >> 1 if calls else 0  # fits int32, with either sign
