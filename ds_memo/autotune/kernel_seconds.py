"""Seconds of kernels while training: a part of the prediction that training corrects (learning.py).

In training a GPU is hotter than in a profile, and attention is longer: clocks and kernels have other rates. So in one window of
steps, events of CUDA time the parts of one layer a step:

    runs whole   forward · backward, with its replay
    in tiles     pre · attention · post · post_backward · attention_backward · pre_backward

A backward ends as that of another layer begins. Waits for copies are left out. What is learned is kept for this device and its
power limit, and later runs begin with it.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import statistics
import subprocess
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import torch

from ds_memo import files
from ds_memo.autotune import learning
from ds_memo.autotune.learning import Totals
from ds_memo.autotune.pass_solution import PassSolution
from ds_memo.distributed.agree import from_all_ranks
from ds_memo.placement import Placement, PlacementKind
from ds_memo.profile.json_file import FORMAT
from ds_memo.profile.stopwatch import SUSTAINED_S, now, seconds_between
from ds_memo.solve.run_costs import LayerCosts, RunCosts, Slowdown
from ds_memo.swap.stream_protocol import Streams
from ds_memo.swap.streams import CudaStreams

_NOISE = 0.01
"""Share by which a part may take longer or shorter than predicted without being corrected."""
_LEAST, _MOST = 0.25, 4.0
"""Factors that a cache may hold."""


class PartBegin(NamedTuple):
    """The begin of a part of a layer's call on the device."""

    part: str
    """"": what comes between the layer's forward and its backward, or behind that."""
    event: torch.Event
    waits: list[tuple[torch.Event, torch.Event]]
    """Events before and behind each wait of compute in it, for copies."""


def seconds_of(call: Sequence[PartBegin]) -> dict[str, float]:
    """Return the seconds of each part without waits. The device must have come to the end."""
    found: dict[str, float] = {}
    for begin, end in pairwise(call):
        waited_s = sum(seconds_between(*events) for events in begin.waits)
        found[begin.part] = found.get(begin.part, 0.0) + seconds_between(begin.event, end.event) - waited_s
    return found


class PartClock:
    """Notes when the parts of one layer's call begin, forward and backward, once a step. An observer of layers.

    Args:
        streams: of training. On a CPU nothing is noted: its seconds are too noisy to learn from.
    """

    def __init__(self, streams: Streams) -> None:
        self._streams = streams if isinstance(streams, CudaStreams) else None
        self.device = self._streams and self._streams.device
        """None: nothing is noted."""
        self._layer: int | None = None
        """None: none is watched until the next step."""
        self._call: list[PartBegin] = []
        self._inside = False

    def watch(self, layer: int | None) -> list[PartBegin]:
        """Return the whole call of the layer that was watched; empty: it did not come. Watch another one from now on."""
        found = self._call if self._layer is None else []
        self._layer = layer if self.device else None
        self.interrupted()
        return found

    def layer_begins(self, layer: int) -> None:
        if layer == self._layer:
            self._call, self._inside = [], True  # an earlier call, whose backward has not come, counts no more
            self._note("forward")

    def layer_ends(self, layer: int) -> None:
        if layer == self._layer:
            self._leave()

    def layer_replays(self, layer: int) -> None:
        if self._layer is None or not self._call:
            return
        if layer == self._layer and not self._inside:
            self._inside = True
            self._note("backward")
        elif layer != self._layer and self._inside:
            self._leave()
            self._layer = None

    def part_begins(self, part: str) -> None:
        if self._inside:
            self._note(part)

    def interrupted(self) -> None:
        self._call, self._inside = [], False
        if self._streams is not None:
            self._streams.noted = None

    def _leave(self) -> None:
        self._note("")
        self._inside = False
        self._streams.noted = None  # type: ignore[union-attr]

    def _note(self, part: str) -> None:
        assert self._streams is not None
        waits: list[tuple[torch.Event, torch.Event]] = []
        self._streams.noted = waits
        self._call.append(PartBegin(part, now(self._streams.device), waits))


class KernelSeconds:
    """Factors on the seconds of the profile's layers. All ranks have the same.

    Args:
        learns: False: nothing is solved for.
    """

    def __init__(self, clock: PartClock, learns: bool) -> None:
        self.factors = Slowdown()
        self._clock = clock
        self._learns = learns and clock.device is not None
        self._folder: Path | None = None
        self._steps = 0
        self._watched: int | None = None
        self._noted: deque[tuple[int, int, list[PartBegin]]] = deque(maxlen=learning.WINDOW)
        """Step, layer and its call."""

    def begin(self, folder: Path | None) -> None:
        """Begin with what an earlier run has learned on this device. All ranks call this together.

        Args:
            folder: of the cache; None: nothing is cached.
        """
        self._folder = folder
        found = [Slowdown(*factors) for factors in from_all_ranks(self._load()) if factors]
        self.factors = _greatest(found)

    def stepped(self, passed: PassSolution | None) -> None:
        """Follow the end of an optimizer step: watch another layer in the next."""
        if not self._learns:
            return
        self._steps += 1
        if call := self._clock.watch(None):
            self._noted.append((self._steps, self._watched or 0, call))
        if passed is not None:
            recomputed = [call for call, kind in passed.kinds.items() if kind is not PlacementKind.NO_RECOMPUTE]
            candidates = [call for call in recomputed if 0 < call < passed.layers and call - 1 in recomputed]
            self._watched = candidates[self._steps % learning.WINDOW * len(candidates) // learning.WINDOW] if candidates else None
            self._clock.watch(self._watched)

    # ---- a part that training corrects

    def measured(self, window: Totals, passed: PassSolution) -> Slowdown | None:
        """Return by how much the parts took longer than predicted."""
        calls = [
            (passed.solved.index(layer), noted) for step, layer, noted in self._noted if step > self._steps - learning.WINDOW
        ]
        self._noted.clear()
        if not self._learns or not calls:
            return None
        torch.cuda.synchronize(self._clock.device)
        layers, placements = passed.run.layers, passed.solution.placements
        ratios = [_ratios(layers[number], placements[number], seconds_of(call)) for number, call in calls]
        return Slowdown(*map(statistics.median, zip(*ratios, strict=True)))

    def learn(self, by_rank: Sequence[Slowdown | None]) -> str | None:
        """Take the greatest ratios of all ranks, once."""
        ratios = [Slowdown(*found) for found in by_rank if found is not None]
        if not ratios:
            return None
        self._learns = False
        self._clock.watch(None)
        slower = _greatest(ratios)
        if all(abs(ratio - 1) <= _NOISE for ratio in slower):
            return None
        self.factors = Slowdown(*map(float.__mul__, self.factors, slower))
        self._store()
        return "layers take, in shares of what was predicted, " + ", ".join(
            f"{ratio:.3f} in {name.replace('_', ' ')}" for name, ratio in slower._asdict().items()
        )

    def correct(self, run: RunCosts) -> RunCosts:
        return run if self.factors == Slowdown() else run.each(lambda layer: layer.slower(self.factors))

    # ---- the cache

    def _load(self) -> list[float] | None:
        if self._folder is None or self._clock.device is None:
            return None
        try:
            factors = json.loads(files.read_private(self._path, 1 << 10))
        except (OSError, ValueError, files.NotPrivate, files.TooLong):  # none yet, or one that cannot be trusted
            return None
        right = isinstance(factors, list) and len(factors) == len(Slowdown()) and all(type(f) is float for f in factors)
        return factors if right and all(_LEAST <= factor <= _MOST for factor in factors) else None

    def _store(self) -> None:
        if self._folder is None or int(os.environ.get("LOCAL_RANK") or 0):
            return
        with suppress(OSError):  # the next run learns again
            files.write_private(self._path, json.dumps(self.factors))

    @property
    def _path(self) -> Path:
        assert self._folder is not None
        device = self._clock.device
        assert device is not None
        key = FORMAT, SUSTAINED_S, torch.cuda.get_device_name(device), power_limit_w(device)
        return self._folder / f"kernels-{hashlib.sha256(json.dumps(key).encode()).hexdigest()[:20]}.json"


def power_limit_w(device: torch.device) -> float | None:
    """Return the watts that the driver lets a GPU draw; None: it does not say."""
    uuid = getattr(torch.cuda.get_device_properties(device), "uuid", None)
    command = ["nvidia-smi", f"--id=GPU-{uuid}", "--query-gpu=power.limit", "--format=csv,noheader,nounits"]
    try:
        found = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout
        watts = float(found)
    except (OSError, ValueError, subprocess.SubprocessError):
        return None
    return watts if math.isfinite(watts) else None


def _greatest(ratios: Sequence[Slowdown]) -> Slowdown:
    return Slowdown(*map(max, zip(*ratios, strict=True))) if ratios else Slowdown()


def _ratios(layer: LayerCosts, placement: Placement, took: dict[str, float]) -> Slowdown:
    """Return the seconds of a layer's call over those that are predicted, part by part."""

    def over(predicted_s: float, *parts: str) -> float:
        return sum(took[part] for part in parts) / predicted_s if predicted_s > 0 else 1.0

    again_s = layer.attention_s if placement.kind.recomputes_attention else 0.0
    if layer.in_tiles is None or "pre" not in took:
        recomputed_s = layer.replay_s + (1 - placement.decided_alpha) * layer.gemm_s + again_s
        forward, backward = over(layer.forward_s, "forward"), over(layer.backward_s + recomputed_s, "backward")
        return Slowdown(forward, forward, backward, backward)
    tiles = layer.in_tiles
    saved_s = layer.gemm_s * tiles.stored(placement.decided_alpha) / tiles.count
    if tiles.result_differs or again_s:
        again_s += tiles.pre_again_s
    return Slowdown(
        forward=over(layer.forward_s - layer.attention_s, "forward", "pre", "post"),
        attention=over(layer.attention_s, "attention"),
        backward=over(
            tiles.post_backward_s - saved_s + tiles.pre_backward_s + again_s, "backward", "post_backward", "pre_backward"
        ),
        attention_backward=over(layer.attention_backward_s, "attention_backward"),
    )
