"""A module's state beside its gradients: buffers, attributes, hooks, generators. What runs beside the training pass undoes it."""

from __future__ import annotations

import operator
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from ds_memo.remat.random_states import GENERATORS, another, set_states, state_of
from ds_memo.remat.undo import Undoing

SMALL = 1 << 20
"""Bytes. A larger tensor is a table or a quantised weight: no forward changes it, and a copy may not fit."""
MISSING: Any = object()
CONTAINERS = (dict, OrderedDict, defaultdict, Counter, list, set, deque)


def is_foreign(name: str) -> bool:
    """Return True for an attribute that DeepSpeed keeps in modules: its hooks count by it in every run."""
    return name.startswith(("ds_", "applied_pre_backward", "_original_parameters", "_external_params"))


def is_small(tensor: torch.Tensor) -> bool:
    """Return True if a tensor's bytes are looked at, copied and put back."""
    plain = type(tensor) in (torch.Tensor, nn.Parameter) and torch._C._has_storage(tensor)
    return plain and tensor.nbytes <= SMALL and tensor.device.type != "meta" and not tensor.is_inference()


def tensors_of(module: nn.Module) -> list[torch.Tensor]:
    """Return a module's parameters and buffers, and the tensors that its parts hold as plain attributes."""
    attributes = (value for part in module.modules() for value in vars(part).values() if isinstance(value, torch.Tensor))
    return [*module.parameters(), *module.buffers(), *attributes]


def same_bytes(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Return True if two tensors have the same dtype, shape and bytes. NaN equals NaN."""
    if a.dtype != b.dtype or a.shape != b.shape or a.device != b.device:
        return False
    return torch.equal(*(x.detach().reshape(-1).contiguous().view(torch.uint8) for x in (a, b)))


@contextmanager
def unchanged(module: nn.Module) -> Iterator[None]:
    """Undo what the block does to a module: attributes, lists and dicts that they hold, buffers, hooks, generators, flags.

    The bytes of buffers and parameters above SMALL stay as the block leaves them.
    """
    snapshot = Snapshot()
    for part in module.modules():
        snapshot.add_table(vars(part))
        for name, value in vars(part).items():
            if not is_foreign(name):
                snapshot.add(value)
    with Undoing(snapshot.put_back):
        yield


class Snapshot:
    """Attributes of modules, and contents of objects, each once. All is put back in place."""

    def __init__(self) -> None:
        self._reached: set[int] = set()
        self._tables: list[tuple[dict[str, Any], dict[str, Any]]] = []
        self._containers: list[tuple[Any, list[Any]]] = []
        self._tensors: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.generators: list[tuple[Any, bytes]] = []

    def add_table(self, table: dict[str, Any]) -> None:
        """Add what a module's attributes, or its buffers, are. DeepSpeed's are its own."""
        self._tables.append((table, {name: value for name, value in table.items() if not is_foreign(name)}))

    def add_container(self, container: Any) -> None:
        self._containers.append((container, contents_of(container)))

    def add(self, value: Any) -> None:
        """Add the contents of a value: of a small tensor, a generator, a container and what is in it."""
        if id(value) in self._reached:
            return
        if isinstance(value, torch.Tensor):
            if is_small(value) and not hasattr(value, "ds_id"):
                self._reached.add(id(value))
                self._tensors.append((value, value.detach().clone()))
        elif type(value) in CONTAINERS or type(value) is tuple:
            if type(value) is not tuple:
                self._reached.add(id(value))
                self.add_container(value)
            for inner in value.values() if isinstance(value, dict) else value:
                self.add(inner)
        elif isinstance(value, GENERATORS):
            self._reached.add(id(value))
            self.generators.append((value, state_of(value)))

    def put_back(self) -> None:
        for table, own in self._tables:
            for name in table.keys() - own.keys():
                if not is_foreign(name):
                    del table[name]
            for name, value in own.items():
                if table.get(name, MISSING) is not value:
                    table[name] = value
        for container, contents in self._containers:
            fill_with(container, contents)
        for tensor, value in self._tensors:
            if tensor.shape != value.shape:
                tensor.data = value
            elif not same_bytes(tensor, value):
                tensor.data.copy_(value)  # autograd need not know: the value is what it was
        set_states(self.generators)


def contents_of(container: Any) -> list[Any]:
    """Return what a container holds: for a dict, names and values by turns."""
    if isinstance(container, dict):
        return [one for item in container.items() for one in item]
    return list(container)


def fill_with(container: Any, contents: list[Any]) -> None:
    """Have a container hold again what :func:`contents_of` returned."""
    now = contents_of(container)
    if len(now) == len(contents) and all(map(operator.is_, now, contents)):
        return
    container.clear()
    if isinstance(container, dict):
        container.update(zip(contents[::2], contents[1::2], strict=True))
    elif isinstance(container, set):
        container.update(contents)
    else:
        container.extend(contents)


def copied(value: Any, copies: dict[int, Any]) -> Any:
    """Return a value that no write to the original reaches: small tensors, generators, containers and what is in them.

    Args:
        copies: by id of the original: what two attributes share, their copies share.
    """
    if id(value) in copies:
        return copies[id(value)]
    if isinstance(value, torch.Tensor):
        made = value.detach().clone() if is_small(value) and not isinstance(value, nn.Parameter) else value
    elif type(value) in CONTAINERS:
        made = value.copy()
        fill_with(made, [copied(inner, copies) for inner in contents_of(value)])
    elif isinstance(value, GENERATORS):
        made = another(value)
    else:
        return value
    copies[id(value)] = made
    return made


def alike(a: Any, b: Any) -> bool:
    """Return True if two values are the same object, or equal as far as :func:`copied` copies."""
    if a is b:
        return True
    if type(a) is not type(b):
        return False
    if isinstance(a, torch.Tensor):
        return is_small(a) and same_bytes(a, b)
    if type(a) in CONTAINERS:
        return len(a) == len(b) and all(map(alike, contents_of(a), contents_of(b)))
    if isinstance(a, GENERATORS):
        return state_of(a) == state_of(b)
    return isinstance(a, (bool, int, float, complex, str, bytes)) and a == b
