"""A training script's first steps as one of many GPUs, on a machine without one: requests to CUDA and time of each step.

    export DS_MEMO_CUDA_TORCH=/path/to/python
    python -m benchmarks.rehearsal --ranks 8 --device-gib 80 launch/train.py --deepspeed_config ds_configs/zero3_bf16_memo.json \\
        --model ds_configs/models/llama3-8b.json --seq-length 64K --steps 8

The script runs unchanged, on the emulated device (emulator.py) and as one of ranks that all do the same (emulated_ranks.py):
ZeRO, FSDP2, Ulysses, buckets and gathers are DeepSpeed's or PyTorch's, of full size, and no number is computed. So losses mean
nothing, nor does a "speed" that the script prints by the host's clock. Times printed here come from a table, never from a GPU.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import runpy
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from benchmarks.emulated_process import run_emulated, without_values
from benchmarks.emulated_ranks import NAME, among
from benchmarks.emulated_steps import HEADER, Step, line
from benchmarks.emulated_time import Clock, keeping_time
from ds_memo.deepspeed import sequence
from ds_memo.estimate import hardware
from ds_memo.runtime import attach
from ds_memo.runtime.handle import MemoHandle


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser("python -m benchmarks.rehearsal", description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=8, metavar="N", help="default: 8; a node has as many as the hardware says")
    parser.add_argument("--rank", type=int, default=0, metavar="N", help="which of them this is; default: 0")
    parser.add_argument("--device-gib", type=float, default=139.8, help="of each GPU; default: 139.8")
    parser.add_argument("--host-gib", type=float, default=1843.0, help="free on the node; default: 1843")
    parser.add_argument("--hardware", default="h200", help="whose rates: a name or file of ds-memo estimate; default: h200")
    parser.add_argument("--flash-attn-3", action="store_true", help="as if FlashAttention-3's package were installed")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write what each step took, and the kernels of attention")
    parser.add_argument("--emulated", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("script", metavar="SCRIPT ARGS", nargs=argparse.REMAINDER)
    options = parser.parse_args(arguments)
    if not options.script:
        parser.error("no script")
    if not options.emulated:
        asked = ["--emulated", *(sys.argv[1:] if arguments is None else arguments)]
        return run_emulated("benchmarks.rehearsal", asked, options.device_gib)
    os.environ |= {"RANK": str(options.rank), "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    machine = hardware.load(options.hardware)
    of_node = min(options.ranks, int(machine.gpus_per_node))
    os.environ |= {"WORLD_SIZE": str(options.ranks), "LOCAL_WORLD_SIZE": str(of_node)}
    without_values(options.host_gib, options.flash_attn_3)
    rows: list[dict[str, Any]] = []
    with keeping_time(machine) as clock:
        try:
            rehearse(clock, options.ranks, options.rank, rows, *options.script)
        finally:
            attention = [[*what, calls] for what, calls in sorted(clock.attention.items())]
            print("attention:", *(f"{calls} calls of {op} ({kernel})" for kernel, op, calls in attention), file=sys.stderr)
            if options.json:
                options.json.write_text(json.dumps({"steps": rows, "attention": attention}))
    return 0


def rehearse(clock: Clock, ranks: int, rank: int, rows: list[dict[str, Any]], script: str, *arguments: str) -> None:
    """Run the script, and print a line for each optimizer step but the first, in which layers are measured.

    Args:
        rows: a row for each of these steps is added.
    """
    import deepspeed
    from deepspeed.runtime.zero import partitioned_param_coordinator

    if rank:  # a broadcast from rank 0 on the device brings nothing
        partitioned_param_coordinator.assert_ints_same_as_other_ranks = lambda ints: None
    among(ranks, clock, rank)
    sequence.split = _split
    sequence.refuse_inexact = lambda model, forward: None  # it compares values, and there are none
    running: dict[Any, Step] = {}
    said: set[str] = set()
    init, take_step, in_engine = deepspeed.init_distributed, deepspeed.DeepSpeedEngine.step, []

    def ended(of: Any, handle: Any) -> None:
        if of in running:
            rows.append(running[of].row(len(rows) + 2, "no memo"))
            told = [word for word in (*rows[-1]["changes"], *rows[-1]["warnings"]) if word not in said]
            print(line(rows[-1]), *told, sep="\n     ", file=sys.stderr)
            said.update(told)
        else:
            print("\n" + HEADER, file=sys.stderr)
        running[of] = Step(clock, handle)

    def step(engine: Any, *args: Any, **kwargs: Any) -> Any:
        in_engine.append(engine)
        result = take_step(engine, *args, **kwargs)
        in_engine.pop()
        if engine.is_gradient_accumulation_boundary():
            ended(engine, getattr(engine, "memo", None))
        return result

    def plain_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if not in_engine:
            session = next(iter(attach.attached()), None)
            ended(optimizer, None if session is None else MemoHandle(session))

    deepspeed.init_distributed = lambda *args, **kwargs: init(dist_backend=NAME)
    torch.distributed.init_process_group = lambda *args, **kwargs: None  # it is there
    deepspeed.DeepSpeedEngine.step = step
    register_optimizer_step_post_hook(plain_step)
    sys.argv = [script, *arguments]
    sys.path.insert(0, str(Path(script).resolve().parent))
    runpy.run_path(script, run_name="__main__")


def _split(batches: Iterable[dict[str, Any]], device: Any) -> Iterator[dict[str, Any]]:
    """ds_memo.deepspeed.sequence.split without an exchange of lengths: all ranks have this rank's."""
    from deepspeed.runtime.sequence_parallel import parallel_state_sp

    ranks, rank = parallel_state_sp.get_sequence_parallel_world_size(), parallel_state_sp.get_sequence_parallel_rank()
    for batch in batches:
        part = {name: x.chunk(ranks, 1)[rank].to(device) if torch.is_tensor(x) else x for name, x in batch.items()}
        yield from itertools.repeat(part, ranks)


if __name__ == "__main__":
    sys.exit(main())
