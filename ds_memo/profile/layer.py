"""Measure one layer by running it alone: times, bytes kept, bytes that autograd would save, and peak bytes.

Gradients come from autograd.grad, so no parameter's .grad and no hook on it is touched. Random numbers are drawn from a fork of
the generators, and the module gets its state back. Nothing is copied to the host.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import nn

from ds_memo.errors import MemoError
from ds_memo.placement import FULL_RECOMPUTE, GEMMS_RECOMPUTED, NO_RECOMPUTE, ON_DEVICE, Placement
from ds_memo.profile.caught_call import CaughtCall, hidden_from_training, uncompiled
from ds_memo.profile.layer_sample import LayerSample
from ds_memo.profile.live import AllocatedBytes, LiveBytes, bytes_made, storages_of
from ds_memo.profile.stopwatch import Stopwatch, now, repeats, seconds_between, sustain, synchronize
from ds_memo.remat.layer import Layer
from ds_memo.remat.layer_call import OwnForward, Tiler
from ds_memo.remat.layer_host import LayerHost
from ds_memo.remat.random_states import KeepsGiven, forked
from ds_memo.remat.recipe import Gemm, Recipe
from ds_memo.remat.remat import Remat
from ds_memo.remat.tensors import tensor_leaves
from ds_memo.remat.undo import Undoing
from ds_memo.solve.run_costs import Output, OutputRole, PeakBytes
from ds_memo.swap.engine import SwapEngine
from ds_memo.swap.frame import Frame
from ds_memo.swap.host_pool import HostPool
from ds_memo.swap.host_slab import HostSlab
from ds_memo.swap.streams import streams_for


def measure(call: CaughtCall, length: int, device: torch.device, attention: str | None = None, gathered: int = 0) -> LayerSample:
    """Measure one layer at one length, at most the length of the call.

    A compiled layer is timed as it runs. Its tensors and kernels are those of the layer uncompiled, which show one by one.

    Args:
        attention: as the "memo" section's.
        gathered: bytes that are on the device whenever the layer runs.

    Raises:
        MemoError: the layer saves nothing for a backward.
    """
    with alone(call, length, device) as (fn, args, inputs, trained):
        made = partial(Bench, call.layer, args=args, leaves=[*inputs, *trained], device=device, attention=attention)
        bench = as_called = made(uncompiled(fn))
        try:
            if call.compiled_by is not None:
                as_called = made(fn)
                as_called.run(ON_DEVICE)
            compiled = call.compiled_by is not None  # a layer that cannot be traced shows when it is
            if not compiled:
                as_called = bench
            forward_s, backward_s = as_called.timed(NO_RECOMPUTE)
            full, none = bench.recipe(ON_DEVICE), bench.recipe(GEMMS_RECOMPUTED)
            if not full.packs:
                raise MemoError(f"layer {call.layer.name} has nothing to train")
            if [op.func for op in full.ops] != [op.func for op in none.ops]:
                raise MemoError(f"layer {call.layer.name} runs other products each time (parts are skipped, experts in a loop)")
            replay_s = max(0.0, as_called.timed(ON_DEVICE)[1] - backward_s) if compiled else bench.replay_s()
            watch = bench.watched()
            seen = as_called if device.type == "cuda" else bench  # on a CPU nothing shows what compiled code allocates
            peaks = []
            for kept in (ON_DEVICE, GEMMS_RECOMPUTED, FULL_RECOMPUTE):
                seen.forward(kept)  # analysed
                peaks.append(PeakBytes(*seen.peaks(kept, gathered)))
            working, at_0, without_attention = peaks
            outputs, gemm_s, all_gemms_s = _outputs(full, none, watch)
            return LayerSample(
                batch=call.batch,
                length=length,
                forward_s=forward_s,
                attention_s=min(forward_s, watch.attention_s),
                backward_s=backward_s,
                attention_backward_s=min(backward_s, watch.attention_backward_s),
                replay_s=replay_s,
                gemm_s=min(forward_s, gemm_s),
                all_gemms_s=all_gemms_s,
                gemm_flops=full.gemm_flops,
                attention_flops=watch.attention_flops,
                no_recompute_bytes=as_called.saved_bytes(),
                working=working,
                working_at_0=at_0,
                working_without_attention=replace(without_attention, forward=at_0.forward),
                outputs=outputs,
            )
        finally:
            bench.close()
            as_called.close()


@contextmanager
def alone(
    call: CaughtCall, length: int, device: torch.device
) -> Iterator[tuple[Callable[..., Any], tuple, list[torch.Tensor], list[nn.Parameter]]]:
    """Let a call run inside the block without a trace in training.

    Yields:
        The function, its arguments, the inputs that require a gradient, and the parameters that do.
    """
    module = call.layer.module()
    with forked(device), torch.enable_grad(), hidden_from_training(module), _own_parameters(module) as trained:
        fn, args, inputs = call.at(length)
        with KeepsGiven() as generators, torch.no_grad():  # a mode would slow down what is timed
            uncompiled(fn)(*args)
        with forked(device, [generator for generator, _ in generators.given.values()]):
            yield fn, args, inputs, trained


@contextmanager
def _own_parameters(module: nn.Module) -> Iterator[list[nn.Parameter]]:
    """Replace the trained parameters by copies that share their memory but not their hooks and gradients.

    autograd.grad alone is not enough. A backward that runs another backward inside, as DeepSpeed's TiledMLP does, adds to .grad
    and calls the parameters' hooks; a hook that reduces gradients waits for other ranks.
    """
    held = ((part, name, own) for part in module.modules() for name, own in part._parameters.items())
    owners = [(part, name, own) for part, name, own in held if own is not None and own.requires_grad]
    others: dict[nn.Parameter, nn.Parameter] = {}
    for _, _, own in owners:
        if own not in others:
            others[own] = nn.Parameter(own.detach())
            vars(others[own]).update(vars(own))

    def put_back() -> None:
        for part, name, own in owners:
            part._parameters[name] = own

    with Undoing(put_back):
        for part, name, own in owners:
            part._parameters[name] = others[own]
        yield list(others.values())


class _Fixed:
    """A policy whose placement is always `now`. Measured layers stay on the device, so there is no alpha to decide."""

    now = ON_DEVICE

    def placement(self, layer: Layer) -> Placement:
        return self.now

    def decide_alpha(self, layer: Layer, placement: Placement, whole_bytes: int, split_bytes: int) -> Placement:
        raise AssertionError("no rows are swapped in a profile")

    def has_room(self, nbytes: int, planned: bool = True) -> bool:
        raise AssertionError("nothing goes to the host in a profile")


class _Watched(SwapEngine):
    """A swap engine that records when each replay began and ended."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.replays: list[tuple[Any, Any]] = []
        self._began: Any = None

    def bring_back(self, frame: Frame, then: Frame | None = None, again: bool = False) -> None:
        self._began = now(self.device)
        super().bring_back(frame, then, again)

    def replayed(self, frame: Frame) -> None:
        super().replayed(frame)
        self.replays.append((self._began, now(self.device)))


class Bench:
    """One layer, set up to run repeatedly on its own.

    Args:
        fn, args: of the call; fn may be a partial that holds keywords.
        leaves: tensors that get a gradient.
        warn: hears what would be said to the user.
    """

    def __init__(
        self,
        layer: Layer,
        fn: Callable,
        args: tuple,
        leaves: list[torch.Tensor],
        device: torch.device,
        attention: str | None,
        warn: Callable[[str], None] = lambda message: None,
        tiler: Tiler | None = None,
    ) -> None:
        self._layer = Layer(layer.index, layer.name, layer.module())
        self._fn, self._args = fn, args
        self.leaves = leaves
        self._device = device
        self._policy = _Fixed()
        self._engine = _Watched(streams_for(device), HostSlab(0, HostPool(device)), device)
        self._part_begins: Callable[[], None] = lambda: None
        host = LayerHost(self._engine, self._policy, warn, attention, part_begins=lambda part: self._part_begins())
        self.remat = Remat(host, tiler)

    def close(self) -> None:
        self._engine.close()

    def forward(self, placement: Placement) -> list[torch.Tensor]:
        self._policy.now = placement
        out = self.remat.run(self._layer, self._fn, *self._args)
        return [tensor for tensor in tensor_leaves(out) if tensor.requires_grad]

    def backward(self, outputs: list[torch.Tensor]) -> None:
        """Run a backward. Its gradients are the outputs' values: with ones a GPU would take less power, and clock higher."""
        torch.autograd.grad(outputs, self.leaves, [out.detach().clone() for out in outputs], allow_unused=True)

    def run(self, placement: Placement, read: Callable[[], Any] = lambda: None) -> list[Any]:
        """Run the layer forward and backward.

        Returns:
            What `read` returns at the begin of each part, and at the end. A layer that runs whole has two parts.
        """
        readings: list[Any] = []
        if placement.tiles is not None:
            self._part_begins = lambda: readings.append(read())
            self.backward([_GivesOwnGradient.apply(output) for output in self.forward(placement)])
        else:
            readings.append(read())
            outputs = self.forward(placement)
            readings.append(read())
            self.backward(outputs)
        return [*readings, read()]

    def timed(self, placement: Placement) -> tuple[float, ...]:
        """Return the seconds of each part: medians."""
        self.run(placement)
        sustain(self._device)
        times = [self.run(placement, partial(now, self._device)) for _ in range(repeats(self._device))]
        synchronize(self._device)
        seconds = ([seconds_between(*pair) for pair in pairwise(points)] for points in times)
        return tuple(map(statistics.median, zip(*seconds, strict=True)))

    def replay_s(self) -> float:
        """Return the seconds of a resident layer's replay: the median.

        The difference of two backwards would not do: on a CPU, where the allocator's pages come and go, it is noisier than a
        replay is long.
        """
        self.run(ON_DEVICE)
        sustain(self._device)
        self._engine.replays = []
        for _ in range(repeats(self._device)):
            self.run(ON_DEVICE)
        synchronize(self._device)
        return statistics.median(seconds_between(*span) for span in self._engine.replays)

    def recipe(self, placement: Placement) -> Recipe:
        self.forward(placement)
        return self._layer.latest

    def watched(self) -> Stopwatch:
        """Time each GEMM, attention and choice of one run."""
        self.run(NO_RECOMPUTE)
        sustain(self._device)
        with Stopwatch(self._device) as watch:
            start = watch.now()
            outputs = self.forward(NO_RECOMPUTE)
            watch.forward_over(start)
            self.backward(outputs)
        watch.read()
        return watch

    def peaks(self, placement: Placement, gathered: int) -> list[int]:
        """Return the peak bytes of each part: in the forward with the layer's input, in the backward without its frame.

        The output, which in a step belongs to the frame above, counts in both.

        Args:
            gathered: bytes that are on the device whenever the layer runs.
        """
        with bytes_made(self._device) as count:
            _, *found = self.run(placement, partial(_peak, count))
        forward, into = len(found) // 2, self.leaves[0].untyped_storage().nbytes()
        beside = [into if number < forward else -self._frame_bytes for number in range(len(found))]
        return [max(0, peak + more) + gathered for peak, more in zip(found, beside, strict=True)]

    @property
    def _frame_bytes(self) -> int:
        """Device bytes of what the latest forward keeps."""
        return self._layer.latest.layout.buffer_bytes

    @property
    def kept_bytes(self) -> int:
        """The same without gaps between tensors."""
        return sum(kept.stored_bytes for kept in self._layer.latest.layout.kept)

    def saved_bytes(self) -> int:
        """Return the bytes that autograd saves, without parameters, buffers and arguments that other layers share."""
        module = self._layer.module()
        own = (*module.parameters(), *module.buffers())
        shared = tensor_leaves((self._args, self._fn.keywords if isinstance(self._fn, partial) else ()))
        known = {storage._cdata for x in (*own, *shared) if x is not self.leaves[0] for storage in storages_of(x)}
        saved: dict[int, torch.UntypedStorage] = {}

        def note(tensor: torch.Tensor) -> None:  # returns nothing: the graph would keep a saved output, which keeps the graph
            for storage in storages_of(tensor) if not isinstance(tensor, nn.Parameter) else ():
                if storage._cdata not in known:
                    saved[storage._cdata] = storage

        if isinstance(getattr(self._fn, "func", self._fn), OwnForward):  # dynamo is at work when it is called
            note = torch.compiler.disable(note)
        with torch.autograd.graph.saved_tensors_hooks(note, lambda nothing: nothing):
            self.forward(NO_RECOMPUTE)
        return sum(storage.nbytes() for storage in saved.values())


def _peak(count: LiveBytes | AllocatedBytes) -> int:
    """Return the most bytes since the last reading."""
    found = count.peak
    count.reset_peak()
    return found


class _GivesOwnGradient(torch.autograd.Function):
    """Hands a layer in tiles a gradient that no one else holds, as the layer above does in training. The output stays alive."""

    @staticmethod
    def forward(ctx: Any, output: torch.Tensor) -> torch.Tensor:
        ctx.output = output
        return output.new_zeros(())

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return ctx.output.detach().clone(memory_format=torch.contiguous_format)


def _outputs(full: Recipe, none: Recipe, watch: Stopwatch) -> tuple[tuple[Output, ...], float, float]:
    """Return the kept outputs, in the order of birth, the seconds of the GEMMs that alpha splits, and those of all GEMMs."""
    outputs = [Output("input", 1, kept.stored_bytes, 0.0) for kept in full.inputs if kept]
    role: OutputRole
    gemm_s = all_gemms_s = 0.0
    for index, (op, at_zero) in enumerate(zip(full.ops, none.ops, strict=True)):
        timed = index < len(watch.seconds)
        born = watch.born[index] if timed else 1.0
        if isinstance(op, Gemm):
            split = op.kept is not None and at_zero.kept is None
            for_others = isinstance(at_zero, Gemm) and at_zero.wanted and not op.wanted  # at alpha 0 others are computed from it
            all_gemms_s += watch.seconds[index] if timed else 0.0
            gemm_s += watch.seconds[index] if timed and (split or for_others) else 0.0
            if op.kept is not None:
                rows = op.kept.rows
                outputs.append(Output("gemm" if split else "choice", rows, op.kept.stored_bytes // rows, born))
        else:
            role = "attention" if op.is_attention else "choice"
            outputs += [Output(role, 1, kept.stored_bytes, born) for kept in op.kept or () if kept]
    return tuple(outputs), gemm_s, all_gemms_s
