"""Solve one pass: ways to run its layers, and the shortest step among them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

from ds_memo.autotune.pass_solution import PassSolution
from ds_memo.autotune.pending_calls import InFlight
from ds_memo.config import MemoConfig
from ds_memo.placement import Tiles
from ds_memo.profile.run_profile import RunProfile
from ds_memo.shapes import HiddenShapes
from ds_memo.solve.headroom import shortest, without_recomputed_attention
from ds_memo.solve.refusals import NothingFits
from ds_memo.solve.run_costs import RunCosts
from ds_memo.solve.solution import Solution
from ds_memo.units import GIB

_TOO_MUCH = 0.05
"""Share of the device's budget that other streams may hold before layers that recompute attention make it worth a warning."""


class SolveRequest(NamedTuple):
    """Inputs of the solution of a pass, besides what is configured and learned."""

    shapes: HiddenShapes
    in_flight: InFlight
    host: int
    """Bytes of the host."""
    files: int
    may_skip_recompute: bool
    may_compute_inputs: bool = True
    must_store: frozenset[int] = frozenset()
    """Indices of the layers that store their input, whatever is solved."""

    def follows(self, called: Sequence[int]) -> tuple[bool, ...]:
        """Return for each layer that is called if its input may be computed from the layer below.

        Args:
            called: indices of these layers.
        """
        below = (None, *called)
        return tuple(last == index - 1 and index not in self.must_store for last, index in zip(below, called, strict=False))


def solve_pass(
    request: SolveRequest,
    config: MemoConfig,
    profile: RunProfile,
    costs: Callable[[Tiles | None], RunCosts],
    alpha: float | None,
    device_limit: int,
    unplanned_overhead: float,
    may_tile: bool,
) -> tuple[Solution, RunCosts]:
    """Return the solution with the shortest step, and the costs that it was solved for.

    Args:
        costs: of the layers in tiles, or whole.
        alpha: as configured; None: solved for.
        device_limit: bytes of the device with nothing left alone for what is only guessed.
        may_tile: False: layers run whole unless tiles are configured.

    Raises:
        NothingFits: no solution keeps the budgets.
    """

    def layers_alone(run: RunCosts) -> RunCosts:  # no solution changes what the head takes
        return replace(run.layers_alone(), device_budget=device_limit)

    def best(tilings: Sequence[Tiles | None]) -> tuple[RunCosts, Solution]:
        skips = request.may_skip_recompute
        return shortest([*map(costs, tilings)], layers_alone, alpha, config.resident_layers, skips, unplanned_overhead)

    tilings = _tilings(request, config, profile, may_tile)
    found = refusal = None
    try:
        found = best(tilings)
    except NothingFits as error:
        refusal = error
    if request.may_compute_inputs and config.input_every is None and alpha in (None, 0.0):
        found = without_recomputed_attention(found, [tiles for tiles in tilings if tiles is not None], best)
    if found is None:
        assert refusal is not None
        raise refusal
    run, solution = found
    if run.tiles is not None and config.head_groups is None:
        doublings = range(run.tiles.head_groups.bit_length())
        run, solution = best([run.tiles._replace(head_groups=1 << doubled) for doubled in doublings])  # no more than needed
    return solution, run


def _tilings(request: SolveRequest, config: MemoConfig, profile: RunProfile, may_tile: bool) -> list[Tiles | None]:
    """Return ways to run the layers: whole, and in tiles of several lengths with as many groups of heads as can be."""
    tokens, groups = config.tile_tokens, config.head_groups
    if tokens == 0 or (tokens is None and not may_tile):
        return [None]
    tilings = profile.tilings([shape and (shape.batch, shape.length) for shape in request.shapes])
    most = groups or (tilings[0].head_groups if tilings else 1)
    every = (config.input_every or 1) if request.may_compute_inputs else 1
    if tokens is not None:
        return [Tiles(tokens, most, every)]
    in_tiles = [Tiles(tiles.tokens, most, every) for tiles in tilings]
    return in_tiles if in_tiles and config.groups_inputs else [None, *in_tiles]


def warn_of_non_layer_memory(found: PassSolution, device_limit: int, warn: Callable[[str], None]) -> None:
    """Warn if other memory than the layers' leaves them too little."""
    run, others = found.run, found.run.non_layer_bytes()
    if run.device_budget > device_limit:
        needed = others["always"] + max(nbytes for part, nbytes in others.items() if part != "always")
        warn(
            f"beside the layers {math.prod(found.shape[:2]):,} tokens take {needed / GIB:.3g} GiB of device memory "
            f"for head, loss and gradients on their way ({others['backward'] / GIB:.3g} GiB). With them a step "
            f"needs {run.device_budget / GIB:.3g} GiB where {device_limit / GIB:.3g} GiB are free: it may run out of memory. "
            "A smaller zero_optimization.reduce_bucket_size helps, and logits that are lazy (leave kernels.cross_entropy out)"
        )
    recomputes = any(kind.recomputes_attention for kind in found.solution.kinds)
    if recomputes and run.working_bytes > _TOO_MUCH * run.device_budget:
        warn(
            "layers recompute attention for want of device memory, of which DeepSpeed holds "
            f"{run.working_bytes / GIB:.3g} GiB on other streams for what it gathers and reduces. In zero_optimization a "
            "smaller reduce_bucket_size, and under ZeRO-3 stage3_max_live_parameters and stage3_prefetch_bucket_size, leave "
            "more to layers"
        )
