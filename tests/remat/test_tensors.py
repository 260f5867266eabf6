"""Tensors of a tree: those of torch's pytree, in its order."""

from __future__ import annotations

from collections import OrderedDict, defaultdict, deque
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch.utils._pytree import tree_leaves
from transformers.modeling_outputs import BaseModelOutput

from ds_memo.remat.tensors import tensor_leaves


class Named(NamedTuple):
    x: Any
    y: Any


X = [torch.zeros(i) for i in range(8)]
TREES = [
    *(X[1], None, (), [], {}, "text", nn.Linear(2, 2), slice(X[0], None)),
    (X[0], [X[1], (X[2], None)], {"b": X[4], "a": (X[3], 1.5)}, torch.float32, X[0]),
    [Named(X[0], [X[1]]), Named(None, {"a": X[2]}), X[3].shape, X[4]],
    (OrderedDict(b=X[0], a=[X[1]]), defaultdict(list, b=[X[2]]), deque([X[3], (X[4],)]), {X[5]}, X[6]),
    [BaseModelOutput(last_hidden_state=X[0], hidden_states=(X[1], X[2])), torch.zeros(3, 2).sort(), nn.Parameter(X[3])],
]


@pytest.mark.parametrize("tree", TREES, ids=lambda tree: type(tree).__name__)
def test_tensors_of_a_tree(tree: Any) -> None:
    wanted = [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]
    found = tensor_leaves(tree)
    assert len(found) == len(wanted) and all(map(lambda one, other: one is other, found, wanted))
