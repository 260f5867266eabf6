"""The policy that remat asks: the placement of each layer call in the running pass.

configured       alpha and resident layers as they are given, or one of the ablations
solved           what is left open, by the tuner's solution of the pass
without profile  where none can be made: two resident layers, and as much alpha as the host holds
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence, Set
from dataclasses import replace

from ds_memo.autotune.pass_solution import PassSolution
from ds_memo.autotune.pending_calls import CallsInFlight
from ds_memo.config import MOST_TOKENS, MemoConfig
from ds_memo.errors import MemoError
from ds_memo.placement import FULL_RECOMPUTE, ON_DEVICE, SWAPPED, UNDECIDED, Placement, PlacementKind, Tiles, spread
from ds_memo.remat.layer import Layer
from ds_memo.solve.groups import without_inputs
from ds_memo.solve.refusals import host_too_small
from ds_memo.solve.solver import alpha_for_host
from ds_memo.swap.host_budget import HostBudget
from ds_memo.units import GIB

RESIDENTS = 2
"""Where nothing is known: the last two, whose copies could not hide behind anything."""
_SLACK_PER_FRAME = 1 << 16
"""Bytes that alignment and page rounding may add to a frame; only counts when alpha is worked out from the budget."""
WITHOUT_ALPHA = (
    "a pass was run without memo.alpha {}: other models, or forwards before it, held what that needs of the host. "
    "Leave memo.alpha out, and each has what there is"
)
WITHOUT_FILES = (
    "a pass was run without memo.alpha {}: host memory is full, and the files take no more of it, as another warning says. Free "
    "the drive or name another, lower memo.alpha, or leave it out"
)
REFUSED = "layer calls are recomputed for which the system has no host memory: {}"
LAYER_TOO_LARGE = (
    "what one layer keeps takes {:.3g} GiB of host memory, {:.3g} GiB are there, and it is recomputed. Files take whole layers. "
    "Raise memo.host_memory_gib or lower memo.alpha"
)


class PlacementPolicy:
    """Decides the placements of one attached model's layer calls. See :class:`ds_memo.remat.layer_host.Policy`.

    Args:
        config: what it gives is obeyed.
        layers: in the order of the model; none for a model that calls ``ds_memo.checkpoint`` itself.
        host: its bytes bound alpha.
        warn: says something once and shows it in the report.
        nvme_budget: bytes of files behind the host. A configured alpha counts on them.
    """

    def __init__(
        self,
        config: MemoConfig,
        layers: Sequence[Layer],
        host: HostBudget,
        warn: Callable[[str], None],
        nvme_budget: int = 0,
    ) -> None:
        self._config = config
        self._nvme_budget = nvme_budget
        self._layers = list(layers)
        self._host = host
        self._warn = warn
        self.in_flight = CallsInFlight()
        """Counts the calls that are placed by a solution."""
        self.layers_known = bool(layers)
        self.fixed = config.ablation is not None or (config.alpha is not None and config.resident_layers is not None)
        """True if nothing is left open."""
        if self.fixed:
            host.needs = 0
        tiles = None
        if config.tile_tokens or config.groups_inputs:
            tiles = Tiles(config.tile_tokens or MOST_TOKENS, config.head_groups or 1, config.input_every or 1)
        self._on_device = replace(ON_DEVICE, tiles=tiles)
        self._swapped = replace(SWAPPED, alpha=UNDECIDED if config.alpha is None else config.alpha, tiles=tiles)
        self._without_input = replace(self._swapped, kind=PlacementKind.SWAPPED_WITHOUT_INPUT)
        self._inputs_follow: Set[int] = frozenset()
        """Indices of the layers whose inputs the backward computes, as configured."""
        self.pass_solution: PassSolution | None = None
        """The tuner's, for the running pass."""
        self.kinds = self._configured()
        """Kinds of placements by the number of the layer call; the calls that are missing are swapped, or were not solved for."""
        self.alpha_used = config.alpha
        self.binding = "not known before the first forward"
        self._first_on_host = 0
        """Index of the first layer whose host block does not go on to a file, at the configured alpha. Beyond what is known of
        their sizes the engine writes what the host has no room for."""
        self._frame_bytes: dict[type, float] = {}
        """Bytes of a swapped layer's host block at the configured alpha, by its class."""
        self._needs: dict[type, int] = {}
        """Bytes of the host for a pass at the configured alpha, by the class of layers."""
        self._refused: tuple[int, int] | None = None
        """In the running pass: bytes that there was no room for, and what was allocated in all by then."""
        if layers and config.resident_layers == len(layers):
            self.binding = f"as configured: all {len(layers)} layers are resident, nothing is swapped"
        if config.ablation == "full_recompute":
            self.alpha_used = 0.0
            self.binding = "as configured: full recomputation, inputs stay on the device"

    @property
    def no_recompute(self) -> bool:
        """True if everything fits, and no layer is checkpointed."""
        return self.pass_solution is not None and self.pass_solution.solution.no_recompute

    def is_without_recompute(self, layer: Layer) -> bool:
        """True if no call of this layer is checkpointed."""
        if self.pass_solution is None or layer.index >= self.pass_solution.layers:
            return False
        calls = range(layer.index, len(self.pass_solution.placements), self.pass_solution.layers)
        return all(self.kinds.get(number) is PlacementKind.NO_RECOMPUTE for number in calls)

    @property
    def tiles(self) -> Tiles | None:
        """Tiles of the running pass; None: its layers run whole."""
        return self._swapped.tiles if self.pass_solution is None else self.pass_solution.run.tiles

    def calls(self, *kinds: PlacementKind) -> list[int]:
        """Numbers of the layer calls whose placement is of one of these kinds."""
        return sorted(number for number, kind in self.kinds.items() if kind in kinds)

    def follow(self, solution: PassSolution | None) -> None:
        """Place the calls of the pass that begins by this; None: by what needs no profile."""
        self.pass_solution = solution
        self._refused = None
        if solution is None:
            self._first_on_host = self._that_stays() if self._nvme_budget else 0
        else:
            self.kinds, self.alpha_used, self.binding = solution.kinds, solution.solution.alpha, solution.solution.binding

    def add_layer(self, layer: Layer) -> None:
        """Know one more layer of a model that calls ``ds_memo.checkpoint`` itself."""
        self._layers.append(layer)

    def know_layers(self) -> None:
        """All layers of a model that calls ``ds_memo.checkpoint`` itself were seen: alpha, 0 until now, is decided again."""
        self.layers_known = True
        self.kinds = self._configured()
        for layer in self._layers:
            layer.recipes.clear()

    def placements_by_requests(self) -> tuple[Placement, ...] | None:
        """Placements of the pass, with one alpha for all that ask the device for the same memory: how many rows are stored
        changes nothing, only whether none, some or all are."""
        if self.pass_solution is None:
            return None
        placements = self.pass_solution.placements[self.in_flight.earlier * self.pass_solution.layers :]
        return tuple(p if p.alpha in (0.0, 1.0) else replace(p, alpha=0.5) for p in placements)

    def placement(self, layer: Layer) -> Placement:
        if self.pass_solution is not None:
            return self._solved(self.pass_solution, layer)
        if self._config.ablation == "full_recompute":
            return FULL_RECOMPUTE
        if self._is_resident(layer):
            return self._on_device
        swapped = self._without_input if layer.index in self._inputs_follow else self._swapped
        return replace(swapped, nvme=True) if layer.index < self._first_on_host else swapped

    def _solved(self, solution: PassSolution, layer: Layer) -> Placement:
        if layer.index >= solution.layers:
            self._warn(
                f"{layer.name} is not among the {solution.layers} layers that were solved for, and is fully recomputed. "
                "Call every layer in the first pass"
            )
            return FULL_RECOMPUTE
        number = self.in_flight.number(layer.index) * solution.layers + layer.index
        if layer.index not in solution.solved and any(parameter.requires_grad for parameter in layer.parameters):
            self._warn(
                f"{type(layer.module()).__name__} trains, and in the first pass, which was profiled, not every rank called one "
                "that trained: it is fully recomputed. Begin with batches that call all kinds of layers, or set memo.alpha and "
                "memo.resident_layers"
            )
            return FULL_RECOMPUTE
        # More calls than ever before: the next pass is solved for so many, and this one takes no more than it must.
        return solution.placements[number] if number < len(solution.placements) else FULL_RECOMPUTE

    def decide_alpha(self, layer: Layer, placement: Placement, whole_bytes: int, split_bytes: int) -> Placement:
        """Return the placement with an alpha that the host can hold; a solution has decided it."""
        if self.pass_solution is not None:
            return placement
        others = [other for other in self._layers if not self._is_resident(other)]
        budget, where = self._host.reservation, "host memory"
        if placement.alpha is UNDECIDED:
            swapped, least = max(1, len(others)), 0.0
            slack = swapped * _SLACK_PER_FRAME if self.layers_known else 0
            fits = alpha_for_host(budget - slack, swapped, whole_bytes, split_bytes)
            if self.layers_known:
                alpha, reason = fits, "host memory" if fits < 1 else "nothing: all rows fit the host"
            else:  # how many will share the host shows in this forward
                alpha, reason = 0.0, "layers not known"
        else:  # layers of another class keep something else; the host budget has the last word on all of them
            swapped = max(1, sum(type(other.module()) is type(layer.module()) for other in others))
            if self._nvme_budget:
                budget, where = budget + self._nvme_budget, "host memory and files"
            fits = alpha_for_host(budget, swapped, whole_bytes, split_bytes)
            alpha = least = placement.decided_alpha
            reason = "as configured"
        stores_more = placement.kind is PlacementKind.SWAPPED and self._inputs_follow  # than most others
        if fits < least and not stores_more:
            need = swapped * (whole_bytes + least * split_bytes)
            raise MemoError(host_too_small(f"{swapped} swapped layers like {layer.name}", need, least, budget, fits))
        used = swapped * (whole_bytes + alpha * split_bytes)
        if self.fixed:
            of_class, need = type(layer.module()), math.ceil(used) + swapped * _SLACK_PER_FRAME
            self._needs[of_class] = max(need, self._needs.get(of_class, 0))
            self._host.needs = sum(self._needs.values())
            if self._nvme_budget:
                self._host.needs = min(self._host.needs, self._host.nbytes)
            self._frame_bytes[of_class] = used / swapped
        self.binding = f"{reason}: {used / GIB:.3g} of {budget / GIB:.3g} GiB of {where} at alpha {alpha:.3g}"
        self.alpha_used = alpha
        return replace(placement, alpha=alpha)

    def has_room(self, nbytes: int, planned: bool = True) -> bool:
        """Return True if a layer call may take so many bytes of the host, or if the allocation is to raise.

        A model that is solved for has reserved them for the pass, and only the system can refuse them. Where not even an empty
        host holds what is configured, the allocation raises.
        """
        needs, fixed = self._host.needs, self.fixed or not planned
        if not nbytes or (needs is not None and needs > self._host.share):
            return True
        if self._refused and nbytes >= self._refused[0] and self._host.pool.used == self._refused[1]:
            return False  # to ask again takes a collection of garbage, and a pass that goes without has many layers
        if (not fixed or self._host.has_room(nbytes)) and self._host.has_memory(nbytes):
            return True
        if self._host.allows(nbytes):
            self._warn(REFUSED.format(self._host.pool.why_no_more))
        elif nbytes > self._host.share:
            self._warn(LAYER_TOO_LARGE.format(nbytes / GIB, self._host.share / GIB))
        elif self._nvme_budget:
            self._warn(WITHOUT_FILES.format(self._config.alpha))
        else:
            self._warn(WITHOUT_ALPHA.format(self._config.alpha))
        self._refused = nbytes, self._host.pool.used
        return False

    def _that_stays(self) -> int:
        """Return the index of the first layer that the host has room for, next to all behind it. The earliest wait longest."""
        left: float = self._host.share
        for layer in reversed(self._layers):
            if not self._is_resident(layer):
                left -= self._frame_bytes.get(type(layer.module()), 0)
                if left < 0:
                    return layer.index + 1
        return 0

    def _is_resident(self, layer: Layer) -> bool:
        return self.kinds.get(layer.index) is PlacementKind.ON_DEVICE

    def _configured(self) -> dict[int, PlacementKind]:
        wanted = 0 if self._config.ablation == "full_recompute" else self._config.resident_layers
        kinds = dict.fromkeys(spread(len(self._layers), RESIDENTS if wanted is None else wanted), PlacementKind.ON_DEVICE)
        if not self._config.groups_inputs:
            return kinds
        n = len(self._layers)
        listed = [kinds.get(index, PlacementKind.SWAPPED) for index in range(n)]
        every = self._config.input_every or 1
        grouped = without_inputs(listed, every, [index > 0 for index in range(n)], [1] * n, [2] * n)
        alone = {index: kind for index, kind in enumerate(grouped) if kind is PlacementKind.SWAPPED_WITHOUT_INPUT}
        self._inputs_follow = alone.keys()
        return kinds | alone
