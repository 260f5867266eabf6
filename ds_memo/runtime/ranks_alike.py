"""Ranks compare what they were given before they attach their models: those that differ would wait for each other later."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

import ds_memo
from ds_memo.autotune.model_profile import shared_settings
from ds_memo.config import MemoConfig
from ds_memo.distributed import agree
from ds_memo.distributed.lost_ranks import in_words
from ds_memo.errors import MemoWarning

LATE = (
    "rank {} waits in {}, and ranks {} have not come there for {:g} s. Do they run under ds_memo? Where a script starts its "
    "ranks by itself (Lightning, mp.spawn), start it with ds-memo run COMMAND, or call ds_memo.install() in it"
)
ARRIVAL_S = 60.0
"""Seconds until a rank warns of others that have not come."""
_FAILED = "error"
"""Under which a rank tells of an error in place of what it was given."""


def shared_by_ranks(config: MemoConfig, model: nn.Module, layers: int) -> dict[str, Any]:
    """Return what all ranks must be given alike, by name, for a model with so many layers."""
    parameters = list(model.parameters())
    return {
        **shared_settings(config),
        "the model": type(model).__name__,
        "its layers": layers,
        "its parameters": len(parameters),
        "its frozen parameters": sum(not parameter.requires_grad for parameter in parameters),
        "its types": sorted({str(parameter.dtype) for parameter in parameters}),
        "its attention": getattr(getattr(model, "config", None), "_attn_implementation", None),
        "the version of ds_memo": ds_memo.__version__,
    }


@contextmanager
def heard_by_others() -> Iterator[None]:
    """Tell the other ranks, which wait in :func:`compare`, of an error."""
    try:
        yield
    except Exception as error:
        if torch.distributed.is_initialized():
            agree.announce(json.dumps({_FAILED: in_words(error)}), wait=False)
        raise


def leaves_alone(why: str) -> None:
    """Tell other ranks, which may wait in :func:`compare`, that this one leaves its model without memo."""
    if torch.distributed.is_initialized():
        agree.announce(json.dumps({_FAILED: f"leaves its model without memo: {why}"}), wait=False)


def compare(settings: dict[str, Any], first: tuple[str, ...], where: str, wait: bool = True) -> None:
    """Refuse ranks that were given other things than this one.

    Args:
        first: names of settings that every rank tells; the others are compared if these are equal.
        where: the function that ranks wait in, for the warning.
        wait: hear what the others say; False: only tell them.

    Raises:
        MemoError: the names of what differs, with all values; or another rank's error.
        Absent: a rank has not come.
    """

    def remind(late: list[int]) -> None:
        warnings.warn(LATE.format(torch.distributed.get_rank(), where, late, ARRIVAL_S), MemoWarning, stacklevel=4)

    by_rank = [json.loads(text) for text in agree.announce(json.dumps(settings), wait, ARRIVAL_S, remind)]
    failed = [f"rank {rank}: {answer[_FAILED]}" for rank, answer in enumerate(by_rank) if _FAILED in answer]
    if failed:
        raise agree.Failed(failed)
    for shared in ([{name: answer[name] for name in first} for answer in by_rank], by_rank):
        agree.refuse_differences("the configuration", shared)
