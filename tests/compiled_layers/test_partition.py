"""What the graphs of a compiled layer compute, and what a partition that does not do it looks like."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch

import ds_memo
from ds_memo.compiled_layers.partition import _Partition
from tests.compiled_layers.rig import compiled, graphs, run
from tests.everyday import everyday
from tests.models import LAYERS, Batch, Toy, build

ATTENTION = "aten._scaled_dot_product_flash_attention_for_cpu.default"
JOIN = "memo.join_{}.default"


def split(model: Any, config: dict[str, Any], backend: str = "aot_eager") -> tuple[Any, Any, dict[str, Any]]:
    """Run a step. Return the ops of the forward and the backward graph of swapped layers, and the report."""
    torch._dynamo.reset()
    handle = ds_memo.attach(compiled(model, backend=backend), config)
    with graphs() as found, torch._inductor.config.patch(force_disable_caches=True):  # a cached graph was split before
        run(model, Batch.random(2, 40))
    report = handle.report()
    handle.detach()
    return *found[0], report


@pytest.mark.parametrize(
    "name, backend, products", everyday([("llama", "inductor", 7), ("plain", "aot_eager", 4)], [("plain", "aot_eager", 4)])
)
def test_what_is_computed_again(name: str, backend: str, products: int) -> None:
    """Attention and the last product of the layer are not; every other product has its rows joined."""
    forward, backward, _ = split(build(name), {"alpha": 0.5, "resident_layers": 0}, backend)
    kind = "mm" if name == "llama" else "addmm"
    assert forward[ATTENTION] == 1 and backward[ATTENTION] == 0
    assert forward[f"aten.{kind}.default"] == products
    assert backward[JOIN.format(kind)] == products - 1
    assert backward["memo.supply.default"] == 3  # the input, attention's output and its log-sum-exp
    assert backward["aten.mm.default"] == 2 * products  # of gradients alone


def test_a_partition_that_saves_nothing() -> None:
    """The control: the same assertions fail for it."""
    with mock.patch.object(_Partition, "_recomputes", lambda self, node: True):
        _, backward, report = split(Toy(), {"alpha": 0.5, "resident_layers": 0})
    assert backward[ATTENTION] == 1
    assert report["attention_recomputed"] == LAYERS


def test_a_last_product_that_is_needed() -> None:
    """The control: where a backward reads the last product, it is joined like the others."""

    model = Toy()
    for block in model.blocks:
        block.down = torch.nn.Sequential(block.down, torch.nn.GELU())  # its backward reads the product
    _, backward, _ = split(model, {"alpha": 0.5, "resident_layers": 0})
    assert backward[JOIN.format("addmm")] == 4
