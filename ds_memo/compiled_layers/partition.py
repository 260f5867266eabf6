"""The recipe as a partition of AOTAutograd's joint graph.

    forward graph    the layer, whole; then handle = memo::keep(output, [inputs, attention's outputs, products, ...])
    backward graph   what it needs of the forward is copied into it (the replay). In the copy
                       inputs, outputs of saved ops   are memo::supply(handle, i)
                       a product                      is memo::join(handle, i, its operands)
                     and what nothing needs (down_proj, attention) is dead and left out

A placement on the device has autograd save the same tensors itself. Then the handle only counts work.
"""

from __future__ import annotations

import copy
import operator
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import fx
from torch._ops import OpOverload

from ds_memo.compiled_layers import torch_private
from ds_memo.compiled_layers.ops import HOLD, KEEP, SUPPLY, join_of
from ds_memo.placement import PlacementKind
from ds_memo.remat import op_policy
from ds_memo.remat.layer_call import CannotRun
from ds_memo.remat.op_policy import OpKind
from ds_memo.remat.recipe import SMALL

CHANGES = "changes an input or a buffer in place"
_COLLECTIVES = ("c10d", "c10d_functional", "_c10d_functional", "_dtensor")


class CannotCompile(CannotRun):
    """A layer cannot run compiled. The message says why, as the end of "it …"."""


def partition(
    joint: fx.GraphModule,
    joint_inputs: Sequence[Any],
    *,
    kind: PlacementKind,
    num_fwd_outputs: int,
    static_lifetime_input_indices: Sequence[int] | None = None,
    **others: Any,
) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Split a joint graph by the recipe of a kind of placement. The arguments are those of PyTorch's partitioners.

    Raises:
        CannotCompile: no recipe holds for this graph.
    """
    parts = _Partition(joint, kind, num_fwd_outputs, static_lifetime_input_indices).split()
    if parts is None:  # the backward hands on what it is given
        return torch_private.default_partition(joint, joint_inputs, num_fwd_outputs=num_fwd_outputs)
    return parts


class _Partition:
    """Splits one joint graph, which it changes in place.

    Args:
        static: positions of parameters and buffers among the inputs.
    """

    def __init__(self, joint: fx.GraphModule, kind: PlacementKind, num_fwd_outputs: int, static: Sequence[int] | None) -> None:
        joint.graph.eliminate_dead_code()
        joint.graph = torch_private.fx_graph_cse(joint.graph)
        self._joint = joint
        self._graph = joint.graph
        self._kind = kind
        self._num_fwd_outputs = num_fwd_outputs
        self._outputs, self._gradients = torch_private.outputs_of(joint, num_fwd_outputs)
        self._output = next((value for value in self._outputs if _is_tensor(value)), None)
        self._primals, tangents = torch_private.placeholders(self._graph)
        self._static = [self._primals[index] for index in static or ()]
        self._weights = set(self._static)
        """Parameters, buffers, and what is computed from them alone."""
        self._late = set(tangents)
        """Nodes that depend on an incoming gradient."""
        self._early: list[fx.Node] = []
        for node in self._graph.nodes:
            if node.op == "output":
                continue
            arguments = node.all_input_nodes
            if node in self._late or any(argument in self._late for argument in arguments):
                self._late.add(node)
            else:
                self._early.append(node)
                if arguments and self._weights.issuperset(arguments):
                    self._weights.add(node)
        self._chosen_from: set[fx.Node] = set()
        """Products that a choice depends on: all their rows are kept."""
        self._stand_ins: dict[fx.Node, fx.Node] = {}
        """What the backward reads in place of an early node."""
        self._copies: list[fx.Node] = []
        self._native: set[fx.Node] = set()
        """Early nodes that autograd saves as they are, if they are needed."""
        self._kept: dict[fx.Node, fx.Node] = {}
        """Early nodes that the frame keeps, if their stand-ins are needed. Autograd keeps them for placements on the device."""

    def split(self) -> tuple[fx.GraphModule, fx.GraphModule] | None:
        """Return the forward and the backward graph; None: nothing is computed from the gradients that come in."""
        self._refuse()
        first_late = next((node for node in self._graph.nodes if node in self._late and node.op == "call_function"), None)
        if first_late is None:
            return None
        for node in self._early:  # some stand among the late ones
            if node.op != "placeholder":
                first_late.prepend(node)
        self._follow_choices()
        with self._graph.inserting_before(first_late):
            self._handle = self._graph.call_function(KEEP)
            inputs = self._inputs()
            for node in self._early:
                self._replay(node, inputs)
        for node in self._late:
            node.args, node.kwargs = fx.map_arg((node.args, node.kwargs), self._stand_in)
        self._return([self._stand_in(value) if isinstance(value, fx.Node) else value for value in self._gradients])
        alive = self._alive()
        self._write_keep(alive)
        if self._handle not in alive:
            self._hold(alive)
        saved = [node for node in self._graph.nodes if node in self._native and node in alive and _is_tensor(node)]
        symbols = [node for node in self._graph.nodes if node in self._native and node in alive and _is_symbol(node)]
        return torch_private.split(self._joint, [*saved, self._handle], symbols, self._num_fwd_outputs, self._static)

    def _refuse(self) -> None:
        """Refuse graphs whose replay would not do what the forward did.

        Raises:
            CannotCompile: always says why.
        """
        if self._output is None:
            raise CannotCompile("returns no tensor")
        traced = torch_private.traced_metadata()
        if traced is not None and traced.num_mutated_inp_runtime_indices:
            raise CannotCompile(CHANGES)
        for node in self._graph.nodes:
            if not isinstance(node.target, OpOverload):
                continue
            if node.target.namespace in _COLLECTIVES:
                raise CannotCompile(f"runs a collective ({node.target})")
            if op_policy.is_mutating(node.target):
                raise CannotCompile(CHANGES)

    # ---- what is kept

    def _follow_choices(self) -> None:
        """Find the products that a choice depends on, back to the nearest product or saved op."""
        sources: dict[fx.Node, frozenset[fx.Node]] = {}
        for node in self._early:
            made_of = frozenset[fx.Node]().union(*(sources[argument] for argument in node.all_input_nodes))
            if _is_choice(node):
                self._chosen_from |= made_of
            elif isinstance(node.target, OpOverload):
                values = {id(argument.meta.get("val")): argument for argument in node.all_input_nodes}
                for value in op_policy.chooses_by(node.target, _values(node.args)):
                    self._chosen_from |= sources[values[id(value)]] if id(value) in values else set()
            if self._is_product(node):
                made_of = frozenset({node})
            elif _is_choice(node) or _is_attention(node):
                made_of = frozenset()
            sources[node] = made_of

    def _is_product(self, node: fx.Node) -> bool:
        """Return True for a GEMM. A batched product is one if a weight is an operand; others may be attention."""
        kind = op_policy.kind_of(node.target) if isinstance(node.target, OpOverload) else None
        return kind is OpKind.GEMM or (kind is OpKind.BATCHED and any(arg in self._weights for arg in node.all_input_nodes))

    def _keeps(self, product: fx.Node) -> bool:
        if self._kind.without_gemms and product not in self._chosen_from:
            return False
        return op_policy.rows_are_lefts(product.target, _values(product.args), product.meta["val"])

    def _recomputes(self, node: fx.Node) -> bool:
        """Return True for attention that this placement computes again. With dropout it would draw other numbers."""
        return self._kind.recomputes_attention and _is_attention(node) and not _argument(node, "dropout_p")

    def _inputs(self) -> set[fx.Node]:
        """Return the layer's inputs that its frame keeps: those that need a gradient. Layers share the others.

        The first layer's hidden states may need none: they have the shape of its output.
        """
        static = set(self._static)
        pairs = zip(self._primals, self._gradients, strict=False)
        given = [(primal, grad) for primal, grad in pairs if primal not in static and _is_tensor(primal)]
        floating = [(primal, grad) for primal, grad in given if primal.meta["val"].is_floating_point()]
        if trained := {primal for primal, grad in floating if grad is not None}:
            return trained
        out = str(self._output.meta["val"].shape)  # symbols are compared by name: a comparison would be a guard
        return set([primal for primal, _ in floating if str(primal.meta["val"].shape) == out][:1])

    # ---- the replay

    def _replay(self, node: fx.Node, inputs: set[fx.Node]) -> None:
        """Find what stands for an early node in the backward."""
        of = node.args[0] if node.target is operator.getitem else node
        if not _is_tensor(node):
            if _is_symbol(node) or node.op != "call_function":
                self._stay(node)
            elif not _is_saved(node) or self._recomputes(node):
                self._copy(node)
        elif node.op == "placeholder":
            if node in inputs:
                self._keep(node)
            else:
                self._stay(node)
        elif _is_saved(of) and not self._recomputes(of):
            self._keep(node)
        elif self._is_product(node):
            if self._keeps(node):
                self._keep(node)
            else:
                self._join(node)
        elif node.op != "call_function" or torch_private.has_unknown_size(node.meta["val"]):
            self._stay(node)
        else:
            self._copy(node)

    def _stay(self, node: fx.Node) -> None:
        self._native.add(node)
        self._stand_ins[node] = node

    def _copy(self, node: fx.Node) -> None:
        made = self._graph.node_copy(node, lambda argument: self._stand_ins[argument])
        made.meta = _copied(node.meta)
        self._copies.append(made)
        self._stand_ins[node] = made

    def _keep(self, node: fx.Node) -> None:
        """Have the frame keep a node; autograd, if it is small or stays on the device."""
        product = self._is_product(node)
        if self._kind.on_device or (not product and _is_small(node.meta["val"])):
            self._stay(node)
        elif product:
            self._join(node)
        else:
            value = node.meta["val"]
            sizes = [[torch_private.symbolic(self._graph, size) for size in of] for of in (value.shape, value.stride())]
            self._hand_out(node, SUPPLY, (*sizes, value.dtype, value.device), {})
        if self._kind.on_device or product or not _is_small(node.meta["val"]):
            self._kept[node] = self._stand_ins[node]

    def _join(self, product: fx.Node) -> None:
        args, kwargs = fx.map_arg((product.args, product.kwargs), lambda argument: self._stand_ins[argument])
        self._hand_out(product, join_of(product.target), args, kwargs)

    def _hand_out(self, node: fx.Node, op: OpOverload, args: tuple, kwargs: dict[str, Any]) -> None:
        made = self._graph.call_function(op, (self._handle, -1, *args), kwargs)
        made.meta = _copied(node.meta)
        self._copies.append(made)
        self._stand_ins[node] = made

    def _return(self, gradients: list[Any]) -> None:
        """Have the backward return these."""
        self._gradients = gradients
        output = next(iter(self._graph.find_nodes(op="output")))
        output.args = ((*self._outputs, *gradients),)

    def _stand_in(self, node: fx.Node) -> fx.Node:
        return self._stand_ins.get(node, node)

    def _alive(self) -> set[fx.Node]:
        """Return what the backward needs."""
        alive: set[fx.Node] = set()
        pending = [value for value in self._gradients if isinstance(value, fx.Node)]
        while pending:
            node = pending.pop()
            if node not in alive:
                alive.add(node)
                pending += node.all_input_nodes if node not in self._native else ()
        return alive

    # ---- the handle

    def _write_keep(self, alive: set[fx.Node]) -> None:
        """Write the arguments of memo::keep, and into the backward which of its tensors each node is."""
        wanted = [node for node, stand_in in self._kept.items() if stand_in in alive]
        inputs = [node for node in wanted if node.op == "placeholder"]
        kept = list(inputs)
        names, counts, whole, flops, softmax = [], [], [], [], ""
        with self._graph.inserting_before(self._handle):
            for node in self._early:
                product = self._is_product(node)
                if node.target in op_policy.SOFTMAX and op_policy.materialises_scores(node.target, node.args[0].meta["val"]):
                    softmax = str(node.target)
                if not (product or _is_saved(node)):
                    continue
                outputs = [value for value in (node, *_parts(node)) if value in wanted]
                again = self._recomputes(node) or (product and node not in self._kept)
                kept += outputs
                names.append(node.target.name())
                counts.append(len(outputs) or (-1 if again and self._stand_ins[node] in alive else 0))
                whole.append(node in self._chosen_from)
                work = op_policy.gemm_flops(node.target, _values(node.args), node.meta["val"]) if product else 0
                flops.append(torch_private.symbolic(self._graph, work))
        self._handle.args = (self._output, kept, self._kind.on_device, len(inputs), names, counts, whole, flops, softmax)
        mode = self._output.meta["val"].fake_mode
        self._handle.meta["val"] = mode.from_tensor(torch.empty(1, dtype=torch.int64))
        self._handle.meta["eager_input_vals"] = _values(self._handle.args), {}  # inductor gives it tensors of these strides
        self._native.add(self._handle)
        if not self._kind.on_device:
            for index, node in enumerate(kept):
                stand_in = self._stand_ins[node]
                stand_in.args = (self._handle, index, *stand_in.args[2:])

    def _hold(self, alive: set[fx.Node]) -> None:
        """Have the backward need the handle where all is saved by autograd."""
        saved = [node for node in self._native if node in alive and _is_tensor(node) and node is not self._handle]
        made = [node for node in saved if node.op != "placeholder"] or saved
        if not made:
            raise CannotCompile("saves nothing for its backward")

        def size(node: fx.Node) -> tuple[int, str]:
            numel = node.meta["val"].numel()  # of a symbolic one that of the call that is being compiled
            return (numel if isinstance(numel, int) else numel.node.hint or 0) * node.meta["val"].dtype.itemsize, node.name

        smallest = min(made, key=size)
        readers = [node for node in smallest.users if node in self._late or node in self._copies]
        with self._graph.inserting_after(self._handle):
            held = self._graph.call_function(HOLD, (self._handle, smallest))
        held.meta = _copied(smallest.meta)
        for node in readers:
            node.replace_input_with(smallest, held)
        self._return([held if value is smallest else value for value in self._gradients])


def _values(arguments: Any) -> Any:
    return fx.map_arg(arguments, lambda argument: argument.meta.get("val"))


def _is_tensor(value: Any) -> bool:
    return isinstance(value, fx.Node) and isinstance(value.meta.get("val"), torch.Tensor)


def _is_symbol(node: fx.Node) -> bool:
    """Return True for a number: a size, or what is computed from sizes."""
    return isinstance(node.meta.get("val"), (int, float, bool, torch.SymInt, torch.SymFloat, torch.SymBool))


def _is_attention(node: fx.Node) -> bool:
    return op_policy.is_attention(node.target) if node.op == "call_function" else False


def _is_choice(node: fx.Node) -> bool:
    return isinstance(node.target, OpOverload) and op_policy.kind_of(node.target) is OpKind.CHOICE


def _is_saved(node: fx.Node) -> bool:
    """Return True for an op whose outputs the backward is given: attention, a choice, random numbers."""
    return _is_attention(node) or _is_choice(node) or torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())


def _parts(node: fx.Node) -> Iterator[fx.Node]:
    """Yield the outputs of an op that has several."""
    return (user for user in node.users if user.target is operator.getitem)


def _argument(node: fx.Node, name: str) -> Any:
    """Return an argument of an op by its name; None: it has none."""
    if not isinstance(node.target, OpOverload):
        return None
    for position, parameter in enumerate(node.target._schema.arguments):
        if parameter.name == name:
            return node.args[position] if position < len(node.args) else node.kwargs.get(name, parameter.default_value)
    return None


def _is_small(value: torch.Tensor) -> bool:
    """Return True for a tensor that is not worth a copy. One with a symbol among its sizes may be."""
    numel = value.numel()
    return isinstance(numel, int) and numel * value.dtype.itemsize < SMALL


def _copied(meta: dict[str, Any]) -> dict[str, Any]:
    """Return a node's metadata for its copy in the backward, without the marks of its part of the graph."""
    return {name: copy.copy(value) if name != "val" else value for name, value in meta.items() if name not in _MARKS}


_MARKS = ("partitioner_tag", "recompute", "ac_graph_id", "eager_input_vals")
