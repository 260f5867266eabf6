"""A count of the products that a step runs, to compare reported shares with."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

import ds_memo
from ds_memo.remat.op_policy import ATTENTION
from ds_memo.remat.recipe import Gemm, Recipe
from tests.models import HIDDEN, VOCAB
from tests.remat.situations import BATCH

PRODUCTS = {getattr(torch.ops.aten, name): name for name in ("mm", "addmm", "bmm", "baddbmm", "_scaled_mm")}
PRODUCTS[torch.ops.aten.addmm_] = "addmm"


class Flops(TorchDispatchMode):
    """Count attention calls, and the FLOPs of all products by torch's formulas. Modes inside this one supply the others."""

    def __init__(self) -> None:
        super().__init__()
        self.total = self.attention = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.attention += func in ATTENTION
        if name := PRODUCTS.get(getattr(func, "overloadpacket", None)):
            self.total += flop_registry[getattr(torch.ops.aten, name)](*args, **(kwargs or {}), out_val=out)
        return out


def compare_counts(model: nn.Module, config: dict) -> tuple[float, float, float]:
    """Run steps of a toy with memo and without, each analysed, then followed.

    Returns:
        The reported share of recomputed FLOPs; the FLOPs that memo's and stock's backward ran beyond two for each of the
        forward's, as shares of those of the layers.
    """
    head = 2 * BATCH.labels.numel() * HIDDEN * VOCAB
    beyond = []
    for section in (config, None):
        handle = ds_memo.attach(model, section) if section else None
        for _ in range(3):
            with Flops() as forward:
                loss = model(BATCH.embeds, BATCH.labels).loss
            with Flops() as backward:
                loss.backward()
        beyond.append((backward.total - 2 * forward.total) / (forward.total - head))
        if handle is not None:
            share = handle.report()["gemm_flops_recomputed_fraction"]
            handle.detach()
    return share, *beyond


def predicted_share(recipe: Recipe) -> float:
    """Return the share of a layer's GEMM FLOPs that its recipe says to compute again."""
    gemms = [op for op in recipe.ops if isinstance(op, Gemm)]
    return sum(op.flops * (1 - op.rows / op.m) for op in gemms if op.wanted) / recipe.gemm_flops
