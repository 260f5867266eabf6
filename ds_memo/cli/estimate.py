"""`ds-memo estimate`: time, memory and the binding constraint of a run, before any GPU is rented."""

from __future__ import annotations

import argparse
import csv
import io
import json
import sys
from collections.abc import Sequence
from dataclasses import replace

from ds_memo.attention_kernel import NAMES
from ds_memo.cli.arguments import count, gib, number, tokens
from ds_memo.errors import brief, quoted
from ds_memo.estimate import hardware
from ds_memo.estimate.errors import EstimateError
from ds_memo.estimate.hardware import Hardware
from ds_memo.estimate.layout import OFFLOADS
from ds_memo.estimate.question import METHODS, OK, Estimate, Question
from ds_memo.files import write_output
from ds_memo.units import GIB, short

RANK = 8
"""PEFT's own rank of adapters."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    option = parser.add_argument_group("what runs where").add_argument
    machines = ", ".join(hardware.names())
    config = "a Hugging Face config, a folder with one, or the name of a model whose config is in the Hugging Face cache"
    option("--model", required=True, metavar="CONFIG.json|NAME", help=config)
    option("--hardware", required=True, metavar="NAME|FILE", help=f"one of {machines}, or a JSON file like theirs")
    card = "of a card that no file has (--hardware generic), with --device-memory-gib; or in place of a file's number"
    option("--peak-tflops", type=_rate, metavar="X", help=f"dense bf16 with fp32 sums, {card}")
    option("--device-gb-per-s", type=_rate, metavar="X", help=f"of device memory, {card}")
    option("--link-gb-per-s", type=_rate, metavar="X", help=f"between host and GPU in one direction, {card}")
    option("--gpus", type=count, metavar="N", help="GPUs in all")
    option("--seq-length", type=tokens, metavar="S", help="tokens of a sequence: 131072, 128K, 1M (binary)")
    option("--batch", type=count, default=1, metavar="N", help="sequences per optimizer step (default: 1)")
    option = parser.add_argument_group("how").add_argument
    trained = "train adapters of this rank on all products in layers, by PEFT"
    option("--lora", type=count, nargs="?", const=RANK, metavar="R", help=f"{trained}, on frozen bf16 weights (default: {RANK})")
    option("--qlora", type=count, nargs="?", const=RANK, metavar="R", help=f"{trained}, on weights in 4 bits (default: {RANK})")
    option("--method", choices=METHODS, default="memo", help="default: memo, this project; the others: training without")
    option("--zero", type=int, choices=range(4), metavar="0-3", help="ZeRO stage (default: 3; with --tp or --cp: 1; adapters: 0)")
    states = "model states on the host, as DeepSpeed's offload_optimizer, and with all its offload_param (default: none)"
    option("--offload", choices=OFFLOADS, default="none", help=states)
    option(
        "--sp", type=count, metavar="N", help="ranks to a sequence: memo Ulysses × ring, others Ulysses (default: the fastest)"
    )
    option(
        "--ulysses", type=count, metavar="N", help="of --sp, the ranks that trade heads, as memo.ulysses_size (default: chosen)"
    )
    option("--tp", type=count, metavar="N", help="tensor parallelism (--cp: the fastest that fits)")
    option("--cp", type=count, metavar="N", help="context parallelism (ring attention)")
    option("--alpha", type=_alpha, metavar="X", help="0 to 1 (default: solved)")
    tile = "of a tile, as memo.tile_tokens; 0: layers run whole (default: 4096 where tiles are needed)"
    option("--tile-tokens", type=_tile_tokens, metavar="N", help=tile)
    option("--plan", action=argparse.BooleanOptionalAction, help="a memory plan (default: memo has one)")
    device = "of a GPU, without its context: states and activations (default: all)"
    option("--device-memory-gib", type=gib, metavar="X", help=device)
    host = "of a node, for activations and --offload (default: from --hardware)"
    option("--host-memory-gib", type=gib, metavar="X", help=host)
    option("--nvme-gib", type=gib, metavar="X", help="of a node's drives, behind its host memory (default: from --hardware)")
    rates = "of a node's drives: written and read (default: from --hardware)"
    option("--nvme-gb-per-s", type=_rates, metavar="X|W,R", help=rates)
    option("--nvme-tb-per-day", type=_tb, metavar="X", help="that may be written to a node's drives (default: no limit)")
    fused = "norms, rotary embedding, activations are one kernel each, as Liger's"
    option("--fused-kernels", action="store_true", help=fused)
    kernel = "attention's kernel, as memo.attention, with its package installed (default: PyTorch's choice, without 3 and 4)"
    option("--attention", choices=hardware.ATTENTION, help=kernel)
    option("--profile", metavar="FILE", help="link speeds and layer times of a real run, by `ds-memo profile`")
    option = parser.add_argument_group("other questions, in place of one fixed length").add_argument
    option("--max-length", action="store_true", help="the longest sequence that fits")
    option("--min-gpus", action="store_true", help="the fewest GPUs on which the length fits")
    option("--compare", action="store_true", help="all methods side by side")
    lengths = "lengths: doubled from A to B, or a list; with --compare, for all methods"
    option("--sweep", type=_lengths, metavar="A:B|A,B,…", help=lengths)
    option = parser.add_argument_group("output").add_argument
    option("--json", action="store_true", help="machine-readable, with everything")
    option("-o", "--output", metavar="FILE", help="of a sweep or comparison: .csv, or a plot as .png or .svg")
    streams = "the three streams of one sequence: .html, or .json for chrome://tracing and Perfetto"
    option("--timeline", metavar="FILE", help=streams)


def run(args: argparse.Namespace) -> int:
    _refuse_contradictions(args)
    machine = _machine(args)  # names of files and machines are wrong more often than imports are quick
    from ds_memo.estimate.estimate import estimate, fewest_gpus, longest

    question = _question(args, machine)
    _say("running the model's layers without memory, by Transformers' code: some seconds")
    if args.sweep is not None or args.compare:
        return _table(args, question)
    beyond = None
    if args.max_length:
        answer, beyond = longest(question, _tried)
    elif args.min_gpus:
        answer, beyond = fewest_gpus(question, _tried)
    else:
        answer = estimate(question)
    shown = answer or beyond
    if shown is None:
        raise EstimateError(f"{question.model.name} cannot be split over any number of GPUs as asked")
    if args.timeline:
        write_output(args.timeline, _timeline_as(args.timeline, shown))
    if args.json:
        data = shown.as_json()
        if beyond is not None and beyond is not shown:
            data["beyond"] = {key: beyond.as_json()[key] for key in ("status", "binding", "seq_length", "gpus")}
        print(json.dumps(data, indent=1, allow_nan=False))
    else:
        _print(shown)
        if beyond is not None and beyond is not shown:
            where = _gpus(beyond.question) if args.min_gpus else f"{short(beyond.question.seq_length)} tokens"
            print(f"  with {where}: {beyond.status}, {beyond.binding.partition(' What helps:')[0]}")
        if args.timeline:
            print(f"written to {quoted(args.timeline, 400)}")
    return 0


_CONTRADICTIONS = (
    ("--max-length", "--seq-length --min-gpus --sweep --compare", "it chooses the length of one answer"),
    ("--min-gpus", "--gpus --sweep --compare", "it chooses the GPUs of one answer"),
    ("--sweep", "--seq-length --timeline", "it chooses lengths"),
    ("--profile", "--attention", "its times are those of the kernel that ran"),
    ("--lora", "--qlora --profile", "its layers are measured on frozen bf16 weights, without a GPU"),
    ("--qlora", "--profile", "its layers are measured on weights in 4 bits, without a GPU"),
    ("--compare", "--alpha --plan --tile-tokens --timeline --ulysses", "it shows each method with its own alpha, plan and tiles"),
)
"""An option, others that it does not go with, and why."""


def _refuse_contradictions(args: argparse.Namespace) -> None:
    said = {name for name, value in vars(args).items() if value is not None and (value is not False or name == "plan")}
    given = {f"--{name.replace('_', '-')}" for name in said}
    for one, others, why in _CONTRADICTIONS:
        if one in given and (wrong := given & set(others.split())):
            raise EstimateError(f"{one} does not go with {min(wrong)}: {why}")
    if not given & {"--seq-length", "--max-length", "--sweep"}:
        raise EstimateError("--seq-length is missing (or --max-length, or --sweep)")
    if not given & {"--gpus", "--min-gpus"}:
        raise EstimateError("--gpus is missing (or --min-gpus)")
    if args.output and not given & {"--sweep", "--compare"}:
        raise EstimateError("-o writes a table or plot: give --sweep or --compare too")
    if args.output and not args.output.endswith((".csv", ".png", ".svg")):
        raise EstimateError(f"-o {quoted(args.output)}: expected a name that ends with .csv, .png or .svg")
    if args.timeline and not args.timeline.endswith((".json", ".html")):
        raise EstimateError(f"--timeline {quoted(args.timeline)}: expected a name that ends with .json or .html")


_AS_ASKED = ("batch", "method", "tp", "cp", "sp", "ulysses", "zero", "offload", "alpha", "tile_tokens", "plan")
"""Options that are the question's fields of these names."""


def _machine(args: argparse.Namespace) -> Hardware:
    hardware.model_file(args.model)
    given = {"peak": (args.peak_tflops, 1e12), "device_bandwidth": (args.device_gb_per_s, 1e9)}
    given |= {"device_memory": (args.device_memory_gib, GIB), **dict.fromkeys(("d2h", "h2d"), (args.link_gb_per_s, 1e9))}
    given |= {} if args.device_memory_gib is None else {"device_reserve": (0.0, 1)}  # what is given is usable
    machine = hardware.load(args.hardware, {name: x * unit for name, (x, unit) in given.items() if x is not None})
    machine = machine.attending_with(args.attention)
    return _with_drives(machine, args)


def _say(text: str) -> None:
    print(f"ds-memo estimate: {text}", file=sys.stderr, flush=True)


def _tried(answer: Estimate) -> None:
    """Show the progress of a search."""
    _say(f"{short(answer.question.seq_length)} tokens on {_gpus(answer.question)}: {_verdict(answer)}")


def _gpus(question: Question) -> str:
    return f"{question.gpus} GPU{'s' if question.gpus > 1 else ''}"


def _question(args: argparse.Namespace, machine: Hardware) -> Question:
    from ds_memo.estimate import model
    from ds_memo.estimate.measured import with_profile

    question = Question(
        model=model.load(args.model, args.fused_kernels, args.lora or args.qlora, args.qlora is not None),
        hardware=machine,
        gpus=args.gpus or 1,
        seq_length=args.seq_length or 1024,
        host_memory=None if args.host_memory_gib is None else args.host_memory_gib * GIB,
        **{name: getattr(args, name) for name in _AS_ASKED},
    )
    return with_profile(question, args.profile) if args.profile else question


def _with_drives(machine: Hardware, args: argparse.Namespace) -> Hardware:
    if args.nvme_gib is not None:
        machine = replace(machine, nvme_memory=args.nvme_gib * GIB)
    if args.nvme_gb_per_s is not None:
        write, read = args.nvme_gb_per_s
        machine = replace(machine, nvme_write=write * 1e9, nvme_read=read * 1e9)
    if args.nvme_tb_per_day is not None:
        machine = replace(machine, nvme_daily=args.nvme_tb_per_day * 1e12)
    asked = (args.nvme_gib, args.nvme_gb_per_s, args.nvme_tb_per_day) != (None, None, None)
    if asked and not (machine.nvme_memory and machine.nvme_write):
        missing = "--nvme-gb-per-s" if machine.nvme_memory else "--nvme-gib"
        raise EstimateError(f"{missing} is missing: {machine.name} has no drives of its own")
    if asked and args.method != "memo" and not args.compare:
        raise EstimateError(f"--nvme-gib with --method {args.method}: only memo goes on to files")
    return machine


# ---- one answer


def _on_device(answer: Estimate) -> int | None:
    """Return the number of layers on the device."""
    if answer.resident_layers is None:
        return None
    return answer.resident_layers + answer.placed["without_gemms"] + answer.placed["without_recompute"]


def _print(answer: Estimate) -> None:
    q = answer.question
    adapters = q.model.adapters
    how = f"{q.method}, {adapters}" if adapters else q.method
    title = f"{q.model.name}, {short(q.seq_length)} tokens on {q.gpus} × {q.hardware.name}, {how}"
    print(f"{title}{'' if q.planned else ' without a plan'}: {_verdict(answer)}")
    print(f"  bound by   {answer.binding}")
    print(f"  model      {q.model.parameters / 1e9:.4g} B parameters, {q.model.layers} layers, hidden size {q.model.hidden:,}")
    if adapters:
        frozen = "4 bits, head and embeddings in bf16" if adapters.quantized else "bf16"
        trained = f"{adapters.parameters / 1e6:.4g} M parameters trained; frozen ones take {adapters.frozen_bytes / GIB:.4g} GiB"
        print(f"  adapters   {trained}, in {frozen}")
    print(f"  layout     {answer.layout}; {answer.sequences} sequence{'s' if answer.sequences > 1 else ''} a step")
    if answer.step_s is not None:
        print(f"  step       {answer.step_s:,.2f} s: {_shares(answer.seconds, answer.step_s)}")
        print(f"  speed      MFU {answer.mfu:.1%}, {answer.tgs:,.0f} tokens per GPU and second")
    for text in _attention(answer):
        print(f"  attention  {text}")
    if answer.alpha is not None and answer.status == OK:
        others = {"without_gemms": "without GEMMs", "without_recompute": "without recompute"}
        others["attention_recomputed"] = "with attention recomputed"
        more = "".join(f", {answer.placed[kind]} {words}" for kind, words in others.items() if answer.placed[kind])
        print(f"  placement  alpha {answer.alpha:.4g}, {answer.resident_layers} of {q.model.layers} layers resident{more}")
    if answer.tiles is not None:
        groups = answer.tiles.head_groups
        of_heads = f"; attention's backward in {groups} groups of heads" if groups > 1 else ""
        print(f"  tiles      at most {answer.tiles.tokens:,} tokens{of_heads}")
    if answer.device_bytes:
        print(f"  device     {answer.device_total / GIB:.1f} of {q.hardware.device_memory / GIB:.1f} GiB")
    for name, nbytes in answer.device_bytes.items():
        print(f"             {nbytes / GIB:8.1f} {name}")
    if answer.host_bytes:
        print(f"  host       {answer.host_bytes / GIB:,.0f} of {q.host_bytes / GIB:,.0f} GiB of a node")
    if q.hardware.nvme_memory and answer.status == OK:
        stall = answer.seconds.get("nvme stall", 0.0)
        waits = f"; compute waits {stall:,.2f} s for them" if stall else ""
        print(f"  nvme       {answer.nvme_bytes / GIB:,.0f} of {q.hardware.nvme_memory / GIB:,.0f} GiB of a node{waits}")
        print(f"             {answer.written_a_day / 1e12:8.1f} TB written a day")
    if answer.host_state_bytes:
        print(f"             {answer.host_state_bytes / GIB:8.1f} model states")
        print(f"             {answer.host_activation_bytes / GIB:8.1f} activations")
    for note in answer.notes:
        print(f"  note       {quoted(note, 400)}")


def _attention(answer: Estimate) -> list[str]:
    """Return the kernels of attention, with their rates and why they run."""
    return [
        f"{NAMES.get(kernel.name, kernel.name)} at {rates.forward / 1e12:,.0f} and {rates.backward / 1e12:,.0f} TFLOP/s, forward "
        f"and backward: {kernel.reason}"
        for kernel in answer.attention
        for rates in [answer.question.hardware.attention_rates(kernel.name)]
    ]


def _verdict(answer: Estimate) -> str:
    return {"ok": "fits", "oom": "out of device memory", "oohm": "out of host memory"}[answer.status]


def _shares(seconds: dict[str, float], total: float) -> str:
    return ", ".join(f"{name} {100 * part / total:.1f} %" for name, part in seconds.items() if part > 0.0005 * total)


# ---- tables


def _table(args: argparse.Namespace, question: Question) -> int:
    from ds_memo.estimate.estimate import compare, sweep

    lengths = args.sweep if args.sweep is not None else [question.seq_length]
    found = (compare if args.compare else sweep)(question, lengths)
    rows = [answer.as_json() for answer in found]
    if args.output:
        write_output(args.output, _table_as(args.output, found, rows))
    if args.json:
        print(json.dumps(rows, indent=1, allow_nan=False))
        return 0
    print(f"{question.model.name} on {question.gpus} × {question.hardware.name}")
    cells = [_cells(answer) for answer in found]
    if args.compare:
        kernels = "; ".join(dict.fromkeys(text for answer in found for text in _attention(answer))) or "by the profile"
        print(f"attention: {kernels}", "no memory lost between blocks (a plan, expandable segments)", sep="\n")
        cells = [row | {"assumed": METHODS[answer.question.method]} for row, answer in zip(cells, found, strict=True)]
    columns = [[name, *(row[name] for row in cells)] for name in cells[0]]
    padded = [[cell.ljust(max(map(len, column))) for cell in column] for column in columns if any(column[1:])]
    for row in zip(*padded, strict=True):
        print("  " + "  ".join(row).rstrip())
    if args.output:
        print(f"written to {quoted(args.output, 400)}")
    return 0


def _cells(answer: Estimate) -> dict[str, str]:
    """Return an answer's texts by the heads of their columns; a column without any is not shown."""

    def cell(value: float | None, form: str) -> str:
        return "" if value is None else format(value, form)

    has_drives = bool(answer.question.hardware.nvme_memory)
    return {
        "method": answer.question.method + ("" if answer.question.planned else " (no plan)"),
        "tokens": short(answer.question.seq_length),
        "status": answer.status,
        "MFU": cell(answer.mfu, ".1%"),
        "TGS": cell(answer.tgs, ",.0f"),
        "step s": cell(answer.step_s, ",.2f"),
        "alpha": cell(answer.alpha, ".4g"),
        "on device": cell(_on_device(answer), "d"),
        "tiles": "" if answer.tiles is None else f"{short(answer.tiles.tokens)} / {answer.tiles.head_groups}",
        "device GiB": f"{answer.device_total / GIB:.1f}" if answer.device_bytes else "",
        "host GiB": f"{answer.host_bytes / GIB:,.0f}",
        "nvme GiB": f"{answer.nvme_bytes / GIB:,.0f}" if has_drives else "",
        "TB a day": f"{answer.written_a_day / 1e12:,.1f}" if has_drives else "",
        "layout": str(answer.layout),
    }


def _table_as(path: str, found: Sequence[Estimate], rows: Sequence[dict]) -> str | bytes:
    """Return a sweep or comparison in the format that the file's suffix names."""
    if path.endswith(".csv"):
        file = io.StringIO()
        columns = [name for name, value in rows[0].items() if not isinstance(value, (dict, list))]
        writer = csv.DictWriter(file, columns, extrasaction="ignore")
        writer.writeheader()
        writer.writerows(rows)
        return file.getvalue()
    from ds_memo.show.sweep import draw_sweep

    return draw_sweep(found, path[-3:])


def _timeline_as(path: str, answer: Estimate) -> str:
    """Return the streams of one sequence in the format that the file's suffix names."""
    if answer.run is None:
        raise EstimateError(f"--timeline: there is nothing to draw, the answer is {_verdict(answer)}: {answer.binding}")
    from ds_memo.show.timeline import as_html, chrome_trace

    spans = answer.timeline()
    if path.endswith(".json"):
        return json.dumps(chrome_trace(spans))
    q = answer.question
    title = f"{q.model.name}, {short(q.seq_length)} tokens on {q.gpus} × {q.hardware.name}, {q.method}: one sequence"
    return as_html(spans, title)


# ---- reading


def _lengths(text: str) -> list[int]:
    if not all(text.replace(":", ",").split(",")):
        raise argparse.ArgumentTypeError(f"{brief(text)}, expected A:B or A,B,…, e.g. 64K:1M")
    if ":" in text:
        ends = text.split(":")
        if len(ends) != 2:
            raise argparse.ArgumentTypeError(f"{brief(text)}, expected A:B")
        first, last = map(tokens, ends)
        if first > last:
            raise argparse.ArgumentTypeError(f"{brief(text)}, expected A:B with A not above B")
        lengths = []
        while first <= last:
            lengths.append(first)
            first *= 2
        return lengths
    return [tokens(part) for part in text.split(",")]


def _rates(text: str) -> tuple[float, float]:
    write, _, read = text.partition(",")
    expected = "GB/s above 0, at most 1e6, or two of them, written and read"
    return number(write, 1e-6, 1e6, expected), number(read if "," in text else write, 1e-6, 1e6, expected)


def _rate(text: str) -> float:
    return number(text, 1e-6, 1e6, "a number above 0, at most 1e6")


def _tb(text: str) -> float:
    return number(text, 1e-9, 1e9, "TB above 0, at most 1e9")


def _tile_tokens(text: str) -> int:
    return 0 if text == "0" else tokens(text)


def _alpha(text: str) -> float:
    return number(text, 0.0, 1.0, "0 to 1")
