"""The alpha with the shortest step, among the multiples of 1 / ALPHA_STEPS.

Without files the step is convex in alpha (ds_memo.solve.schedule), and halving finds its minimum in some 25 steps. With files it
is not, so some alphas are tried evenly before. It needs no library and takes 1 ms for 80 layers. CBC finds the same for the
linear program (tests/solve/lp.py), takes 90 ms after 100 ms of importing it, and can crash.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

ALPHA_STEPS = 10_000
"""Alpha is a multiple of 1 / ALPHA_STEPS: that reads better."""
_SHORTER = 1e-9
"""Least relative gain for which a larger alpha is taken."""
_CONVEX = 2


def best_alpha(seconds: Callable[[float], float], cap: float, tries: int = _CONVEX) -> float:
    """Return the alpha from 0 to `cap` with the shortest step, of like ones the smallest.

    Args:
        seconds: of the step at an alpha; inf: that does not fit.
        cap: a multiple of 1 / ALPHA_STEPS.
        tries: intervals whose ends are tried first. More than two: the step need not be convex.
    """
    seconds_at = cache(lambda number: seconds(number / ALPHA_STEPS))

    def is_better(number: int, best: int) -> bool:
        return seconds_at(number) < seconds_at(best) * (1 - _SHORTER if number > best else 1 + _SHORTER)

    most, best = round(cap * ALPHA_STEPS), 0
    for i in range(1, tries + 1):
        if is_better(most * i // tries, best):
            best = most * i // tries
    width = -(-most // tries)
    while width > 1:
        width, middle = -(-width // 2), best
        for number in (middle - width, middle + width):
            if 0 <= number <= most and is_better(number, best):
                best = number
                if tries == _CONVEX:
                    break  # the other side is longer
    return best / ALPHA_STEPS
