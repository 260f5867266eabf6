"""Mixers of Transformers on parts of sequences against whole documents: outputs and all gradients, in float64."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
import torch
import torch.distributed as dist
from torch import nn

from ds_memo.errors import MemoError
from ds_memo.sequence import exchange, mixers
from ds_memo.sequence.catch_mixers import CAUGHT, catch_mixers
from ds_memo.sequence.parts import Parts
from ds_memo.sequence.ranks import ranks_of
from tests import architectures
from tests.distributed_harness.common import DistributedTest
from tests.sequence.float64 import float64

EXACT, WRONG = 1e-12, 1e-3
EVERYDAY = ("qwen3_next", "nemotron_h", "jamba", "recurrent_gemma")
ALL = (
    *EVERYDAY,
    *("qwen3_5_text", "olmo_hybrid", "kimi_linear", "bailing_hybrid", "falcon_h1", "mamba2", "bamba", "granitemoehybrid"),
    *("zamba2", "falcon_mamba", "mamba", "lfm2", "lfm3"),
)
ONE = ((0,),)
PACKED = ((0, 13, 14, 29), (0, 7))
"""Of two rows; the second document of the first is one token long."""
ALIKE = ((0, 17, 20),)


def mixer(name: str) -> nn.Module:
    """Return a mixer with states that live for many tokens: otherwise no test would see whether they arrive."""
    model = architectures.build(name)
    catch_mixers(model)
    found = [module for module in catch_mixers(model) if not isinstance(module, nn.Conv1d)]
    assert found
    module = found[0]
    if type(module).__name__ == "RecurrentGemmaRglru":
        module = next(m for m in model.modules() if type(m).__name__ == "RecurrentGemmaRecurrentBlock")
    for parameter_name, parameter in module.named_parameters():
        if parameter_name.endswith("A_log"):
            parameter.data.sub_(4)
        if parameter_name.endswith("recurrent_param"):
            parameter.data.sub_(5)
    return module


def output(module: nn.Module, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    if type(module).__name__ == "RecurrentGemmaRecurrentBlock":
        return module(x, positions, None, use_cache=False)[0]
    out = module(x)
    return out[0] if isinstance(out, tuple) else out


def off(got: torch.Tensor, expected: torch.Tensor) -> float:
    return float((got - expected).norm() / expected.norm().clamp(min=1e-30))


def worst(name: str, ulysses: int, length: int, documents: Sequence[Sequence[int]], zigzag: bool = True) -> float:
    """Return the largest relative difference, of the output or of any gradient, that any rank sees."""
    with float64():
        module = mixer(name)
        parts = Parts(ranks_of(dist.group.WORLD, ulysses), length, documents, zigzag)
        torch.manual_seed(1)
        x, weights = torch.randn(2, 2, parts.length, module_width(module)).unbind()
        positions = torch.zeros(2, parts.length, dtype=torch.long)
        rows = parts.documents if len(parts.documents) == 2 else parts.documents * 2
        outs = []
        leaf = x.clone().requires_grad_()
        for row, starts in enumerate(rows):
            for start, stop in itertools.pairwise((*starts, parts.length)):
                positions[row, start:stop] = torch.arange(stop - start)
                if start < length:
                    here = slice(row, row + 1), slice(start, stop)
                    outs.append(output(module, leaf[here], positions[here]))
        expected = torch.cat(outs, 1).view(2, length, -1)
        (expected * weights[:, :length]).sum().backward()
        gradients = {name: parameter.grad for name, parameter in module.named_parameters()}
        module.zero_grad()

        for part in module.modules():
            part._ds_memo_parts = parts
        CAUGHT.clear()
        mine = parts.own_of(x, 1).requires_grad_()
        got = output(module, mine, parts.own_of(positions, 1))
        assert CAUGHT, "nothing was caught"
        real = parts.own_of(torch.arange(parts.length), 0) < length
        (got * parts.own_of(weights, 1))[:, real].sum().backward()

        pad = torch.zeros(2, parts.length - length, expected.shape[2])
        differences = {"output": off(got[:, real], parts.own_of(torch.cat([expected, pad], 1), 1)[:, real])}
        differences["input"] = off(mine.grad, parts.own_of(leaf.grad, 1))
        for parameter_name, parameter in module.named_parameters():
            if gradients[parameter_name] is None:
                continue
            mine_of_it = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            dist.all_reduce(mine_of_it)
            differences[parameter_name] = off(mine_of_it, gradients[parameter_name])
        largest = torch.tensor(max(differences.values()))
        dist.all_reduce(largest, op=dist.ReduceOp.MAX)
        print(name, ulysses, length, documents, {k: f"{v:.0e}" for k, v in differences.items()}, dict(CAUGHT))
        return float(largest)


def module_width(module: nn.Module) -> int:
    return architectures.HIDDEN if not hasattr(module, "hidden_size") else module.hidden_size


class TestTwoRanks(DistributedTest):
    world_size = 2

    def test_families(self):
        for name in EVERYDAY:
            for ulysses in (1, 2):
                assert worst(name, ulysses, 37, PACKED) < EXACT, name
        assert worst("qwen3_next", 1, 37, ONE) < EXACT
