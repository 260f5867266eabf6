"""Decisions: what is done with each layer in the running pass. The policy that remat asks.

configured       alpha and resident layers as they are given, or one of the ablations
chosen           what is left open, by the autopilot's profile
without profile  where none can be made: two resident layers, and as much alpha as the host holds
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

from ds_memo.autotune.layer_settings import Chosen
from ds_memo.autotune.pending_calls import Calls
from ds_memo.config import MemoConfig
from ds_memo.errors import MemoError
from ds_memo.placement import Places, spread
from ds_memo.remat.checkpoint import FULL_RECOMPUTE, Layer, Setting
from ds_memo.solve.solver import alpha_for_host
from ds_memo.swap.host_slab import HostSlab
from ds_memo.units import GIB

RESIDENTS = 2
"""Where nothing is known: the last two, whose copies could not hide behind anything."""
_SLACK_PER_FRAME = 1 << 16
"""Bytes that alignment and page rounding may add to a frame; only counts when alpha is worked out from the budget."""
WITHOUT_ALPHA = (
    "a pass was run without memo.alpha {}: other models, or forwards before it, held what that needs of the host. "
    "Leave memo.alpha out, and each has what there is"
)


class Decisions:
    """Of one attached model. See :class:`ds_memo.remat.checkpoint.Policy`.

    Args:
        config: what it gives is obeyed.
        layers: in the order of the model; grows where a model calls ``ds_memo.checkpoint`` itself.
        slab: its budget bounds alpha.
        calls: of the layers.
        warn: says something once and shows it in the report.
    """

    def __init__(
        self, config: MemoConfig, layers: Sequence[Layer], slab: HostSlab, calls: Calls, warn: Callable[[str], None]
    ) -> None:
        self._config = config
        self._layers = layers
        self._slab = slab
        self._calls = calls
        self._warn = warn
        self.layers_known = bool(layers)
        self.chosen: Chosen | None = None
        """By the autopilot, for the running pass."""
        self.places = self._place()
        self.alpha_used = config.alpha
        self.binding = "not known before the first forward"
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
    def plain(self) -> bool:
        """Everything fits, and no layer is checkpointed."""
        return self.chosen is not None and self.chosen.homes.plain

    def is_plain(self, layer: Layer) -> bool:
        """No call of this layer is checkpointed."""
        if self.chosen is None or layer.index >= self.chosen.layers:
            return False
        calls = range(layer.index, len(self.chosen.settings), self.chosen.layers)
        return all(number in self.places.plain for number in calls)

    def follow(self, chosen: Chosen | None) -> None:
        """For the pass that begins; None: what needs no profile."""
        self.chosen = chosen
        self._refused = None
        if chosen is not None:
            homes = chosen.homes
            self.places, self.alpha_used, self.binding = chosen.places, homes.alpha, homes.binding

    def know_layers(self) -> None:
        """All layers of a model that calls ``ds_memo.checkpoint`` itself were seen."""
        self.layers_known = True
        self.places = self._place()

    def settings_by_requests(self) -> tuple[Setting, ...] | None:
        """Of all layers, with one alpha for all that ask the device for the same memory: how many rows are stored changes
        nothing, only whether none, some or all are."""
        if self.chosen is None:
            return None
        settings = self.chosen.settings[self._calls.earlier * self.chosen.layers :]
        return tuple(s if s.alpha in (None, 0.0, 1.0) else replace(s, alpha=0.5) for s in settings)

    def setting(self, layer: Layer) -> Setting:
        if self.chosen is not None:
            return self._chosen_setting(self.chosen, layer)
        if self._config.ablation == "full_recompute":
            return FULL_RECOMPUTE
        return Setting(resident=layer.index in self.places.residents)

    def _chosen_setting(self, chosen: Chosen, layer: Layer) -> Setting:
        if layer.index >= chosen.layers:
            self._warn(f"{layer.name} is checkpointed beside the {chosen.layers} layers that were solved for: fully recomputed")
            return FULL_RECOMPUTE
        number = self._calls.number(layer.index) * chosen.layers + layer.index
        # More calls than ever before: the next pass is solved for so many, and this one takes no more than it must.
        setting = chosen.settings[number] if number < len(chosen.settings) else FULL_RECOMPUTE
        if setting is FULL_RECOMPUTE and layer.index not in chosen.solved and any(p.requires_grad for p in layer.parameters):
            self._warn(
                f"{type(layer.module()).__name__} trains, and none was called, or trained, in the first pass, which was "
                "profiled: it is fully recomputed. Begin with a batch that calls all, or set memo.alpha and memo.resident_layers"
            )
        return setting

    def alpha(self, layer: Layer, whole_bytes: int, split_bytes: int) -> float:
        alpha, reason = self._config.alpha, "as configured"
        budget = self._slab.part if self._slab.fixed else self._slab.claim()  # though others may hold it now: see has_room()
        others = [other for other in self._layers if other.index not in self.places.residents]
        if alpha is not None:  # layers of another class keep something else; the slab has the last word on all of them
            others = [other for other in others if type(other.module()) is type(layer.module())]
        swapped = max(1, len(others))
        if alpha is None and not self.layers_known:  # how many will share the host shows in this forward
            alpha, reason = 0.0, "layers not known"
        slack = swapped * _SLACK_PER_FRAME if alpha is None else 0
        fits = alpha_for_host(budget - slack, swapped, whole_bytes, split_bytes)
        least = alpha or 0.0
        if fits < least:
            need = swapped * (whole_bytes + least * split_bytes)
            way_out = f"memo.alpha of at most {int(fits * 1000) / 1000} fits" if fits >= 0 else "even memo.alpha 0 does not fit"
            raise MemoError(
                f"host memory: {swapped} swapped layers like {layer.name} need {need / GIB:.3g} GiB at alpha {least}, "
                f"{budget / GIB:.3g} GiB are available to this rank; {way_out}. More memo.resident_layers, a larger "
                "memo.host_memory_gib, a smaller batch or more sequence-parallel ranks help too."
            )
        if alpha is None:
            alpha, reason = fits, "host memory" if fits < 1 else "all rows fit the host"
        used = swapped * (whole_bytes + alpha * split_bytes)
        if self._slab.fixed:
            of_class, need = type(layer.module()), math.ceil(used) + swapped * _SLACK_PER_FRAME
            self._needs[of_class] = max(need, self._needs.get(of_class, 0))
            self._slab.needs = sum(self._needs.values())
        self.binding = f"{reason}: {used / GIB:.3g} of {budget / GIB:.3g} GiB of host memory at alpha {alpha:.3g}"
        self.alpha_used = alpha
        return alpha

    def has_room(self, nbytes: int) -> bool:
        """What is open was promised it for the pass. Where not even an empty host holds what is configured, the slab raises."""
        if not (nbytes and self._slab.fixed) or self._slab.needs > self._slab.part:
            return True
        if self._refused and nbytes >= self._refused[0] and self._slab.pool.used == self._refused[1]:
            return False  # to ask again takes a collection of garbage, and a pass that goes without has many layers
        if self._slab.has_room(nbytes):
            return True
        self._refused = nbytes, self._slab.pool.used
        self._warn(WITHOUT_ALPHA.format(self._config.alpha))
        return False

    def _place(self) -> Places:
        wanted = 0 if self._config.ablation == "full_recompute" else self._config.resident_layers
        return Places(residents=spread(len(self._layers), RESIDENTS if wanted is None else wanted))
