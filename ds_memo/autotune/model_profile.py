"""Profiling: the profile of one model, from the cache or measured.

first pass   all ranks together: every kind of layer that all of them call; other kinds stay fully recomputed
again        kinds whose batch was too short to tell of longer ones: each rank by itself, or where ranks meet in layers, all of
             them together
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
from ds_memo.distributed.agree import Do, Failed, from_all_ranks, on_all_ranks, on_this_rank, refuse_differences
from ds_memo.distributed.topology import ranks_per_sequence
from ds_memo.profile import cache
from ds_memo.profile.caught_call import CaughtCall
from ds_memo.profile.layer_kinds import layer_in_words
from ds_memo.profile.merge_ranks import most_careful
from ds_memo.profile.run import SHORTEST, Asked, lengths_of, measure_kinds, take_profile, worth_measuring
from ds_memo.profile.run_profile import RunProfile
from ds_memo.remat.layer import Layer
from ds_memo.shapes import HiddenShapes
from ds_memo.swap.host_budget import HostBudget

_TRIES = 8
"""To measure a kind again: the device may be full at the moment, and another rank's batch short."""


class Profiling:
    """Profiling of one model.

    Args:
        host: this rank's.
        warn: says something once and shows it in the report.
    """

    def __init__(self, config: MemoConfig, host: HostBudget, device: torch.device, warn: Callable[[str], None]) -> None:
        self.profile: RunProfile | None = None
        self.from_cache = False
        self.kinds: list[int] = []
        """The kinds in the profile, in its order; numbers as in `of_layers`."""
        self.folder: Path | None = None
        """Folder of the cache; None: there is none that can be trusted."""
        self.why_whole = ""
        """Why no layer is measured in tiles, and so none runs in tiles that are solved for."""
        self._config = config
        self._of_layers: Sequence[int] = ()
        self._host = host
        self._device = device
        self._warn = warn
        self._tries: Counter[int] = Counter()
        """Attempts to measure a kind again."""

    def first(self, layers: Sequence[Layer], of_layers: Sequence[int], calls: Mapping[int, CaughtCall]) -> None:
        """Profile the first pass. All ranks call this together.

        Args:
            layers: in the order of the model.
            of_layers: of each layer its kind.
            calls: one of each kind that this rank calls.

        Raises:
            Failed: nothing can be measured, or a layer's costs depend on an encoder's length, too; all ranks know.
            MemoError: ranks are configured differently.
        """
        self._of_layers = of_layers
        refuse_differences('the "memo" section', from_all_ranks(shared_settings(self._config)))
        refuse_differences("the model", from_all_ranks({"layers": len(layers), "layer": layer_in_words(layers[0])}))
        asked = self._asked(worth_measuring(layers, of_layers, calls), from_all_ranks)
        if not asked.calls:
            raise Failed(["no layer wants a gradient, or none that all ranks call"])
        self.folder, key = cache.open_folder(self._config.cache_dir, self._warn), asked.key()
        by_rank = from_all_ranks(self.folder and cache.load(self.folder, key, self._warn))
        if all(by_rank):
            self.profile, self.from_cache = most_careful(by_rank), True
        else:
            self.profile = take_profile(asked)
            if self.folder and int(os.environ.get("LOCAL_RANK") or 0) == 0:
                cache.store(self.folder, self.profile, self._warn)
        self.kinds = list(asked.calls)

    def outgrown(self, shapes: HiddenShapes) -> bool:
        """Return True if these hidden states have far more tokens than a kind was measured with: of few, most is overhead."""
        called = ((kind, shape) for kind, shape in zip(self.kinds, shapes, strict=True) if shape and shape.batch)
        return any(self._outgrown(kind, shape.length) for kind, shape in called)

    def _outgrown(self, kind: int, length: int) -> bool:
        longest = self.profile.kinds[self.kinds.index(kind)].samples[-1].length
        return longest < SHORTEST and length > 2 * longest and self._tries[kind] < _TRIES

    def again(self, calls: Mapping[int, CaughtCall], with_others: bool) -> list[str]:
        """Measure the kinds again that these calls have outgrown.

        Args:
            with_others: all ranks call this together, and measure what all of them have outgrown.

        Returns:
            What was measured, in words.
        """
        exchange, do = (from_all_ranks, on_all_ranks) if with_others else (_on_this_rank, on_this_rank)
        answers = exchange({kind: call.length for kind, call in calls.items() if call.tokens})
        changes = []
        for kind in self.kinds:
            lengths = [answer.get(kind, 0) for answer in answers]
            if not self._outgrown(kind, max(lengths)):
                continue
            if self._outgrown(kind, min(lengths)):
                name = type(calls[kind].layer.module()).__name__
                try:
                    self._measure_again(kind, calls[kind], exchange, do)
                    changes.append(f"measured {name} again, with {min(lengths):,} tokens: the first batches told too little")
                except Failed as failed:
                    self._warn(f"{name}: cannot be measured again ({failed}), and what it took before is scaled")
            self._tries[kind] += 1
        return changes

    def _measure_again(self, kind: int, call: CaughtCall, exchange: Callable[[Any], list[Any]], do: Do) -> None:
        asked = replace(self._asked({kind: call}, exchange), do=do)
        measured = replace(self.profile, kinds=measure_kinds(asked))
        kinds = list(self.profile.kinds)
        (kinds[self.kinds.index(kind)],) = most_careful(exchange(measured)).kinds
        self.profile = replace(self.profile, kinds=tuple(kinds))

    def _asked(self, calls: Mapping[int, CaughtCall], exchange: Callable[[Any], list[Any]]) -> Asked:
        """Return the request to profile what all ranks call.

        Raises:
            Failed: a layer attends to an encoder's states of another length; all of them know.
        """
        answers = exchange({kind: (call.length, call.can_shorten(), call.encoder_length) for kind, call in calls.items()})
        calls = {kind: call for kind, call in calls.items() if all(kind in answer for answer in answers)}
        method = self._config.profile.method
        lengths, full = {}, {}
        for kind, call in calls.items():
            by_rank, can_shorten, encoders = zip(*(answer[kind] for answer in answers), strict=True)
            if any(encoders):
                states = f"layer {call.layer.name} attends to {max(encoders):,} states of an encoder"
                raise Failed([f"{states}: its costs depend on two lengths, and a profile has one"])
            full[kind] = min(by_rank)
            lengths[kind] = lengths_of(method, full[kind], call.width, all(can_shorten))
        return Asked(
            kinds=self._of_layers,
            calls=calls,
            method=method,
            lengths=lengths,
            full=full,
            device=self._device,
            host_budget=self._host.nbytes,
            warn=self._warn,
            attention=self._config.attention,
            ranks_per_sequence=max((ranks_per_sequence(call.layer.module()) for call in calls.values()), default=1),
            in_tiles=self._config.tile_tokens != 0 and not self.why_whole,
        )


def shared_settings(config: MemoConfig) -> dict[str, Any]:
    """Return the settings that all ranks must share. Paths name places on a node, and may differ."""
    section = config.model_dump(exclude={"cache_dir": True, "nvme": {"path"}})
    nested = {name: value for name, value in section.items() if isinstance(value, dict)}
    settings = {f"memo.{name}": value for name, value in section.items() if name not in nested}
    return settings | {f"memo.{name}.{key}": value for name, values in nested.items() for key, value in values.items()}


def _on_this_rank(answer: Any) -> list[Any]:
    return [answer]
