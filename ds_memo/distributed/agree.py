"""What all ranks must have in common: the configuration, the profile, the budgets. The most careful of each wins.

There are two ways for ranks to talk. Where every rank is sure to come, a collective does. But where a rank may fail on the way
while others wait for it inside a collective of their own (a layer's all-to-all, a gather of ZeRO-3), a collective by the rank
that failed would be matched with theirs: they would hang, or read each other's bytes. So `together` and `late` use the process
group's key-value store, which no collective waits on.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Sequence
from datetime import timedelta
from textwrap import shorten
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from ds_memo.errors import MemoError

T = TypeVar("T")
PATIENCE_S = 600.0
"""How long a rank that succeeded waits for the others' answers."""
GRACE_S = 60.0
"""How long a rank that failed does. Ranks that do not answer within it are waiting for this one."""
ARRIVAL_S = 60.0
"""How long `late` waits for the others."""
_meetings = itertools.count()


class Failed(MemoError):
    """Something failed on some ranks; all of them know, and may go on without it."""

    def __init__(self, problems: Sequence[str]) -> None:
        super().__init__("; ".join(problems[:3]) + (f"; and {len(problems) - 3} more" if len(problems) > 3 else ""))


def world_size() -> int:
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def from_all_ranks(mine: Any) -> list[Any]:
    """Every rank's object, in the order of the ranks; all ranks must call this together."""
    if world_size() == 1:
        return [mine]
    everybody: list[Any] = [None] * world_size()
    dist.all_gather_object(everybody, mine)
    return everybody


def greatest(mine: Sequence[int], device: torch.device) -> list[int]:
    """The greatest of every number over all ranks; all ranks must call this together. Cheap enough for every pass."""
    numbers = torch.tensor(mine, dtype=torch.int32, device=device)
    if world_size() > 1:
        dist.all_reduce(numbers, dist.ReduceOp.MAX)
    return numbers.tolist()


class Do(Protocol):
    """`together` or `alone`."""

    def __call__(self, what: Callable[[], T]) -> T: ...


def together(what: Callable[[], T]) -> T:
    """Do something on all ranks, each by itself; all ranks must call this together.

    Returns:
        This rank's result, once all ranks have theirs.

    Raises:
        Failed: on all ranks, if it failed on any.
        MemoError: a rank did not answer, so the run cannot go on. So it is if a rank fails in the middle of a collective: the
            others wait for it there. It raises this, and its end ends them.
    """
    done: list[T] = []
    error = None
    try:
        done.append(what())
    except Exception as caught:  # whatever it is, the others must hear of it
        error = caught
    said = _say("" if error is None else _in_words(error))
    problems = [f"rank {number}: {problem}" for number, problem in enumerate(said) if problem]
    if problems:
        raise Failed(problems) from error
    return done[0]


def alone(what: Callable[[], T]) -> T:
    """As `together`, for this rank alone: the others neither wait for it nor hear of a failure.

    Raises:
        Failed: it failed.
    """
    try:
        return what()
    except Exception as error:
        raise Failed([_in_words(error)]) from error


def _in_words(error: Exception) -> str:
    """On one line. PyTorch's errors may go on for a page: they are cut, and whole in the cause of `Failed`."""
    text = str(error) if isinstance(error, MemoError) else shorten(str(error), 300, placeholder=" …")
    return f"{type(error).__name__}: {text}"


def late() -> list[int]:
    """Wait until all ranks have called this; returns those that have not after ARRIVAL_S. For ranks that may have failed."""
    if world_size() == 1:
        return []
    store, meeting = _get_default_store(), next(_meetings)
    keys = [_key(meeting, rank) for rank in range(world_size())]
    store.set(keys[dist.get_rank()], "")
    try:
        store.wait(keys, timedelta(seconds=ARRIVAL_S))
    except RuntimeError:
        return [rank for rank, key in enumerate(keys) if not store.check([key])]
    return []


def _key(meeting: int, rank: int) -> str:
    return f"ds_memo/{meeting}/{rank}"


def _say(problem: str) -> list[str]:
    """Tell the others of a problem; returns every rank's, "" where there is none."""
    if world_size() == 1:
        return [problem]
    store, me, meeting = _get_default_store(), dist.get_rank(), next(_meetings)
    said: list[str] = []
    try:
        store.set(_key(meeting, me), problem)
        for other in range(world_size()):
            key = _key(meeting, other)
            store.wait([key], timedelta(seconds=GRACE_S if problem else PATIENCE_S))
            said.append(store.get(key).decode())
        store.delete_key(_key(meeting - 1, me))  # everybody is here, so everybody has read it
    except RuntimeError as silence:
        if problem:
            raise MemoError(
                f"rank {me}: {problem}. Rank {len(said)} has not answered for {GRACE_S:g} s: it waits for this rank inside a "
                "layer whose ranks talk to each other, so the run cannot go on. With memo.alpha and memo.resident_layers both "
                "set nothing is measured"
            ) from silence
        raise MemoError(
            f"rank {me} waited {PATIENCE_S:g} s for rank {len(said)}, or lost it ({silence}): look for the error it ended with"
        ) from silence
    return said


def refuse_differences(what: str, everybody: Sequence[dict[str, Any]]) -> None:
    """Compare settings by name.

    Raises:
        MemoError: with every setting that differs, its values, and the ranks that have them.
    """
    lines = []
    for name in sorted({name for settings in everybody for name in settings}):
        ranks = defaultdict(list)
        for number, settings in enumerate(everybody):
            ranks[repr(settings.get(name))].append(number)
        if len(ranks) > 1:
            lines.append(f"{name}: " + ", ".join(f"{value} on {_ranks(who)}" for value, who in ranks.items()))
    if lines:
        raise MemoError(f"{what} differs between ranks, and all must work alike; " + "; ".join(lines))


def _ranks(ranks: list[int]) -> str:
    shown = ", ".join(map(str, ranks[:8])) + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")
    return f"rank{'s' if len(ranks) > 1 else ''} {shown}"
