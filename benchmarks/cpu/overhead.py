"""Host time of record and replay beside torch.utils.checkpoint's, in one run.

    python -m benchmarks.overhead [--device cpu|cuda] [--models llama …] [--variants resident …] [-o FILE.json]
    python -m benchmarks.overhead --emulated             # CUDA's host path, without a GPU (see emulator.py)
    python -m benchmarks.overhead --way python           # beside it, record and replay in Python

A model has eight tiny layers, so host time dominates. A sample is a forward and a backward of one step, without an optimizer;
gradients are dropped outside the clock. All variants train the same model, so they differ in what runs around its ops. In a turn
a variant is put on the model, trains steps that do not count, then its samples, and is taken off. Variants take turns. Python's
garbage collector waits meanwhile.

A table has microseconds per layer and pass: median, and 10th percentile in parentheses. The ratio divides forward and backward
together by checkpoint's on as many tokens; its median has the bar. "A tile" is what one more sequence adds to the layer if each
sequence is a tile: all passes of the tile together. Its kernels take time on a CPU: 512 tokens mostly compute there, 16 show host
time. The last column counts the ops of a layer and step that ds_memo handles, in C++ and in Python; of a layer in four tiles, if
in tiles. "Python" alone: all of them.

The clock is the CPU time of the compute thread on a CPU, where other threads copy. On CUDA, where autograd has its own thread, it
is wall time. In the emulator, where kernels and the driver cost next to nothing, it is the CPU time of the process: compute's
thread and autograd's, and no thread of the emulator, as it has none.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import statistics
import sys
import time
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

import ds_memo
from benchmarks import results
from benchmarks.emulated_process import is_emulated, run_emulated, without_values
from benchmarks.workloads import dtype_of, small_models
from ds_memo.remat import follower
from ds_memo.runtime.handle import MemoHandle

LAYERS, VOCABULARY = 8, 128
MODELS = ("llama", "gpt-neox", "qwen3-moe")
SHORT, LONG = 16, 512
"""Tokens of a sequence."""
TURNS, WARM_UP, SAMPLES = 30, 3, 3
"""Turns of a variant; steps of a turn that do not count, as they analyse and plan, and that do."""
RESIDENT_BAR, SWAPPED_BAR = 1.05, 1.25
"""Times checkpoint's host time."""
EMULATED_GIB = 80

Sample = tuple[float, float]
"""Microseconds per layer of a forward and of its backward."""


@dataclass(frozen=True)
class Variant:
    """A way to train."""

    memo: dict[str, Any] | None = None
    """The "memo" section; None: not under ds_memo."""
    checkpoint: bool = False
    tokens: int = SHORT
    batches: tuple[int, ...] = (1,)
    """Sequences. The time of two batches is what each further sequence adds."""
    bar: float | None = None
    base: str = "checkpoint"
    """Variant to divide by."""
    in_python: bool = False

    @contextlib.contextmanager
    def on(self, model: nn.Module) -> Iterator[MemoHandle | None]:
        """Within the block, train the model this way."""
        if self.memo is not None:
            with follower.in_python() if self.in_python else contextlib.nullcontext():
                handle = ds_memo.attach(model, self.memo)
                yield handle
            handle.detach()
        elif self.checkpoint:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
            yield None
            model.gradient_checkpointing_disable()
        else:
            yield None

    def check(self, report: dict[str, Any]) -> None:
        """Assert that ds_memo trained the model this way."""
        resident = len(report["layers_on_device"])
        assert resident == self.memo["resident_layers"] and (report["bytes_to_host"] == 0) == (resident == LAYERS), report
        assert len(self.batches) == 1 or len((report["tiles"] or {"layers": ()})["layers"]) == LAYERS, "a layer ran whole"
        assert not self.in_python or report["host"]["record_and_replay"]["way"] == "Python", report


def _swapped(alpha: float) -> Variant:
    return Variant({"alpha": alpha, "resident_layers": 0}, bar=SWAPPED_BAR)


def _tile(tokens: int, base: str) -> Variant:
    memo = {"alpha": 0.0, "resident_layers": 0, "tile_tokens": tokens}
    return Variant(memo, tokens=tokens, batches=(2, 4), bar=SWAPPED_BAR, base=base)


_LONG_BASE = f"checkpoint, {LONG} tokens"
VARIANTS = {
    "stock": Variant(),
    "checkpoint": Variant(checkpoint=True),
    "resident": Variant({"alpha": 0.5, "resident_layers": LAYERS}, bar=RESIDENT_BAR),
    "alpha 0": _swapped(0.0),
    "alpha 0.5": _swapped(0.5),
    "alpha 1": _swapped(1.0),
    f"a tile of {SHORT}": _tile(SHORT, "checkpoint"),
    _LONG_BASE: Variant(checkpoint=True, tokens=LONG, base=_LONG_BASE),
    f"a tile of {LONG}": _tile(LONG, _LONG_BASE),
}


def chosen(names: Collection[str], python_too: bool = False) -> dict[str, Variant]:
    """Return the named variants and those that they are divided by.

    Args:
        python_too: add ds_memo's once more, in Python. No bar is for these.
    """
    needed = {*names, *(VARIANTS[name].base for name in names)}
    found = {}
    for name in VARIANTS:
        if name in needed:
            found[name] = VARIANTS[name]
            if python_too and VARIANTS[name].memo:
                found[f"{name}, in Python"] = replace(VARIANTS[name], bar=None, in_python=True)
    return found


def build(name: str) -> nn.Module:
    if name != "qwen3-moe":
        return small_models(VOCABULARY, LAYERS, hidden=64, heads=4, kv_heads=2, llama_ffn=128)[name]
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    experts = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "decoder_sparse_step": 1}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    torch.manual_seed(0)
    return Qwen3MoeForCausalLM(
        Qwen3MoeConfig(vocab_size=VOCABULARY, num_hidden_layers=LAYERS, hidden_size=64, **heads, **experts)
    )


def step(model: nn.Module, tokens: torch.Tensor) -> Sample:
    """Train one step and return its sample."""
    model.zero_grad(set_to_none=True)
    if tokens.is_cuda and not is_emulated():
        torch.cuda.synchronize(tokens.device)
        clock = time.perf_counter
    else:
        clock = time.process_time if tokens.is_cuda else time.thread_time
    begin = clock()
    loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
    middle = clock()
    loss.backward()
    end = clock()
    return (middle - begin) * 1e6 / LAYERS, (end - middle) * 1e6 / LAYERS


@contextlib.contextmanager
def undisturbed() -> Iterator[None]:
    """Within the block, ops take one thread, and Python collects garbage only where it is told to, of what is made there."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    gc.disable()
    gc.collect()
    gc.freeze()  # a collection would take longer than a turn's steps
    try:
        yield
    finally:
        gc.unfreeze()
        gc.enable()
        torch.set_num_threads(threads)


def turn(model: nn.Module, variant: Variant, device: torch.device) -> tuple[list[list[Sample]], dict[str, Any]]:
    """Return the samples of each of the variant's batches, and the way that record and replay went, with the ops of a layer in a
    step of the last batch."""
    found, way = [], {}
    with variant.on(model) as handle:
        for sequences in variant.batches:
            tokens = torch.randint(0, VOCABULARY, (sequences, variant.tokens), device=device)
            for _ in range(WARM_UP):
                step(model, tokens)
            before = handle.report()["host"]["record_and_replay"] if handle else {}
            gc.collect()
            found.append([step(model, tokens) for _ in range(SAMPLES)])
        if handle:
            report = handle.report()
            variant.check(report)
            way = report["host"]["record_and_replay"]
            for ops in way.keys() & {"ops_in_cpp", "ops_in_python"}:
                way[ops] = (way[ops] - before[ops]) / (SAMPLES * LAYERS)
    return found, way


def times(variant: Variant, samples: Sequence[Sequence[Sample]]) -> dict[str, list[float]]:
    """Return median and 10th percentile of forward, backward and both together, in microseconds."""

    def of(batch: Sequence[Sample]) -> list[list[float]]:
        parts = [sorted(part) for part in (*zip(*batch, strict=True), map(sum, batch))]
        return [[statistics.median(part), part[len(part) // 10]] for part in parts]

    few, many = of(samples[0]), of(samples[-1])
    if len(samples) > 1:
        more = variant.batches[-1] - variant.batches[0]
        few = [[(b - a) / more for a, b in zip(*parts, strict=True)] for parts in zip(few, many, strict=True)]
    return dict(zip(("forward", "backward", "both"), few, strict=True))


def measure(model_name: str, variants: dict[str, Variant], device: torch.device, turns: int) -> dict[str, Any]:
    """Return each variant's raw samples, times, ratio, and the bar that it is over, for one model."""
    model = build(model_name).to(device, dtype_of(device)).train()
    samples: dict[str, list[list[Sample]]] = {name: [[] for _ in variant.batches] for name, variant in variants.items()}
    ways = {}
    with undisturbed():
        for _ in range(turns):
            for name, variant in variants.items():
                found, ways[name] = turn(model, variant, device)
                for kept, more in zip(samples[name], found, strict=True):
                    kept += more
    rows: dict[str, Any] = {name: {"us": times(variant, samples[name])} | ways[name] for name, variant in variants.items()}
    for name, variant in variants.items():
        row = rows[name]
        row["ratio"], row["ratio_p10"] = (a / b for a, b in zip(row["us"]["both"], rows[variant.base]["us"]["both"], strict=True))
        row |= {"bar": variant.bar, "over": variant.bar is not None and row["ratio"] > variant.bar}
        row["samples_us"] = [[[round(us, 1) for us in sample] for sample in batch] for batch in samples[name]]
    return rows


def table(rows: dict[str, Any]) -> list[str]:
    """Return the lines of one model's table."""
    head = ("variant", "forward", "backward", "both", "x checkpoint's", "bar", "", "ops in C++, Python")
    lines = []
    for name, row in rows.items():
        cells = [f"{median:,.0f} ({least:,.0f})" for median, least in row["us"].values()]
        verdict = ("", "") if row["bar"] is None else (f"<= {row['bar']}", "OVER" if row["over"] else "ok")
        ops = f"{row['ops_in_cpp']:.0f}, {row['ops_in_python']:.0f}" if "ops_in_cpp" in row else row.get("way", "")
        lines.append((name, *cells, f"{row['ratio']:.2f} ({row['ratio_p10']:.2f})", *verdict, ops))
    return results.markdown(head, lines)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser("python -m benchmarks.overhead", description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--emulated", action="store_true", help="CUDA's host path, in the emulator")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=MODELS)
    parser.add_argument(
        "--variants", nargs="+", choices=VARIANTS, default=tuple(VARIANTS), metavar="NAME", help=", ".join(VARIANTS)
    )
    parser.add_argument("--way", choices=["python"], help="measure record and replay in Python, too")
    parser.add_argument("--rounds", type=int, default=TURNS, metavar="TURNS")
    parser.add_argument("-o", "--json", type=Path, metavar="FILE.json", help="times and raw samples")
    options = parser.parse_args(arguments)
    if options.emulated and not is_emulated():
        words = list(sys.argv[1:] if arguments is None else arguments)
        words += ["--json", str(options.json.resolve())] if options.json else []  # the process has another directory
        return run_emulated("benchmarks.overhead", words, EMULATED_GIB)
    if options.emulated:
        without_values()
    device = torch.device("cuda" if options.emulated else options.device)
    variants = chosen(options.variants, options.way == "python")
    found: dict[str, Any] = {"environment": results.environment(device), "emulated": options.emulated, "turns": options.rounds}
    found["unit"] = "microseconds per layer and pass"
    found["models"] = {}
    over = []
    for name in options.models:
        rows = found["models"][name] = measure(name, variants, device, options.rounds)
        results.say("\n".join([f"\n{name}, µs per layer and pass:", *table(rows)]))
        over += [f"{name}, {variant}" for variant, row in rows.items() if row["over"]]
        if options.json:
            options.json.write_text(json.dumps(results.plain(found)) + "\n")
    results.say(f"\nover the bar: {'; '.join(over) or 'none'}")
    return 1 if over else 0


if __name__ == "__main__":
    sys.exit(main())
