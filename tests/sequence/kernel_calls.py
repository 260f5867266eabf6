"""Calls attention by bands on CUDA, for a device whose kernels do nothing: which calls torch accepts. Prints a line for each."""

from __future__ import annotations

import json
from collections import Counter
from types import SimpleNamespace
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ds_memo.sequence import kernels
from ds_memo.sequence.masks import Mask, plan
from ds_memo.sequence.parts import Parts

CASES: dict[str, dict[str, Any]] = {
    "causal": {},
    "rows": {"rows": 3},
    "packed": {"documents": [[0, 100, 101, 300]]},
    "packed rows": {"rows": 2, "documents": [[0, 100, 101, 300], [0]]},
    "window": {"mask": Mask("window", 50)},
    "packed windows": {"rows": 2, "documents": [[0, 100, 101, 300]], "mask": Mask("window", 50)},
    "both": {"mask": Mask("both"), "length": 70},
    "shared": {"heads": (5, 2), "shared": (0, 0, 1, 1, 1)},
    "mla": {"sizes": (192, 128)},
    "odd": {"sizes": (20, 12)},
    "large": {"sizes": (320, 320)},
    "ring": {"ring": 2, "rows": 2},
    "packed ring": {"ring": 2, "rows": 2, "documents": [[0, 100, 101, 300], [0, 7]]},
}


class Attention(TorchDispatchMode):
    """Counts attention ops, and host syncs."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "attention" in str(func) or "_local_scalar" in str(func):
            self.counts[func.__name__] += 1
        return func(*args, **(kwargs or {}))


def called(
    dtype: torch.dtype, length: int = 400, rows: int = 1, documents: Any = ((0,),), mask: Mask = Mask(), heads: tuple[int, int] = (4, 2),
    sizes: tuple[int, int] = (64, 64), shared: Any = None, ring: int = 1, softcap: float = 0.0,
) -> dict[str, int]:  # fmt: skip
    """Call both directions for each step; return the ops."""
    parts = Parts(SimpleNamespace(size=ring, ulysses=1, ring=ring, number=ring - 1, ring_number=ring - 1), length, documents)
    tokens, (h, hk), (d, e) = parts.length // ring, heads, sizes
    shapes = ((h, d), (hk, d), (hk, e), (h, e))
    q, k, v, grad = (torch.empty(rows, tokens, n, size, dtype=dtype, device="cuda") for n, size in shapes)
    with Attention() as ops:
        for bands in plan(parts, mask).steps:
            out, lse = kernels.forward(q, k, v, bands, 0.1, softcap, shared)
            assert (
                out.shape == grad.shape and lse.shape == (rows, h, tokens) and lse.dtype == torch.float32 and out.dtype == dtype
            )
            grads = kernels.backward(grad, q, k, v, out, lse, bands, 0.1, softcap, shared)
            assert [x.shape for x in grads] == [x.shape for x in (q, k, v)]
    return dict(ops.counts)


def main() -> None:
    for dtype in (torch.bfloat16, torch.float32):
        for name, case in CASES.items():
            print(json.dumps([str(dtype), name, called(dtype, **case)]), flush=True)


if __name__ == "__main__":
    main()
