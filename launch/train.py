"""Train a causal language model on long documents with DeepSpeed and ds_memo.

    deepspeed launch/train.py --deepspeed_config ds_configs/zero3_bf16_memo.json \\
        --model ds_configs/models/llama3-8b.json --seq-length 131072 --steps 100

The model is any Hugging Face causal LM: a config JSON (random weights) or a local checkpoint directory. Batch sizes,
optimizer, precision, ZeRO and the "memo" section come from the DeepSpeed JSON; `--no-memo` drops that section, so that
two runs compare. Without `--data` it trains on the Python standard library's own sources.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

import data as long_data
import deepspeed
import measured
import model as hf
import torch
import torch.distributed as dist
import torch.nn.functional as F
from deepspeed.accelerator import get_accelerator
from measured import PeakBytes
from tqdm import tqdm

import ds_memo
from ds_memo.cli.arguments import tokens
from ds_memo.config import memo_config
from ds_memo.deepspeed import sequence
from ds_memo.distributed.lost_ranks import naming_lost_ranks
from ds_memo.files import write_output
from ds_memo.hf.model_flops import model_flops

IGNORE = -100  # cross_entropy's default ignore_index


class UsageError(ValueError):
    """A call that cannot run; says in one line what to change."""


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser("train.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--deepspeed_config", type=Path, required=True, metavar="JSON")
    parser.add_argument("--model", type=Path, required=True, help="config JSON (random weights) or checkpoint directory")
    parser.add_argument("--no-memo", action="store_true", help='ignore the JSON\'s "memo" section: DeepSpeed alone')
    parser.add_argument("--seq-length", type=tokens, default=4096, metavar="TOKENS", help="4096, 128K or 1M, say")
    parser.add_argument("--steps", type=int, default=20, help="optimizer steps in all, those before --resume included")
    parser.add_argument("--seed", type=int, default=0, help="of the weights, the split and the order of the data")
    parser.add_argument("--attn-implementation", default="sdpa")
    parser.add_argument("--data", type=Path, nargs="+", metavar="PATH", help="text or JSONL files, or folders of them")
    pack = "keep documents of a sequence apart: attention and loss stop at their borders (without: both go on across them)"
    parser.add_argument("--pack", action="store_true", help=pack)
    parser.add_argument("--tokenizer", type=Path, metavar="DIR", help="Hugging Face tokenizer; default: bytes")
    parser.add_argument("--eval-every", type=int, default=0, metavar="STEPS", help="validate so often; 0: at the end only")
    parser.add_argument("--eval-batches", type=int, default=4, help="micro batches per rank and validation")
    parser.add_argument("--save", type=Path, metavar="DIR", help="write a DeepSpeed checkpoint at the end")
    parser.add_argument("--save-every", type=int, default=0, metavar="STEPS", help="with --save: also so often")
    parser.add_argument("--resume", type=Path, metavar="DIR", help="go on from a checkpoint, with its next batch")
    parser.add_argument("--metrics-json", type=Path, metavar="FILE", help="write losses, speed, memory and the memo report")
    parser.add_argument("--local_rank", type=int, default=int(os.environ.get("LOCAL_RANK", 0)), help=argparse.SUPPRESS)
    args = parser.parse_args()
    for name in ("steps", "eval_batches"):
        if getattr(args, name) < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1, not {getattr(args, name)}")
    if args.save_every and not args.save:
        parser.error("--save-every needs --save")
    return args


def check_outputs(args: argparse.Namespace) -> None:
    """Check that the files at the end of the run can be written.

    Raises:
        UsageError: Where a folder cannot be made or written to.
    """
    if args.metrics_json and args.metrics_json.is_dir():
        raise UsageError(f"--metrics-json {args.metrics_json} is a folder; name a file in it")
    folders = {"--metrics-json": args.metrics_json and args.metrics_json.parent, "--save": args.save}
    for option, folder in folders.items():
        if folder is None:
            continue
        try:
            folder.mkdir(parents=True, exist_ok=True)
            tempfile.TemporaryFile(dir=folder).close()
        except OSError as error:
            raise UsageError(f"{option}: {folder} cannot be written to ({error.strerror}); choose another folder") from error


def read_ds_config(path: Path, no_memo: bool) -> dict:
    """Return the DeepSpeed JSON as a dict, without its "memo" section if `no_memo`.

    Raises:
        UsageError: Where there is no such file, it is not a JSON object, or it names no optimizer.
        MemoConfigError: Where the "memo" section is wrong; before a model is made, which may take minutes.
    """
    if not path.is_file():
        raise UsageError(f"no DeepSpeed configuration at {path}; check --deepspeed_config")
    try:
        config = json.loads(path.read_text())
    except json.JSONDecodeError as error:
        raise UsageError(f"{path} is not JSON, as expected: {error}") from error
    if not isinstance(config, dict) or "optimizer" not in config:
        raise UsageError(f'{path} has no "optimizer" section; add one')
    if no_memo:
        config.pop("memo", None)
    memo_config(config.get("memo", {}))
    return config


def dtype_of(ds_config: dict) -> torch.dtype:
    """Return the parameters' dtype of the DeepSpeed JSON."""
    for section, dtype in (("bf16", torch.bfloat16), ("fp16", torch.float16)):
        if ds_config.get(section, {}).get("enabled"):
            return dtype
    return torch.float32


def init_distributed() -> None:
    """Join the other ranks.

    Raises:
        UsageError: Where nothing started this process as a rank.
    """
    if get_accelerator().device_name() == "cpu":
        # Spares the 40 s (and the compiler) that DeepSpeed's shared-memory collectives take to build; gloo serves.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    try:
        deepspeed.init_distributed()
    except ModuleNotFoundError as error:
        if error.name != "mpi4py":  # DeepSpeed asks MPI where no launcher's variables are set
            raise
        raise UsageError(
            "no launcher: start it with `deepspeed launch/train.py …` or `torchrun launch/train.py …`, also for one rank"
        ) from error


@dataclass
class Run:
    """One training run: the engine, its data, and its step."""

    args: argparse.Namespace
    engine: deepspeed.DeepSpeedEngine
    training: long_data.Windows
    validation: long_data.Windows
    flops_per_sequence: float | None
    sp: int  # ranks that share a sequence
    samples: int = 0  # consumed so far by all ranks

    @property
    def micro(self) -> int:
        """Sequences in a micro batch of all ranks."""
        return self.engine.train_micro_batch_size_per_gpu() * dist.get_world_size() // self.sp

    def batches(self, windows: long_data.Windows, first: int, shuffle: bool) -> Iterator[dict[str, torch.Tensor]]:
        """This rank's share of every micro batch from sample `first` on; of each sequence its part, if ranks share them."""
        rows = self.engine.train_micro_batch_size_per_gpu()
        group, place = divmod(dist.get_rank(), self.sp)  # a group's ranks read its micro batches in turn
        own = (
            windows.batch(first + number * self.micro + group * rows, rows, shuffle) for number in itertools.count(place, self.sp)
        )
        if self.sp > 1:
            positions = torch.arange(self.args.seq_length).expand(rows, -1)
            return sequence.split(({"position_ids": positions} | batch for batch in own), self.engine.device)
        if self.args.pack and "flash" in self.args.attn_implementation:  # Transformers finds documents in a single row only
            own = ({name: value.view(1, -1) for name, value in batch.items()} for batch in own)
        return ({name: value.to(self.engine.device) for name, value in batch.items()} for batch in own)

    def loss(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        """Return the mean loss of a batch, whose labels stand at the positions that predict them; 0 if none counts."""
        inputs = {name: value for name, value in batch.items() if name != "labels"}
        logits, labels = self.engine(**inputs, use_cache=False).logits, batch["labels"]
        total = F.cross_entropy(logits.float().flatten(0, -2), labels.flatten(), reduction="sum")
        loss = total / (labels != IGNORE).sum().clamp(min=1)
        return sequence.mean_over_ranks(loss, batch["labels"], self.engine) if self.sp > 1 else loss

    def mean(self, losses: list[torch.Tensor]) -> float:
        """Mean over this rank's losses and all ranks; every micro batch weighs the same."""
        total = torch.stack(losses).mean()
        with naming_lost_ranks("the mean of the losses"):
            dist.all_reduce(total)
        return total.item() / dist.get_world_size()

    def step(self, batches: Iterator[dict[str, torch.Tensor]], peak: PeakBytes | None) -> dict:
        """Take one optimizer step and return its metrics."""
        engine, start = self.engine, time.perf_counter()
        losses = []
        if peak:
            peak.bytes = 0
        for _ in range(engine.gradient_accumulation_steps()):
            batch = next(batches)
            with peak.watch() if peak else nullcontext():
                loss = self.loss(batch)
                engine.backward(loss)
            engine.step()
            losses.append(loss.detach())
            self.samples += self.micro
        loss = self.mean(losses)  # waits for the device
        seconds = time.perf_counter() - start
        speed = measured.speed(engine, self.args.seq_length, self.flops_per_sequence, seconds)
        return {"step": engine.global_steps, "loss": loss, **speed, "peak_live_bytes": peak.bytes if peak else None}

    @torch.no_grad()
    def validate(self) -> float:
        """Return the mean loss over the first windows of the held-out documents, the same ones every time."""
        self.engine.eval()
        batches = itertools.islice(self.batches(self.validation, 0, shuffle=False), self.args.eval_batches)
        loss = self.mean([self.loss(batch) for batch in batches])
        self.engine.train()
        return loss

    def save(self) -> None:
        state = {"samples": self.samples, "seed": self.args.seed, "seq_length": self.args.seq_length}
        self.engine.save_checkpoint(self.args.save, client_state=state)
        if dist.get_rank() == 0:
            self.engine.module.config.save_pretrained(self.args.save)

    def resume(self) -> None:
        """Load weights, optimizer, step count and the data position.

        Raises:
            UsageError: Where there is no checkpoint, or it was made with other data options.
        """
        path, state = self.engine.load_checkpoint(self.args.resume)
        if path is None:
            raise UsageError(f"no checkpoint in {self.args.resume}; check --resume")
        for name in ("seed", "seq_length"):
            if state[name] != getattr(self.args, name):
                option, value = name.replace("_", "-"), getattr(self.args, name)
                raise UsageError(f"{self.args.resume} was trained with --{option} {state[name]}, not {value}; use the same")
        self.samples = state["samples"]


def start(args: argparse.Namespace) -> Run:
    """Check the cheap things first, then read the data, build the model and its engine."""
    ds_config = read_ds_config(args.deepspeed_config, args.no_memo)
    config = hf.load_config(args.model)
    positions = hf.max_positions(config)
    if positions is not None and args.seq_length > positions:
        raise UsageError(
            f"--seq-length {args.seq_length} is longer than the model's {positions} positions: "
            "shorten it, or raise max_position_embeddings"
        )
    sp = sequence.size_in(ds_config)
    if sp > 1:
        sequence.check(sp, ds_config.get("memo", {}).get("ulysses_size"), int(os.environ.get("WORLD_SIZE", 1)))
    if args.resume and not args.resume.is_dir():
        raise UsageError(f"no checkpoint in {args.resume}; check --resume")
    tokenizer = long_data.HFTokenizer(args.tokenizer) if args.tokenizer else long_data.ByteTokenizer()
    vocab = config.get_text_config().vocab_size
    if tokenizer.vocab_size > vocab:
        raise UsageError(f"the tokenizer has {tokenizer.vocab_size} tokens, the model's vocabulary only {vocab}; use the model's")
    documents = long_data.read_documents(args.data or [long_data.standard_library()])
    training, validation = long_data.load_windows(documents, tokenizer, args.seq_length, args.seed, args.pack)
    check_outputs(args)  # last: what is refused leaves no folders behind

    init_distributed()
    torch.manual_seed(args.seed)  # the same weights on every rank
    model = hf.build(args.model, config, ds_config, dtype_of(ds_config), args.attn_implementation)
    if args.pack:
        hf.check_packing(model, sp)
    if getattr(config.get_text_config(), "output_router_logits", False):
        raise UsageError(f"{type(model).__name__}: this script adds no router loss; set output_router_logits to false")
    flops = None if args.pack else model_flops(model, args.seq_length)  # attention's depend on the documents
    engine, *_ = ds_memo.initialize(model=model, model_parameters=model.parameters(), config=ds_config)
    return Run(args, engine, training, validation, flops, sp)


def train(run: Run) -> None:
    args, engine, first = run.args, run.engine, dist.get_rank() == 0
    if args.resume:
        run.resume()
        if engine.global_steps >= args.steps:
            raise UsageError(
                f"{args.resume} is at step {engine.global_steps} already; --steps counts those before it, too: raise it"
            )
    peak = PeakBytes(engine.device) if args.metrics_json else None
    steps, validations = [], []
    batches = run.batches(run.training, run.samples, shuffle=True)
    with tqdm(total=args.steps, initial=engine.global_steps, disable=not first, unit="step") as bar:
        while engine.global_steps < args.steps:
            steps.append(run.step(batches, peak))
            measured.show(bar, steps[-1])
            last = engine.global_steps == args.steps
            if args.save and (last or (args.save_every and engine.global_steps % args.save_every == 0)):
                run.save()  # first: a validation that fails costs no step
            if last or (args.eval_every and engine.global_steps % args.eval_every == 0):
                validations.append({"step": engine.global_steps, "loss": run.validate()})
                if first:
                    bar.write(f"step {engine.global_steps}: validation loss {validations[-1]['loss']:.4f}")
    if hasattr(engine, "memo") and first:
        print(ds_memo.report(engine))
    if args.metrics_json and first:
        metrics = measured.of_the_run(engine, args.seq_length, run.sp) | {"steps": steps, "validation": validations}
        write_output(args.metrics_json, json.dumps(metrics, indent=2) + "\n")


def main() -> None:
    args = parse_args()
    try:
        train(start(args))
    except (UsageError, long_data.DataError, hf.ModelError, ds_memo.MemoConfigError) as error:
        if args.local_rank == 0:
            print(f"train.py: error: {error}", file=sys.stderr)
        sys.exit(2)
    except ds_memo.MemoError as error:  # how much host memory a rank has may be its own affair
        print(f"train.py: error on rank {args.local_rank}: {error}", file=sys.stderr)
        sys.exit(2)
    dist.barrier()  # a group that is taken down under another rank's last collective ends that rank
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
