"""`ds-memo profile`: measure a model's layers and this machine's copies, as a run does at its first step.

ds-memo profile --model config.json --seq-length 128K -o profile.json
torchrun --nproc-per-node 8 -m ds_memo.cli profile …          # all ranks of the node copy at once
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ds_memo.cli.arguments import MOST_MESSAGE, count, gib, tokens
from ds_memo.errors import MemoError, brief, quoted
from ds_memo.files import MOST_CONFIG_BYTES, write_output
from ds_memo.profile.json_file import to_json
from ds_memo.profile.run_profile import LayerProfile, LayerSample, RunProfile
from ds_memo.units import short, size

if TYPE_CHECKING:
    import torch

    from ds_memo.profile.caught_call import CaughtCall

_DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
_BACKWARD = 2.5
"""FLOPs of attention's backward relative to its forward: it computes the scores again."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    option = parser.add_argument
    option("--model", required=True, metavar="CONFIG.json", help="a Hugging Face config, or a folder with one")
    lengths = "tokens of a sequence on one rank: 131072, 128K, 1M"
    option("--seq-length", required=True, type=tokens, metavar="S", help=lengths)
    option("--batch", type=count, default=1, metavar="N", help="sequences at a time (default: 1)")
    option("--dtype", choices=_DTYPES, default="bf16", help="of weights and activations (default: %(default)s)")
    method = "fit: two short lengths and a longer one that checks them (default); direct: the whole length"
    option("--method", choices=("fit", "direct"), default="fit", help=method)
    option("--device", choices=("cpu", "cuda"), help="default: cuda where there is one")
    option("--attn-implementation", default="sdpa", metavar="NAME", help="of Transformers (default: %(default)s)")
    option("--host-memory-gib", type=gib, metavar="X", help="of this node, for activations (default: what is free)")
    drive = "measure the drive of this directory, too, as memo.nvme.path; several times: blocks are striped over all"
    option("--nvme", action="append", metavar="PATH", help=drive)
    option("-o", "--output", metavar="FILE", help="write the profile here, as JSON")
    option("--json", action="store_true", help="print the profile as JSON in place of the summary")


def run(args: argparse.Namespace) -> int:
    _check_model(Path(args.model))
    if args.output:
        _check_output(Path(args.output))
    with _ranks(args.device) as (device, rank):
        say = _say if rank == 0 else lambda line: None
        profile = _measure(args, device, say)
        if rank > 0:
            return 0
        if args.output:
            write_output(args.output, to_json(profile) + "\n")
        print(to_json(profile) if args.json else summary(profile, Path(args.model), args.seq_length))
        if args.output and not args.json:
            print(f"written to {args.output}")
    return 0


def _measure(args: argparse.Namespace, device: torch.device, say: Callable[[str], None]) -> RunProfile:
    import torch

    from ds_memo.hf.meta_model import build
    from ds_memo.profile.layer_kinds import kinds_of
    from ds_memo.profile.run import SHORTEST, WIDTHS, Asked, lengths_of, take_profile
    from ds_memo.runtime.attach import attach_model

    say(f"building the layers of {args.model}")
    model = build(Path(args.model), getattr(torch, _DTYPES[args.dtype]), args.attn_implementation, device)
    section: dict[str, Any] = {"plan": {"enabled": False}}
    if args.host_memory_gib is not None:
        section["host_memory_gib"] = args.host_memory_gib
    memo = attach_model(model, section, device=device)
    try:
        width = model.config.get_text_config().hidden_size
        # A CPU is at full speed at once, and its attention takes minutes where a GPU's takes milliseconds.
        longest = max(SHORTEST, 1 << (WIDTHS * width - 1).bit_length()) if device.type == "cpu" else args.seq_length
        direct = args.method == "direct"
        lengths = lengths_of(args.method, args.seq_length if direct else min(args.seq_length, longest), width, can_shorten=True)
        kinds = kinds_of(memo.layers)
        calls = _calls(memo.remat, model, kinds, args.batch, lengths[-1], device)
        if len(lengths) > 1 and not all(call.can_shorten() for call in calls.values()):  # the length equals the batch
            calls = _calls(memo.remat, model, kinds, args.batch, lengths[-1] + 1, device)
        asked = Asked(
            kinds=kinds,
            calls=calls,
            method=args.method,
            lengths=dict.fromkeys(calls, lengths),
            full={kind: call.length for kind, call in calls.items()},
            device=device,
            run_length=args.seq_length,
            host_budget=memo.slab.budget.nbytes,
            warn=lambda message: say(f"warning: {message}"),
            progress=say,
        )
        drives = _drives(args.nvme, memo.slab.budget.nbytes, device, say) if args.nvme else None
        say(f"measuring {_plural(len(calls), 'kind')} of layer on {device} at {_list(lengths)} tokens")
        profile = take_profile(asked)
        profile.measured["drives"] = drives
        return profile
    finally:
        memo.detach()


def _drives(paths: list[str], host_budget: int, device: torch.device, say: Callable[[str], None]) -> dict[str, Any]:
    """Return the directories, and the bytes per second that this rank writes and reads while all ranks do."""
    from ds_memo.config import memo_config
    from ds_memo.distributed.agree import from_all_ranks, on_all_ranks
    from ds_memo.nvme.bandwidth import BLOCK, BLOCKS, measure_drives
    from ds_memo.nvme.open_files import open_files
    from ds_memo.swap.streams import streams_for

    say(f"measuring the drives of {', '.join(paths)}")
    config = memo_config({"nvme": {"path": paths}}).nvme
    assert config is not None
    with closing(streams_for(device)) as streams:
        room, warn = lambda nbytes: min(from_all_ranks(nbytes)), lambda line: say(f"warning: {line}")
        with closing(open_files(config, device, streams, room, warn)) as files:
            mine = on_all_ranks(lambda: measure_drives(files, min(host_budget, BLOCK * BLOCKS), device))
    written, read = (min(rates) for rates in zip(*from_all_ranks(mine), strict=True))
    return {"directories": paths, "write_bytes_per_s": written, "read_bytes_per_s": read}


def _calls(remat: Any, model: Any, kinds: list[int], batch: int, length: int, device: torch.device) -> dict[int, CaughtCall]:
    """Return the first call of each kind of layer for an input of this batch and length."""
    import torch

    from ds_memo.distributed.agree import on_all_ranks
    from ds_memo.profile.caught_call import layer_calls

    embeddings = model.get_input_embeddings().weight

    def caught() -> dict[int, CaughtCall]:
        hidden = torch.randn(batch, length, embeddings.shape[1], dtype=embeddings.dtype, device=device)
        given = {"inputs_embeds": hidden}
        return layer_calls(remat.instead, device, model, (), given, kinds, lambda calls: len(calls) > max(kinds))

    return on_all_ranks(caught)


@contextmanager
def _ranks(wanted: str | None) -> Iterator[tuple[torch.device, int]]:
    """Yield this rank's device and number; form the process group if a launcher started several ranks."""
    import torch
    import torch.distributed as dist

    has_cuda = torch.cuda.is_available()
    if wanted == "cuda" and not has_cuda:
        raise MemoError("--device cuda: PyTorch sees no CUDA device here; leave it out, or take cpu")
    kind = wanted or ("cuda" if has_cuda else "cpu")
    local, world = _environment("LOCAL_RANK", 0), _environment("WORLD_SIZE", 1)
    device = torch.device(kind, local) if kind == "cuda" else torch.device(kind)
    if kind == "cuda":
        if local >= torch.cuda.device_count():
            raise MemoError(f"{local + 1} ranks on this node, but {torch.cuda.device_count()} CUDA devices; start fewer")
        torch.cuda.set_device(device)
    if world == 1 or dist.is_initialized():
        yield device, dist.get_rank() if dist.is_initialized() else 0
        return
    try:
        dist.init_process_group("nccl" if kind == "cuda" else "gloo")
    except (RuntimeError, ValueError) as error:
        raise MemoError(
            f"the {world} ranks cannot find each other ({str(error).splitlines()[0]}); check MASTER_ADDR and MASTER_PORT"
        ) from None
    try:
        yield device, dist.get_rank()
    finally:
        dist.destroy_process_group()


def _environment(name: str, default: int) -> int:
    value = os.environ.get(name) or str(default)
    if not (value.isdecimal() and len(value) < 10):
        raise MemoError(f"the environment's {name} is {brief(value)}, expected a whole number, which a launcher sets")
    return int(value)


# ---- the summary


def summary(profile: RunProfile, model: Path, length: int) -> str:
    """Return the measurements as a page of text."""
    batch = profile.kinds[0].samples[-1].batch
    where = f"{profile.key['device']}, {_plural(profile.key['ranks'], 'rank')}"
    dtype = profile.key["kinds"][0]["dtype"].removeprefix("torch.")
    lines = [f"{quoted(model.stem)}, {short(length)} tokens × {batch}, {dtype} on {where}"]
    for number, kind in enumerate(profile.kinds):
        alike = profile.layers.count(number)
        lines.append(f"  {quoted(kind.name)}{f' and {alike - 1} more like it' if alike > 1 else ''}")
        lines += [f"    {line}" for line in _kind(kind, batch, length)]
    lines.append(
        f"  copies     {profile.d2h_bytes_per_s / 1e9:.3g} GB/s to the host, {profile.h2d_bytes_per_s / 1e9:.3g} GB/s back, "
        f"{_plural(profile.ranks_copying, 'rank')} of the node at once"
    )
    if (drives := profile.measured.get("drives")) is not None:
        lines.append(
            f"  drives     {drives['write_bytes_per_s'] / 1e9:.3g} GB/s written, "
            f"{drives['read_bytes_per_s'] / 1e9:.3g} GB/s read beside copies, {', '.join(map(quoted, drives['directories']))}"
        )
    host = profile.measured["host_memory"]
    lines.append(
        f"  host       {size(host['budget_of_rank'])} for the activations of this rank, of {size(host['available_to_kernel'])} "
        "that the kernel could give"
    )
    for group in host["cgroups"]:
        used = f"{size(group['used'])} of {size(group['limit'])} in use, {size(group['cache'])} of it page cache"
        lines.append(f"             cgroup {group['path']}: {used}")
    locked = "unlimited" if host["memlock_limit"] is None else size(host["memlock_limit"])
    lines.append(f"             locked memory (ulimit -l): {locked}")
    device = profile.measured["device_memory"]
    if device:
        lines.append(f"  device     {size(device['free'])} of {size(device['total'])} free with the layers loaded")
    lines.append(f"  measured in {profile.measured['seconds']:.1f} s")
    return "\n".join(lines)


def _kind(kind: LayerProfile, batch: int, length: int) -> list[str]:
    longest = kind.samples[-1]
    rows: list[tuple[str, ...]] = [("tokens", "forward", "backward", "replay", "")]
    for sample in kind.samples:
        note = f"check: {kind.off():.1%} off the lines" if sample is kind.check else ""
        rows.append((f"{sample.length:,}", *map(_time, (sample.forward_s, sample.backward_s, sample.replay_s)), note))
    at = kind.costs(batch, length)
    if length != longest.length:
        rows.append((f"{length:,}", *map(_time, (at.forward_s, at.backward_s, at.replay_s)), "by the lines"))
    wide = [max(len(row[column]) for row in rows) for column in range(4)]
    lines = ["  ".join(cell.rjust(width) for cell, width in zip(row, [*wide, 0], strict=True)).rstrip() for row in rows]
    always, split = at.whole_bytes, at.split_bytes
    here = batch * length
    return [
        *lines,
        _rates(longest),
        f"keeps a token's {always / here:,.0f} B always and {split / here:,.0f} B × alpha; autograd would save "
        f"{at.no_recompute_bytes / here:,.0f} B",
        f"needs {size(at.working.backward)} more of the device for {short(length)} tokens",
    ]


def _rates(sample: LayerSample) -> str:
    def rate(flops: float, seconds: float) -> str:
        unit, name = (1e12, "TFLOP/s") if flops / seconds >= 1e12 else (1e9, "GFLOP/s")
        return f"{flops / seconds / unit:.3g} {name}"

    said = []
    if sample.all_gemms_s:
        said.append(f"GEMMs {rate(sample.gemm_flops, sample.all_gemms_s)}")
    if not sample.attention_s:
        said.append("no attention kernel observed: attention, if it has any, is computed again in each replay")
    elif sample.attention_backward_s:
        back = rate(_BACKWARD * sample.attention_flops, sample.attention_backward_s)
        said.append(f"attention {rate(sample.attention_flops, sample.attention_s)} forward, {back} backward")
    return "; ".join(said)


def _time(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"


def _plural(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _list(lengths: tuple[int, ...]) -> str:
    words = [f"{length:,}" for length in lengths]
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"


# ---- reading and writing


def _say(line: str) -> None:
    print(f"ds-memo profile: {quoted(line, MOST_MESSAGE)}", file=sys.stderr, flush=True)


def _check_model(path: Path) -> None:
    """Refuse a config that is no regular file or too long: Transformers would read ``/dev/zero`` for ever."""
    config = path / "config.json" if path.is_dir() else path
    if config.exists() and not config.is_file():
        raise MemoError(f"model {quoted(str(path), 400)}: is no regular file, expected a Hugging Face config JSON")
    if config.exists() and config.stat().st_size > MOST_CONFIG_BYTES:
        raise MemoError(f"model {quoted(str(path), 400)}: its config has more than the allowed {MOST_CONFIG_BYTES:,} bytes")


def _check_output(path: Path) -> None:
    """Refuse an output that cannot be written, before anything is measured."""
    name = quoted(str(path), 400)
    if path.is_dir():
        raise MemoError(f"-o {name}: is a folder, expected a file")
    try:
        tempfile.TemporaryFile(dir=path.parent).close()
    except OSError as error:
        raise MemoError(f"-o {name}: its folder cannot be written to ({error.strerror}); choose another") from None
