"""Agreement between ranks on configuration, profile and budgets: the most careful value wins.

Ranks talk in two ways. Where every rank is sure to arrive, they use a collective. But a rank may fail while others wait for it
inside another collective (a layer's all-to-all, a gather of ZeRO-3). A collective by the failed rank would be matched with
theirs: the ranks would hang, or read each other's bytes. So `on_all_ranks`, `meet` and `announce` use ds_memo.distributed.store.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist

from ds_memo.distributed import store
from ds_memo.distributed.lost_ranks import Absent, LostRank, in_numbers, in_words, naming_lost_ranks
from ds_memo.errors import MemoError

T = TypeVar("T")
GRACE_S = 60.0
"""Seconds that a rank that failed waits at most. Ranks that do not answer in time are waiting for this one."""
_meetings = itertools.count()
_meetings_of: defaultdict[tuple[int, ...], itertools.count[int]] = defaultdict(itertools.count)
"""Meetings of some ranks, by these."""


class Failed(MemoError):
    """Raised on all ranks if an action failed on some; the run can go on without it."""

    def __init__(self, problems: Sequence[str]) -> None:
        super().__init__("; ".join(problems[:3]) + (f"; and {len(problems) - 3} more" if len(problems) > 3 else ""))


def world_size() -> int:
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def from_all_ranks(local: Any) -> list[Any]:
    """Return every rank's object, in rank order; all ranks must call this together."""
    if world_size() == 1:
        return [local]
    gathered: list[Any] = [None] * world_size()
    with naming_lost_ranks("an agreement of ranks"):
        dist.all_gather_object(gathered, local, group=_of_hosts())
    return gathered


def greatest(local: Sequence[int]) -> list[int]:
    """Return the greatest of each number over all ranks; all ranks must call this together. Cheap enough for every pass."""
    numbers = torch.tensor(local, dtype=torch.int32)
    if world_size() > 1:
        with naming_lost_ranks("an agreement of ranks"):
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
            _hosts = default, dist.new_group(backend="gloo", timeout=store.time_out())
        except RuntimeError as error:
            raise MemoError(
                f"the ranks cannot connect over gloo, by which memo agrees on host memory ({str(error).partition(chr(10))[0]}). "
                "Often a host name resolves to 127.0.1.1: set GLOO_SOCKET_IFNAME to the network interface between the nodes "
                "(ip addr lists them) on every node"
            ) from error
    return _hosts[1]


class Do(Protocol):
    """`on_all_ranks` or `on_this_rank`."""

    def __call__(self, what: Callable[[], T]) -> T: ...


def on_all_ranks(what: Callable[[], T]) -> T:
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
    answers = _say("" if error is None else in_words(error))
    problems = [f"rank {number}: {problem}" for number, problem in enumerate(answers) if problem]
    if problems:
        raise Failed(problems) from error
    return done[0]


def on_this_rank(what: Callable[[], T]) -> T:
    """Run a function on this rank only: other ranks neither wait for it nor hear of a failure.

    Raises:
        Failed: the function failed.
    """
    try:
        return what()
    except Exception as error:
        raise Failed([in_words(error)]) from error


def announce(
    local: str, wait: bool = True, remind_s: float = 0.0, remind: Callable[[list[int]], None] | None = None
) -> list[str]:
    """Tell all ranks a text; return every rank's, by rank. All ranks must call this; not all need wait.

    Args:
        wait: for the others; False: only tell them, and return nothing.
        remind_s: seconds until `remind` is called with the ranks that have not come, if they have not.

    Raises:
        Absent: a rank has not called it within the process group's time-out.
    """
    if world_size() == 1:
        return [local]
    keys = [_key(str(next(_meetings)), rank) for rank in range(world_size())]
    store.tell(keys[dist.get_rank()], local)
    if not wait:
        return []
    wait_s = store.time_out().total_seconds()
    remind_s = min(remind_s, wait_s / 2)
    answers = store.heard(keys, remind_s)
    if None in answers:
        if remind is not None and answers[dist.get_rank()] is not None:
            remind([rank for rank, text in enumerate(answers) if text is None])
        answers = store.heard(keys, wait_s - remind_s)
    return _all_of(answers, range(world_size()), wait_s)


def _key(meeting: str, rank: int) -> str:
    return f"ds_memo/{meeting}/{rank}"


def meet(local: str, ranks: Sequence[int], wait_s: float | None = None) -> list[str]:
    """Tell some ranks, of which this is one, a text; return the text of each. All of them must call this, and no other rank.

    Args:
        wait_s: seconds until a rank counts as absent, if that is less than in a collective; None: as in a collective.

    Raises:
        Absent: a rank has not called it.
    """
    if len(ranks) == 1:
        return [local]
    most, me, all_of_them = store.time_out().total_seconds(), dist.get_rank(), tuple(ranks)
    wait_s = most if wait_s is None else min(wait_s, most)
    meetings, where = _meetings, ""
    if len(all_of_them) < world_size():
        meetings, where = _meetings_of[all_of_them], f"{','.join(map(str, all_of_them))}/"
    meeting = next(meetings)
    store.tell(_key(f"{where}{meeting}", me), local)
    answers = store.heard([_key(f"{where}{meeting}", other) for other in all_of_them], wait_s)
    complete = _all_of(answers, all_of_them, wait_s)
    store.forget(_key(f"{where}{meeting - 1}", me))  # all ranks are here, so all have read it
    return complete


def _all_of(answers: Sequence[str | None], ranks: Sequence[int], wait_s: float) -> list[str]:
    if answers[ranks.index(dist.get_rank())] is None:  # not even this rank is heard
        raise LostRank(
            f"the process group's store has not answered for {wait_s:g} s: look at the process that holds it, rank 0 or the "
            "agent of torchrun, which has ended or is frozen"
        )
    heard = [text for text in answers if text is not None]
    if len(heard) < len(answers):
        raise Absent(ranks[answers.index(None)], wait_s)
    return heard


def _say(problem: str) -> list[str]:
    """Tell the other ranks of a problem; return every rank's problem, "" if it has none."""
    try:
        return meet(problem, range(world_size()), GRACE_S if problem else None)
    except Absent as absent:
        if not problem:
            raise
        raise MemoError(
            f"rank {dist.get_rank()}: {problem}. Rank {absent.rank} has not answered for {absent.wait_s:g} s: it waits for this "
            "rank inside a layer whose ranks talk to each other, so the run cannot go on. "
            "Mend that rank's error; with memo.alpha and "
            "memo.resident_layers both set nothing is measured"
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
            lines.append(f"{name}: " + ", ".join(f"{value} on {in_numbers(numbers)}" for value, numbers in ranks.items()))
    if lines:
        raise MemoError(f"{what} differs between ranks, and all must work alike. Give all ranks the same: " + "; ".join(lines))
