"""All private functions of PyTorch that compiled layers use. A new torch is tried here first; docs/compile.md has the versions.

The imports below, and what is found at its place:

    torch._C._dynamo.eval_frame.set_eval_frame, torch._dynamo.decorators.skip    runtime/module_patches.py
    torch._dynamo.eval_frame.OptimizedModule                                     remat/diagnostics.py
    torch._C._autograd._top_saved_tensors_default_hooks, torch._dynamo.config.assume_static_by_default,
    _torchdynamo_orig_backend of dynamo's callbacks                              layers.py
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import _TorchCompileInductorWrapper as InductorBackend
from torch import _TorchCompileWrapper as NamedBackend
from torch._dynamo.backends.common import AotAutograd
from torch._dynamo.eval_frame import innermost_backend
from torch._dynamo.exc import BackendCompilerFailed, FailOnRecompileLimitHit, TorchDynamoException
from torch._functorch._aot_autograd import runtime_wrappers
from torch._functorch.partitioners import (
    _extract_fwd_bwd_modules,
    _extract_fwd_bwd_outputs,
    _is_primal,
    _is_tangent,
    default_partition,
    find_symbol_binding_fx_nodes,
    fx_graph_cse,
    raise_getitems,
    reordering_to_mimic_autograd_engine,
)
from torch._guards import TracingContext
from torch._inductor.custom_graph_pass import CustomPartitionerFn, get_hash_for_files
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols
from torch.fx.proxy import GraphAppendingTracer
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils._sympy.interp import sympy_interp
from torch.utils._sympy.reference import PythonReferenceAnalysis

CANNOT_COMPILE = (TorchDynamoException, FailOnRecompileLimitHit)
"""Raised where a function cannot be compiled as one graph. No op of it has run by then."""

MARK_OF_ANY_SIZE = (
    "_dynamo_propagated_dynamic_indices"  # from torch 2.13 on
    if hasattr(runtime_wrappers, "mark_dynamo_propagated_dynamic_indices")
    else "_dynamo_weak_dynamic_indices"
)
"""The attribute by which AOTAutograd tells the next graph that a size of a tensor is a symbol."""


def outputs_of(joint: torch.fx.GraphModule, num_fwd_outputs: int) -> tuple[list[Any], list[Any]]:
    forward, backward, *_ = _extract_fwd_bwd_outputs(joint, num_fwd_outputs=num_fwd_outputs)
    return forward, backward


def placeholders(graph: torch.fx.Graph) -> tuple[list[torch.fx.Node], list[torch.fx.Node]]:
    """Return the inputs of the forward and the gradients that come in."""
    found = [node for node in graph.nodes if node.op == "placeholder"]
    return [node for node in found if _is_primal(node)], [node for node in found if _is_tangent(node)]


def traced_metadata() -> Any:
    """Return what AOTAutograd knows of the graph that is being compiled; None: it does not tell."""
    context = TracingContext.try_get()
    return context.fw_metadata if context is not None else None


def split(
    joint: torch.fx.GraphModule,
    saved: list[torch.fx.Node],
    symbols: list[torch.fx.Node],
    num_fwd_outputs: int,
    static: Sequence[torch.fx.Node],
) -> tuple[torch.fx.GraphModule, torch.fx.GraphModule]:
    """Split a joint graph where `saved` tensors and `symbols` go from the forward to the backward."""
    forward, backward = _extract_fwd_bwd_modules(
        joint,
        saved,
        saved_sym_nodes=symbols,
        num_fwd_outputs=num_fwd_outputs,
        static_lifetime_input_nodes=static,  # type: ignore[arg-type]
    )
    backward = reordering_to_mimic_autograd_engine(backward)
    return raise_getitems(forward), raise_getitems(backward)


def symbolic(graph: torch.fx.Graph, value: int | torch.SymInt) -> Any:
    """Return a size for the arguments of a node: an int, or the node that computes a symbolic one from the graph's inputs.

    New nodes are put at the graph's insertion point.

    Raises:
        KeyError: the graph has no node for a symbol.
    """
    if isinstance(value, int):
        return value
    known = set(graph.nodes)
    tracer = GraphAppendingTracer(graph)
    env = {symbol: torch.fx.Proxy(node, tracer) for symbol, node in find_symbol_binding_fx_nodes(graph).items()}
    made = sympy_interp(PythonReferenceAnalysis, env, value.node.expr)
    if not isinstance(made, torch.fx.Proxy):
        return int(made)
    for node in graph.nodes:
        if node not in known:
            node.meta["val"] = node.target(*torch.fx.map_arg(node.args, lambda argument: argument.meta["val"]))
    return made.node


def has_unknown_size(value: torch.Tensor) -> bool:
    """Return True for a tensor whose size depends on values, such as nonzero's."""
    return bool(free_unbacked_symbols(value))


def boxed(run: Callable[..., Any]) -> Callable[[list[Any]], Any]:
    """Return `run` in the calling convention of AOTAutograd: one list, which the callee empties."""

    def call(arguments: list[Any]) -> Any:
        taken = tuple(arguments)
        arguments.clear()
        return run(*taken)

    call._boxed_call = True  # type: ignore[attr-defined]
    return call
