"""Qwen3-8B on one sequence of 1,048,576 tokens and eight GPUs, as TRL 1.13 trains it and under ds_memo.

    torchrun --nproc-per-node 8 -m benchmarks.trl_million ours          # on eight GPUs
    torchrun --nproc-per-node 8 -m benchmarks.trl_million trl
    python -m benchmarks.trl_million rehearse                           # both as rank 0 of eight, on the emulated H100
    python -m benchmarks.trl_million predict                            # both by the estimator

trl    what TRL's example asks for (huggingface/trl, examples/sft_qwen3_8b_1m_context), by the code that runs there: FSDP2 with
       fp32 parameters and bf16 computing, torch's ring attention of context parallelism, Transformers' gradient checkpointing
       with `offload`, the loss in chunks of 256 tokens. Without its Trainer, accelerate, and clipping of gradients
ours   DeepSpeed's ZeRO-3 and the "memo" section, in which nothing is set but `"enabled": true`; eight ranks to a sequence

Tokens are random, weights too. TRL published 380 s a step and 56.2 GB a GPU (pull request 6846). Layers and tokens can be fewer:
a step of 36 layers at 1 Mi tokens takes minutes on the emulator, too.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from benchmarks.results import markdown
from benchmarks.ring import Ring
from ds_memo.cli.arguments import tokens
from ds_memo.units import GIB

PUBLISHED = {"cudnn": {"s": 380, "gib": 56.2}, "flash": {"s": 606, "gib": 56.2}}
CHUNK = 256
"""Tokens of the loss in a chunk, as TRL's."""
CONFIG = Path(__file__).resolve().parents[2] / "ds_configs" / "models" / "qwen3-8b.json"


def config_of(layers: int, length: int) -> Any:
    from transformers import Qwen3Config

    yarn = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 32.0, "original_max_position_embeddings": 32768}
    given = {name: value for name, value in json.loads(CONFIG.read_text()).items() if name not in ("model_type", "rope_theta")}
    given |= {"num_hidden_layers": layers, "max_position_embeddings": length, "rope_parameters": yarn}
    return Qwen3Config(**given)


class Peaks:
    """Most device memory of a step. Others reset PyTorch's peak within it: the rehearsal does, with the optimizer's step."""

    def begin(self) -> None:
        torch.cuda.reset_peak_memory_stats()
        self.gib = self.reserved_gib = 0.0

    def note(self) -> None:
        self.gib = max(self.gib, torch.cuda.max_memory_allocated() / GIB)
        self.reserved_gib = max(self.reserved_gib, torch.cuda.max_memory_reserved() / GIB)


# ---- as TRL


def ring_attention(module: nn.Module, q: Any, k: Any, v: Any, mask: None, scaling: float, **_: Any) -> tuple[torch.Tensor, None]:
    return Ring.apply(q, k, v, scaling, dist.group.WORLD).transpose(1, 2).contiguous(), None


class Scored(nn.Module):
    """A model with its loss in chunks, each of which is computed again in the backward."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.inner = model

    def forward(self, ids: torch.Tensor, positions: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        hidden = self.inner.model(
            input_ids=ids, position_ids=positions, attention_mask={"full_attention": None}, use_cache=False
        ).last_hidden_state
        total = hidden.new_zeros((), dtype=torch.float32)
        for rows, said in zip(hidden[0].split(CHUNK), labels[0].split(CHUNK), strict=True):
            total = total + torch.utils.checkpoint.checkpoint(self._of, rows, said, use_reentrant=False)
        return total / labels.numel()

    def _of(self, rows: torch.Tensor, said: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.inner.lm_head(rows).float(), said, reduction="sum")


def as_trl(
    config: Any, length: int, device: str = "cuda", computes: torch.dtype = torch.bfloat16
) -> tuple[Scored, tuple[torch.Tensor, ...]]:
    """Return this rank's shard of the model, without weights, and its part of a batch."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    from transformers import AttentionInterface, AutoModelForCausalLM

    AttentionInterface.register("torch_ring", ring_attention)
    ranks, rank = dist.get_world_size(), dist.get_rank()
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="torch_ring")
    model.gradient_checkpointing_enable({"use_reentrant": False}, offload=True)
    scored = Scored(model).train()
    policy = MixedPrecisionPolicy(computes, computes, computes)
    mesh = init_device_mesh(device, (ranks,))
    for part in (*model.model.layers, scored):
        fully_shard(part, mesh=mesh, mp_policy=policy)
    scored.to_empty(device=device)
    with torch.device(device):
        model.model.rotary_emb = type(model.model.rotary_emb)(config)
    generator = torch.Generator().manual_seed(0)
    ids, positions = torch.randint(config.vocab_size, (1, length), generator=generator), torch.arange(length)[None]
    pieces = length // (2 * ranks)  # zigzag: one piece from the front, one from the back

    def mine(whole: torch.Tensor) -> torch.Tensor:
        parts = whole.split(pieces, 1)
        return torch.cat([parts[rank], parts[2 * ranks - 1 - rank]], 1).to(device)

    return scored, (mine(ids), mine(positions), mine(ids.roll(-1, 1)))


def trl(config: Any, length: int, memo: dict[str, Any], peaks: Peaks, attention: str) -> Callable[[], None]:
    torch.backends.cuda.enable_cudnn_sdp(attention == "cudnn")
    if attention == "flash_attn_3":
        torch.nn.attention.activate_flash_attention_impl("FA3")
    if not dist.is_initialized():
        dist.init_process_group("nccl")
    scored, batch = as_trl(config, length)
    with torch.no_grad():
        for name, parameter in scored.named_parameters():
            parameter.fill_(1.0) if "norm" in name else parameter.normal_(0, 0.02)
    optimizer = torch.optim.AdamW(scored.parameters(), lr=2e-5, fused=True)

    def step() -> None:
        scored(*batch).backward()
        peaks.note()
        optimizer.step()
        optimizer.zero_grad()

    return step


# ---- under ds_memo


def ours(config: Any, length: int, memo: dict[str, Any], peaks: Peaks, attention: str) -> Callable[[], None]:
    import deepspeed
    from transformers import AutoModelForCausalLM

    import ds_memo
    from ds_memo.deepspeed import sequence

    section = {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 2e-5, "torch_adam": True}},
        "zero_optimization": {"stage": 3},
        "sequence_parallel_size": int(os.environ["WORLD_SIZE"]),
        "memo": {"enabled": True} | ({"attention": attention} if attention != "flash_attn_3" else {}) | memo,  # 3 runs unasked
    }
    deepspeed.init_distributed()
    torch.manual_seed(0)
    with deepspeed.zero.Init(config_dict_or_path=section), torch.device("cuda"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    engine, *_ = ds_memo.initialize(model=model.train(), model_parameters=model.parameters(), config=section)
    generator = torch.Generator().manual_seed(0)
    ids, positions = torch.randint(config.vocab_size, (1, length), generator=generator), torch.arange(length)[None]
    whole = {"input_ids": ids, "position_ids": positions, "labels": ids.roll(-1, 1)}
    parts = sequence.split(iter(lambda: whole, None), engine.device)

    def step() -> None:
        part = next(parts)
        logits = engine(input_ids=part["input_ids"], position_ids=part["position_ids"], use_cache=False).logits
        loss = F.cross_entropy(logits.float().flatten(0, -2), part["labels"].flatten())
        engine.backward(sequence.mean_over_ranks(loss, part["labels"], engine))
        peaks.note()
        engine.step()

    step.engine = engine  # type: ignore[attr-defined]
    return step


# ---- both


def train(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Train some steps; return seconds and memory of each."""
    torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
    way, peaks, rows = {"ours": ours, "trl": trl}[options.way], Peaks(), []
    step = way(config_of(options.layers, options.tokens), options.tokens, options.memo, peaks, options.attention)
    for number in range(1, options.steps + 1):
        peaks.begin()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        step()
        end.record()
        end.synchronize()
        peaks.note()
        rows.append({"step": number, "s": begin.elapsed_time(end) / 1e3, **vars(peaks)})
        if dist.get_rank() == 0:
            print(options.way, json.dumps(rows[-1]), flush=True)
    if options.way == "ours" and dist.get_rank() == 0:
        import ds_memo

        report = ds_memo.report(step.engine)
        kept = ("attention_kernel", "alpha", "tiles", "resident_layers", "binding", "step_s", "predicted", "stall_s", "host")
        rows[-1] |= {name: report[name] for name in (*kept, "warnings")}
    return rows


def predicted(options: argparse.Namespace) -> dict[str, dict[str, float]]:
    """Return what the estimator says of both ways, of all layers."""
    from benchmarks.published_runs import DATA, answer, machine, model
    from ds_memo.estimate.estimate import estimate
    from ds_memo.estimate.question import Question

    theirs = answer(json.loads(DATA.read_text())["runs"][0] | {"tokens": options.tokens, "kernel": options.attention})
    h100, limit_gib = machine(options.attention), options.memo.get("device_memory_gib")
    if limit_gib:
        h100 = h100.with_device_memory(limit_gib * GIB)
    mine = estimate(Question(model("qwen3-8b", fused=False), h100, 8, options.tokens))
    found = {"s": mine.step_s, "gib": mine.device_total / GIB, "host_gib": mine.host_bytes / GIB}
    return {"trl": {"s": theirs.seconds, "gib": theirs.gib}, "ours": found}


def rehearse(options: argparse.Namespace) -> dict[str, Any]:
    """Run the ways as rank 0 of eight on the emulated H100."""
    from benchmarks import rehearsal

    found: dict[str, Any] = {"hardware": "h100", "calls of attention": {}}
    with tempfile.TemporaryDirectory() as folder:
        for way in options.ways:
            result, seen = Path(folder, f"{way}.json"), Path(folder, "rehearsal.json")
            asked = [way, "--layers", options.layers, "--tokens", options.tokens, "--steps", options.steps, "--json", result]
            asked += ["--attention", options.attention, "--memo", json.dumps(options.memo)]
            device = ["--ranks", "8", "--device-gib", options.device_gib, "--hardware", "h100", "--json", seen]
            device += ["--flash-attn-3"] * (options.attention == "flash_attn_3")
            if code := rehearsal.main([str(word) for word in (*device, __file__, *asked)]):
                raise SystemExit(code)
            found[way] = json.loads(result.read_text())
            found["calls of attention"][way] = json.loads(seen.read_text())["attention"]
    return found


def show(options: argparse.Namespace, found: dict[str, Any]) -> None:
    """Print the table: published, emulated if that was done, and predicted."""
    layers = f"Emulated with {options.layers} of 36 layers as rank 0 of 8. " if "hardware" in found else ""
    print(f"\n{options.tokens:,} tokens, {options.attention}. {layers}Published: TRL 1.13, 1,048,576 tokens, 36 layers")
    head = ("", "published s, GiB", "emulated s", "GiB", "GiB reserved", "host GiB of the node", "predicted s", "GiB", "host GiB")
    lines, published = [], ", ".join(map(str, PUBLISHED.get(options.attention, {}).values()))
    for way in options.ways:
        rows, told = found.get(way), found["predicted"][way]
        host = 8 * rows[-1]["host"]["slab"] / GIB if rows and "host" in rows[-1] else None
        emulated = [rows[-1][name] for name in ("s", "gib", "reserved_gib")] if rows else [None] * 3
        numbers = [*emulated, host, told["s"], told["gib"], told.get("host_gib")]
        lines.append((way, published if way == "trl" else "", *("" if x is None else f"{x:,.1f}" for x in numbers)))
    print(*markdown(head, lines), sep="\n")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser("python -m benchmarks.trl_million", description=__doc__.splitlines()[0])
    parser.add_argument("way", choices=("ours", "trl", "rehearse", "predict"))
    parser.add_argument("--layers", type=int, default=36)
    parser.add_argument("--tokens", type=tokens, default=1 << 20)
    parser.add_argument("--steps", type=int, default=5)
    kernel = "of both ways, as memo.attention names it; default: cudnn"
    parser.add_argument("--attention", choices=("flash", "cudnn", "flash_attn_3"), default="cudnn", help=kernel)
    parser.add_argument("--memo", type=json.loads, default={}, metavar="JSON", help='more of the "memo" section')
    parser.add_argument("--device-gib", type=float, default=80.0, help="of the emulated device; default: 80")
    parser.add_argument("--ways", nargs="+", choices=("trl", "ours"), default=("trl", "ours"), help="to rehearse; default: both")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write seconds and memory of each step")
    options = parser.parse_args(arguments)
    if options.way in ("rehearse", "predict"):
        asked = {"memo": options.memo, "attention": options.attention}
        found = {"published": PUBLISHED.get(options.attention), **asked, "predicted": predicted(options)}
        if options.way == "rehearse":
            found |= rehearse(options)
        show(options, found)
        if options.json:
            options.json.write_text(json.dumps(found, indent=1) + "\n")
        return 0
    rows = train(options)
    if options.json and dist.get_rank() == 0:
        options.json.write_text(json.dumps(rows) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
