"""Lost ranks: where the process group fails, one line says which rank is missing, what it ended with, and what to look at.

A rank that raises an error leaves it in the group's store; the ranks that wait for it read it there. A rank that left none within
some seconds, though others have failed, has been killed, is frozen, or waits for something else.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from textwrap import shorten

import torch.distributed as dist

from ds_memo.distributed import store
from ds_memo.errors import MemoError

ANSWER_S = 3.0
"""Seconds in which all ranks notice that one is lost, once one has."""
_LOOK = (
    "look for an error at the end of its log. If its process is alive, see where it is (py-spy dump --pid); if it only needs "
    "longer, raise the process group's time-out (DEEPSPEED_TIMEOUT, in minutes)"
)
_OTHERWISE = (
    "no rank says what it failed with, so they wait for each other in different places: give all ranks the same configuration, "
    "batches of like shapes, and as many forwards, backwards and steps"
)


_told = False
"""True if this rank has left an error that it then was not ended by, unless it ends now."""


class LostRank(MemoError):
    """Raised if another rank is missing."""


class Absent(LostRank):
    """Raised if a rank has not come to a meeting in time."""

    def __init__(self, rank: int, wait_s: float) -> None:
        answer = ended_with([rank]).get(rank)
        why = f"it ended with {answer}" if answer else _LOOK
        super().__init__(f"rank {rank} has not come for {wait_s:g} s: {why}")
        self.rank, self.wait_s = rank, wait_s


@contextmanager
def naming_lost_ranks(where: str) -> Iterator[None]:
    """Replace an error of the process group by one line, and leave any other error to the other ranks.

    Args:
        where: what runs within, in words.

    Raises:
        LostRank: instead of the process group's error.
    """
    global _told
    if _told:
        store.forget(_key(dist.get_rank()))
        _told = False
    try:
        yield
    except BaseException as error:
        if not (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1):
            raise
        lost = isinstance(error, LostRank) or _is_of_group(error)
        store.tell(_key(dist.get_rank()), "" if lost else in_words(error))
        _told = True
        if not lost or isinstance(error, LostRank):
            raise
        text = re.sub(r"^\[[^\]]*\]\s*", "", str(error)).partition("\n")[0].partition(". This is")[0]
        raise LostRank(
            f"rank {dist.get_rank()} lost the other ranks in {where} ({shorten(text, 200, placeholder=' …')}): {_why()}"
        ) from error


def in_words(error: BaseException) -> str:
    """Return an error as one line. Long errors of PyTorch are cut."""
    text = str(error) if isinstance(error, MemoError) else shorten(str(error), 300, placeholder=" …")
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def ended_with(ranks: Sequence[int], wait_s: float = 0.1) -> dict[int, str | None]:
    """Return the errors that ranks ended with: "" for one that lost another rank, None for one that left nothing."""
    return dict(zip(ranks, store.heard([_key(rank) for rank in ranks], wait_s), strict=True))


def in_numbers(ranks: Sequence[int]) -> str:
    """Return "rank 1" or "ranks 1, 2"; of many, the first."""
    shown = ", ".join(map(str, ranks[:8])) + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")
    return f"rank{'s' if len(ranks) > 1 else ''} {shown}"


def _key(rank: int) -> str:
    return f"ds_memo/ended/{rank}"


def _is_of_group(error: BaseException) -> bool:
    """Return True for an error of NCCL or the store, and for one of gloo, which raises plain RuntimeErrors."""
    text = str(error)
    return isinstance(error, dist.DistError) or (type(error) is RuntimeError and ("gloo" in text or text == "Wait timeout"))


def _why() -> str:
    """Return what the other ranks say, within ANSWER_S, of an error of the process group."""
    others = [rank for rank in range(dist.get_world_size()) if rank != dist.get_rank()]
    answers = ended_with(others, ANSWER_S)
    failed = [f"rank {rank} ended with {text}" for rank, text in answers.items() if text]
    silent = [rank for rank, text in answers.items() if text is None]
    return "; ".join(failed[:3]) or (f"{in_numbers(silent)} said nothing: {_LOOK}" if silent else _OTHERWISE)
