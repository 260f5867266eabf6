"""Answers to open questions: the longest sequence, the fewest GPUs, sweeps over lengths and methods."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from ds_memo.estimate.errors import EstimateError
from ds_memo.estimate.estimate import estimate
from ds_memo.estimate.question import OK, OOHM, Estimate, Question, check

GRAIN = 32
"""The longest length is found to one part in GRAIN of itself, or to 1 Ki tokens."""
KI = 1024
_MOST_GPUS = 1 << 16


def longest(question: Question) -> tuple[Estimate | None, Estimate]:
    """Return the longest sequence that fits, in whole Ki tokens (None: 1 Ki does not fit), and the shortest found that does not.

    `question.seq_length` is ignored.
    """

    def at(units: int) -> Estimate:
        return estimate(replace(question, seq_length=units * KI))

    low, fits, high = 0, None, 1
    beyond = at(high)
    while beyond.status == OK:
        low, fits, high = high, beyond, 2 * high
        if high > 1 << 24:
            raise EstimateError("no sequence length is too long for this")
        beyond = at(high)
    while high - low > max(1, low // GRAIN):
        middle = (low + high) // 2
        tried = at(middle)
        if tried.status == OK:
            low, fits = middle, tried
        else:
            high, beyond = middle, tried
    return fits, beyond


def fewest_gpus(question: Question) -> tuple[Estimate | None, Estimate | None]:
    """Return the fewest GPUs on which the length fits, and the last number tried that was too small.

    The search tries 1, 2, 4, … GPUs of a node, then 1, 2, 4, … nodes. It ends where more GPUs only add replicas and save no
    memory; the first answer is None then.

    Raises:
        EstimateError: a value is out of range for any number of GPUs.
    """
    check(question)
    before: Estimate | None = None
    for gpus in _counts(int(question.hardware.gpus_per_node), _MOST_GPUS):
        try:
            tried = estimate(replace(question, gpus=gpus))
        except EstimateError:  # this model cannot be split over so many
            continue
        if tried.status == OK:
            return tried, before
        if before is not None and tried.layout.ranks == before.layout.ranks and _misses(tried) > 0.99 * _misses(before):
            return None, tried
        before = tried
    return None, before


def _misses(answer: Estimate) -> float:
    """Return the bytes needed of the memory that runs out."""
    return answer.host_bytes / answer.question.ranks_on_node if answer.status == OOHM else answer.device_total


def sweep(question: Question, lengths: Sequence[int], methods: Sequence[str]) -> list[Estimate]:
    """Return one answer per length and method."""
    return [estimate(replace(question, method=method, seq_length=length)) for method in methods for length in lengths]


def _counts(node: int, most: int) -> Iterator[int]:
    gpus = 1
    while gpus < node:
        yield gpus
        gpus *= 2
    gpus = node
    while gpus <= most:
        yield gpus
        gpus *= 2
