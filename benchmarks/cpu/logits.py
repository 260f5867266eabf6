"""Time and memory of an output head with its loss, forward and backward: python -m benchmarks.logits

    whole        F.linear and F.cross_entropy
    lazy         ds_memo's lazy logits
    at forward   the way of Liger's fused linear cross entropy, in PyTorch's ops: each tile of logits gives its gradients at once
    torch        F.linear_cross_entropy (torch 2.13), chunked

They take turns. Printed are medians, and each over "at forward". On a CUDA device Liger's own kernel comes in addition.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from ds_memo.logits.head_bytes import tile_rows
from ds_memo.logits.lazy_head import LazyHead

Loss = Callable[[torch.Tensor, nn.Linear, torch.Tensor], torch.Tensor]


class AtForward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden_NH: torch.Tensor, weight_VH: torch.Tensor, labels_N: torch.Tensor, rows: int) -> torch.Tensor:
        d_hidden, d_weight = torch.empty_like(hidden_NH), torch.zeros_like(weight_VH, dtype=torch.float32)
        total = hidden_NH.new_zeros((), dtype=torch.float32)
        for start in range(0, len(labels_N), rows):
            span = slice(start, start + rows)
            logits = F.linear(hidden_NH[span], weight_VH).float()
            total += F.cross_entropy(logits, labels_N[span], reduction="sum")
            logits = torch.softmax(logits, -1)
            logits.scatter_add_(1, labels_N[span, None], torch.full_like(logits[:, :1], -1.0))
            d_logits = (logits / len(labels_N)).to(hidden_NH.dtype)
            d_hidden[span] = d_logits @ weight_VH
            d_weight += d_logits.T @ hidden_NH[span]
        ctx.save_for_backward(d_hidden, d_weight.to(weight_VH.dtype))
        return total / len(labels_N)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        d_hidden, d_weight = ctx.saved_tensors
        return d_hidden * gradient, d_weight * gradient, None, None


def losses(head: nn.Linear, rows: int) -> dict[str, Loss]:
    lazy = LazyHead(head, 1 << 62, print)
    lazy.rows = rows
    found: dict[str, Loss] = {
        "whole": lambda x, head, y: F.cross_entropy(head(x).float(), y),
        "lazy": lambda x, head, y: F.cross_entropy(lazy(head.forward, x).float(), y),
        "at forward": lambda x, head, y: AtForward.apply(x, head.weight, y, rows),
    }
    if hasattr(nn, "LinearCrossEntropyOptions"):
        options = nn.LinearCrossEntropyOptions()
        found["torch"] = lambda x, head, y: F.linear_cross_entropy(x, head.weight, y, options=options)
    if torch.cuda.is_available():
        from liger_kernel.transformers.functional import liger_fused_linear_cross_entropy

        found["liger"] = lambda x, head, y: liger_fused_linear_cross_entropy(x, head.weight, y)
    return found


def measure(tokens: int, vocabulary: int, hidden: int, dtype: torch.dtype, repeats: int) -> list[dict[str, Any]]:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(0)
    head = nn.Linear(hidden, vocabulary, bias=False, dtype=dtype, device=device)
    x = torch.randn(tokens, hidden, dtype=dtype, device=device, requires_grad=True)
    y = torch.randint(0, vocabulary, (tokens,), device=device)
    rows = min(tile_rows(vocabulary, 1 << 62), tokens // 4)
    ways = losses(head, rows)
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(repeats + 1):
        for name, loss in ways.items():
            head.weight.grad = x.grad = None
            began = time.perf_counter()
            loss(x, head, y).backward()
            if device.type == "cuda":
                torch.cuda.synchronize()
            seconds[name].append(time.perf_counter() - began)
    base = statistics.median(seconds["at forward"][1:])
    return [
        {"way": name, "median_s": (now := statistics.median(found[1:])), "over_at_forward": now / base, "seconds": found[1:]}
        for name, found in seconds.items()
    ]


def main() -> None:
    parser = argparse.ArgumentParser("python -m benchmarks.logits", description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--vocabulary", type=int, default=32768)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args()
    found = measure(args.tokens, args.vocabulary, args.hidden, getattr(torch, args.dtype), args.repeats)
    print(f"{args.tokens} tokens, vocabulary {args.vocabulary}, hidden {args.hidden}, {args.dtype}")
    for row in found:
        print(f"{row['way']:12} {row['median_s'] * 1e3:9.1f} ms   {row['over_at_forward']:.3f} of at forward")
    if args.json:
        args.json.write_text(json.dumps({"arguments": {**vars(args), "json": None}, "rows": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
