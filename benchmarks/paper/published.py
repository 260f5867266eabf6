"""The paper's 7B GPT and the methods of its tables, by formula: what their times and bytes say of a machine's constants.

method           kept of a layer
none             everything autograd saves
full_recompute   the input
full_swap        everything, on the host
paper            input and attention output, and alpha of everything else: MEMO as published

Layers have Megatron's kernels, but for DeepSpeed's rows, which have those of Transformers. Units are bytes of the hidden states:
autograd saves 16 of a layer (section 2), and a plan of its transients takes 8.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from benchmarks.paper_alpha import paper_alpha
from ds_memo.estimate.hardware import Hardware, mfu
from ds_memo.estimate.layout import GpuLayout
from ds_memo.estimate.methods import CACHE_GROWTH, LOGIT_BYTES
from ds_memo.estimate.question import OK, OOHM, OOM
from ds_memo.hf.model_flops import sequence_flops
from ds_memo.memory.host import HOST_HEADROOM
from ds_memo.placement import PlacementKind
from ds_memo.solve.run_costs import LayerCosts, Output, RunCosts
from ds_memo.solve.schedule import Schedule

LAYERS, HIDDEN, VOCAB, HEADS = 32, 4096, 50257, 32
OF_LAYER = 12 * HIDDEN**2
PARAMETERS = LAYERS * OF_LAYER + 2 * VOCAB * HIDDEN
SAVED, TRANSIENT = 16, 8
"""Units of a layer."""
FUSED_LOGIT_BYTES = 4
"""Megatron's vocabulary-parallel loss works in place in fp32."""
_GEMM_TILE = 128 * 256


class Moved(NamedTuple):
    """Bytes that elementwise kernels move, per token and element of the hidden states."""

    forward: float
    backward: float
    replay: float
    of_logit: float
    norm: float


MEGATRON = Moved(24 + 4 * 4, 46 + 6 * 4, 14 + 4 * 4, 20, 0)
TRANSFORMERS = Moved(88, 158, 82, 36, 10)


@dataclass(frozen=True)
class Run:
    """A run of the tables."""

    hardware: Hardware
    gpus: int
    seq_length: int
    batch: int
    method: str
    tp: int | None = None
    cp: int | None = None
    alpha: float | None = None
    plan: bool | None = None

    @property
    def planned(self) -> bool:
        return self.method in ("paper", "full_swap") if self.plan is None else self.plan

    @property
    def megatron(self) -> bool:
        return self.tp is not None or self.method == "paper"

    @property
    def host_bytes(self) -> float:
        return self.hardware.host_memory * (1 - HOST_HEADROOM)

    def layouts(self) -> list[GpuLayout]:
        """Return the layouts that it may have had: as stated; tp 4 or 8 and any cp; or Ulysses with ZeRO-3. Every replica has a
        sequence."""
        if self.tp is not None:
            return [GpuLayout(self.gpus, self.tp, self.cp or 1, zero=1)]
        powers = [1 << i for i in range(self.gpus.bit_length()) if self.gpus % (1 << i) == 0]
        if self.method == "paper":
            found = [GpuLayout(self.gpus, tp, cp, zero=1) for tp in (4, 8) for cp in powers if self.gpus % (tp * cp) == 0]
        else:
            found = [GpuLayout(self.gpus, sp=sp) for sp in powers]
        return [layout for layout in found if layout.dp <= self.batch]


class Answer(NamedTuple):
    status: str
    mfu: float | None = None
    """0 to 1."""


def estimate(run: Run) -> Answer:
    """Return the best layout's answer."""
    order = (OOM, OOHM, OK)
    return max((_on(run, layout) for layout in run.layouts()), key=lambda answer: (order.index(answer.status), answer.mfu or 0))


def _on(run: Run, layout: GpuLayout) -> Answer:
    if run.method == "paper" and run.alpha is None:  # falls back to stock training where that fits
        stock = _on(replace(run, method="none", plan=False, tp=layout.tp), layout)
        if stock.status == OK:
            return stock
    costs = Costs(run, layout)
    parts, transient = costs.device_bytes()
    loose = 0.0 if run.planned else (run.hardware.fragmentation - 1) * (transient + costs.lasting)
    if sum(parts) + loose > run.hardware.device_memory:
        return Answer(OOM)
    layer = costs.layer()
    if run.method in ("none", "full_recompute"):
        again_s = layer.forward_s if run.megatron else max(layer.gemm_s + layer.attention_s, costs.gather_s)
        layer = replace(layer, outputs=(), replay_s=again_s if run.method == "full_recompute" else 0.0, gemm_s=0.0)
        alpha, kinds = 1.0, [PlacementKind.ON_DEVICE] * LAYERS
    else:
        alpha = 1.0 if run.method == "full_swap" else run.alpha
        alpha = _papers_alpha(run, layer) if alpha is None else alpha
        if pinned(layer, alpha) * (LAYERS - 2) * _ranks(run) > run.host_bytes:
            return Answer(OOHM)
        kinds = [PlacementKind.SWAPPED] * (LAYERS - 2) + [PlacementKind.ON_DEVICE] * 2
    machine, rounds = run.hardware, max(1, run.batch // layout.dp)
    one = RunCosts((layer,) * LAYERS, machine.d2h, machine.h2d, 0, 0, head_s=costs.head_s)
    seconds = rounds * Schedule(one, kinds).at(alpha).seconds
    flushes = sum(parts) - transient + CACHE_GROWTH * transient > machine.device_memory
    if not run.planned and flushes:
        seconds *= 1 + machine.stall
    seconds += costs.optimizer_s
    work = sequence_flops(run.seq_length, LAYERS * OF_LAYER + VOCAB * HIDDEN, LAYERS, HIDDEN)
    return Answer(OK, mfu(rounds * layout.dp * work, seconds, run.gpus, machine.peak))


def _ranks(run: Run) -> int:
    return min(run.gpus, int(run.hardware.gpus_per_node))


def pinned(layer: LayerCosts, alpha: float) -> int:
    """Return the host bytes of a layer's block of PyTorch's pinned memory, which is rounded up to a power of two."""
    return 1 << max(0, math.ceil(layer.whole_bytes + alpha * layer.split_bytes) - 1).bit_length()


def _papers_alpha(run: Run, layer: LayerCosts) -> float:
    """Return the alpha of the paper's program, with its pinned blocks."""
    link = paper_alpha(
        input_bytes=layer.nbytes("input"),
        attention_bytes=layer.attention_bytes,
        other_bytes=layer.split_bytes,
        bandwidth=min(run.hardware.d2h, run.hardware.h2d) * run.hardware.quiet_link,
        layer_forward_s=layer.forward_s,
        layers=LAYERS,
        host_bytes=math.inf,
    )
    block = int(run.host_bytes / ((LAYERS - 2) * _ranks(run)))
    largest = 1 << max(0, block.bit_length() - 1)
    return min(link or 0.0, max(0.0, (largest - layer.whole_bytes) / layer.split_bytes))


class Costs:
    """Seconds and bytes of one rank."""

    def __init__(self, run: Run, layout: GpuLayout) -> None:
        machine = run.hardware
        self.run, self.layout, self.machine = run, layout, machine
        self.moved = MEGATRON if run.megatron else TRANSFORMERS
        self.tokens = run.seq_length / layout.ranks
        self.unit = 2 * self.tokens * HIDDEN
        self.gemm_rate = machine.peak * machine.gemm_efficiency
        self.memory_rate = machine.device_bandwidth * machine.device_bandwidth_efficiency
        flops = 2 * run.seq_length**2 * HIDDEN / layout.ranks
        around = 4 * run.seq_length / layout.sp * HIDDEN / layout.tp * (layout.cp - 1) / layout.cp
        self.ring_s = around / machine.link(layout.tp * layout.cp)
        self.attention_s = max(flops / (machine.peak * machine.attention_forward_efficiency), self.ring_s)
        self.attention_back_s = max(2.5 * flops / (machine.peak * machine.attention_backward_efficiency), 2 * self.ring_s)
        depth, down = (2 + 5 / layout.tp) * HIDDEN, 4 * HIDDEN / layout.tp
        self.gemm_s = self._gemm_s(8 * HIDDEN**2) + self._idle_s(depth - down)
        """Without the last one, whose output the backward does not need."""
        self._all_gemms_s = self._gemm_s(OF_LAYER) + self._idle_s(depth)
        self._gemms_back_s = 2 * self._gemm_s(OF_LAYER) + self._idle_s((2 + 7 / layout.tp) * HIDDEN)

    def _gemm_s(self, parameters: float) -> float:
        return 2 * self.tokens * parameters / self.gemm_rate

    def _idle_s(self, depths: float) -> float:
        """Return the seconds for which GEMMs leave half of the multiprocessors idle in their last wave of tiles."""
        return self.machine.multiprocessors * _GEMM_TILE * depths / self.gemm_rate

    @property
    def shards_bandwidth(self) -> float:
        return self.machine.bandwidth(self.layout.sharded, self.layout.tp)

    @property
    def gather_s(self) -> float:
        shards = self.layout.sharded
        nbytes = 2 * OF_LAYER / self.layout.tp * (shards - 1) / shards
        return nbytes / self.shards_bandwidth if self.layout.zero == 3 else 0.0

    def layer(self) -> LayerCosts:
        layout, machine = self.layout, self.machine
        hidden_s = self.unit * (layout.tp - 1) / machine.bandwidth(layout.tp)
        ulysses_s = 4 * self.unit / layout.sp * (layout.sp - 1) / machine.intra_node
        move_s = self.tokens * HIDDEN / self.memory_rate
        forward = self._all_gemms_s + self.moved.forward * move_s + self.attention_s + 4 * hidden_s + ulysses_s
        backward = self._gemms_back_s + self.moved.backward * move_s + self.attention_back_s + 6 * hidden_s + ulysses_s
        rows = max(1, round(self.tokens))
        outputs = (
            Output("input", rows, 2 * HIDDEN),
            Output("attention", rows, 2 * HIDDEN),
            Output("gemm", rows, (SAVED - 2) * 2 * HIDDEN),
        )
        replay = self.gemm_s + self.moved.replay * move_s + 3 * hidden_s + ulysses_s
        timed: dict[str, Any] = {"forward_s": max(forward, self.gather_s), "backward_s": max(backward, 2 * self.gather_s)}
        return LayerCosts(
            outputs,
            **timed,
            replay_s=0.0,
            gemm_s=replay,
            attention_s=self.attention_s,
            no_recompute_bytes=int(SAVED * self.unit),
        )

    @property
    def lasting(self) -> float:
        """Bytes of activations that stay through the step, and of gathered parameters."""
        units = {"none": SAVED * LAYERS, "full_recompute": LAYERS}.get(self.run.method, 2 * SAVED)
        gathered = 3 * 2 * OF_LAYER / self.layout.tp if self.layout.zero == 3 else 0.0
        return units * self.unit + gathered

    def device_bytes(self) -> tuple[list[float], float]:
        """Return all bytes, and those that come and go."""
        layout, megatron = self.layout, self.run.megatron
        mine = PARAMETERS / layout.tp
        shards, zero = layout.sharded, layout.zero
        states = mine * (2 / (shards if zero >= 3 else 1) + (4 if megatron else 2) / (shards if zero >= 2 else 1))
        states += 12 * mine / (shards if zero >= 1 else 1)
        transient = TRANSIENT * self.unit + self.tokens * VOCAB * (FUSED_LOGIT_BYTES if megatron else LOGIT_BYTES)
        transient += SAVED * self.unit if self.run.method == "full_recompute" else 0.0
        return [states, self.lasting, transient, self.machine.device_reserve], transient

    @property
    def head_s(self) -> float:
        moved = self.tokens * (self.moved.norm * HIDDEN + self.moved.of_logit * VOCAB)
        return 3 * self._gemm_s(VOCAB * HIDDEN) + moved / self.memory_rate

    @property
    def optimizer_s(self) -> float:
        """Seconds of the optimizer. Megatron's distributed one scatters fp32 gradients and gathers bf16 parameters; under ZeRO-3
        layers have done that."""
        layout = self.layout
        mine = PARAMETERS / layout.tp
        sent = 0.0 if layout.zero == 3 else (4 + 2) * mine * (layout.sharded - 1) / layout.sharded
        return 32 * mine / layout.sharded / self.memory_rate + sent / self.shards_bandwidth
