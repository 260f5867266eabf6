"""What all ranks must have in common: the configuration, the profile, the budgets. The most careful of each wins."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch.distributed as dist

from ds_memo.errors import MemoError
from ds_memo.profile.sample import Profile


def from_all_ranks(mine: Any) -> list[Any]:
    """What every rank has to say, in the order of the ranks; all ranks must call this together."""
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return [mine]
    everybody: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everybody, mine)
    return everybody


def refuse_differences(what: str, everybody: Sequence[dict[str, Any]]) -> None:
    """Compare settings by name.

    Raises:
        MemoError: with every setting that differs, its values, and the ranks that have them.
    """
    lines = []
    for name in sorted({name for settings in everybody for name in settings}):
        ranks = defaultdict(list)
        for rank, settings in enumerate(everybody):
            ranks[repr(settings.get(name))].append(rank)
        if len(ranks) > 1:
            lines.append(f"{name}: " + ", ".join(f"{value} on {_ranks(who)}" for value, who in ranks.items()))
    if lines:
        raise MemoError(f"{what} differs between ranks, and all must work alike; " + "; ".join(lines))


def most_careful(profiles: Sequence[Profile]) -> Profile:
    """One profile for all: the slowest copies, and of every layer the samples of the rank that needs the most memory.

    Times are rank 0's: ranks wait for each other in every step, so a slower one slows all.
    """
    first = profiles[0]
    kinds = []
    for kind in range(len(first.kinds)):
        of_all = [profile.kinds[kind] for profile in profiles]
        worst = [max(p.samples[i].working_bytes for p in of_all) for i in range(len(first.kinds[kind].samples))]
        samples = zip(of_all[0].samples, worst, strict=True)
        kinds.append(replace(of_all[0], samples=tuple(replace(sample, working_bytes=most) for sample, most in samples)))
    return replace(
        first,
        kinds=tuple(kinds),
        d2h_bytes_per_s=min(profile.d2h_bytes_per_s for profile in profiles),
        h2d_bytes_per_s=min(profile.h2d_bytes_per_s for profile in profiles),
    )


def all_or_none(mine: Callable[[], Any]) -> tuple[Any, list[str]]:
    """Do something on all ranks: its result, and what went wrong anywhere. A rank that fails leaves none waiting."""
    result, problem = None, None
    try:
        result = mine()
    except (MemoError, RuntimeError, TypeError, ValueError, IndexError, KeyError, AttributeError, NotImplementedError) as error:
        problem = f"{type(error).__name__}: {error}"
    problems = [f"rank {rank}: {said}" for rank, said in enumerate(from_all_ranks(problem)) if said]
    return result, problems


def _ranks(ranks: list[int]) -> str:
    shown = ", ".join(map(str, ranks[:8])) + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")
    return f"rank{'s' if len(ranks) > 1 else ''} {shown}"
