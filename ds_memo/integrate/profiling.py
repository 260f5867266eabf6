"""Profiling: the profile of one model, from the cache or measured.

first pass   all ranks together: of every kind of layer that all of them call
later        of kinds that come with a later batch (an image after text), or to some ranks only: by each rank itself; by all
             together where ranks meet in layers, for there they come together
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
from ds_memo.integrate.ranks import ranks_per_sequence
from ds_memo.plan import native
from ds_memo.profile import cache
from ds_memo.profile.agree import Failed, alone, from_all_ranks, most_careful, refuse_differences, together
from ds_memo.profile.call import LayerCall
from ds_memo.profile.kinds import layer_in_words
from ds_memo.profile.run import Asked, lengths_of, measure_kinds, take_profile, worth_measuring
from ds_memo.profile.sample import Profile
from ds_memo.remat.checkpoint import Layer
from ds_memo.swap.slab import HostSlab

_TRIES = 3
"""To measure a kind that comes later: the device may be full at the moment."""


class Profiling:
    """Of one model.

    Args:
        layers: in the order of the model.
        slab: its budget is this rank's.
        warn: says something once and shows it in the report.
    """

    def __init__(
        self, config: MemoConfig, layers: Sequence[Layer], slab: HostSlab, device: torch.device, warn: Callable[[str], None]
    ) -> None:
        self.profile: Profile | None = None
        self.from_cache = False
        self.kinds: list[int] = []
        """Those in the profile, in its order; numbers as in `of_layers`."""
        self._config = config
        self._layers = layers
        self._slab = slab
        self._device = device
        self._warn = warn
        self._failures: Counter[int] = Counter()
        """Of kinds that came later."""

    def first(self, of_layers: Sequence[int], calls: Mapping[int, LayerCall]) -> None:
        """Of the first pass. All ranks call this together.

        Args:
            of_layers: of each layer its kind.
            calls: one of each kind that this rank calls.

        Raises:
            Failed: nothing can be measured; all ranks know.
            MemoError: ranks are configured differently.
        """
        refuse_differences('the "memo" section', from_all_ranks(_configured(self._config)))
        refuse_differences("the model", from_all_ranks({"layers": len(self._layers), "layer": layer_in_words(self._layers[0])}))
        asked = self._asked(of_layers, worth_measuring(self._layers, of_layers, calls), from_all_ranks)
        if not asked.calls:
            raise Failed(["no layer wants a gradient, or none that all ranks call"])
        folder, key = cache_folder(self._config), asked.key()
        everybodys = from_all_ranks(cache.load(folder, key, self._warn))
        if all(everybodys):
            self.profile, self.from_cache = most_careful(everybodys), True
        else:
            self.profile = take_profile(asked, self._warn)
            if int(os.environ.get("LOCAL_RANK") or 0) == 0:
                cache.store(folder, self.profile, self._warn)
        self.kinds += asked.calls

    def later(self, of_layers: Sequence[int], calls: Mapping[int, LayerCall], with_others: bool) -> list[str]:
        """Of a pass with kinds that the profile lacks; what can be learned of them is in it then.

        Args:
            with_others: all ranks call this together.

        Returns:
            What was measured: classes.
        """
        unknown = {kind for kind in of_layers if kind not in self.kinds and self._failures[kind] < _TRIES}
        if not unknown:  # on all ranks: they have learned the same, and no pass needs to ask
            return []
        new = {kind: call for kind, call in worth_measuring(self._layers, of_layers, calls).items() if kind in unknown}
        everybody, do = (from_all_ranks, together) if with_others else (_only_me, alone)
        everything, learned = self._asked(of_layers, new, everybody), []
        for kind, call in everything.calls.items():
            asked, name = replace(everything, calls={kind: call}), type(call.layer.module()).__name__
            try:
                mine = replace(self.profile, kinds=measure_kinds(asked, self._warn, do=do), layers=asked.numbers())
            except Failed as failed:
                self._failures[kind] += 1
                self._warn(f"{name}: cannot be profiled ({failed}), and is fully recomputed")
                continue
            self.profile = self.profile.beside(most_careful(everybody(mine)))
            self.kinds.append(kind)
            learned.append(name)
        return learned

    def _asked(self, of_layers: Sequence[int], calls: Mapping[int, LayerCall], everybody: Callable[[Any], list[Any]]) -> Asked:
        """What all of them call."""
        everybodys = everybody({kind: (call.length, call.can_shorten()) for kind, call in calls.items()})
        calls = {kind: call for kind, call in calls.items() if all(kind in theirs for theirs in everybodys)}
        method = self._config.profile.method
        lengths, longest = {}, {}
        for kind in calls:
            said, can_shorten = zip(*(theirs[kind] for theirs in everybodys), strict=True)
            longest[kind] = min(said)
            lengths[kind] = lengths_of(method, longest[kind], all(can_shorten))
        return Asked(
            layers=self._layers,
            kinds=of_layers,
            calls=calls,
            method=method,
            lengths=lengths,
            longest=longest,
            device=self._device,
            host_budget=self._slab.budget,
            attention=self._config.attention,
            device_memory_gib=self._config.device_memory_gib,
            ranks_per_sequence=ranks_per_sequence(),
        )


def cache_folder(config: MemoConfig) -> Path:
    """plan.cache_dir; its default obeys XDG_CACHE_HOME."""
    if "cache_dir" in config.plan.model_fields_set:
        return Path(config.plan.cache_dir).expanduser()
    return native.cache_dir()


def _configured(config: MemoConfig) -> dict[str, Any]:
    section = config.model_dump()
    return {f"memo.{name}": value for name, value in section.items()}


def _only_me(mine: Any) -> list[Any]:
    return [mine]
