"""Made-up machines and lengths, and the best alpha of each by a sweep over the engine in virtual time."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

from ds_memo.solve.memory import device_bytes, host_cap
from ds_memo.solve.placement_kinds import Kinds, swapped
from ds_memo.solve.run_costs import RunCosts
from ds_memo.solve.solver import Solution
from tests.placements import placed, swapped_at
from tests.solve.runs import GPT, LLAMA, layer, run
from tests.solve.virtual_engine import simulate

KI = 1024
BAR = 0.02
"""Largest distance of the solver's alpha from the best of the sweep."""


@dataclass
class Case:
    """A made-up machine and a length."""

    tokens: int
    """Tokens of this rank."""
    link: float
    """Bytes a second, each way."""
    host: float
    """Host memory as a share of all rows of all layers."""
    device: float
    """Device memory in frames."""
    shape: tuple = GPT
    layers: int = 24

    def costs(self) -> RunCosts:
        one = layer(self.tokens, shape=self.shape)
        whole = self.layers * one.host_bytes(swapped_at(1.0))
        return run(one, self.layers, self.link, int(self.host * whole), int(self.device * one.frame_bytes), head_s=one.forward_s)


CASES = [
    Case(tokens * KI, link * 1e9, host, device, shape)
    for (tokens, link), (host, device), shape in itertools.product(
        [(4, 12.0), (8, 25.0), (16, 12.0), (16, 50.0), (64, 25.0), (128, 12.0), (256, 50.0)],
        [(2.0, 4.0), (0.5, 4.0), (2.0, 12.5), (0.3, 2.0)],
        [GPT, LLAMA],
    )
]


def best_of_a_sweep(costs: RunCosts, kinds: Kinds) -> list[float]:
    """Return the alphas of the shortest step: 0, 0.05 … 1 as far as the host holds them, then finer around the best.
    Only 0 if the device has no room for reload buffers with rows."""
    layers = [costs.layers[index] for index in swapped(kinds)]
    cap = host_cap(layers, costs.host_budget) if device_bytes(costs, kinds, 1.0) <= costs.device_budget else 0.0
    tried: dict[float, float] = {}

    def best_near(alphas: list[float]) -> float:
        for alpha in alphas:
            if 0 <= alpha <= cap and alpha not in tried:
                tried[alpha] = simulate(costs, placed(kinds, alpha)).seconds
        return min(tried, key=tried.__getitem__)

    best = best_near([i / 20 for i in range(21)] + [cap])
    best = best_near([best + i / 100 for i in range(-5, 6)])
    least = tried[best]
    return [alpha for alpha, seconds in tried.items() if seconds <= least * (1 + 1e-5)]


def off_the_best(costs: RunCosts, solution: Solution) -> float:
    """Return |alpha − best of the sweep|, for the nearest of several equal ones."""
    return min(abs(solution.alpha - alpha) for alpha in best_of_a_sweep(costs, solution.kinds))
