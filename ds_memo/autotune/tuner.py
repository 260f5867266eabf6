"""The tuner: solve what the configuration leaves open, for each training pass, in stages.

profile      at the first pass: each kind of layer is measured, or read from the cache (model_profile.py)
shapes       the hidden states of the pass, by its inputs or a probe forward (probe_forward.py)
agree        ranks that wait for each other start from the same numbers, and do the same (ranks.py)
candidates   costs of the layers, whole and in tiles, within the budgets (budgets.py), as corrected while training (learning.py)
solve        the shortest step that keeps the budgets (solve_pass.py), or NothingFits before a layer runs
place        layers that run in tiles are gathered whole; the policy follows the solution

Between steps the tuner learns: see learning.py. What it learns makes all solutions new.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

from torch import nn

from ds_memo.autotune.budgets import Budgets, PassMemory
from ds_memo.autotune.drives import Drives
from ds_memo.autotune.kernel_seconds import KernelSeconds, PartClock
from ds_memo.autotune.learning import Link, Totals, Windows
from ds_memo.autotune.model_profile import Profiling
from ds_memo.autotune.pass_solution import PassSolution
from ds_memo.autotune.pending_calls import CallsInFlight, InFlight
from ds_memo.autotune.policy import WITHOUT_ALPHA
from ds_memo.autotune.probe_forward import REMEMBERED, Probe, TrainingPass
from ds_memo.autotune.ranks import Ranks, Start
from ds_memo.autotune.solve_pass import SolveRequest, solve_pass, warn_of_non_layer_memory
from ds_memo.config import MemoConfig
from ds_memo.distributed.agree import Failed, from_all_ranks, on_all_ranks, world_size
from ds_memo.distributed.topology import gathers_by_module
from ds_memo.logits.lazy_head import LazyHead
from ds_memo.placement import Tiles
from ds_memo.planned_alloc import UNPLANNED_OVERHEAD
from ds_memo.planned_alloc.runtime import Addresses
from ds_memo.profile.caught_call import CaughtCall
from ds_memo.profile.run_profile import RunProfile
from ds_memo.remat.layer import Layer
from ds_memo.remat.remat import Remat
from ds_memo.shapes import HiddenShapes
from ds_memo.solve.memory import bytes_of_layers
from ds_memo.solve.refusals import NothingFits
from ds_memo.solve.run_costs import RunCosts
from ds_memo.tiles.check.refuse import BY_MODULE

_TRIES = 3
"""Passes that may fail before their first layer until no profile is made."""
_SETTLED = 4
"""Steps until ZeRO-3 has seen twice in which order layers come, and so keeps and gathers ahead what it will."""


class Tuner:
    """Solves for one model's training passes.

    Args:
        config: what is given in it is obeyed, what is absent is solved for.
        remat: runs the layers, with the slab and the streams of training.
        addresses: know, where they are planned, the non-layer memory of a pass.
        warn: says something once and shows it in the report.
        has_engine: an engine holds optimizer states already.
        before_probe: called before a forward is probed, and its layers are run by themselves.
        gather_whole: has ZeRO-3 gather each of these layers at once from now on; None: it cannot be told.
        drives: behind host memory; None: there are none.
        heads: output heads with lazy logits.
        clock: an observer of `remat`'s layers.
    """

    def __init__(
        self,
        config: MemoConfig,
        remat: Remat,
        addresses: Addresses,
        warn: Callable[[str], None],
        has_engine: bool,
        before_probe: Callable[[], None],
        clock: PartClock,
        gather_whole: Callable[[Sequence[nn.Module]], None] | None = None,
        drives: Drives | None = None,
        heads: Sequence[LazyHead] = (),
    ) -> None:
        self.changes: list[str] = []
        """What was changed while the run went on, in words."""
        self.unsettled = 0
        """Profiles, probes and solutions that were made so far."""
        self.gave_up = False
        """No profile could be made: the policy falls back on what needs none."""
        self._config = config
        self._addresses = addresses
        self._warn = warn
        self._has_engine = has_engine
        self._gather_whole = gather_whole
        self._streams, self._layer_host = remat.engine.streams, remat.host
        host, device = remat.engine.slab.budget, remat.engine.device
        self._profiling = Profiling(config, host, device, warn)
        self._probe = Probe(remat, before_probe)
        self._budgets = Budgets(config.device_memory_gib, host, device, heads)
        self._drives, self._link, self._kernels = drives, Link(), KernelSeconds(clock, learns=config.alpha is None)
        self._parts: list[KernelSeconds | Link | Drives] = [self._kernels, self._link, *([drives] if drives else [])]
        self._windows = Windows(self._totals)
        self._ranks: Ranks
        """Known from the first pass on."""
        self._solutions: dict[SolveRequest, PassSolution] = {}
        self._latest: PassSolution | None = None
        self._in_flight = InFlight()
        self._steps = 0
        self._failed_passes = 0
        """Passes whose first layer call could not be caught."""

    @property
    def profile(self) -> RunProfile | None:
        return self._profiling.profile

    # ---- before each training pass

    def solve(self, training_pass: TrainingPass, layers: Sequence[Layer], calls: CallsInFlight) -> PassSolution | None:
        """Return the solution of a pass that is about to begin; None: no profile could be made, or none of its layers is in it.

        Args:
            layers: of the model, in order.
            calls: in flight as the pass begins; those before it may be raised to another rank's.

        Raises:
            MemoError: ranks are configured differently.
            NothingFits: no solution keeps the budgets.
        """
        if world_size() == 1:  # ranks agree between steps
            self._budgets.host.agree(*self._budgets.host.offer)
        if (why := self._budgets.host.changed()) is not None:
            self.changes.append(why)
        if self.gave_up or (self.profile is None and not self._measure(training_pass, layers)):
            return None
        shapes = self._probe.shapes(training_pass.kind)
        if shapes and self._ranks.may_measure_again and self._profiling.outgrown(shapes):
            shapes = None
        start = self._start_alike(calls, shapes is None)
        solution = self._solve_alike(training_pass, None if start.probes else shapes, start, layers)
        if solution is not self._latest:
            self._latest = solution
            self._windows.another_kind()
        return solution

    def _start_alike(self, calls: CallsInFlight, probes: bool) -> Start:
        host, addresses, files = self._budgets.host, self._addresses, self._drives.budget if self._drives else 0
        local = Start(probes, calls.earlier, *calls.most, host.reservation, host.left, host.share, files)
        start, why = self._ranks.start_alike(local, addresses.why_not_planned)
        if addresses.planned and why:
            addresses.stop_planning(f"{why}; ranks that exchange tensors inside layers plan alike")
        calls.earlier = start.earlier
        if start.earlier:
            self._windows.another_kind()  # what is predicted is of all forwards that wait for a backward
        if start.in_flight != self._in_flight:
            self._in_flight = start.in_flight
            forwards = f", in {start.forwards} forwards" if start.forwards > 1 else ""
            self.changes.append(f"solved for {start.calls} calls of each layer before its backward{forwards}")
        return start

    def _solve_alike(
        self, training_pass: TrainingPass, shapes: HiddenShapes | None, start: Start, layers: Sequence[Layer]
    ) -> PassSolution | None:
        """Solve for this rank, and again where ranks that meet in layers must do the same.

        These gather parameters in every forward and replay of a layer, or trade tokens there. So no rank probes a forward alone.
        All replay the same layers: every layer, unless they agree on those without recompute. All store every layer's input,
        unless they agree on those that are computed. All gather layers alike if one has tiles. Their lengths may differ.
        """
        may_skip = compute_inputs = True  # as ranks that differ leave it
        while True:
            solution = refusal = None
            if shapes is not None:
                try:
                    solution = self._solved(shapes, start, may_skip and self._may_skip_recompute, compute_inputs)
                except NothingFits as error:
                    refusal = error
            vote = self._ranks.vote(shapes is None, solution, refusal is not None)
            if vote.probes:
                shapes = self._probed(training_pass)
            elif vote.refused:
                self._ranks.refuse(refusal)
            elif vote.inputs_differ and compute_inputs:
                compute_inputs = False
            elif vote.differs and may_skip:
                may_skip = False
            else:
                break
        if vote.in_tiles and self._gather_whole is not None:
            self._gather_whole(_modules(layers))
        return solution

    @property
    def _may_skip_recompute(self) -> bool:
        """Checkpoint in step one so that it measures head and loss, where addresses are planned."""
        return self._steps > 0 or not self._addresses.planned

    def _probed(self, training_pass: TrainingPass) -> HiddenShapes:
        """Run the forward up to its last kind of layer, and measure kinds again that it has outgrown."""
        self.unsettled += 1
        probe = functools.partial(self._probe.later, training_pass)
        calls = on_all_ranks(probe) if self._ranks.meet else probe()
        self._warn_of_encoders(calls[kind] for kind in self._profiling.kinds if kind in calls)
        if self._ranks.may_measure_again and (again := self._profiling.again(calls, with_others=self._ranks.meet)):
            self.changes += again
            self._solutions.clear()
        return self._probe.saw(training_pass.kind, calls)

    def _warn_of_encoders(self, calls: Iterable[CaughtCall]) -> None:
        for call in calls:
            if call.encoder_length:
                self._warn(
                    f"layer {call.layer.name} attends to an encoder's states, which were as long as its own in the first pass "
                    "and are not any more: what it takes is predicted as if they were. Set memo.alpha and memo.resident_layers "
                    "for such a model"
                )

    def _solved(self, shapes: HiddenShapes, start: Start, skip: bool, compute_inputs: bool) -> PassSolution | None:
        """Solve with no host memory if earlier forwards hold it: this one was not foreseen, or they were longer."""
        if not any(shapes):
            return None
        must_store = frozenset(self._layer_host.must_store)
        request = SolveRequest(shapes, start.in_flight, start.reservation, start.files, skip, compute_inputs, must_store)
        solution = self._remembered(request, start.share)
        end = start.earlier + start.calls // start.forwards
        if start.earlier and solution.host_bytes(start.earlier, end) > start.left:
            return self._remembered(request._replace(host=0), start.share)
        return solution

    def _remembered(self, request: SolveRequest, share: int) -> PassSolution:
        """Solve, unless it is known; drop the configured alpha if the host is full for now.

        Args:
            share: bytes of the host that there are at other times.
        """
        if request in self._solutions:
            return self._solutions[request]
        self.unsettled += 1
        alpha = self._config.alpha
        try:
            solution = self._solve(request, alpha)
        except NothingFits as error:
            if alpha is None or error.where != "host" or request.host >= share:
                raise
            solution = self._solve(request, None)
            self._warn(WITHOUT_ALPHA.format(alpha))
        while len(self._solutions) >= REMEMBERED:
            del self._solutions[next(iter(self._solutions))]
        self._solutions[request] = solution
        return solution

    def _solve(self, request: SolveRequest, alpha: float | None) -> PassSolution:
        profile, limit, shapes = self.profile, self._budgets.device_limit, request.shapes

        def costs(tiles: Tiles | None) -> RunCosts:
            run = self._budgets.costs(profile, shapes, request.in_flight, request.host, tiles)
            run = replace(run, follows=request.follows(profile.called(shapes)) * request.in_flight.calls)
            for part in self._parts:
                run = part.correct(run)
            return run if run.nvme is None else replace(run, nvme=replace(run.nvme, budget=request.files))

        overhead = UNPLANNED_OVERHEAD if self._addresses.planned else 1.0  # a pass without frames is never planned
        may_tile = not self._ranks.trade_tokens
        solution, run = solve_pass(request, self._config, profile, costs, alpha, limit, overhead, may_tile)
        called, last = tuple(profile.called(shapes)), profile.last(shapes)
        budget = self._budgets.device
        found = PassSolution(solution, run, called, len(profile.layers), shapes, last, budget, self._ranks.meet)
        warn_of_non_layer_memory(found, limit, self._warn)
        return found

    # ---- the first pass

    def _measure(self, training_pass: TrainingPass, layers: Sequence[Layer]) -> bool:
        """Profile. All ranks do this together, at their first training pass. Return False if no profile could be made."""
        self.unsettled += 1
        layers, model = tuple(layers), training_pass.model
        if self._gather_whole is None and any(map(gathers_by_module, _modules(layers))):
            self._profiling.why_whole = BY_MODULE
        try:
            calls = on_all_ranks(functools.partial(self._probe.first, training_pass, layers))
        except Failed as failed:  # the forward itself will say what is wrong with it; it may well be right the next time
            self._failed_passes += 1
            return self._failed_passes >= _TRIES and self._give_up(failed)
        self._ranks = Ranks(model)
        try:
            self._profiling.first(layers, self._probe.kinds, calls)
            self._kernels.begin(self._profiling.folder)
            if self._drives is not None:
                self._drives.measure()
        except Failed as failed:
            return self._give_up(failed)
        self._probe.profiled(training_pass.kind, calls, self._profiling.kinds)
        del calls  # their hidden states are nothing that will be there
        self._budgets.measure(model, self._has_engine, stepped=False)
        return True

    def _give_up(self, failed: Failed) -> bool:
        self.gave_up = True
        self._warn(
            f"no profile could be made ({failed}): the last two layers are resident and alpha is what the host "
            "holds. Set memo.alpha and memo.resident_layers to choose otherwise."
        )
        return False

    def report(self) -> dict[str, Any] | None:
        """Return what the solutions rest on; None before the first training pass."""
        if self.profile is None:
            return None
        why_whole = self._profiling.why_whole
        return {
            "method": self.profile.method,
            "from_cache": self._profiling.from_cache,
            "d2h_bytes_per_s": self.profile.d2h_bytes_per_s * self._link.share,
            "h2d_bytes_per_s": self.profile.h2d_bytes_per_s * self._link.share,
            "device_budget": self._budgets.device.nbytes,
            "host_budget": self._budgets.host.share,
            "kernel_factors": self._kernels.factors._asdict(),
            "samples": {kind.name: kind.seconds() for kind in self.profile.kinds},
            "calls": self._in_flight.calls,
            "not_tiled": {kind.name: why for kind in self.profile.kinds if (why := why_whole or kind.not_tiled)},
            "changes": list(self.changes),
        }

    # ---- between steps

    def stepped(self, model: nn.Module | None, passes: int, calls: int, now: float) -> None:
        """Learn from an optimizer step, which is over on all ranks.

        Args:
            passes: training passes so far.
            calls: of each layer before its backward, the most lately.
            now: the time, in seconds.
        """
        if self.profile is None or model is None:
            return
        self._steps += 1
        self._kernels.stepped(self._latest)
        seen = self._windows.stepped(passes, now)
        looks = self._steps == 1 or (self._ranks.meet and self._steps <= _SETTLED)
        if looks and self._budgets.learn(from_all_ranks(self._non_layer_memory(calls))):
            self._solutions.clear()
        if self._steps == 1:
            self._budgets.measure(model, self._has_engine, stepped=True)
            self._solutions.clear()
        elif seen is not None:
            self._learn(*seen)

    def _totals(self) -> Totals:
        totals = self._drives.totals() if self._drives else Totals()
        return totals._replace(copy_stall_s=sum(self._streams.stall_s().values()))

    def _learn(self, window: Totals, comparable: bool) -> None:
        """Compare a window with the latest solution, and exchange the host's room. All ranks do this together."""
        passed, alpha = self._latest, self._config.alpha
        comparable = comparable and passed is not None and alpha is None  # a configured alpha is obeyed
        measured = [part.measured(window, passed) if comparable else None for part in self._parts]
        offers, *by_part = zip(*from_all_ranks([self._budgets.host.offer, *measured]), strict=True)
        self._budgets.host.agree(*min(offers))
        learned = [part.learn(by_rank) for part, by_rank in zip(self._parts, by_part, strict=True)]
        why = "; ".join(change for change in learned if change is not None)
        if not why:
            return
        self._solutions.clear()
        if passed is None:
            return
        before, run = passed.solution, passed.run
        files, must_store = run.nvme.budget if run.nvme else 0, frozenset(self._layer_host.must_store)
        request = SolveRequest(passed.shapes, self._in_flight, run.host_budget, files, True, must_store=must_store)
        after = self._solve(request, alpha).solution
        if after.alpha != before.alpha:
            changed = "lowered" if after.alpha < before.alpha else "raised"
            self.changes.append(f"alpha {changed} from {before.alpha:.4g} to {after.alpha:.4g}: {why}")
        elif after.kinds != before.kinds:
            self.changes.append(f"other placements ({after.binding}): {why}")
        else:
            self.changes.append(f"{why}; placements stay")

    def _non_layer_memory(self, calls: int) -> PassMemory | None:
        passed = self._latest
        if passed is None:
            return None
        arena = self._addresses.arena_bytes  # all of it is alive to the device's counters
        inputs = (output.nbytes for output in passed.run.layers[-1].outputs if output.role == "input")
        hidden_bytes = max(inputs, default=0)  # where it came inside of something, it is not kept
        forward, between, backward = bytes_of_layers(passed.run, passed.solution.kinds, passed.solution.alpha)
        if calls == 1 and len(passed.run.layers) == len(passed.solved):
            by_layer = [dict(zip(passed.solved, nbytes, strict=True)) for nbytes in (forward, backward)]
        else:  # more than one call of each: it is not known which is which
            by_layer = [{}, {}]
        logged = self._addresses.non_layer_memory(hidden_bytes, *by_layer)
        return self._budgets.measured(logged, math.prod(passed.shape[:2]), between - arena)


def _modules(layers: Sequence[Layer]) -> list[nn.Module]:
    return [module for layer in layers if (module := layer.module()) is not None]
