"""Profiling: the profile of one model, from the cache or measured.

first pass   all ranks together: of every kind of layer that all of them call
later        of kinds that come with a later batch (an image after text), or to some ranks only, and once more of kinds that
             were measured in a batch too short to tell of longer ones: by each rank itself; by all together where ranks meet in
             layers, for there they come together
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from ds_memo.config import MemoConfig
from ds_memo.distributed.agree import Failed, alone, from_all_ranks, refuse_differences, together
from ds_memo.distributed.topology import ranks_per_sequence
from ds_memo.files import NotPrivate, cache_home
from ds_memo.profile import cache
from ds_memo.profile.call import LayerCall
from ds_memo.profile.kinds import layer_in_words
from ds_memo.profile.merge_ranks import most_careful
from ds_memo.profile.run import SHORTEST, Asked, lengths_of, measure_kinds, take_profile, worth_measuring
from ds_memo.profile.sample import Profile
from ds_memo.remat.checkpoint import Layer
from ds_memo.shapes import HiddenShapes
from ds_memo.swap.host_budget import HostBudget

_TRIES = 8
"""To measure a kind later: the device may be full at the moment, and another rank's batch short."""


class Profiling:
    """Profiling of one model.

    Args:
        host: this rank's.
        warn: says something once and shows it in the report.
    """

    def __init__(self, config: MemoConfig, host: HostBudget, device: torch.device, warn: Callable[[str], None]) -> None:
        self.profile: Profile | None = None
        self.from_cache = False
        self.kinds: list[int] = []
        """Those in the profile, in its order; numbers as in `of_layers`."""
        self._config = config
        self._layers: Sequence[Layer] = ()
        self._of_layers: Sequence[int] = ()
        self._host = host
        self._device = device
        self._warn = warn
        self._tries: Counter[int] = Counter()
        """Attempts to measure kinds that came later."""

    def first(self, layers: Sequence[Layer], of_layers: Sequence[int], calls: Mapping[int, LayerCall]) -> None:
        """Profile the first pass. All ranks call this together.

        Args:
            layers: in the order of the model.
            of_layers: of each layer its kind.
            calls: one of each kind that this rank calls.

        Raises:
            Failed: nothing can be measured; all ranks know.
            MemoError: ranks are configured differently.
        """
        self._layers, self._of_layers = layers, of_layers
        refuse_differences('the "memo" section', from_all_ranks(_configured(self._config)))
        refuse_differences("the model", from_all_ranks({"layers": len(self._layers), "layer": layer_in_words(self._layers[0])}))
        asked = self._asked(worth_measuring(layers, of_layers, calls), from_all_ranks)
        if not asked.calls:
            raise Failed(["no layer wants a gradient, or none that all ranks call"])
        folder, key = self._cache(), asked.key()
        everybodys = from_all_ranks(folder and cache.load(folder, key, self._warn))
        if all(everybodys):
            self.profile, self.from_cache = most_careful(everybodys), True
        else:
            self.profile = take_profile(asked, self._warn)
            if folder and int(os.environ.get("LOCAL_RANK") or 0) == 0:
                cache.store(folder, self.profile, self._warn)
        self.kinds += asked.calls

    def _cache(self) -> Path | None:
        """Return the folder of profiles in plan.cache_dir, whose default obeys XDG_CACHE_HOME; None, with a warning, if there is
        none."""
        plan = self._config.plan
        try:
            folder = Path(plan.cache_dir) if "cache_dir" in plan.model_fields_set else cache_home()
        except NotPrivate as error:
            self._warn(f"profiles are not cached: {error}; each start measures again. memo.plan.cache_dir names a folder")
            return None
        return cache.open_folder(folder, self._warn)

    def outgrown(self, shapes: HiddenShapes) -> bool:
        """Whether these hidden states, or an encoder's beside them, have far more tokens than a kind was measured with: of few,
        most is overhead. Where both had as many, what is whose could not be told."""
        return any(here and self._outgrown(kind, here.length, here.source) for kind, here in zip(self.kinds, shapes, strict=True))

    def _outgrown(self, kind: int, length: int, source: int) -> bool:
        longest = self.profile.kinds[self.kinds.index(kind)].taken[-1]
        both = (longest.length, length), (longest.source, source)
        short = any(seen < SHORTEST and now > 2 * seen for seen, now in both)
        return short and self._tries[kind] < _TRIES

    def later(self, calls: Mapping[int, LayerCall], with_others: bool) -> list[str]:
        """Measure kinds that the profile lacks, or knows from shorter batches alone, and add them to it.

        Args:
            with_others: all ranks call this together.

        Returns:
            What was measured, in words.
        """
        everybody, do = (from_all_ranks, together) if with_others else (_only_me, alone)
        unknown = {kind for kind in self._of_layers if kind not in self.kinds and self._tries[kind] < _TRIES}
        known = ((kind, calls[kind]) for kind in self.kinds if kind in calls)
        outgrown = {kind for kind, call in known if self._outgrown(kind, call.length, call.source)}
        grown = set().union(*everybody(outgrown))
        if not unknown | grown:  # on all ranks: they have learned the same
            return []
        worth = worth_measuring(self._layers, self._of_layers, calls)
        new = {kind: call for kind, call in worth.items() if kind in unknown | grown}
        asked, learned, again = self._asked(new, everybody), [], []
        for kind, call in asked.calls.items():
            name, full, source = type(call.layer.module()).__name__, asked.full[kind], asked.sources[kind]
            if kind in grown and not self._outgrown(kind, full, source):  # of all ranks together
                continue
            one = replace(asked, calls={kind: call})
            try:
                mine = replace(self.profile, kinds=measure_kinds(one, self._warn, do=do), layers=one.numbers())
            except Failed as failed:
                instead = "what it took before is scaled" if kind in grown else "it is fully recomputed"
                self._warn(f"{name}: cannot be profiled ({failed}), and {instead}")
                continue
            careful = most_careful(everybody(mine))
            if kind in grown:
                kinds = list(self.profile.kinds)
                kinds[self.kinds.index(kind)] = careful.kinds[0]
                self.profile = replace(self.profile, kinds=tuple(kinds))
                beside = f" beside {source:,}" if source else ""
                again.append(f"measured {name} again, with {full:,} tokens{beside}: the first batches told too little")
            else:
                self.profile = self.profile.with_kinds(careful)
                self.kinds.append(kind)
                learned.append(name)
        self._tries.update(grown | asked.calls.keys())
        return [*([f"profiled {', '.join(learned)}, which no pass before has called"] if learned else []), *again]

    def _asked(self, calls: Mapping[int, LayerCall], everybody: Callable[[Any], list[Any]]) -> Asked:
        """What all of them call."""
        everybodys = everybody({kind: (call.length, call.can_shorten(), call.source) for kind, call in calls.items()})
        calls = {kind: call for kind, call in calls.items() if all(kind in theirs for theirs in everybodys)}
        method = self._config.profile.method
        lengths, full, sources = {}, {}, {}
        for kind, call in calls.items():
            said, can_shorten, beside = zip(*(theirs[kind] for theirs in everybodys), strict=True)
            full[kind] = min(said)
            lengths[kind] = lengths_of(method, full[kind], call.width, all(can_shorten))
            sources[kind] = lengths_of(method, min(beside), call.width, True)[-1] if min(beside) and all(can_shorten) else 0
        return Asked(
            layers=self._layers,
            kinds=self._of_layers,
            calls=calls,
            method=method,
            lengths=lengths,
            full=full,
            sources=sources,
            device=self._device,
            host_budget=self._host.budget,
            attention=self._config.attention,
            ranks_per_sequence=ranks_per_sequence(),
        )


def _configured(config: MemoConfig) -> dict[str, Any]:
    section = config.model_dump()
    return {f"memo.{name}": value for name, value in section.items()}


def _only_me(mine: Any) -> list[Any]:
    return [mine]
