"""The estimator's questions and answers.

method           kept of a layer
memo             input and attention output, and alpha of the GEMM outputs: this project, solved by ds_memo.solve
checkpoint       the input: torch's checkpointing, with the loss in chunks
full_recompute   the input: torch's checkpointing, with whole logits
alst, trl        the input, on the host: Arctic Long Sequence Training's recipe; TRL's example for 1 Mi tokens
none             everything that autograd saves
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ds_memo.attention_kernel import AttentionKernel
from ds_memo.estimate.errors import EstimateError
from ds_memo.estimate.hardware import Hardware, mfu
from ds_memo.estimate.layout import LEAST_ZERO, GpuLayout
from ds_memo.memory.host import HOST_HEADROOM
from ds_memo.placement import Placement, PlacementKind, Tiles
from ds_memo.profile.run_profile import RunProfile
from ds_memo.solve.run_costs import RunCosts
from ds_memo.solve.schedule import Schedule
from ds_memo.solve.timeline import TimelineSpan
from ds_memo.units import GIB

if TYPE_CHECKING:
    from ds_memo.estimate.model import Model

METHODS = {
    "memo": "logits are lazy",
    "alst": "inputs on the host; MLP and loss in tiles",
    "trl": "inputs on the host; loss in chunks",
    "checkpoint": "inputs on the device; loss in chunks",
    "full_recompute": "inputs on the device; whole logits",
    "none": "all on the device; whole logits",
}
"""Methods, and what each is assumed to do beside its name."""
OK, OOM, OOHM = "ok", "oom", "oohm"
DAY_S = 24 * 60 * 60
_MOST_BYTES = 1 << 60
"""The solver counts in 64 bits."""


@dataclass(frozen=True)
class Question:
    """The run to estimate. Sizes are those of the whole job; the estimator chooses those that are None."""

    model: Model
    hardware: Hardware
    gpus: int
    seq_length: int
    batch: int = 1
    """Sequences per optimizer step, accumulated one at a time on each replica."""
    method: str = "memo"
    tp: int | None = None
    cp: int | None = None
    sp: int | None = None
    ulysses: int | None = None
    """Ranks of sp that trade heads, as memo.ulysses_size."""
    zero: int | None = None
    offload: str = "none"
    """Model states on the host: one of layout.OFFLOADS."""
    alpha: float | None = None
    tile_tokens: int | None = None
    """0: layers run whole."""
    plan: bool | None = None
    host_memory: float | None = None
    """Bytes of a node, for activations and offloaded model states."""
    profile: RunProfile | None = None
    """Profile of a real run on as many ranks per sequence: under memo its layers replace the formulas."""

    @property
    def planned(self) -> bool:
        return self.method == "memo" if self.plan is None else self.plan

    @property
    def host_bytes(self) -> float:
        """Bytes of a node that activations and offloaded model states may take."""
        return self.hardware.host_memory * (1 - HOST_HEADROOM) if self.host_memory is None else self.host_memory

    @property
    def ranks_on_node(self) -> int:
        return min(self.gpus, int(self.hardware.gpus_per_node))


@dataclass(frozen=True)
class Estimate:
    """The answer. Times are of one optimizer step; device bytes of one GPU, host bytes of one node."""

    question: Question
    layout: GpuLayout
    status: str
    binding: str
    device_bytes: dict[str, float]
    host_bytes: float
    """With those of offloaded model states."""
    step_s: float | None = None
    alpha: float | None = None
    resident_layers: int | None = None
    seconds: dict[str, float] = field(default_factory=dict)
    host_state_bytes: float = 0.0
    run: RunCosts | None = field(default=None, repr=False)
    placements: tuple[Placement, ...] = ()
    notes: tuple[str, ...] = ()
    nvme_bytes: float = 0.0
    """Bytes on the drives of a node at once. Each sequence writes them."""
    attention: tuple[AttentionKernel, ...] = ()
    """The kernels that run the layers' attention. Empty: the times are those of a profile."""

    @property
    def sequences(self) -> int:
        """Sequences in a step: every replica has at least one."""
        return self.layout.dp * math.ceil(self.question.batch / self.layout.dp)

    @property
    def mfu(self) -> float | None:
        """Model FLOPs utilisation, 0 to 1."""
        if self.step_s is None:
            return None
        q = self.question
        return mfu(self.sequences * q.model.sequence_flops(q.seq_length), self.step_s, q.gpus, q.hardware.peak)

    @property
    def tgs(self) -> float | None:
        """Tokens per GPU and second."""
        return None if self.step_s is None else self.sequences * self.question.seq_length / (self.step_s * self.question.gpus)

    @property
    def written_a_day(self) -> float:
        """Bytes that a day of such steps writes to the drives of a node."""
        return self.nvme_bytes * (self.sequences // self.layout.dp) * DAY_S / self.step_s if self.step_s else 0.0

    @property
    def device_total(self) -> float:
        return sum(self.device_bytes.values())

    @property
    def host_activation_bytes(self) -> float:
        return self.host_bytes - self.host_state_bytes

    @property
    def tiles(self) -> Tiles | None:
        """Return how layers run in tiles; None: they run whole."""
        return None if self.run is None else self.run.tiles

    @property
    def placed(self) -> dict[str, int]:
        """The number of layers, by placement: those of the report, and those that recompute attention."""
        kinds = [placement.kind for placement in self.placements]
        return {
            "on_device": kinds.count(PlacementKind.ON_DEVICE),
            "without_gemms": sum(kind.without_gemms for kind in kinds),
            "without_recompute": kinds.count(PlacementKind.NO_RECOMPUTE),
            "attention_recomputed": sum(kind.recomputes_attention for kind in kinds),
            "input_computed": kinds.count(PlacementKind.SWAPPED_WITHOUT_INPUT),
        }

    def timeline(self) -> list[TimelineSpan]:
        """Return what every stream does in one forward and backward."""
        assert self.run is not None  # of an answer that fits
        files = max((number + 1 for number, placement in enumerate(self.placements) if placement.nvme), default=0)
        return Schedule(self.run, [placement.kind for placement in self.placements]).timeline(self.alpha or 0.0, files)

    def as_json(self) -> dict[str, Any]:
        layout = self.layout
        return {
            "status": self.status,
            "mfu": self.mfu,
            "tgs": self.tgs,
            "step_s": self.step_s,
            "alpha": self.alpha,
            "resident_layers": self.resident_layers,
            "tile_tokens": self.tiles and self.tiles.tokens,
            "head_groups": self.tiles and self.tiles.head_groups,
            "input_every": self.tiles and self.tiles.input_every,
            "placements": self.placed,
            "binding": self.binding,
            "device_gib": self.device_total / GIB,
            "host_gib": self.host_bytes / GIB,
            "nvme_gib": self.nvme_bytes / GIB,
            "nvme_stall_s": self.seconds.get("nvme stall", 0.0),
            "nvme_tb_per_day": self.written_a_day / 1e12,
            "parts": {
                "device_gib": {name: nbytes / GIB for name, nbytes in self.device_bytes.items()},
                "host_gib": {"model states": self.host_state_bytes / GIB, "activations": self.host_activation_bytes / GIB},
                "step_s": self.seconds,
            },
            "adapters": self.question.model.adapters and self.question.model.adapters._asdict(),
            "method": self.question.method,
            "plan": self.question.planned,
            "seq_length": self.question.seq_length,
            "gpus": self.question.gpus,
            "sequences": self.sequences,
            "layout": {name: getattr(layout, name) for name in ("tp", "cp", "sp", "ulysses", "dp", "zero")},
            "offload": layout.offload,
            "attention": [
                {"kernel": kernel.name, "reason": kernel.reason, "forward_tflops": forward / 1e12, "backward_tflops": back / 1e12}
                for kernel in self.attention
                for forward, back in [self.question.hardware.attention_rates(kernel.name)]
            ],
            "notes": list(self.notes),
        }


def check(question: Question) -> None:
    for name in ("gpus", "seq_length", "batch"):
        if getattr(question, name) < 1:
            raise EstimateError(f"{name} is {getattr(question, name)}, expected at least 1")
    model = question.model
    if 64 * model.layers * model.hidden * question.seq_length > _MOST_BYTES:
        raise EstimateError(f"{model.name} at {question.seq_length} tokens needs more bytes than 64 bits can count")
    least = LEAST_ZERO.get(question.offload)
    if least is None:
        raise EstimateError(f"offload is {question.offload!r}, expected one of {', '.join(LEAST_ZERO)}")
    if question.zero is not None and question.zero < least:
        raise EstimateError(
            f"--offload {question.offload} with --zero {question.zero}: DeepSpeed offloads so from ZeRO {least} on"
        )
    if (adapters := model.adapters) is not None:
        if question.offload != "none" or question.tp is not None:
            what = f"--offload {question.offload}" if question.offload != "none" else f"--tp {question.tp}"
            raise EstimateError(f"{what} with {adapters}: adapters are estimated without it")
        if adapters.quantized and question.zero == 3:
            raise EstimateError(
                f"--zero 3 with {adapters}: weights in 4 bits are estimated whole on each GPU. Give --zero 0 to 2"
            )
    if question.method not in METHODS:
        raise EstimateError(f"method is {question.method!r}, expected one of {', '.join(METHODS)}")
    if question.alpha is not None:
        if question.method != "memo":
            raise EstimateError(f"alpha {question.alpha} with method {question.method}: only memo has an alpha")
        if not 0 <= question.alpha <= 1:
            raise EstimateError(f"alpha is {question.alpha}, expected 0 to 1")
    if question.ulysses is not None and (question.method != "memo" or question.sp is None):
        raise EstimateError(f"--ulysses {question.ulysses}: only memo splits, and only an --sp that is given")
    if question.tile_tokens is not None and question.method != "memo":
        raise EstimateError(f"tile_tokens {question.tile_tokens} with method {question.method}: only memo runs layers in tiles")
