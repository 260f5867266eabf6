"""Five steps of a small model under a DeepSpeed configuration, with memo and without, and by plain torch on one process.

All ways read the same sequences. Some labels are left out, more of them in the first part of each sequence than in the second,
but as many of each sequence, so that the mean over sequences is the mean over labels.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

import deepspeed
import deepspeed.comm as dist
import torch
import torch.nn.functional as F
from deepspeed.utils import groups

import ds_memo
from ds_memo.deepspeed import sequence
from ds_memo.sequence.parts import contiguous, even
from tests.models import VOCAB, build

STEPS, LENGTH = 5, 32
SEQUENCES = 4
"""In a step, whatever the number of ranks and of micro-batches."""
MEMO = {"enabled": True, "alpha": 0.5, "resident_layers": 1, "plan": {"enabled": False}}
ADAM = {"lr": 1e-2, "eps": 1e-2, "weight_decay": 0.1}
"""So large an eps that a step's size follows the gradient's: one that is off by a factor shows."""
CLIP = 1.9
"""Below the norm in some steps only, for the same reason."""
MOST_RECOMPUTED = 0.5 * 3 / 4 * 7 / 9 + 1e-3
"""GEMM FLOPs: half of the rows, three of four layers, and never the last product (2/9 of them), gathered weights or not."""
TOLERANCE = {"fp32": 1e-6, "bf16": 1e-2}
"""Relative, of the loss: with memo and without, and between numbers of ranks."""


@dataclass(frozen=True)
class Case:
    stage: int
    dtype: str
    micro_batches: int
    offload: str = ""
    """"optimizer" or "all": also parameters."""
    ranks_per_sequence: int = 1
    ulysses: int | None = None
    """Ranks of these that trade heads; the others are a ring."""

    def __str__(self) -> str:
        parts = [f"zero{self.stage}", self.dtype, f"accumulate{self.micro_batches}", self.offload and f"offload-{self.offload}"]
        ring = self.ulysses and f"ring{self.ranks_per_sequence // self.ulysses}"
        return "-".join(filter(None, [*parts, f"sp{self.ranks_per_sequence}", ring]))

    def config(self, memo: dict[str, Any] | None) -> dict[str, Any]:
        zero: dict[str, Any] = {"stage": self.stage, "stage3_param_persistence_threshold": 0, "reduce_bucket_size": 10**5}
        if self.offload:
            zero["offload_optimizer"] = {"device": "cpu"}
        if self.offload == "all":
            zero["offload_param"] = {"device": "cpu"}
        config = {
            "train_micro_batch_size_per_gpu": self.rows,
            "gradient_accumulation_steps": self.micro_batches,
            "gradient_clipping": CLIP,
            "optimizer": {"type": "AdamW", "params": {**ADAM, "torch_adam": True}},
            "zero_optimization": zero,
            "zero_force_ds_cpu_optimizer": False,
            "bf16": {"enabled": self.dtype == "bf16"},
            "steps_per_print": 10**9,
        }
        if self.ranks_per_sequence > 1:
            config["sequence_parallel_size"] = self.ranks_per_sequence
        section = (memo or {}) | ({} if self.ulysses is None else {"ulysses_size": self.ulysses})
        return config | ({"memo": section} if section else {})

    @property
    def groups(self) -> int:
        """Groups of ranks that work on other sequences."""
        return dist.get_world_size() // self.ranks_per_sequence

    @property
    def rows(self) -> int:
        """Sequences in a micro-batch of one group."""
        return SEQUENCES // self.micro_batches // self.groups


def every_case(ranks_per_sequence: int) -> list[Case]:
    """The whole matrix for one number of ranks per sequence; offload where DeepSpeed has it."""
    cases = []
    for stage, dtype, micro_batches in itertools.product((0, 1, 2, 3), ("fp32", "bf16"), (1, 2)):
        offloads = ["", *(["optimizer"] if stage else []), *(["all"] if stage == 3 else [])]
        cases += [Case(stage, dtype, micro_batches, offload, ranks_per_sequence) for offload in offloads]
    return cases


def quick_cases(ranks_per_sequence: int) -> list[Case]:
    """Every value of every axis, and every stage with every dtype."""
    few = [
        Case(0, "fp32", 2), Case(1, "fp32", 1, "optimizer"), Case(2, "fp32", 1), Case(3, "fp32", 2),
        Case(0, "bf16", 1), Case(1, "bf16", 2), Case(2, "bf16", 2, "optimizer"), Case(3, "bf16", 1, "all"),
    ]  # fmt: skip
    return [Case(c.stage, c.dtype, c.micro_batches, c.offload, ranks_per_sequence) for c in few]


def sequences(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and aligned labels, both (SEQUENCES, LENGTH)."""
    tokens = torch.randint(0, VOCAB, (SEQUENCES, LENGTH + 1), generator=torch.Generator().manual_seed(step))
    labels = tokens[:, 1:].clone()
    labels[:, 3:12] = -100
    return tokens[:, :-1], labels


def mean_loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())


def reference() -> list[float]:
    """The losses by plain torch in fp32."""
    model = build("llama")
    optimizer = torch.optim.AdamW(model.parameters(), **ADAM)
    losses, norms = [], []
    for step in range(STEPS):
        tokens, labels = sequences(step)
        loss = mean_loss(model(input_ids=tokens).logits, labels)
        loss.backward()
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP).item())
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert min(norms) < CLIP < max(norms), f"of {norms} clipping should change some"
    return losses


Loss = Callable[[torch.Tensor, torch.Tensor, deepspeed.DeepSpeedEngine], torch.Tensor]


def train(
    case: Case, memo: dict[str, Any] | None, over_ranks: Loss = sequence.mean_over_ranks, evaluations: Collection[int] = ()
) -> tuple[list[float], dict[str, Any] | None]:
    """The losses over all ranks, and memo's report.

    Args:
        over_ranks: how a part's loss becomes that of whole sequences.
        evaluations: steps that only evaluate.
    """
    model = build("llama")
    engine = ds_memo.initialize(model=model, model_parameters=model.parameters(), config=case.config(memo))[0]
    group, place = divmod(dist.get_rank(), case.ranks_per_sequence)
    ((start, stop),) = contiguous(even(LENGTH, case.ranks_per_sequence))[place]
    part = slice(start, stop)
    losses = []
    for step in range(STEPS):
        total = torch.zeros(())
        for micro_batch in range(case.micro_batches):
            first = (micro_batch * case.groups + group) * case.rows
            positions = torch.arange(LENGTH).expand(case.rows, -1)[:, part]
            tokens, labels = (value[first : first + case.rows, part] for value in sequences(step))
            with torch.set_grad_enabled(step not in evaluations):
                engine.train(step not in evaluations)
                loss = mean_loss(engine(input_ids=tokens, position_ids=positions, use_cache=False).logits, labels)
            if case.ranks_per_sequence > 1:
                loss = over_ranks(loss, labels, engine)
            if step not in evaluations:
                engine.backward(loss)
                engine.step()
            total += loss.detach()
        dist.all_reduce(total)
        losses.append(total.item() / dist.get_world_size() / case.micro_batches)
    report = ds_memo.report(engine) if memo else None
    if memo:
        engine.memo.detach()
    engine.destroy()
    groups.mpu = None  # DeepSpeed keeps it for the process
    return losses, report


def apart(losses: list[float], want: list[float]) -> float:
    """The largest relative difference of a step's loss."""
    return max(abs(a - b) / abs(b) for a, b in zip(losses, want, strict=True))


def run(cases: list[Case], section: dict[str, Any] = MEMO) -> None:
    """Train every case with memo and without; whole layers against plain torch, too. All that is off is told at the end."""
    in_tiles = "tile_tokens" in section
    want = None if in_tiles else reference()
    wrong = []
    for case in cases:
        stock, _ = train(case, None)
        memo, report = train(case, section)
        by_memo, by_ranks = apart(memo, stock), apart(stock, want or stock)
        print(f"{case}: memo changes losses by {by_memo:.1e}; they are {by_ranks:.1e} from one process's", flush=True)
        if not max(by_memo, by_ranks) <= TOLERANCE[case.dtype]:
            wrong.append(f"{case}: with memo {memo}, without {stock}, plain torch {want}")
        if in_tiles:
            done = report["tiles"]["layers"] == [0, 1, 2, 3] and not report["tiles"]["not_tiled"]
        else:
            done = report["bytes_to_host"] == report["bytes_from_host"] > 0
            done = done and report["gemm_flops_recomputed_fraction"] <= MOST_RECOMPUTED
        if not done or report["attention_recomputed"]:
            wrong.append(f"{case}: {report}")
    assert not wrong, "\n".join(wrong)
