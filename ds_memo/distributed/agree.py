"""Agreement between ranks on configuration, profile and budgets: the most careful value wins.

Ranks talk in two ways. Where every rank is sure to arrive, they use a collective. But a rank may fail while others wait for it
inside another collective (a layer's all-to-all, a gather of ZeRO-3). A collective by the failed rank would be matched with
theirs: the ranks would hang, or read each other's bytes. So `together` and `words` use the process group's key-value store.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from textwrap import shorten
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from ds_memo.errors import MemoError

T = TypeVar("T")
PATIENCE_S = 600.0
"""Seconds that a rank that succeeded waits for the others' answers."""
GRACE_S = 60.0
"""Seconds that a rank that failed waits. Ranks that do not answer in time are waiting for this one."""
ARRIVAL_S = 60.0
"""Seconds that `words` waits for the others."""
_meetings = itertools.count()
_meetings_of: defaultdict[tuple[int, ...], itertools.count[int]] = defaultdict(itertools.count)
"""Meetings of some ranks, by these."""


class Absent(MemoError):
    """Raised if a rank has not come to a meeting in time."""

    def __init__(self, rank: int, wait_s: float, why: str) -> None:
        super().__init__(f"rank {rank} has not come for {wait_s:g} s: look for the error that it ended with ({why})")
        self.rank = rank


class Failed(MemoError):
    """Raised on all ranks if an action failed on some; the run can go on without it."""

    def __init__(self, problems: Sequence[str]) -> None:
        super().__init__("; ".join(problems[:3]) + (f"; and {len(problems) - 3} more" if len(problems) > 3 else ""))


def world_size() -> int:
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def from_all_ranks(mine: Any) -> list[Any]:
    """Return every rank's object, in rank order; all ranks must call this together."""
    if world_size() == 1:
        return [mine]
    gathered: list[Any] = [None] * world_size()
    dist.all_gather_object(gathered, mine, group=_of_hosts())
    return gathered


def greatest(mine: Sequence[int]) -> list[int]:
    """Return the greatest of each number over all ranks; all ranks must call this together. Cheap enough for every pass."""
    numbers = torch.tensor(mine, dtype=torch.int32)
    if world_size() > 1:
        dist.all_reduce(numbers, dist.ReduceOp.MAX, group=_of_hosts())
    return numbers.tolist()


_hosts: tuple[dist.ProcessGroup, dist.ProcessGroup] | None = None
"""The default group, and the one made for its ranks' host memory."""


def _of_hosts() -> dist.ProcessGroup:
    """Return a group of all ranks that moves host memory. NCCL's does not: then all ranks make one of gloo, once.

    What NCCL moves, the host must wait for: it would wait for all that the device has to do.
    """
    global _hosts
    default = dist.group.WORLD
    if torch.device("cpu") in default._device_types:
        return default
    if _hosts is None or _hosts[0] is not default:
        try:
            _hosts = default, dist.new_group(backend="gloo")
        except RuntimeError as error:
            raise MemoError(
                f"the ranks cannot connect over gloo, by which memo agrees on host memory ({str(error).partition(chr(10))[0]}). "
                "Often a host name resolves to 127.0.1.1: set GLOO_SOCKET_IFNAME to the network interface between the nodes "
                "(ip addr lists them) on every node"
            ) from error
    return _hosts[1]


class Do(Protocol):
    """`together` or `alone`."""

    def __call__(self, what: Callable[[], T]) -> T: ...


def together(what: Callable[[], T]) -> T:
    """Run a function on every rank, each for itself; all ranks must call this together.

    Returns:
        This rank's result, once all ranks have theirs.

    Raises:
        Failed: on all ranks, if it failed on any.
        MemoError: a rank did not answer, so the run cannot go on. A rank that fails inside a collective raises this, because
            the others wait for it there; its exit ends them.
    """
    done: list[T] = []
    error = None
    try:
        done.append(what())
    except Exception as caught:  # the others must hear of any error
        error = caught
    said = _say("" if error is None else _in_words(error))
    problems = [f"rank {number}: {problem}" for number, problem in enumerate(said) if problem]
    if problems:
        raise Failed(problems) from error
    return done[0]


def alone(what: Callable[[], T]) -> T:
    """Run a function on this rank only: other ranks neither wait for it nor hear of a failure.

    Raises:
        Failed: the function failed.
    """
    try:
        return what()
    except Exception as error:
        raise Failed([_in_words(error)]) from error


def _in_words(error: Exception) -> str:
    """Return an error as one line. Long errors of PyTorch are cut; the cause of `Failed` has the full text."""
    text = str(error) if isinstance(error, MemoError) else shorten(str(error), 300, placeholder=" …")
    return f"{type(error).__name__}: {text}"


def words(mine: str, wait: bool = True) -> list[str | None]:
    """Say a word to all ranks; return every rank's, by rank. For ranks that may have failed.

    Args:
        wait: for the others, up to ARRIVAL_S. The word of a rank that has said none by then is None. False: return no words.
    """
    if world_size() == 1:
        return [mine]
    store, meeting = _get_default_store(), next(_meetings)
    keys = [_key(meeting, rank) for rank in range(world_size())]
    store.set(keys[dist.get_rank()], mine)
    if not wait:
        return []
    with suppress(RuntimeError):
        store.wait(keys, timedelta(seconds=ARRIVAL_S))
    return [store.get(key).decode() if store.check([key]) else None for key in keys]


def _key(meeting: int | str, rank: int) -> str:
    return f"ds_memo/{meeting}/{rank}"


def meet(mine: str, ranks: Sequence[int], wait_s: float | None = None) -> list[str]:
    """Tell some ranks, of which this is one, a text; return the text of each. All of them must call this, and no other rank.

    Args:
        wait_s: seconds until a rank counts as absent; None: as many as in a collective.

    Raises:
        Absent: a rank has not called it.
    """
    if len(ranks) == 1:
        return [mine]
    wait_s = _patience_s() if wait_s is None else wait_s
    store, me, all_of_them = _get_default_store(), dist.get_rank(), tuple(ranks)
    meetings, where = _meetings, ""
    if len(all_of_them) < world_size():
        meetings, where = _meetings_of[all_of_them], f"{','.join(map(str, all_of_them))}/"
    meeting = next(meetings)
    said: list[str] = []
    try:
        store.set(_key(f"{where}{meeting}", me), mine)
        for other in all_of_them:
            key = _key(f"{where}{meeting}", other)
            store.wait([key], timedelta(seconds=wait_s))
            said.append(store.get(key).decode())
        store.delete_key(_key(f"{where}{meeting - 1}", me))  # all ranks are here, so all have read it
    except RuntimeError as silence:
        raise Absent(all_of_them[len(said)], wait_s, str(silence).partition("\n")[0]) from silence
    return said


def _patience_s() -> float:
    """Return the seconds that ranks wait for each other in a collective, and PATIENCE_S at least."""
    world = dist.group.WORLD
    options = getattr(world._get_backend(world._device_types[0]), "options", None)
    return max(PATIENCE_S, options._timeout.total_seconds() if options is not None else 0.0)


def _say(problem: str) -> list[str]:
    """Tell the other ranks of a problem; return every rank's problem, "" if it has none."""
    try:
        return meet(problem, range(world_size()), GRACE_S if problem else PATIENCE_S)
    except Absent as absent:
        if not problem:
            raise
        raise MemoError(
            f"rank {dist.get_rank()}: {problem}. Rank {absent.rank} has not answered for {GRACE_S:g} s: it waits for this rank "
            "inside a layer whose ranks talk to each other, so the run cannot go on. With memo.alpha and memo.resident_layers "
            "both set nothing is measured"
        ) from absent


def refuse_differences(what: str, by_rank: Sequence[dict[str, Any]]) -> None:
    """Refuse settings that differ between ranks.

    Raises:
        MemoError: settings differ; the message names them, their values, and the ranks.
    """
    lines = []
    for name in sorted({name for settings in by_rank for name in settings}):
        ranks = defaultdict(list)
        for number, settings in enumerate(by_rank):
            ranks[repr(settings.get(name))].append(number)
        if len(ranks) > 1:
            lines.append(f"{name}: " + ", ".join(f"{value} on {_ranks(numbers)}" for value, numbers in ranks.items()))
    if lines:
        raise MemoError(f"{what} differs between ranks, and all must work alike; " + "; ".join(lines))


def _ranks(ranks: list[int]) -> str:
    shown = ", ".join(map(str, ranks[:8])) + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")
    return f"rank{'s' if len(ranks) > 1 else ''} {shown}"
