"""Seconds and bytes of one layer, of the head and of the optimizer step, by formula. All numbers are those of one rank.

A rank has T = s / ranks tokens. Bytes are bf16 unless stated otherwise.

    GEMM         2·T FLOPs a parameter forward, twice that backward. Tiles run in waves, one tile on each multiprocessor; on
                 average half of the last wave is empty ("wave quantization", NVIDIA's Matrix Multiplication Background)
    attention    2·s²·width FLOPs a sequence forward (causal), 2.5 times that backward (flash recomputes the scores)
    elementwise  bytes through device memory: norms, residuals, rotary, activation; op by op as in Transformers (traffic.py), or
                 by a table of Megatron's kernels, which the paper ran
    Ulysses      q, k, v in and the output back: four all-to-alls each way, and again in a replay
    tensor par.  four gathers or reduce-scatters of the hidden states forward, six backward, three in a replay
    context par. keys and values around the ring, hidden behind attention as far as it goes
    ZeRO-3       each layer's parameters gathered for forward and backward and its gradients reduced, hidden as far as it goes
    ZeRO 0 to 2  gradients reduced, and parameters gathered, with the optimizer's step; nothing hides it
    offload      model states on the link and CPU Adam: offload.py
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from ds_memo.estimate import offload, requests
from ds_memo.estimate.hardware import Hardware
from ds_memo.estimate.layout import Layout
from ds_memo.estimate.model import Model
from ds_memo.estimate.traffic import mlp_traffic, norm_bytes, traffic
from ds_memo.solve.costs import LayerCosts, Output

# Megatron's elementwise traffic in bytes per token and element of width: forward, backward, replay (without the last
# residual). The constants of hardware_data/a800.json are calibrated with it.
_HIDDEN_BYTES = (24, 46, 14)
_UNGATED_BYTES = (4, 6, 4)
_GATED_BYTES = (10, 18, 10)
_LOGIT_MOVED, _MEGATRON_LOGIT_MOVED = 36, 20
"""Bytes through device memory per logit: computed, cast to fp32, exponentiated, and the backward."""
_GEMM_TILE = 128 * 256
"""Outputs of cuBLAS's most efficient tile (NVIDIA's Matrix Multiplication Background)."""
_OPTIMIZER_MOVED = 32
"""Bytes through device memory per parameter of this rank: fp32 weight, two moments and gradient, read and written."""


@dataclass(frozen=True)
class Seconds:
    """Seconds of one layer and one sequence."""

    forward: float
    backward: float
    gemm: float
    """Part of the forward in GEMMs whose outputs the backward needs: all but the last."""
    attention: float
    elementwise_replay: float
    exchange: float
    """Part of the forward in collectives that no computation hides."""
    exchange_replay: float


class Costs:
    """Costs of one model on one layout at one length.

    Args:
        seq_length: tokens of a sequence.
        megatron: use Megatron's kernels, not those of Transformers.
    """

    def __init__(self, model: Model, hardware: Hardware, layout: Layout, seq_length: int, megatron: bool = False) -> None:
        self.model = model
        self.megatron = megatron
        self.hardware = hardware
        self.layout = layout
        self.seq_length = seq_length
        self.tokens = seq_length / layout.ranks
        self._gemm_rate = hardware.peak * hardware.gemm_efficiency
        self._memory_rate = hardware.device_bandwidth * hardware.device_bandwidth_efficiency
        self.hidden_bytes = 2 * self.tokens * model.hidden
        """Bytes of one tensor as wide as the hidden states: the paper's unit."""
        self.states_s = offload.layer_link_s(model, hardware, layout)
        self.layer = self._layer_seconds()
        self.h2d = hardware.h2d * offload.activations_share(self.states_s.backward_h2d, self.layer.backward)
        """Bandwidth of reloads: offloaded model states come over the same link."""

    # ---- seconds

    def gemm_s(self, parameters: float) -> float:
        """Return the seconds of GEMMs with this many weights."""
        return 2 * self.tokens * parameters / self._gemm_rate

    def _idle_s(self, depths: float) -> float:
        """Return the seconds for which GEMMs leave half of the multiprocessors idle in their last wave of tiles.

        Args:
            depths: sum of the dimensions over which the GEMMs add up.
        """
        return self.hardware.multiprocessors * _GEMM_TILE * depths / self._gemm_rate

    def gemm_depths(self) -> tuple[float, float]:
        """Return the depths of a layer's GEMMs in the forward, and of the inputs' gradients.

        Gradients of weights have as many tiles at any length, and cuBLAS splits their depth: `gemm_efficiency` covers them.
        Experts' products are one grouped GEMM.
        """
        model, tp = self.model, self.layout.tp
        gates = 2 if model.gated else 1
        mlps = [width for width in (model.ffn, model.shared_ffn) if width]
        from_hidden = 1 if self.megatron or model.fused_qkv else 3
        from_hidden += len(mlps) * (1 if self.megatron or model.fused_gate else gates)
        forward = from_hidden * model.hidden + (model.attention_width + sum(mlps)) / tp
        inputs = model.attention_width + 2 * model.kv_width + gates * sum(mlps)
        return forward, inputs / tp + (1 + len(mlps)) * model.hidden

    def moved_s(self, nbytes: float) -> float:
        """Return the seconds of elementwise ops that move this many bytes."""
        return nbytes / self._memory_rate

    def _elementwise(self, which: int) -> float:
        if not self.megatron:
            return self.tokens * traffic(self.model)[which] / self._memory_rate
        ffn_bytes = _GATED_BYTES if self.model.gated else _UNGATED_BYTES
        width = _HIDDEN_BYTES[which] * self.model.hidden + ffn_bytes[which] * self.model.active_ffn
        return self.tokens * width / self._memory_rate

    def _layer_seconds(self) -> Seconds:
        model, hardware, layout = self.model, self.hardware, self.layout
        flops = 2 * self.seq_length**2 * model.attention_width / layout.ranks
        attention = flops / (hardware.peak * hardware.attention_forward_efficiency)
        attention_back = 2.5 * flops / (hardware.peak * hardware.attention_backward_efficiency)
        ring = self._ring()
        attention, attention_back = max(attention, ring), max(attention_back, 2 * ring)
        needed = model.experts or model.post_norms  # the last GEMM's output, for weights or a norm
        down = 0 if needed else model.hidden * model.active_ffn
        hidden_gather, ulysses = self._tensor_parallel(), self._ulysses()
        exchange = 4 * hidden_gather + ulysses
        depths, depths_back = self.gemm_depths()
        needed_depths = depths if needed else depths - model.ffn / layout.tp
        forward = self.gemm_s(model.active_layer_parameters) + self._idle_s(depths) + self._elementwise(0) + attention + exchange
        backward = 2 * self.gemm_s(model.active_layer_parameters) + self._idle_s(depths_back)
        backward += self._elementwise(1) + attention_back
        backward += 6 * hidden_gather + ulysses
        forward = max(forward, self.gather_s, self.states_s.forward_h2d)
        backward = max(backward, 2 * self.gather_s, self.states_s.backward_h2d, self.states_s.backward_d2h)
        return Seconds(
            forward=forward,
            backward=backward,
            gemm=self.gemm_s(model.active_layer_parameters - down) + self._idle_s(needed_depths),
            attention=attention,
            elementwise_replay=self._elementwise(2),
            exchange=exchange,
            exchange_replay=3 * hidden_gather + ulysses,
        )

    def _tensor_parallel(self) -> float:
        tp = self.layout.tp
        return self.hidden_bytes * (tp - 1) / self.hardware.bandwidth(tp)

    def _ring(self) -> float:
        layout = self.layout
        around = 4 * self.seq_length / layout.sp * self.model.kv_width / layout.tp * (layout.cp - 1) / layout.cp
        return around / self.hardware.link(layout.tp * layout.cp)

    def _ulysses(self) -> float:
        """Return the seconds of one pass's all-to-alls. Traffic in and between nodes overlaps; the slower part counts."""
        model, sp, node = self.model, self.layout.sp, self.hardware.gpus_per_node
        kv_width = model.kv_width * max(1, sp / model.kv_heads)
        nbytes = 2 * self.tokens * (2 * model.attention_width + 2 * kv_width) / sp  # to each other rank
        inside, outside = min(sp, node) - 1, max(0, sp - node)
        return max(nbytes * inside / self.hardware.intra_node, nbytes * outside / self.hardware.inter_node)

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

    @property
    def head_s(self) -> float:
        """Seconds of head and loss, forward and backward, with the norm before them."""
        norm, of_logit = (0.0, _MEGATRON_LOGIT_MOVED) if self.megatron else (norm_bytes(self.model), _LOGIT_MOVED)
        moved = self.tokens * (norm + of_logit * self.model.vocab)
        return 3 * self.gemm_s(self.model.vocab * self.model.hidden) + moved / self._memory_rate

    def optimizer_s(self, sequences: int) -> float:
        """Return the seconds of one optimizer step and of its communication.

        Args:
            sequences: sequences of this replica in a step.
        """
        mine = self.model.parameters / self.layout.tp / (self.layout.sharded if self.layout.zero else 1)
        sent_s = self.sent_bytes(sequences) / self._replicas_bandwidth
        if self.layout.offload != "none":
            return offload.step_s(self.model, self.hardware, self.layout, sequences) + sent_s
        return _OPTIMIZER_MOVED * mine / self._memory_rate + sent_s

    @property
    def gradient_bytes(self) -> int:
        """Bytes of a parameter's gradient, kept and sent: fp32 under Megatron, bf16 under DeepSpeed (which sends fp32 where ranks
        share sequences over an NCCL older than 2.27.3)."""
        return 4 if self.megatron else 2

    def sent_bytes(self, sequences: int) -> float:
        """Return the bytes through each rank's link in a step below ZeRO-3, where no computation hides them.

        Gradients are reduced and, if optimizer states are sharded, bf16 parameters gathered. DeepSpeed all-reduces gradients at
        every stage (use_multi_rank_bucket_allreduce), which sends them twice, and under ZeRO-2 after each sequence. Megatron's
        distributed optimizer scatters them.

        Args:
            sequences: sequences of this replica in a step.
        """
        zero, ranks = self.layout.zero, self.layout.sharded
        if zero == 3:
            return 0.0
        times = 1 if self.megatron and zero else 2
        reductions = sequences if zero == 2 else 1
        of_parameter = reductions * times * self.gradient_bytes + (2 if zero else 0)
        return of_parameter * self.model.parameters / self.layout.tp * (ranks - 1) / ranks

    # ---- kept outputs

    def layers(self, of: Callable[[Costs], LayerCosts]) -> tuple[LayerCosts, ...]:
        """Return all layers in forward order; in some mixtures a few are dense.

        Args:
            of: Costs.memo_layer, Costs.paper_layer or Costs.alst_layer.
        """
        found = [of(self)] * self.model.layers
        if self.model.dense_layers:
            dense = of(Costs(self.model.dense, self.hardware, self.layout, self.seq_length, self.megatron))
            for index in self.model.dense_layers:
                found[index] = dense
        return tuple(found)

    def memo_layer(self) -> LayerCosts:
        """Return a layer under ds_memo: it keeps input, attention output and needed GEMM outputs; the rest runs again."""
        model, seconds, rows = self.model, self.layer, self._rows
        width, kv_width, ffn = model.attention_width, model.kv_width, model.ffn
        inner = (2 if model.gated else 1) * model.shared_ffn
        visits = model.experts_per_token or 1
        after = (self.gemm_s(model.hidden * (width + 2 * kv_width)) + seconds.exchange / 2) / seconds.forward
        attended = min(1.0, after + seconds.attention / seconds.forward)
        rest = 1.0 - attended
        outputs = [
            Output("input", rows, 2 * model.hidden, 0.0),
            Output("gemm", rows, 2 * (width + 2 * kv_width), after),
            Output("attention", rows, 2 * width + 4 * model.heads, attended),
            Output("gemm", rows, 2 * model.hidden, attended + 0.15 * rest),
        ]
        if model.experts:
            router = (4 if model.float_router else 2) * model.experts
            outputs.append(Output("choice", rows, router, attended + 0.2 * rest))  # its GEMM, never split
            outputs.append(Output("choice", rows, 28 * visits, attended + 0.2 * rest))  # the choice of experts and their order
        outputs.append(Output("gemm", rows, 2 * (visits * ffn * (2 if model.gated else 1) + inner), attended + 0.6 * rest))
        if model.experts:  # the routing weights' gradient needs each expert's output
            outputs.append(Output("gemm", rows, 2 * visits * model.hidden, 1.0))
        elif model.post_norms:
            outputs.append(Output("gemm", rows, 2 * model.hidden, 1.0))
        if model.shared_gate:
            outputs.append(Output("gemm", rows, 2 * (model.hidden + 1), 1.0))  # and one number of the gate
        return LayerCosts(
            outputs=tuple(outputs),
            forward_s=seconds.forward,
            backward_s=seconds.backward,
            replay_s=seconds.elementwise_replay + seconds.exchange_replay,
            gemm_s=seconds.gemm,
            attention_s=seconds.attention,
            no_recompute_bytes=int(requests.saved_bytes(model, self.tokens)),
            working=requests.working(model, self.tokens),
            working_at_0=requests.working(model, self.tokens, gemms=False),
            working_without_attention=requests.working(model, self.tokens, gemms=False, attention=False),
        )

    def paper_layer(self) -> LayerCosts:
        """Return a layer as in the paper: it keeps all that autograd saves, and alpha splits all but input and attention output.
        Copies begin when the layer is over."""
        seconds, rows = self.layer, self._rows
        not_split = 2 * self.model.hidden + 2 * self.model.attention_width
        outputs = (
            Output("input", rows, 2 * self.model.hidden),
            Output("attention", rows, 2 * self.model.attention_width),
            Output("gemm", rows, max(1, round(self.skeletal_bytes / self.tokens) - not_split)),
        )
        replay = seconds.gemm + seconds.elementwise_replay + seconds.exchange_replay
        return LayerCosts(outputs, seconds.forward, seconds.backward, 0.0, replay, seconds.attention, int(self.skeletal_bytes))

    def alst_layer(self) -> LayerCosts:
        """Return a layer under ALST's recipe. Compute waits for its input's way to the host and back; its forward runs again, and
        the MLP's tiles once more in their backward."""
        model, seconds, wide = self.model, self.layer, self.hidden_bytes
        tiled, mlp = model.active_layer_parameters - model.attention_parameters, mlp_traffic(model)
        tiles = math.ceil(self.tokens / model.hidden)
        weights = (model.layer_parameters - model.attention_parameters) / self.layout.tp
        joined_s = 2 * wide / self._memory_rate
        again_s = self.gemm_s(tiled) + self.tokens * mlp.forward / self._memory_rate
        sums_s = (4 * wide + 6 * tiles * weights) / self._memory_rate  # of the input's gradient, and of bf16 gradients of weights
        forward_s = self.gemm_s(model.active_layer_parameters) + self._idle_s(self.gemm_depths()[0]) + seconds.attention
        replay_s = forward_s + seconds.elementwise_replay + seconds.exchange_replay + joined_s
        return LayerCosts(
            outputs=(),
            forward_s=seconds.forward + joined_s + wide / self.hardware.d2h,
            backward_s=seconds.backward + again_s + sums_s,
            replay_s=max(replay_s, self.gather_s) + wide / self.h2d,
            gemm_s=0.0,
            attention_s=seconds.attention,
            no_recompute_bytes=0,
            working=requests.tiled_working(model, self.tokens),
        )

    @property
    def _rows(self) -> int:
        return max(1, round(self.tokens))

    @property
    def skeletal_bytes(self) -> float:
        """Bytes that autograd saves of a layer as the paper counts (section 2): 16 times a GPT's hidden states, without
        attention's log-sum-exp."""
        return requests.saved_bytes(self._published, self.tokens) - 4 * self.model.heads * self.tokens

    @property
    def transient_bytes(self) -> float:
        """Bytes of a layer's arena where all that autograd saves is kept."""
        return requests.transient_bytes(self._published, self.tokens)

    @property
    def _published(self) -> Model:
        """The model with learned positions if it is a GPT, as in the paper; ds_configs/models/gpt-*.json have rotary ones."""
        return self.model if self.model.gated else replace(self.model, rotary=False)
