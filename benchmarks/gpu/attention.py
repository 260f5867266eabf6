"""Attention kernels side by side: forward and backward TFLOP/s of causal attention at 7B width.

    python -m benchmarks.attention [--device cuda|cpu] [--lengths 16384 …] [--out DIR]

cuDNN and flash through F.scaled_dot_product_attention, flash-attn 2, 3 and 4 where they can be imported. And which kernel
runs where the configuration has no "attention": the best of those it can choose from, or that is a miss.
"""

from __future__ import annotations

import argparse
import importlib
import statistics
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks import results
from benchmarks.timing import seconds
from benchmarks.workloads import dtype_of, sdpa
from ds_memo.remat.op_policy import ATTENTION

HEADS, HEAD = 32, 128
ROUNDS = 4
CLOSE = 0.02
"""Two kernels whose times differ by less are equally good."""

Kernel = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def through_sdpa(backend: SDPBackend) -> Kernel:
    def kernel(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        with sdpa_kernel(backend):
            return sdpa(q, k, v, HEAD**-0.5)

    return kernel


def package(name: str) -> Kernel:
    """A flash-attn package's function, which takes (b, s, heads, d) and may return more than the output."""
    function = importlib.import_module(name).flash_attn_func

    def kernel(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        out = function(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), causal=True)
        return (out[0] if isinstance(out, tuple) else out).transpose(1, 2)

    return kernel


PACKAGES = {"flash_attn 2": "flash_attn", "flash_attn 3": "flash_attn_interface", "flash_attn 4": "flash_attn.cute"}


def kernels(device: torch.device) -> tuple[dict[str, Kernel], dict[str, str]]:
    """Return the kernels that can run, and by name why the others cannot."""
    names = {"cudnn": SDPBackend.CUDNN_ATTENTION, "flash": SDPBackend.FLASH_ATTENTION}
    if device.type != "cuda":
        names = {"flash": SDPBackend.FLASH_ATTENTION, "math": SDPBackend.MATH}
    found = {name: through_sdpa(backend) for name, backend in names.items()}
    out = {}
    for name, module in PACKAGES.items():
        try:
            found[name] = package(module)
        except Exception as error:  # a package built for another torch fails in its own ways
            out[name] = f"{type(error).__name__}: {str(error)[:120]}"
    return found, out


class Seen(TorchDispatchMode):
    """Names of the attention kernels that run."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        if func in ATTENTION:
            self.names.append(func.name())
        return func(*args, **(kwargs or {}))


def picked(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> str:
    """Return the kernel that PyTorch chooses by itself."""
    with Seen() as seen:
        sdpa(q, k, v, HEAD**-0.5)
    return short((seen.names or ["math"])[0])


def short(name: str) -> str:
    """Return the word for an attention op of PyTorch; another op's name as it is."""
    return next((word for word in ("cudnn", "flash", "efficient") if word in name), name)


def measure(device: torch.device, lengths: list[int], heads: int = HEADS) -> dict[str, Any]:
    dtype = dtype_of(device)
    able, out = kernels(device)
    points, claims, failures = [], [], []
    for length in lengths:
        q, k, v = (torch.randn(1, length, heads, HEAD, device=device, dtype=dtype).transpose(1, 2) for _ in range(3))
        for x in (q, k, v):
            x.requires_grad_()
        flops = 2.0 * heads * HEAD * length**2  # two products of half a square
        rows: dict[str, dict[str, Any]] = {name: {"forward_s": [], "backward_s": []} for name in able}
        for turn in range(ROUNDS + 1):
            for name, kernel in able.items():
                if "out" not in rows[name]:
                    _once(kernel, (q, k, v), rows[name], warm=turn == 0)
        for name, row in rows.items():
            if "out" not in row:
                row["forward_tflops"] = flops / statistics.median(row["forward_s"]) / 1e12
                row["backward_tflops"] = 2.5 * flops / statistics.median(row["backward_s"]) / 1e12
                row["both_s"] = statistics.median(row["forward_s"]) + statistics.median(row["backward_s"])
                results.say(
                    f"    attention {length:7d} {name:14s} forward {row['forward_tflops']:8.3g} TFLOP/s, "
                    f"backward {row['backward_tflops']:8.3g}"
                )
        try:
            mine = picked(q.detach().requires_grad_(), k, v)
        except Exception as error:
            mine = None
            failures.append(f"attention {length}: what PyTorch picks breaks: {type(error).__name__}: {str(error)[:200]}")
        point = {"length": length, "heads": heads, "head": HEAD, "kernels": rows, "picked": mine}
        ran = {name: row["both_s"] for name, row in rows.items() if "both_s" in row and name in ("cudnn", "flash")}
        if mine in ran:
            value = ran[mine] / min(ran.values())
            held = value <= 1 + CLOSE
            claims.append({"claim": f"{mine} is picked at {length}, time / best", "value": value, "bar": 1 + CLOSE, "held": held})
        points.append(point)
    return {"points": points, "not_importable": out, "claims": claims, "failures": failures}


def _once(kernel: Kernel, qkv: tuple[torch.Tensor, ...], row: dict[str, Any], warm: bool) -> None:
    made: list[torch.Tensor] = []
    try:
        forward = seconds(lambda: made.append(kernel(*qkv)), qkv[0].device)
        gradient = torch.ones_like(made[0])
        backward = seconds(lambda: torch.autograd.grad(made[0], qkv, gradient), qkv[0].device)
    except Exception as error:  # no such kernel for this device, dtype or version, and packages fail in their own ways
        row["out"] = f"{type(error).__name__}: {str(error)[:200]}"
        return
    if not warm:
        row["forward_s"].append(forward)
        row["backward_s"].append(backward)


def lengths_for(device: torch.device) -> list[int]:
    return [n * 1024 for n in (16, 32, 64, 128)] if device.type == "cuda" else [128, 256]


def heads_for(device: torch.device) -> int:
    return HEADS if device.type == "cuda" else 2


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--lengths", type=int, nargs="+")
    parser.add_argument("--out")
    options = parser.parse_args()
    device = results.device_or_exit(options.device, "attention")
    run = results.Run("attention", device, options.out, vars(options))
    found = measure(device, options.lengths or lengths_for(device), heads_for(device))
    run.failures += found.pop("failures")
    run.found |= found
    return run.finish()


if __name__ == "__main__":
    sys.exit(main())
