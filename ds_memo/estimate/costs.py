"""Seconds and bytes of a step: layers as measured on the meta device, or by a profile; what ranks send; head and optimizer.

A rank has T = s / ranks tokens. Bytes are bf16 unless stated otherwise.

    Ulysses      q, k, v in and the output back: all-to-alls, which the layer's own code calls (meta_kernels.py)
    its ring     keys and values forward; in the backward their gradients, too, in fp32. A step hides what it computes as long
    tensor par.  four gathers or reduce-scatters of the hidden states forward, six backward, three in a replay
    context par. keys and values around the ring, hidden behind attention as far as it goes
    ZeRO-3       each layer's parameters gathered for forward and backward and its gradients reduced, hidden as far as it goes
    ZeRO 0 to 2  gradients reduced, and parameters gathered, with the optimizer's step; nothing hides it
    offload      model states on the host, as DeepSpeed keeps them (`offload_optimizer`, `offload_param`; docs/estimate.md): their
                 copies hide behind a layer as far as it takes, CPU Adam and the rest of the copies hide behind nothing. Reduce
                 buckets, DeepSpeed's staging buffers and the rounding of pinned blocks are not counted
"""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property
from typing import NamedTuple

from ds_memo.attention_kernel import FLASH, Attention, AttentionKernel
from ds_memo.estimate.hardware import AttentionRates, Hardware
from ds_memo.estimate.kernels import BACKWARD_FLOPS
from ds_memo.estimate.layout import GpuLayout
from ds_memo.estimate.meta_kernels import exchange_bytes_per_s
from ds_memo.estimate.model import Model
from ds_memo.placement import Tiles
from ds_memo.profile.run_profile import RunProfile
from ds_memo.solve.run_costs import LayerCosts

_LOGIT_MOVED, _NORM_MOVED = 36, 128
"""Bytes through device memory per logit (computed, cast to fp32, exponentiated, and the backward), and per element of the hidden
states in the norm before them."""
_OPTIMIZER_MOVED = 32
"""Bytes through device memory per parameter of this rank: fp32 weight, two moments and gradient, read and written."""

_HOST_BYTES = {"none": 0, "optimizer": 18, "all": 20}
"""Bytes on the host per parameter of a rank's shard."""
_HOST_MOVED = 42
"""Bytes through host memory per parameter of a rank's shard: CPU Adam reads four fp32 numbers and writes three (28), gradients
are scaled (8), and weights are rounded to bf16 (6)."""
_LEAST_SHARE = 0.5
"""Share of a link that activations get at least."""


class LinkSeconds(NamedTuple):
    """Seconds of one layer's model states on the link, at full speed."""

    forward_h2d: float
    backward_h2d: float
    backward_d2h: float


class Costs:
    """Costs of one model on one layout at one length.

    Args:
        seq_length: tokens of a sequence.
        profile: of a real run; None: the layers are measured on the meta device.
    """

    def __init__(
        self, model: Model, hardware: Hardware, layout: GpuLayout, seq_length: int, profile: RunProfile | None = None
    ) -> None:
        self.model = model
        self.hardware = hardware
        self.layout = layout
        self.seq_length = seq_length
        self.tokens = seq_length / layout.ranks
        self._given = profile
        self._memory_rate = hardware.device_bandwidth * hardware.device_bandwidth_efficiency
        self.hidden_bytes = 2 * self.tokens * model.hidden
        """Bytes of one tensor as wide as the hidden states: the paper's unit."""
        self.shard = model.trained / layout.tp / (layout.sharded if layout.zero else 1)
        """Parameters whose optimizer states this rank has."""

    @cached_property
    def h2d(self) -> float:
        """Bandwidth of reloads: offloaded model states come over the same link."""
        backward_s = min(layer.backward_s for layer in self.layers())
        return self.hardware.h2d * max(_LEAST_SHARE, 1 - self.states_s.backward_h2d / backward_s)

    # ---- model states on the host

    @property
    def host_state_bytes(self) -> float:
        """Bytes of this rank's model states on the host."""
        return _HOST_BYTES[self.layout.offload] * self.shard

    @property
    def states_s(self) -> LinkSeconds:
        """Seconds of one layer's copies that its computation hides, as far as it takes.

        Parameters come for the forward and for the backward (`all`). Under ZeRO-3 a bf16 gradient goes to the host and back, to
        be added up, and goes there again in fp32: DeepSpeed's partition_grads.
        """
        layout, machine, shard = self.layout, self.hardware, self.model.layer_parameters / self.layout.tp / self.layout.sharded
        parameters = 2 * shard if layout.offload == "all" else 0.0
        gradients = shard if layout.offload != "none" and layout.zero == 3 else 0.0
        to_device = (parameters + 2 * gradients) / machine.h2d
        return LinkSeconds(parameters / machine.h2d, to_device, (2 + 4) * gradients / machine.d2h)

    def _offloaded_step_s(self, sequences: int) -> float:
        """Return the seconds of CPU Adam and of the copies that nothing hides.

        Below ZeRO-3 DeepSpeed copies gradients on the compute stream, unless overlap_comm is set.
        """
        layout, machine, shard = self.layout, self.hardware, self.shard
        ranks = min(layout.gpus, machine.gpus_per_node)
        seconds = _HOST_MOVED * shard * ranks / (machine.host_bandwidth * machine.host_bandwidth_efficiency)
        if layout.offload == "optimizer":
            seconds += 2 * shard / machine.h2d
        if layout.zero < 3:
            seconds += 4 * shard / machine.d2h
        if layout.zero == 2 and sequences > 1:  # added up in bf16, on the host
            seconds += 2 * shard * (sequences / machine.d2h + (sequences - 1) / machine.h2d)
        return seconds

    # ---- layers

    @cached_property
    def attention(self) -> tuple[AttentionKernel, ...]:
        """The kernels that run the layers' attention; none where the times of a profile hold."""
        return () if self._given is not None else tuple({kernel.name: kernel for kernel in self._kernels.values()}.values())

    @cached_property
    def _kernels(self) -> dict[Attention, AttentionKernel]:
        """The kernel of each call of attention at this length."""
        queries = round(self.seq_length / (self.layout.ring * self.layout.cp))
        calls = self.model.measured.attention
        return {call: self.hardware.attention_kernel(call._replace(queries_of_a_head=queries)) for call in calls}

    @property
    def _machine(self) -> Hardware:
        """The hardware, asked for the kernel that runs where the calls of samples, which are shorter, have another."""
        for call, kernel in self._kernels.items():
            if self.hardware.attention_kernel(call).name != kernel.name:
                return replace(self.hardware, attention=kernel.name)
        return self.hardware

    @cached_property
    def _attention_rates(self) -> AttentionRates:
        return self.hardware.attention_rates(next((kernel.name for kernel in self._kernels.values()), FLASH))

    def profile(self, tiled: bool) -> RunProfile:
        if self._given is not None:
            return self._given
        machine = replace(self._machine, d2h=1.0, h2d=1.0, name="", host_memory=1.0, device_memory=1.0)  # its kernels alone
        return self.model.measured.profile(machine, self.layout.ulysses, self.layout.ring, round(self.tokens), tiled)

    def tilings(self, tokens: int) -> list[Tiles]:
        """Return the ways to run layers in tiles of this length, in as many groups of heads as can be; none: they run whole."""
        profile = self.profile(tiled=True)
        found = [sample.most_groups for kind in profile.kinds for sample in kind.in_tiles]
        outside = self.layout.tp > 1 or self.layout.cp > 1  # attention's own parallelism: ds_memo has none of it
        return [] if outside or not found or tokens >= self.tokens else [Tiles(tokens, min(found))]

    def layers(self, tiles: Tiles | None = None) -> tuple[LayerCosts, ...]:
        """Return all layers in forward order.

        Args:
            tiles: how layers run that can run in tiles; None: all run whole.
        """
        profile = self.profile(tiled=tiles is not None)
        sizes = [(1, max(1, round(self.tokens)))] * len(profile.kinds)
        return profile.costs(sizes, 0, 0, self.layout.ranks, tiles).each(self._among_ranks).layers

    def _among_ranks(self, layer: LayerCosts) -> LayerCosts:
        """Add what ranks send each other. No layer is faster than its gathers, and its offloaded model states on the link."""
        hidden_s, ring_s, states, model = self._tensor_parallel_s, self._cp_s, self.states_s, self.model
        alone = self._given is not None and self._given.ranks_per_sequence == 1
        ulysses_s = self._ulysses_s if alone else 0.0
        ratio = BACKWARD_FLOPS * self._attention_rates.forward / self._attention_rates.backward
        own_s = self.ring_s(layer.attention_s, ratio * layer.attention_s) if alone or self._given is None else (0.0, 0.0)
        forward_s = layer.forward_s + 4 * hidden_s + ulysses_s + max(0.0, ring_s - layer.attention_s) + own_s[0]
        backward_s = layer.backward_s + 6 * hidden_s + ulysses_s + max(0.0, 2 * ring_s - ratio * layer.attention_s) + own_s[1]
        return replace(
            layer,
            forward_s=max(forward_s, self.gather_s, states.forward_h2d),
            backward_s=max(
                backward_s,
                (1 + model.layer_trained / model.layer_parameters) * self.gather_s,
                states.backward_h2d,
                states.backward_d2h,
            ),
            replay_s=layer.replay_s + 3 * hidden_s + ulysses_s,
            attention_s=max(layer.attention_s, ring_s) + own_s[0],
        )

    @property
    def _tensor_parallel_s(self) -> float:
        tp = self.layout.tp
        return self.hidden_bytes * (tp - 1) / self.hardware.bandwidth(tp)

    @property
    def _cp_s(self) -> float:
        layout = self.layout
        around = (
            4 * self.seq_length / layout.sp * self.model.kv_heads * self.model.head_size / layout.tp * (layout.cp - 1) / layout.cp
        )
        return around / self.hardware.link(layout.tp * layout.cp)

    @property
    def _ulysses_s(self) -> float:
        """Seconds of one pass's all-to-alls, for a profile of one rank alone."""
        ranks, model = self.layout.ulysses, self.model
        if ranks == 1:
            return 0.0
        heads = model.heads + max(model.kv_heads, ranks)
        return 2 * self.tokens * heads * model.key_value_size / ranks / exchange_bytes_per_s(self.hardware, ranks)

    def ring_s(self, attention_s: float, backward_s: float) -> tuple[float, float]:
        """Return the seconds, forward and backward, that ds_memo's ring adds to attention of these.

        While a step computes, the next keys and values are on their way; in the backward also the gradients, in fp32, of those
        before. Nothing hides the gradients' last way, home. All steps have equal work (zigzag).
        """
        layout, model, ring = self.layout, self.model, self.layout.ring
        if ring == 1 or not attention_s:  # what mixes tokens otherwise runs no ring
            return 0.0, 0.0
        way_s = 2 * self.tokens * max(model.kv_heads, layout.ulysses) * model.key_value_size / self.hardware.link(layout.ranks)
        step_s = backward_s / ring
        between = (max(0.0, ways * way_s - step_s) for ways in (1, *(3,) * (ring - 2), 2))
        return (ring - 1) * max(0.0, way_s - attention_s / ring), sum(between) + 2 * way_s

    @property
    def gather_s(self) -> float:
        """Seconds to gather a layer's parameters under ZeRO-3; the layer's own computation hides them."""
        if self.layout.zero < 3:
            return 0.0
        shards = self.layout.sharded
        nbytes = 2 * self.model.layer_parameters / self.layout.tp * (shards - 1) / shards
        return nbytes / self._replicas_bandwidth

    @property
    def _replicas_bandwidth(self) -> float:
        """Bus bandwidth of collectives among the ranks that share the shards of a tensor-parallel rank's parameters."""
        return self.hardware.bandwidth(self.layout.sharded, self.layout.tp)

    # ---- head and optimizer

    @property
    def head_s(self) -> float:
        """Seconds of head and loss, forward and backward, with the norm before them."""
        model, machine = self.model, self.hardware
        gemm_s = 2 * self.tokens * model.vocab * model.hidden / (machine.peak * machine.gemm_efficiency)
        moved = self.tokens * (_NORM_MOVED * model.hidden + _LOGIT_MOVED * model.vocab)
        return (3 if model.head_trained else 2) * gemm_s + moved / self._memory_rate

    def optimizer_s(self, sequences: int) -> float:
        """Return the seconds of one optimizer step and of its communication.

        Args:
            sequences: sequences of this replica in a step.
        """
        sent_s = self.sent_bytes(sequences) / self._replicas_bandwidth
        if self.layout.offload != "none":
            return self._offloaded_step_s(sequences) + sent_s
        return _OPTIMIZER_MOVED * self.shard / self._memory_rate + sent_s

    def sent_bytes(self, sequences: int) -> float:
        """Return the bytes through each rank's link in a step below ZeRO-3, where no computation hides them.

        Gradients are reduced in bf16 (DeepSpeed sends fp32 where ranks share sequences over an NCCL older than 2.27.3) and, if
        optimizer states are sharded, bf16 parameters gathered. DeepSpeed all-reduces gradients at every stage
        (use_multi_rank_bucket_allreduce), which sends them twice, and under ZeRO-2 after each sequence.

        Args:
            sequences: sequences of this replica in a step.
        """
        zero, ranks = self.layout.zero, self.layout.sharded
        if zero == 3:
            return 0.0
        reductions = sequences if zero == 2 else 1
        of_parameter = 4 * reductions + (2 if zero else 0)
        return of_parameter * self.model.trained / self.layout.tp * (ranks - 1) / ranks
