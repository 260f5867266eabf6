"""The tuner: measure, and solve for, what the configuration leaves open, per kind of training pass.

first pass        the first call of each kind of layer is caught before the forward runs; ds_memo.autotune.model_profile has the
                  profile; solved; NothingFits comes out here, before the first step
other passes      solved from the same profile; ranks that hold parameters in pieces (ZeRO-3) or each some of the experts agree
                  in each pass on whether they checkpoint; ranks that share sequences (Ulysses) or GEMMs (AutoTP) solve from the
                  same numbers; the others need not talk
between steps     budgets are measured again once the first optimizer step has shown what else needs memory, head and loss
                  above all; copies that take longer than profiled lower alpha
"""

from __future__ import annotations

import functools
import json
import math
import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from torch import nn

from ds_memo.autotune.budgets import Budgets
from ds_memo.autotune.copy_stalls import StallWatch, Window, slower
from ds_memo.autotune.drives import Drives
from ds_memo.autotune.model_profile import Profiling
from ds_memo.autotune.pass_solution import PassSolution
from ds_memo.autotune.pending_calls import CallsInFlight, InFlight
from ds_memo.autotune.policy import WITHOUT_ALPHA
from ds_memo.autotune.probe_forward import REMEMBERED, Probe, TrainingPass
from ds_memo.config import MemoConfig
from ds_memo.distributed import agree
from ds_memo.distributed.agree import Failed, from_all_ranks, greatest, on_all_ranks, world_size
from ds_memo.distributed.topology import gathers_by_module, is_experts, meet_in_layers, sharing_ranks, talk_in_layers
from ds_memo.logits.lazy_head import LazyHead
from ds_memo.placement import PlacementKind, Tiles
from ds_memo.planned_alloc import UNPLANNED_OVERHEAD
from ds_memo.planned_alloc.runtime import Addresses
from ds_memo.profile.caught_call import CaughtCall
from ds_memo.profile.run_profile import RunProfile
from ds_memo.remat.checkpoint import Remat
from ds_memo.remat.layer import Layer
from ds_memo.shapes import HiddenShapes, Shapes
from ds_memo.solve.headroom import shortest
from ds_memo.solve.memory import bytes_of_layers
from ds_memo.solve.refusals import NothingFits
from ds_memo.solve.run_costs import RunCosts
from ds_memo.solve.solution import Solution
from ds_memo.tiles.check.refuse import BY_MODULE
from ds_memo.units import GIB

_TRIES = 3
"""Passes that may fail before their first layer until no profile is made."""
_WORTH_SAYING = 0.05
"""Share of the device's budget: of more than that on other streams people hear where layers lack it."""
_SETTLED = 4
"""Steps until ZeRO-3 has seen twice in which order layers come, and so keeps and gathers ahead what it will."""


class _Room(NamedTuple):
    """Bytes for a pass; those of the host are HostBudget's properties of these names."""

    reservation: int
    left: int
    share: int
    files: int


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
    """

    def __init__(
        self,
        config: MemoConfig,
        remat: Remat,
        addresses: Addresses,
        warn: Callable[[str], None],
        has_engine: bool,
        before_probe: Callable[[], None],
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
        self._device = remat.engine.device
        self._addresses = addresses
        self._warn = warn
        self._has_engine = has_engine
        self._solutions: dict[tuple[HiddenShapes, InFlight, int, bool], PassSolution] = {}
        """By the shapes of the hidden states, the calls in flight, the host's bytes, and whether the pass may do without
        checkpointing."""
        self._profiling = Profiling(config, remat.engine.slab.budget, self._device, warn)
        self._probe = Probe(remat, before_probe)
        self._gather_whole = gather_whole
        self._drives = drives
        self._layers: Sequence[Layer] = ()
        self._why_whole = ""
        """Why no layer was measured in tiles, and so none runs in tiles that are solved for."""
        self._in_flight = InFlight()
        self._earlier = 0
        """Calls of a layer in forwards that wait for their backward, before the pass that begins."""
        self._meets_in_layers = False
        """See ds_memo.distributed.topology."""
        self._sharing: tuple[int, ...] = ()
        """Ranks that share this rank's sequences or GEMMs: see ds_memo.distributed.topology."""
        self._room = _Room(0, 0, 0, 0)
        self._trades_tokens = False
        """Ranks exchange tokens for experts in layers, so all would have to run as many tiles."""
        self._measures_again = False
        """Layers can be measured again in a later pass: with all ranks, or without making another rank wait."""
        self._latest: PassSolution | None = None
        self._budgets = Budgets(config.device_memory_gib, remat.engine.slab.budget, self._device, heads)
        self._copies_at = 1.0
        """The share of the profiled bandwidth that copies were seen to reach."""
        self._steps = 0
        self._missed = 0
        """Passes whose first layer call could not be caught."""
        self._stalls = StallWatch(remat.engine.streams)

    @property
    def profile(self) -> RunProfile | None:
        return self._profiling.profile

    # ---- before each training pass

    def solve(self, training_pass: TrainingPass, layers: Sequence[Layer], calls: CallsInFlight) -> PassSolution | None:
        """The solution of a pass that is about to begin; None: no profile could be made, or none of its layers is in it.

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
        if self.gave_up or (self.profile is None and not self._start(training_pass, layers)):
            return None
        shapes = self._shapes(training_pass.kind)
        in_flight, must_probe = self._agreed(calls, shapes is None)
        shapes = None if must_probe else shapes
        self._expect(in_flight, calls.earlier)
        self._layers = layers
        if self._meets_in_layers:
            solution = self._solve_together(training_pass, shapes)
        else:
            solution = self._solved(shapes or self._probed(training_pass), self._may_skip_recompute)
            self._gather_for_tiles(_in_tiles(solution))
        if solution is not self._latest:
            self._latest = solution
            self._stalls.another_kind()
        return solution

    def _agreed(self, calls: CallsInFlight, must_probe: bool) -> tuple[InFlight, bool]:
        """Have ranks that share sequences or GEMMs solve from the same numbers, and plan addresses if all of them can.

        Garbage collection, other models and compilers differ between ranks. A replay on one rank alone would wait for the others.

        Returns:
            The calls in flight, and True if the pass must be probed, on any of these ranks.
        """
        host, addresses = self._budgets.host, self._addresses
        room = _Room(host.reservation, host.left, host.share, self._drives.budget if self._drives else 0)
        mine = [must_probe, calls.earlier, *calls.most, *(-nbytes for nbytes in room)]
        said = agree.meet(json.dumps([mine, addresses.why_not_planned]), self._sharing)
        everybodys, whys = zip(*map(json.loads, said), strict=True)
        one_must, calls.earlier, most, forwards, *minus_room = map(max, zip(*everybodys, strict=True))
        self._room = _Room(*(-nbytes for nbytes in minus_room))
        not_planned = (f"rank {rank}: {why}" for rank, why in zip(self._sharing, whys, strict=True) if why)
        if addresses.planned and (why := next(not_planned, None)) is not None:
            addresses.stop_planning(f"{why}; ranks that exchange tensors inside layers plan alike")
        return InFlight(most, forwards), one_must

    def _expect(self, in_flight: InFlight, earlier: int) -> None:
        self._earlier = earlier
        if earlier:
            self._stalls.another_kind()  # what is predicted is of all forwards that wait for a backward
        if in_flight != self._in_flight:
            self._in_flight = in_flight
            forwards = f", in {in_flight.forwards} forwards" if in_flight.forwards > 1 else ""
            self.changes.append(f"solved for {in_flight.calls} calls of each layer before its backward{forwards}")

    def _shapes(self, kind: Shapes) -> HiddenShapes | None:
        """The hidden states of a pass of this kind; None: it must be probed, as its inputs do not tell, or it has outgrown what
        was measured."""
        shapes = self._probe.shapes(kind)
        return None if shapes and self._measures_again and self._profiling.outgrown(shapes) else shapes

    def _solve_together(self, training_pass: TrainingPass, shapes: HiddenShapes | None) -> PassSolution | None:
        """Solve on all ranks alike, whatever lengths they have.

        Ranks that hold parameters in pieces gather them in every forward and replay of a layer; ranks with other experts trade
        tokens there. So no rank probes a forward alone, all replay the same layers (all, unless they agree on those without
        recompute), and all gather layers alike if one has tiles.
        """
        solution, nothing_fits = None, None
        if shapes is not None:
            try:
                solution = self._solved(shapes, self._may_skip_recompute)
            except NothingFits as error:
                nothing_fits = error
        no_recompute = _digest(solution)
        mine = (shapes is None, no_recompute, -no_recompute, nothing_fits is not None, _in_tiles(solution))
        one_must_probe, most, minus_least, fails, in_tiles = greatest(mine)
        if shapes is None or one_must_probe:
            return self._solve_together(training_pass, self._probed(training_pass))
        if fails:
            self._refuse_together(nothing_fits)
        if most != -minus_least:
            solution = self._solved(shapes, False)
            (in_tiles,) = greatest((_in_tiles(solution),))
        self._gather_for_tiles(in_tiles)
        return solution

    def _gather_for_tiles(self, in_tiles: bool | int) -> None:
        if in_tiles and self._gather_whole is not None:
            self._gather_whole(_modules(self._layers))

    def _refuse_together(self, mine: NothingFits | None) -> None:
        """Ranks that wait for one that has ended would learn of it much later, and not why."""
        everybodys = from_all_ranks(mine and (str(mine), mine.numbers))
        if mine is not None:
            raise mine
        rank, (message, numbers) = next((rank, said) for rank, said in enumerate(everybodys) if said)
        raise NothingFits(f"rank {rank}: {message}", *numbers)

    @property
    def _may_skip_recompute(self) -> bool:
        """The first step is to show what head and loss take, and does so where it checkpoints and addresses are planned."""
        return self._steps > 0 or not self._addresses.planned

    def _probed(self, training_pass: TrainingPass) -> HiddenShapes:
        """Run the forward up to its last kind of layer, and measure kinds again that it has outgrown."""
        self.unsettled += 1
        probe = functools.partial(self._probe.later, training_pass)
        calls = on_all_ranks(probe) if self._meets_in_layers else probe()
        self._warn_of_encoders(calls[kind] for kind in self._profiling.kinds if kind in calls)
        if self._measures_again and (again := self._profiling.again(calls, with_others=self._meets_in_layers)):
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

    def _solved(self, shapes: HiddenShapes, may_skip_recompute: bool) -> PassSolution | None:
        """Forwards of before may hold more of the host than is left by what is solved for now: this one was not foreseen, or they
        were longer. Then it does without."""
        if not any(shapes):
            return None
        solution = self._solved_within(self._room.reservation, shapes, may_skip_recompute)
        if self._earlier:
            end = self._earlier + self._in_flight.calls // self._in_flight.forwards
            if solution.host_bytes(self._earlier, end) > self._room.left:
                return self._solved_within(0, shapes, may_skip_recompute)
        return solution

    def _solved_within(self, host: int, shapes: HiddenShapes, may_skip_recompute: bool) -> PassSolution:
        key = (shapes, self._in_flight, host, may_skip_recompute)
        known = self._solutions.get(key)
        if known is None:
            self.unsettled += 1
            while len(self._solutions) >= REMEMBERED:
                del self._solutions[next(iter(self._solutions))]
            known = self._solutions[key] = self._solve_as_configured(host, shapes, may_skip_recompute)
        return known

    def _solve_as_configured(self, host: int, shapes: HiddenShapes, may_skip_recompute: bool) -> PassSolution:
        """Solve as configured; drop the configured alpha if the host is full for now."""
        alpha = self._config.alpha
        try:
            return self._solve(host, shapes, may_skip_recompute, alpha)
        except NothingFits as error:
            if alpha is None or error.where != "host" or host >= self._room.share:
                raise
            solution = self._solve(host, shapes, may_skip_recompute, None)
        self._warn(WITHOUT_ALPHA.format(alpha))
        return solution

    def _solve(self, host: int, shapes: HiddenShapes, may_skip_recompute: bool, alpha: float | None) -> PassSolution:
        shape, limit = self.profile.last(shapes), self._budgets.device_limit
        overhead = UNPLANNED_OVERHEAD if self._addresses.planned else 1.0  # a pass without frames is never planned

        def layers_alone(run: RunCosts) -> RunCosts:  # no solution changes what the head takes
            return replace(run.layers_alone(), device_budget=limit)

        def best(tilings: Sequence[Tiles | None]) -> tuple[RunCosts, Solution]:
            candidates = [self._candidate(host, shapes, tiles) for tiles in tilings]
            return shortest(candidates, layers_alone, alpha, self._config.resident_layers, may_skip_recompute, overhead)

        run, solution = best(self._tilings(shapes))
        if run.tiles is not None and self._config.head_groups is None:
            doublings = range(run.tiles.head_groups.bit_length())
            run, solution = best([run.tiles._replace(head_groups=1 << doubled) for doubled in doublings])  # no more than needed
        if run.device_budget > limit:
            others = run.non_layer_bytes()
            needed = others.pop("always") + max(others.values())
            self._warn(
                f"beside the layers {math.prod(shape[:2]):,} tokens take {needed / GIB:.3g} GiB of device memory "
                f"for head, loss and gradients on their way ({others['backward'] / GIB:.3g} GiB). With them a step "
                f"needs {run.device_budget / GIB:.3g} GiB where {limit / GIB:.3g} GiB are free: it may run out of memory. "
                "A smaller zero_optimization.reduce_bucket_size helps, and logits that are lazy (leave kernels.cross_entropy out)"
            )
        again = any(kind.recomputes_attention for kind in solution.kinds)
        if again and run.working_bytes > _WORTH_SAYING * run.device_budget:
            self._warn(
                "layers recompute attention for want of device memory, of which DeepSpeed holds "
                f"{run.working_bytes / GIB:.3g} GiB on other streams for what it gathers and reduces. In zero_optimization a "
                "smaller reduce_bucket_size, and under ZeRO-3 stage3_max_live_parameters and stage3_prefetch_bucket_size, leave "
                "more to layers"
            )
        called, layers = tuple(self.profile.called(shapes)), len(self.profile.layers)
        return PassSolution(solution, run, called, layers, shapes, shape, paced=self._meets_in_layers)

    def _candidate(self, host: int, shapes: HiddenShapes, tiles: Tiles | None) -> RunCosts:
        run = slower(self._budgets.costs(self.profile, shapes, self._in_flight, host, tiles), self._copies_at)
        if self._drives is not None and (nvme := self._drives.costs()) is not None:
            run = replace(run, nvme=replace(nvme, budget=self._room.files))
        return run

    def _tilings(self, shapes: HiddenShapes) -> list[Tiles | None]:
        """Ways to run the layers: whole, and in tiles of several lengths with as many groups of heads as can be."""
        tokens, groups = self._config.tile_tokens, self._config.head_groups
        if tokens == 0 or (tokens is None and self._trades_tokens):
            return [None]
        solved = self.profile.tilings([shape and (shape.batch, shape.length) for shape in shapes])
        most = groups or (solved[0].head_groups if solved else 1)
        if tokens is not None:
            return [Tiles(tokens, most)]
        return [None, *(tiles._replace(head_groups=most) for tiles in solved)]

    # ---- the first pass

    def _start(self, training_pass: TrainingPass, layers: Sequence[Layer]) -> bool:
        """Profile. All ranks do this together, at their first training pass."""
        self.unsettled += 1
        layers, model = tuple(layers), training_pass.model
        if self._gather_whole is None and any(map(gathers_by_module, _modules(layers))):
            self._profiling.in_tiles, self._why_whole = False, BY_MODULE
        try:
            calls = on_all_ranks(functools.partial(self._probe.first, training_pass, layers))
        except Failed as failed:  # the forward itself will say what is wrong with it; it may well be right the next time
            self._missed += 1
            return self._missed >= _TRIES and self._give_up(failed)
        try:
            self._profiling.first(layers, self._probe.kinds, calls)
            if self._drives is not None:
                self._drives.measure()
        except Failed as failed:
            return self._give_up(failed)
        self._probe.profiled(training_pass.kind, calls, self._profiling.kinds)
        self._meets_in_layers, self._sharing = meet_in_layers(model), sharing_ranks(model)
        self._trades_tokens = self._meets_in_layers and any(map(is_experts, model.parameters()))
        self._measures_again = self._meets_in_layers or not talk_in_layers(model)
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
        return {
            "method": self.profile.method,
            "from_cache": self._profiling.from_cache,
            "d2h_bytes_per_s": self.profile.d2h_bytes_per_s * self._copies_at,
            "h2d_bytes_per_s": self.profile.h2d_bytes_per_s * self._copies_at,
            "device_budget": self._budgets.device,
            "host_budget": self._budgets.host.share,
            "calls": self._in_flight.calls,
            "not_tiled": {kind.name: why for kind in self.profile.kinds if (why := self._why_whole or kind.not_tiled)},
            "changes": list(self.changes),
        }

    # ---- between steps

    def stepped(self, model: nn.Module | None, passes: int, calls: int, now: float) -> None:
        """An optimizer step is over on all ranks.

        Args:
            passes: training passes so far.
            calls: of each layer before its backward, the most lately.
            now: the time, in seconds.
        """
        if self.profile is None or model is None:
            return
        self._steps += 1
        first = self._steps == 1
        if (first or (self._meets_in_layers and self._steps <= _SETTLED)) and self._see(self._latest, calls):
            self._solutions.clear()
        if first:
            self._budgets.measure(model, self._has_engine, stepped=True)
            self._solutions.clear()
            return
        if (window := self._stalls.stepped(passes, now)) is None:
            return
        passed = self._latest
        share = window.share(passed.run, passed.solution) if passed and self._config.alpha is None else 1.0
        shares, offers = zip(*from_all_ranks((share, self._budgets.host.offer)), strict=True)
        self._budgets.host.agree(*min(offers))
        if self._config.alpha is None:
            self._copies_are_slower(min(shares))
            if self._drives is not None:
                self._drives_are_slower(self._drives, window)

    def _see(self, passed: PassSolution | None, calls: int) -> bool:
        """Learn the non-layer memory of the latest pass; return whether some of it is more than was known."""
        if passed is None:
            return self._budgets.see(None, 0, 0)
        arena = self._addresses.arena_bytes  # all of it is alive to the device's counters
        inputs = (output.nbytes for output in passed.run.layers[-1].outputs if output.role == "input")
        hidden_bytes = max(inputs, default=0)  # where it came inside of something, it is not kept
        forward, between, backward = bytes_of_layers(passed.run, passed.solution.kinds, passed.solution.alpha)
        if calls == 1 and len(passed.run.layers) == len(passed.solved):
            by_layer = [dict(zip(passed.solved, nbytes, strict=True)) for nbytes in (forward, backward)]
        else:  # more than one call of each: it is not known which is which
            by_layer = [{}, {}]
        logged = self._addresses.non_layer_memory(hidden_bytes, *by_layer)
        return self._budgets.see(logged, math.prod(passed.shape[:2]), between - arena)

    def _copies_are_slower(self, share: float) -> None:
        if share >= 1:
            return
        self._copies_at *= share
        self._solutions.clear()
        before = self._latest
        if before is None:
            return
        after = self._solve(before.run.host_budget, before.shapes, self._may_skip_recompute, None).solution
        if after.alpha < before.solution.alpha:
            change = f"alpha lowered from {before.solution.alpha:.4g} to {after.alpha:.4g}"
        elif after.kinds != before.solution.kinds:
            change = f"other placements ({after.binding})"
        else:
            return
        self.changes.append(f"{change}: copies reach {self._copies_at:.0%} of the profiled bandwidth")

    def _drives_are_slower(self, drives: Drives, window: Window) -> None:
        predicted_s = self._latest.solution.nvme_stall_s if self._latest else 0.0
        passes = 0 if window.mixed else window.passes
        if (why := drives.learn(predicted_s, window.seconds / max(1, passes), passes)) is not None:
            self.changes.append(why)
            self._solutions.clear()


def _modules(layers: Sequence[Layer]) -> list[nn.Module]:
    return [module for layer in layers if (module := layer.module()) is not None]


def _in_tiles(solution: PassSolution | None) -> bool:
    return solution is not None and solution.run.tiles is not None


def _digest(solution: PassSolution | None) -> int:
    """A number for the layers without recompute. Ranks that solve for other layers (a tower that only some call) may have as many
    of them and not the same."""
    return zlib.crc32(repr(_without_recompute(solution)).encode()) >> 1 if solution else 0  # fits int32, with either sign


def _without_recompute(solution: PassSolution | None) -> list[int]:
    """Return the numbers of the calls without recompute."""
    kinds = solution.kinds if solution is not None else {}
    return sorted(number for number, kind in kinds.items() if kind is PlacementKind.NO_RECOMPUTE)
