"""Prints the attention ops that attention by bands calls on CUDA, where torch accepts them. Values may be anything."""

from __future__ import annotations

import json
from collections import Counter
from types import SimpleNamespace
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ds_memo.sequence import kernels
from ds_memo.sequence.masks import Mask, plan
from ds_memo.sequence.parts import SequenceParts

PACKED = [[0, 100, 101, 300]]
CASES: dict[str, dict[str, Any]] = {
    "causal": {},
    "rows": {"rows": 3},
    "packed": {"documents": PACKED},
    "packed rows": {"rows": 2, "documents": [*PACKED, [0]]},
    "window": {"mask": Mask("window", 50)},
    "packed windows": {"rows": 2, "documents": PACKED, "mask": Mask("window", 50)},
    "both": {"mask": Mask("both"), "length": 70},
    "mla": {"sizes": (192, 128)},
    "odd": {"sizes": (20, 12)},
    "large": {"sizes": (320, 320)},
    "ring": {"ring": 2, "rows": 2},
    "packed ring": {"ring": 2, "rows": 2, "documents": [*PACKED, [0, 7]]},
    "softcap": {"softcap": 2.0},
}
ALWAYS = {"length": 400, "rows": 1, "documents": [[0]], "mask": Mask(), "heads": (4, 2), "sizes": (64, 64), "ring": 1}


class Ops(TorchDispatchMode):
    """Counts attention, and what makes the host wait."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        to_host = name == "_to_copy" and str((kwargs or {}).get("device", "cuda")) == "cpu"
        if "attention" in name or name in ("_local_scalar_dense", "nonzero") or to_host:
            self.counts[name] += 1
        return func(*args, **(kwargs or {}))


def called(dtype: torch.dtype, case: Any) -> dict[str, int]:
    """Call both directions for each ring step; return the ops."""
    rows, ring, (h, hk), (d, e) = case.rows, case.ring, case.heads, case.sizes
    ranks = SimpleNamespace(size=ring, ulysses=1, ring=ring, number=ring - 1, ring_number=ring - 1)
    parts = SequenceParts(ranks, case.length, case.documents)
    tokens, heads = parts.length // ring, ((h, d), (hk, d), (hk, e), (h, e))
    q, k, v, grad = (torch.empty(rows, tokens, n, size, dtype=dtype, device="cuda") for n, size in heads)
    how = 0.1, getattr(case, "softcap", 0.0)
    with Ops() as ops:
        for bands in plan(parts, case.mask).steps:
            out, lse = kernels.forward(q, k, v, bands, *how)
            assert (out.shape, out.dtype) == (grad.shape, dtype)
            assert (lse.shape, lse.dtype) == ((rows, h, tokens), torch.float32)
            grads = kernels.backward(grad, q, k, v, out, lse, bands, *how)
            assert [x.shape for x in grads] == [x.shape for x in (q, k, v)]
    return dict(ops.counts)


def main() -> None:
    for dtype in (torch.bfloat16, torch.float32):
        for name, case in CASES.items():
            print(json.dumps([str(dtype), name, called(dtype, SimpleNamespace(**ALWAYS | case))]), flush=True)


if __name__ == "__main__":
    main()
