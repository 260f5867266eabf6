"""The alpha with the shortest step, in hundredths: first every fifth, then those around the best.

Steps of 1/16 would make a step up to 0.7 % longer (tests/solve/sweep.py's cells), finer ones than 1/100 shorten it by 0.1 % at
most. The step need not be convex in alpha, since files are behind the host in steps of whole layers.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

ALPHA_STEPS = 100
_COARSE = 5
_SHORTER = 1e-9
"""Least relative gain for which a larger alpha is taken."""


def best_alpha(seconds: Callable[[float], float], cap: float) -> float:
    """Return the alpha from 0 to `cap` with the shortest step, of like ones the smallest.

    Args:
        seconds: of the step at an alpha; inf: that does not fit.
        cap: a multiple of 1 / ALPHA_STEPS.
    """
    seconds_at = cache(lambda number: seconds(number / ALPHA_STEPS))

    def best_of(numbers: list[int]) -> int:
        best = numbers[0]
        for number in numbers[1:]:
            if seconds_at(number) < seconds_at(best) * (1 - _SHORTER):
                best = number
        return best

    most = round(cap * ALPHA_STEPS)
    coarse = best_of([*range(0, most, _COARSE), most])
    return best_of(list(range(max(0, coarse - _COARSE), min(most, coarse + _COARSE) + 1))) / ALPHA_STEPS
