"""The part of `gpu.sh check` on layers in tiles: the card's attention kernels over parts of the keys, experts and scans."""

from __future__ import annotations

import copy
import itertools
import traceback
import warnings
from collections.abc import Sequence
from typing import Any

import torch

import ds_memo
from benchmarks import tile_models
from benchmarks.noise import distance
from benchmarks.timing import clear
from benchmarks.workloads import AttentionOps
from ds_memo.remat.undo import changed
from tests import models

LENGTH, TILE = 104, 32
"""Tokens of each of two sequences: three whole tiles and one of eight tokens."""
SETTINGS = tuple(itertools.product((0.0, 0.5), (1, 2)))
"""Alpha and groups of heads."""
HALF = ("llama", "qwen2", "qwen3", "mistral", "phi3", "gemma3", "gpt2", "opt", "neox", "plain")
"""Models of the test suite, in half precision on CUDA."""
FLOAT32 = ("mixtral", "qwen3_next", "nemotron_h", "falcon_h1", "mamba2", "recurrent_gemma")
"""Model types with experts, which half precision chooses otherwise, and with convolutions and scans. benchmarks/tile_models.py
compares them."""
ROUNDINGS = 1.5
"""Bar in units of what stock's worst gradient is off: tiles round parts of a sum that stock rounds once."""
STEPS = 3
"""Layers are analysed in the first; later ones follow recipes."""


def measure(device: torch.device, dtype: torch.dtype, names: Sequence[str] = HALF) -> dict[str, Any]:
    """Compare the worst gradient of models in tiles with stock's: how far is each from that of the same weights in float32?"""
    rows: dict[str, Any] = {}
    for name in names:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                rows[name] = row = _half(name, device, dtype) if name in HALF else _float32(name, device)
        except Exception as error:  # a kernel that one model cannot have says nothing of the others
            traceback.print_exc()
            rows[name] = row = {"failures": [f"{name} in tiles: {type(error).__name__}: {str(error)[:500]}"]}
            clear(device)
        told = f"worst {row['worst']:.1e}, bar {row['bar']:.1e}, {row['tiled']} layers in tiles, " if "bar" in row else ""
        print(f"    {name:15s} {told}{len(row['failures'])} failures; {', '.join(row.get('kernels', ()))}", flush=True)
    failures = [failure for row in rows.values() for failure in row["failures"]]
    return {"length": LENGTH, "tile": TILE, "settings": SETTINGS, "models": rows, "failures": failures}


def _half(name: str, device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
    model = models.build(name, dtype).to(device)
    batch = models.Batch.random(2, LENGTH, dtype).to(device)
    zero = models.ZERO_GRADIENTS.get(name, ())
    exact = models.step(copy.deepcopy(model).float(), models.Batch(batch.embeds.float(), batch.labels))

    def error(found: models.Outcome) -> float:
        loss = abs(float(found.loss - exact.loss)) / float(exact.loss)
        return max(loss, *distance(found.grads, exact.grads, zero).values())

    stock = error(models.step(model, batch))
    bar = ROUNDINGS * max(stock, torch.finfo(dtype).eps)
    row: dict[str, Any] = {"bar": bar, "stock": stock, "worst": 0.0, "failures": []}
    with AttentionOps() as seen:
        for alpha, groups in SETTINGS:
            at = f"{name} in tiles, alpha {alpha}, {groups} groups of heads"
            config = {"alpha": alpha, "resident_layers": 0, "tile_tokens": TILE, "head_groups": groups}
            handle = ds_memo.attach(model, config)
            try:
                off = max(error(models.step(model, batch)) for _ in range(STEPS))
                tiles = handle.report()["tiles"]
            finally:
                handle.detach()
            if not off <= bar:
                row["failures"].append(f"{at}: off by {off:.1e}, bar {bar:.1e}")
            row["failures"] += [f"{at}: layer {layer} runs whole: {why}" for layer, why in tiles["not_tiled"].items()]
            row |= {"tiled": len(tiles["layers"]), "worst": max(row["worst"], off)}
    return row | {"kernels": sorted(set(seen.names))}


def _float32(name: str, device: torch.device) -> dict[str, Any]:
    with changed(torch.backends.cudnn, "allow_tf32", False):  # which rounds a convolution's inputs to ten bits
        one = tile_models.verdict(name, device=device)
    row = {"bar": one.bar, "worst": one.difference, "tiled": one.tiled, "failures": []}
    if not one.right:
        row["failures"].append(f"{name} in tiles: {one.worst} off by {one.difference:.1e}, loss by {one.loss_difference:.1e}")
    if one.tiled < one.layers:
        row["failures"].append(f"{name}: {one.layers - one.tiled} layers run whole: {'; '.join(one.reasons)}")
    return row
