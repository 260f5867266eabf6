"""The parts of one model under ds_memo: made once, and handed to whatever follows the model's passes and steps."""

from __future__ import annotations

import re
import warnings
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ds_memo.autotune.drives import Drives
from ds_memo.autotune.policy import RESIDENTS, PlacementPolicy
from ds_memo.autotune.tuner import Tuner
from ds_memo.config import MemoConfig
from ds_memo.errors import MemoWarning
from ds_memo.layer_observer import LayerObserver
from ds_memo.logits.lazy_head import LazyHead
from ds_memo.memory.host import budget_bytes, ranks_on_node
from ds_memo.nvme.file_home import FileHome
from ds_memo.nvme.open_files import open_files
from ds_memo.planned_alloc.runtime import Addresses
from ds_memo.remat.checkpoint import Remat
from ds_memo.remat.layer import Layer
from ds_memo.runtime.module_patches import ModulePatches, nothing
from ds_memo.swap.engine import SwapEngine
from ds_memo.swap.host_budget import promised_bytes, shared_pool
from ds_memo.swap.host_slab import HostSlab
from ds_memo.swap.pinned_segments import memlock_binds
from ds_memo.swap.streams import streams_for
from ds_memo.tiles.tiling import Tiling
from ds_memo.units import GIB

_SIZE = re.compile(r"\b\d[\d,.]*(e[+-]\d+)?(?= (tokens|bytes|GiB)\b)")


def _as_it_is(nbytes: int) -> int:
    return nbytes


@dataclass(frozen=True)
class EngineTies:
    """Ties of an engine to the session of its model. The defaults are a session's without an engine."""

    of_engine: bool = False
    """True: an engine attaches the model; else ds_memo.attach does."""
    agree_on_host: Callable[[int], int] = _as_it_is
    """Returns the host budget of all ranks, in bytes, for that of this rank. All ranks call it together."""
    observers: tuple[LayerObserver, ...] = ()
    """Observers that are called before all others."""
    before_probe: Callable[[], None] = nothing
    """Called before a forward is probed."""
    gather_whole: Callable[[Sequence[nn.Module]], None] | None = None
    """Has ZeRO-3 gather each of these layers at once from now on, as tiles need it. All ranks call it together. None: it cannot
    be told."""
    on_last_micro_batch: Callable[[], bool] | None = None
    """Returns True if an optimizer step follows the present micro-batch; None: steps may not be told of."""
    tell_what_moved: Callable[[Any], bool] | None = None
    """Called with the session after each step until it returns True. None: no line is printed."""


class Parts:
    """Slab, swap engine, planned addresses, policy, remat and tuner of one model.

    Args:
        model: kept alive by others.
        config: checked.
        layers: their names and modules, checked, in the order of the model.
        device: where they compute, with its index.
        ties: what an engine brings.
    """

    def __init__(
        self,
        model: nn.Module,
        config: MemoConfig,
        layers: list[tuple[str, nn.Module]],
        device: torch.device,
        ties: EngineTies,
    ) -> None:
        if config.ablation == "full_swap":
            residents = RESIDENTS if config.resident_layers is None else config.resident_layers
            config = config.model_copy(update={"alpha": 1.0, "resident_layers": residents})
        self.model = weakref.ref(model)
        self.config = config
        self.ties = ties
        self.warnings: list[str] = []
        self._warned: set[str] = set()
        self.patches = ModulePatches()
        """Changes of the model, and how they are undone."""
        self.heads: list[LazyHead] = []
        """Output heads that return lazy logits."""
        self.eager_attention: dict[str, str] = {}
        """How attention runs for which Transformers has an eager function alone, by class."""
        self.drives: Drives | None = None
        """None: host memory is all there is."""
        try:
            self._make(layers, device)
        except BaseException:
            self.patches.undo()
            raise

    def _make(self, layers: list[tuple[str, nn.Module]], device: torch.device) -> None:
        config, ties, undo_with = self.config, self.ties, self.patches.undo_with
        self.slab = self._make_slab(device)
        undo_with(self.slab.close)
        self.engine = self._make_engine(device)
        undo_with(self.engine.close)
        self.addresses = Addresses(device, config.plan, self.warn, steps_happen=ties.on_last_micro_batch is not None)
        undo_with(self.addresses.close)
        self.layers = [Layer(index, name, module) for index, (name, module) in enumerate(layers)]
        budget = self.drives.budget if self.drives else 0
        self.policy = PlacementPolicy(config, self.layers, self.slab.budget, self.warn, budget)
        self.tiling = Tiling(self.policy.tiles) if config.may_tile else None
        if self.tiling is not None:
            undo_with(self.tiling.close)
        observers = (*ties.observers, self.addresses)
        self.remat = Remat(self.engine, self.policy, self.warn, config.attention, observers, self.tiling, self.addresses.aside)
        self.tuner = None
        if not self.policy.fixed:
            before = ties.before_probe, ties.gather_whole
            self.tuner = Tuner(config, self.remat, self.addresses, self.warn, ties.of_engine, *before, self.drives, self.heads)

    def warn(self, message: str) -> None:
        """Warn and show it in the report: once, also where sizes differ from those of an earlier one (another batch)."""
        if (wording := _SIZE.sub("", message)) not in self._warned:
            self._warned.add(wording)
            self.warnings.append(message)
            warnings.warn(message, MemoWarning, stacklevel=3)

    def hidden_shape(self) -> tuple[int, ...]:
        """Return the shape of what last came into the first layer that is in use, normally (b, s, h); (0,): not known."""
        if self.policy.pass_solution is not None:
            shape = self.policy.pass_solution.shape
            return (shape.batch, shape.length, *shape.rest)
        inputs = (kept for layer in self.layers if layer.latest for kept in layer.latest.inputs if kept)
        kept = next(inputs, None)
        return kept.shape if kept else (0,)

    def _make_slab(self, device: torch.device) -> HostSlab:
        given = self.config.host_memory_gib
        pool = shared_pool(given, device)
        promised, locked = promised_bytes(pool), pool.pinned and memlock_binds()
        budget = budget_bytes(given, ranks_on_node(), locked, promised, pool.size)
        if promised and given is None:
            self.warn(
                f"attached models of this process with a memo.host_memory_gib may still take {promised / GIB:.3g} GiB, and leave "
                f"{budget / GIB:.3g} GiB of host memory to this one. Give all the same, or none, and they share it. Of one that "
                "is done engine.destroy() gives it back (of a Trainer trainer.model_wrapped.destroy()), or handle.detach()"
            )
        return HostSlab(self.ties.agree_on_host(budget), pool)

    def _make_engine(self, device: torch.device) -> SwapEngine:
        streams = streams_for(device)
        if self.config.nvme is None:
            return SwapEngine(streams, self.slab, device)
        try:
            opened = open_files(self.config.nvme, device, streams, self.ties.agree_on_host, self.warn)
        except BaseException:
            streams.close()
            raise
        self.drives = Drives(self.config.nvme.max_tb_per_day, opened, self.slab.budget, device)
        return SwapEngine(streams, self.slab, device, FileHome(streams, self.slab, opened, self.warn))
