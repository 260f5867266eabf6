"""Models whose parameters FSDP2 (``fully_shard``) gathers and frees: losses, gradients and weights are those without memo."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

import ds_memo
from ds_memo.remat import gathered_params
from tests.distributed_harness.common import DistributedTest
from tests.models import build

LAYERS, LENGTH = 4, 160
GIVEN = {"alpha": 0.5, "resident_layers": 1, "plan": {"enabled": False}}
SOLVED = {"host_memory_gib": 1.0, "device_memory_gib": 1.0}
TIGHT = {"host_memory_gib": 1.0, "device_memory_gib": 0.0015}
IN_TILES = {**GIVEN, "tile_tokens": 64}
GROUPS = {"alpha": 0.0, "resident_layers": 0, "tile_tokens": 64, "input_every": 4, "plan": {"enabled": False}}
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "given": (GIVEN, {}),
    "solved": (SOLVED, {}),
    "solved, bf16": (SOLVED, {"bf16": True}),
    "solved, not freed behind a forward": (SOLVED, {"reshard": False}),
    "solved, offloaded": (SOLVED, {"offload": True}),
    "solved, the root alone": (SOLVED, {"root_only": True}),
    "little memory": (TIGHT, {}),
    "tiles": (IN_TILES, {}),
    "groups of layers": (GROUPS, {}),
    "whole logits": ({**GIVEN, "device_memory_gib": 0.25}, {"vocabulary": 4096, "length": 600}),
    "whole logits, a head of its own": ({**GIVEN, "device_memory_gib": 0.25}, {"vocabulary": 4096, "length": 600, "head": True}),
}
EXACT = ("given", "solved", "solved, bf16", "solved, not freed behind a forward", "solved, offloaded", "solved, the root alone")
TILED = 2e-5
"""Tiles and split rows sum in another order."""


def sharded(model: nn.Module, how: dict[str, Any]) -> nn.Module:
    dtype = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if how.get("bf16") else MixedPrecisionPolicy()
    more: dict[str, Any] = {"mesh": init_device_mesh("cpu", (dist.get_world_size(),)), "mp_policy": dtype}
    more["reshard_after_forward"] = how.get("reshard", True)
    if how.get("offload"):
        more["offload_policy"] = CPUOffloadPolicy(pin_memory=False)
    if not how.get("root_only"):
        for layer in model.model.layers:
            fully_shard(layer, **more)
    if how.get("head"):
        fully_shard(model.lm_head, **more)
    return fully_shard(model, **more)


def train(model: nn.Module, memo: dict[str, Any] | None, how: dict[str, Any]) -> tuple[list[float], dict[str, torch.Tensor], Any]:
    """Return losses and weights of three steps, and the report."""
    model = sharded(copy.deepcopy(model).train(), how)
    handle = None if memo is None else ds_memo.attach(model, memo)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)
    made = torch.Generator().manual_seed(dist.get_rank())
    losses = []
    for _ in range(3):
        ids = torch.randint(how.get("vocabulary", 96), (1, how.get("length", LENGTH)), generator=made)
        outputs = model(input_ids=ids, labels=ids, use_cache=False)
        outputs.loss.backward()
        optimizer.step()  # while `outputs` is alive
        optimizer.zero_grad()
        losses.append(float(outputs.loss))
    weights = {name: weight.full_tensor().detach() for name, weight in model.named_parameters()}
    report = None if handle is None else handle.report()
    if handle is not None:
        handle.detach()
    return losses, weights, report


def compare(name: str) -> Any:
    memo, how = CASES[name]
    torch.manual_seed(0)
    more = {"vocab_size": how["vocabulary"]} if "vocabulary" in how else {}
    model = build("llama", num_hidden_layers=LAYERS, **more)
    want, got = train(model, None, how), train(model, memo, how)
    tolerance = 0.0 if name in EXACT else TILED
    assert got[0] == pytest.approx(want[0], rel=tolerance or 1e-12), name
    for weight, of_stock in want[1].items():
        apart = float((got[1][weight] - of_stock).norm() / of_stock.norm())
        assert apart <= 10 * tolerance, (name, weight, apart)  # Adam divides by gradients that are next to nothing
    return got[2]


@pytest.mark.processes
class TestTwoRanks(DistributedTest):
    world_size = 2

    def test_every_case(self) -> None:
        warnings.simplefilter("ignore")
        reports = {name: compare(name) for name in CASES}
        assert reports["little memory"]["bytes_to_host"] or reports["little memory"]["gemm_flops_recomputed_fraction"]
        assert reports["tiles"]["tiles"]["layers"] and reports["groups of layers"]["layers_without_input"]
        for name in ("whole logits", "whole logits, a head of its own"):
            assert reports[name]["logits"]["lazy_calls"] == 0, name

    def test_a_probe_that_leaves_units_gathered_is_seen(self, monkeypatch: pytest.MonkeyPatch) -> None:
        warnings.simplefilter("ignore")
        monkeypatch.setattr("ds_memo.profile.caught_call.reshard", lambda model: None)
        monkeypatch.setattr(gathered_params, "units", lambda module: [])
        with pytest.raises(Exception, match=r"mixed torch\.Tensor and DTensor|size|shape|freed|storage"):
            compare("solved")


def test_a_model_without_memory_is_refused() -> None:
    with torch.device("meta"):
        model = nn.TransformerEncoderLayer(16, 2)
    with pytest.raises(ds_memo.MemoError, match=r"on the meta device.* Attach it once"):
        ds_memo.attach(nn.Sequential(model), GIVEN, layers=["0"])
