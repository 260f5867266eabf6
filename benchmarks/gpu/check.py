"""Check ds_memo's results on this machine. Ends with 1 if anything is off.

    bash benchmarks/gpu.sh check [--device cuda|cpu] [--parts gradients,memory,…] [--out FILE]

On CUDA in bf16, on a CPU (to try the harness) in fp32:

    host           a virtual machine whose memory grows as it is used is made to grow, on CUDA
    gradients      every model of the test suite, alpha × resident layers, three steps each, against the model without memo; the
                   bar is the difference of stock from stock in five other orders of summation, for each model its own
    stream_order   copies delayed by a random time, freed memory overwritten: gradients bit-equal to the undelayed run
                   Both once more without cuDNN's attention, on CUDA, where it is what PyTorch picks on a new card
    memory         stored bytes per layer, live bytes after the forward, backward peak (benchmarks/memory.py)

and, where --parts names them, as their processes import everything or wait for a compiler:

    flex           gradients with FlexAttention, on CUDA: its compiled kernels are out of every dispatch mode's sight
    tiles          gradients of layers in tiles in half precision (benchmarks/check_tiles.py)
    tiles_float32  the same in float32, of models with experts, convolutions and scans
"""

from __future__ import annotations

import argparse
import functools
import itertools
import random
import sys
import traceback
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import ds_memo
from benchmarks import check_tiles, host, memory, results
from benchmarks.noise import distance, noise
from benchmarks.timing import clear
from benchmarks.workloads import AttentionOps, dtype_of
from ds_memo.swap.streams import H2D, CudaStreams, bytes_of
from ds_memo.units import GIB
from tests import models

HOST = 24 * GIB
"""Host memory that the check needs on a machine whose memory grows."""
ORDERS = 5
OTHER_ATTENTION = (SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH)
"""Without cuDNN: flash if it can, one of the others for masks."""
MODELS: dict[str, Callable[[torch.dtype], nn.Module]] = {
    **{name: functools.partial(models.build, name) for name in models.MODELS},
    "dropout": lambda dtype: models.build("gpt2", dtype, attn_pdrop=0.1, resid_pdrop=0.1, embd_pdrop=0.1),
}
"""The models of the tests, and one that draws random numbers inside and outside attention."""
APART = ("flex", "tiles", "tiles_float32")
"""Parts that run where --parts names them: their processes import everything, or wait for a compiler."""
ALPHAS, RESIDENTS = (0.0, 0.125, 0.5, 0.875, 1.0), (0, 2, models.LAYERS)


def gradients(
    device: torch.device, dtype: torch.dtype, alphas: tuple[float, ...] = ALPHAS, residents: tuple[int, ...] = RESIDENTS
) -> dict[str, Any]:
    """Compare gradients of every model, alpha and number of residents; loss and generator must be equal to the bit."""
    failures: list[str] = []
    rows = {}
    for name, make in MODELS.items():
        try:
            rows[name] = row = gradients_of(name, make(dtype).to(device), dtype, list(itertools.product(alphas, residents)))
        except Exception as error:  # a kernel that one model cannot have says nothing of the others
            traceback.print_exc()
            rows[name] = row = {"failures": [f"{name}: {type(error).__name__}: {str(error)[:500]}"]}
            clear(device)
        failures += row["failures"]
        wrong, bar = len(row["failures"]), f"bar {row['bar']:.1e}" if "bar" in row else "no bar"
        print(f"    {name:10s} {bar}, {wrong} failures; attention: {', '.join(row.get('kernels', ())) or '–'}", flush=True)
    return {"models": rows, "alphas": alphas, "residents": residents, "failures": failures}


def gradients_of(
    name: str, model: nn.Module, dtype: torch.dtype, settings: list[tuple[float, int]], size: tuple[int, int] = (2, 33)
) -> dict[str, Any]:
    """Compare one model's gradients with its own without memo, and name the attention kernels that ran.

    Args:
        settings: pairs of alpha and resident layers.
        size: sequences and tokens.
    """
    batch = models.Batch.random(*size, dtype).to(next(model.parameters()).device)
    zero = models.ZERO_GRADIENTS.get(name, ())
    with AttentionOps() as seen:
        want = models.step(model, batch)
    bar = noise(lambda: models.step(model, batch).grads, want.grads, dtype, ORDERS, zero)
    row: dict[str, Any] = {"bar": bar, "worst": 0.0, "kernels": sorted(set(seen.names)), "failures": []}
    for alpha, residents in settings:
        compare(row, f"{name} alpha {alpha} resident {residents}", model, batch, want, alpha, residents, bar, zero)
    return row


def compare(
    row: dict[str, Any],
    at: str,
    model: nn.Module,
    batch: models.Batch,
    want: models.Outcome,
    alpha: float,
    residents: int,
    bar: float,
    zero: tuple[str, ...] = (),
) -> int:
    """Take three steps under ds_memo, and note in the row how far their gradients are from stock's.

    Returns:
        Calls of attention that ran again.
    """
    handle = ds_memo.attach(model, {"alpha": alpha, "resident_layers": residents})
    try:
        for _ in range(3):
            got = models.step(model, batch)
            models.assert_same(got, want, bar, zero)
            row["worst"] = max(row["worst"], *distance(got.grads, want.grads, zero).values())
        return handle.report()["attention_recomputed"]
    except models.Different as different:
        row["failures"].append(f"{at}: {different}")
    except Exception as error:
        raise RuntimeError(f"{at}: {type(error).__name__}: {error}") from error
    finally:
        handle.detach()
    return 0


class DelayedCudaStreams(CudaStreams):
    """Every copy waits a random time on its stream first; fresh reload buffers hold NaN until the copy has arrived."""

    def __init__(self, device: torch.device, seed: int) -> None:
        super().__init__(device)
        self._random = random.Random(seed)

    def copy(self, stream: str, dst: torch.Tensor, src: torch.Tensor, nbytes: int, dst_at: int = 0, src_at: int = 0) -> None:
        with torch.cuda.stream(self._copy_streams[stream]):
            torch.cuda._sleep(self._random.choice((0, 100_000, 2_000_000)))
            if stream == H2D:
                bytes_of(dst, dst_at, nbytes).fill_(0xFF)
        super().copy(stream, dst, src, nbytes, dst_at, src_at)


def short_sequences(device: torch.device, dtype: torch.dtype) -> models.Batch:
    """Return the batch of the stream order: on CUDA many sequences, as addresses are planned for requests of 1 MiB and more, and
    short ones, so that backwards repeat to the bit."""
    return models.Batch.random(512 if device.type == "cuda" else 2, 64, dtype).to(device)


def stream_order(device: torch.device, dtype: torch.dtype, schedules: int) -> dict[str, Any]:
    """Train with random alpha, residents and delays; compute overwrites freed memory at once."""
    model = models.build("llama", dtype).to(device)
    batch = short_sequences(device, dtype)
    failures, poisoned, planned = [], 0, 0
    for seed in range(schedules):
        draw = random.Random(seed)
        config = {"alpha": draw.choice(ALPHAS), "resident_layers": draw.randrange(models.LAYERS + 1)}
        handle = ds_memo.attach(model, config)
        try:
            want, again = [models.step(model, batch) for _ in range(3)][1:]  # the first one analyses; now addresses are planned
            if unlike := different(again, want):
                failures.append(f"seed {seed} {config}: undelayed runs differ by themselves: {unlike}")
            if device.type == "cuda":
                handle._session.engine.streams.close()
                handle._session.engine.streams = DelayedCudaStreams(device, seed)
            let_go = handle._session.engine._let_go

            def poison_and_let_go(frame: Any, let_go: Callable = let_go) -> None:
                nonlocal poisoned
                kept = list(frame.device.values()) if frame is not None and frame.state == "swapping" else []
                let_go(frame)
                while kept:
                    tensor = kept.pop()
                    users = torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)  # `tensor`, and its Python storage
                    if users == 2 and tensor.is_floating_point():
                        tensor.fill_(float("nan"))  # on compute, as a later op that was handed this memory would
                        poisoned += 1

            handle._session.engine._let_go = poison_and_let_go
            for _ in range(2):
                got = models.step(model, batch)
                if unlike := different(got, want):
                    failures.append(f"seed {seed} {config}: {unlike}")
            planned += handle.report()["plan"]["hits"]
        finally:
            handle.detach()
    if not poisoned or not planned:
        failures.append(
            f"stream order: {poisoned} tensors were written over, {planned} requests planned; 0 of them tests nothing"
        )
    print(f"    {schedules} schedules, {poisoned} tensors written over, {planned} requests planned, {len(failures)} failures")
    return {"schedules": schedules, "poisoned": poisoned, "planned": planned, "failures": failures}


def different(got: models.Outcome, want: models.Outcome) -> list[str]:
    """Return the names of the first few values that are not equal to the bit."""
    names = [name for name in want.grads if not _bit_equal(got.grads[name], want.grads[name])]
    return ([] if torch.equal(got.loss, want.loss) else ["loss"]) + names[:3]


def _bit_equal(a: torch.Tensor | None, b: torch.Tensor | None) -> bool:
    return a is b if a is None or b is None else torch.equal(a, b)


def stored_and_live(device: torch.device, dtype: torch.dtype, **size: int) -> dict[str, Any]:
    rows = memory.measure(device, dtype, **size)
    return {"rows": [asdict(row) for row in rows], "failures": [miss for row in rows for miss in row.misses()]}


def flex(device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
    """Compare gradients with the model without memo, within half precision; the loss to the bit; attention runs once."""
    model = models.build("llama", dtype, attn_implementation="flex_attention", use_cache=False).to(device)
    batch = models.Batch.random(2, 256, dtype).to(device)
    want = models.step(model, batch)
    row: dict[str, Any] = {"worst": 0.0, "failures": []}
    for alpha, residents in itertools.product((0.0, 0.5, 1.0), (0, 2)):
        again = compare(row, f"flex, alpha {alpha} resident {residents}", model, batch, want, alpha, residents, models.BF16)
        if again:
            row["failures"].append(f"flex, alpha {alpha} resident {residents}: attention ran again {again} times")
    print(f"    worst gradient {row['worst']:.1e} off, bar {models.BF16:.0e}, {len(row['failures'])} failures")
    return row


def parts(device: torch.device) -> dict[str, Callable[[], Any]]:
    """Return the parts of the check, in their order."""
    cuda = device.type == "cuda"
    dtype = dtype_of(device)
    # A CPU only tries the harness: the suite compares more there.
    settings: dict[str, Any] = {} if cuda else {"alphas": (0.5,), "residents": (2,)}
    size = {} if cuda else {"layers": 4, "length": 128}

    def without_cudnn(part: Callable[..., Any], **less: Any) -> Any:
        with sdpa_kernel(list(OTHER_ATTENTION)):
            return part(device, dtype, **less)

    found: dict[str, Callable[[], Any]] = {"host": lambda: {"bytes": host.grow(HOST)}} if cuda else {}
    found |= {
        "gradients": lambda: gradients(device, dtype, **settings),
        "stream_order": lambda: stream_order(device, dtype, 30 if cuda else 5),
    }
    if cuda:
        found["gradients_without_cudnn"] = lambda: without_cudnn(gradients, alphas=(0.0, 0.5, 1.0), residents=(0, 2))
        found["stream_order_without_cudnn"] = lambda: without_cudnn(stream_order, schedules=10)
    return found | {
        "memory": lambda: stored_and_live(device, dtype, **size),
        "flex": lambda: flex(device, dtype) if cuda else {"skipped": "PyTorch's has no backward on a CPU"},
        "tiles": lambda: check_tiles.measure(device, dtype),
        "tiles_float32": lambda: check_tiles.measure(device, torch.float32, check_tiles.FLOAT32),
    }


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser("gpu.sh check", description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--parts", type=lambda text: text.split(","), metavar="A,B", help=f"default: all but {', '.join(APART)}")
    parser.add_argument("--out", help="file or folder of the result; absent: $OUT, else benchmarks/results")
    options = parser.parse_args(arguments)
    device = results.device_or_exit(options.device, "check")
    table = parts(device)
    named = options.parts or [name for name in table if name not in APART]
    if unknown := set(named) - table.keys():
        parser.error(f"--parts: got {', '.join(sorted(unknown))}; allowed: {', '.join(table)}")
    run = results.Run("check", device, options.out, vars(options))

    for name in (name for name in table if name in named):
        results.say(f"== {name}")
        found = run.attempt(name, table[name])
        run.failures += (found or {}).get("failures", ())
        run.save(**{name: found})
    return run.finish()


if __name__ == "__main__":
    sys.exit(main())
