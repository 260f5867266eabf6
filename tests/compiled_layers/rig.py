"""Compiled models, their graphs, and the comparison with stock."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import fx, nn
from torch._dynamo.utils import get_compilation_metrics

import ds_memo
from ds_memo.compiled_layers import ops, torch_private
from tests.models import Batch, Outcome, step

TOLERANCE = 2e-6
"""Largest relative difference of a gradient, as between two compiled runs of stock that differ in what is saved
(test_gradients.py measures that)."""


def layers_of(model: nn.Module) -> nn.ModuleList:
    for path in ("model.layers", "gpt_neox.layers", "transformer.h", "blocks"):
        try:
            return model.get_submodule(path)
        except AttributeError:
            continue
    raise AssertionError(type(model))


def compiled(model: nn.Module, how: str = "layer", **options: Any) -> nn.Module:
    """Compile a model as users do: each layer, each layer wrapped, the whole, or the whole wrapped."""
    layers = layers_of(model)
    if how == "layer":
        for layer in layers:
            layer.compile(**options)
    elif how == "wrapped":
        for index, layer in enumerate(layers):
            layers[index] = torch.compile(layer, **options)
    elif how == "model":
        model.compile(**options)
    else:
        return torch.compile(model, **options)
    return model


def run(model: nn.Module, batch: Batch, **kwargs: Any) -> Outcome:
    """Run a step. Names are those of the model before its layers were wrapped."""
    outcome = step(model, batch, **kwargs)
    outcome.grads = {name.replace("_orig_mod.", ""): grad for name, grad in outcome.grads.items()}
    return outcome


def worst(got: Outcome, want: Outcome) -> float:
    """Return the largest relative difference of loss and gradients."""
    assert got.grads.keys() == want.grads.keys()
    pairs = [(got.loss, want.loss)]
    for name, reference in want.grads.items():
        assert (got.grads[name] is None) == (reference is None), name
        if reference is not None:
            pairs.append((got.grads[name], reference))
    return max(float((a - b).norm() / (b.norm() + 1e-12)) for a, b in pairs)


@contextmanager
def graphs() -> Iterator[list[tuple[Counter, Counter]]]:
    """Yield a list that receives the ops of each forward and backward graph that memo splits."""
    found: list[tuple[Counter, Counter]] = []

    def split(*args: Any) -> tuple[fx.GraphModule, fx.GraphModule]:
        parts = real(*args)
        found.append(tuple(map(ops_of, parts)))
        return parts

    real = torch_private.split
    with mock.patch.object(torch_private, "split", split):
        yield found


def ops_of(module: fx.GraphModule) -> Counter:
    return Counter(str(node.target) for node in module.graph.nodes if node.op == "call_function")


def compare(
    model: nn.Module, config: dict[str, Any], how: str = "layer", backend: str = "aot_eager", steps: int = 2, length: int = 40
) -> tuple[float, dict[str, Any], dict[str, Any]]:
    """Run steps of compiled stock, compiled memo and eager memo.

    Returns:
        The largest difference of compiled memo from compiled stock, and the reports of compiled and of eager memo.
    """
    torch._dynamo.reset()
    stock, eager = copy.deepcopy(model), copy.deepcopy(model)
    compiled(stock, "layer", backend=backend)
    compiled(model, how, backend=backend)
    handles = [ds_memo.attach(each, config) for each in (model, eager)]
    off = 0.0
    for number in range(steps):
        batch = Batch.random(2, length, seed=number)
        want = run(stock, batch)
        off = max(off, worst(run(model, batch), want))
        run(eager, batch)
    reports = [handle.report() for handle in handles]
    for handle in handles:
        handle.detach()
    assert ops.calls_alive() == 0
    return off, *reports


def recompilations(run: Callable[[], Any]) -> Counter:
    """Return how often dynamo compiled code again in a run because a guard failed, by file, line and name of the code."""
    torch._dynamo.reset()
    torch._dynamo.utils.clear_compilation_metrics()
    run()
    return Counter((of.co_filename, of.co_firstlineno, of.co_name) for of in get_compilation_metrics() if of.recompile_reason)
