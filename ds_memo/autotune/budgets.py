"""Budgets: what host and device have for activations, and what else a step puts on the device. All ranks have the same.

before the first step    half of what the device has free is left alone for what has not been seen
after it                 non-layer memory is known from the pass's request log, or bounded by CUDA's peak
"""

from __future__ import annotations

import gc
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import nn

from ds_memo.autotune.pending_calls import InFlight
from ds_memo.distributed.agree import from_all_ranks
from ds_memo.logits.lazy_head import HeadBytes, LazyHead
from ds_memo.memory.device import UNSEEN, DeviceBudget, device_budget, lost_bytes, most_beyond, states_to_come
from ds_memo.placement import Tiles
from ds_memo.planned_alloc.non_layer_memory import NonLayerMemory, largest
from ds_memo.profile.run_profile import RunProfile
from ds_memo.shapes import HiddenShapes
from ds_memo.solve.headroom import HEADROOM
from ds_memo.solve.run_costs import RunCosts
from ds_memo.swap.host_budget import HostBudget


class HeadMemory(NamedTuple):
    """Bytes of head and loss at any number of tokens, as passes have shown them."""

    whole_per_token: float = 0.0
    """Bytes a token where logits are whole."""
    lazy: HeadBytes | None = None
    """Lazy logits by the rule, before a pass has shown them. None: there are none."""
    seen: tuple[int, int] = (0, 0)
    """Tokens and bytes of the pass with lazy logits that took most."""

    def with_seen(self, tokens: int, nbytes: int, lazy: Sequence[HeadBytes]) -> HeadMemory:
        """Return the larger of this and what a pass of one rank took.

        Args:
            lazy: what the rank's lazy heads take by the rule.
        """
        found = self
        for head in lazy:
            least = found.lazy or head
            found = found._replace(lazy=HeadBytes(min(least.rows, head.rows), *map(max, least[1:], head[1:])))
        if found.lazy is None or tokens <= found.lazy.rows:
            return found._replace(whole_per_token=max(self.whole_per_token, nbytes / tokens))
        if not found.seen[0] or (nbytes > found.at(tokens) and tokens >= found.seen[0]):
            return found._replace(seen=(tokens, nbytes))
        more = max(0, nbytes - found.at(tokens))
        return found._replace(lazy=found.lazy._replace(fixed=found.lazy.fixed + more), seen=(found.seen[0], found.seen[1] + more))

    def at(self, tokens: int) -> int:
        """Return the bytes at a number of tokens: a pass that was seen, and the rule for the difference to it."""
        if self.lazy is None or tokens <= self.lazy.rows:
            return math.ceil(self.whole_per_token * tokens)
        by_rule = self.lazy.fixed + self.lazy.per_token * tokens
        known, nbytes = self.seen
        if not known:
            return by_rule
        return min(by_rule, nbytes) if tokens < known else nbytes + self.lazy.per_token * (tokens - known)


class PassMemory(NamedTuple):
    """Non-layer memory of a pass, as far as one rank knows it."""

    tokens: int
    head_bytes: int
    lazy: list[HeadBytes]
    """What the rank's lazy heads take by the rule."""
    non_layer: NonLayerMemory


class Budgets:
    """Device and host budgets of one model's training.

    Args:
        device_memory_gib: as configured.
        host: the bytes of the host.
        device: where layers compute.
        heads: output heads with lazy logits.
    """

    def __init__(
        self, device_memory_gib: float | None, host: HostBudget, device: torch.device, heads: Sequence[LazyHead] = ()
    ) -> None:
        self.device = DeviceBudget(0)
        """Bytes beyond parameters, gradients and optimizer states."""
        self.device_limit = 0
        """The same with nothing left alone for what is only guessed: optimizer states, head, workspaces of kernels."""
        self._given = device_memory_gib
        self.host = host
        self._device = device
        self._non_layer: NonLayerMemory | None = None
        """None: not seen."""
        self._heads = heads
        self._head = HeadMemory()

    def measure(self, model: nn.Module, has_engine: bool, stepped: bool) -> None:
        """Measure what there is now. All ranks call this together.

        Args:
            has_engine: an engine holds optimizer states already.
            stepped: an optimizer step has been made.
        """
        lost = lost_bytes(self._device) if stepped else 0
        gc.collect()  # what the profile, or a pass with another solution, has left behind
        if self._device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(self._device)
        to_come, gradients = (0, 0) if stepped else (states_to_come(model, engine) for engine in (has_engine, True))
        headroom = UNSEEN if self._non_layer is None else HEADROOM
        careful = device_budget(self._device, self._given, to_come, headroom, lost)
        most = device_budget(self._device, self._given, gradients, 0.0)  # Adam's states are a guess, and refuse no run
        offers, budgets, limits = zip(*from_all_ranks((self.host.offer, careful, most.nbytes)), strict=True)
        self.host.agree(*min(offers))
        self.device, self.device_limit = min(budgets), min(limits)

    def measured(self, logged: NonLayerMemory | None, tokens: int, bytes_of_layers: int) -> PassMemory | None:
        """Return the non-layer memory of this rank's pass; None: it is not known.

        Args:
            logged: None: no log shows it; then CUDA's peak tells what it was at most, unless an earlier pass has told.
            tokens: of this rank's batch in the pass; 0: there was none.
            bytes_of_layers: what layers kept on the device between its forward and its backward, beyond an arena's bytes.
        """
        head = logged.head if logged else 0
        if logged is None and self._non_layer is None and (most := most_beyond(self._device, bytes_of_layers)) is not None:
            head, logged = most, NonLayerMemory(most)
        return PassMemory(tokens, head, [head.bytes for head in self._heads if head.bytes], logged) if tokens and logged else None

    def learn(self, by_rank: Sequence[PassMemory | None]) -> bool:
        """Take the pass of the rank that needs most, or an earlier one; nothing, where a rank does not know.

        Returns:
            True if some of it is more than was known.
        """
        known = [passed for passed in by_rank if passed is not None]
        if len(known) < len(by_rank):
            return False
        before = self._head, self._non_layer
        for passed in known:
            self._head = self._head.with_seen(passed.tokens, passed.head_bytes, passed.lazy)
        earlier = [self._non_layer] if self._non_layer else []
        self._non_layer = largest([*earlier, *(passed.non_layer for passed in known)])
        return (self._head, self._non_layer) != before

    def costs(
        self, profile: RunProfile, shapes: HiddenShapes, in_flight: InFlight, host: int, tiles: Tiles | None = None
    ) -> RunCosts:
        """Return the costs of what comes before a backward, for layers with these hidden states, within these budgets.

        Args:
            host: bytes, of those that the pass may have.
            tiles: how layers run that can run in tiles; None: all run whole.
        """
        at = [shape and (shape.batch, shape.length) for shape in shapes]
        tokens = math.prod(profile.last(at)) * in_flight.forwards
        run = profile.costs(at, host, self.device.nbytes, tiles=tiles)
        other, calls = self._non_layer or NonLayerMemory(0), in_flight.calls
        backward, most = other.backward, max(other.backward)
        if len(backward) != len(run.layers):  # some are not called
            backward = (most,) * len(run.layers)
        return replace(
            run,
            layers=run.layers * calls,
            working_bytes=other.elsewhere,
            forward_bytes=other.forward,
            head_bytes=self._head.at(tokens) + other.staying,
            backward_bytes=(most,) * (len(backward) * (calls - 1)) + backward,  # what a layer's last call has added stays
        )
