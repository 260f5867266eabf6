"""A layer's state beside its gradients, which runs outside the training pass need as it was and must leave alone.

Settings    plain attributes (flags, numbers, the active adapter), parameters and buffers by reference, hooks,
            `requires_grad`. All parts of the layer have them. A call notes them, and its replay compares
Values      what a part writes in place: the bytes of its buffers, lists and dicts, its generators. The layer's first call shows
            which parts write; only these are copied in later calls

A replay, a probe and a measurement get copies of their own of what they write, and their writes are dropped.
"""

from __future__ import annotations

import operator
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch import nn

from ds_memo.errors import MemoError
from ds_memo.remat import follower
from ds_memo.remat.random_states import GENERATORS, GLOBAL_GENERATORS, another, set_states, state_of, states_of
from ds_memo.remat.tensors import storage_of
from ds_memo.remat.undo import Undoing

SMALL = 1 << 20
"""Bytes. A larger tensor is a table or a quantised weight: no forward changes it, and a copy may not fit."""
_MISSING: Any = object()
_CONTAINERS = (dict, OrderedDict, defaultdict, Counter, list, set, deque)
_HOOKS = (
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
)
_OF_EVERY_MODULE = frozenset(vars(nn.Module()))
_PLAIN_TENSORS = {torch.Tensor, nn.Parameter, type(None)}
"""Types of tensors that are put in parameters' places. FSDP2 exchanges others by itself, by hooks."""
PLAIN: set[type] = {bool, int, float, str, type(None)}
"""Types of settings. Other packages add theirs, whose objects are never changed."""
OF_LATEST: set[str] = set()
"""Attributes that tell of the latest forward, whatever ran it. A replay gets those of its own."""
_MERGED = "merged_adapters"
"""PEFT's list of the adapters that are in a weight's values now."""


class Attributes(NamedTuple):
    """Attributes of a part, as far as they are known. layer_settings.h reads the first four fields by their numbers."""

    table: dict[str, Any]
    size: int
    """Number of all that it has."""
    weights: int
    """Number of its parameters."""
    names: tuple[str, ...]
    """Those that are settings."""
    keys: frozenset[str]
    """All that it has."""
    values_in: Callable[[dict[str, Any]], tuple[Any, ...]]
    """Returns their values in the part's table."""


class Settings(NamedTuple):
    attributes: Attributes
    values: list[Any]
    parameters: dict[str, Any]
    """Tensors by their parameter's name. ``torch.func.functional_call`` puts others in their places while the model runs."""
    buffers: list[torch.Tensor | None]
    hooks: list[list[Any]]
    """Contents of the tables _HOOKS; empty: no forward hook is there."""

    def are(self, now: Settings) -> bool:
        """Return True if nothing has been set since."""
        return (
            self.attributes is now.attributes
            and all(map(operator.is_, self.values, now.values))
            and self.parameters.keys() == now.parameters.keys()
            and all(tensor is now.parameters[name] for name, tensor in self.parameters.items())
            and all(map(operator.is_, self.buffers, now.buffers))
            and self.hooks == now.hooks
        )


class ModulePart:
    """A module of the layer."""

    __slots__ = ("attributes", "path", "table", "weights", "writes")

    def __init__(self, path: str, module: nn.Module, weights: Iterable[str]) -> None:
        self.path = path
        self.table = vars(module)
        start = path + "." if path else ""
        known = (name.removeprefix(start) for name in weights if name.startswith(start))
        self.weights = {*self.table["_parameters"], *(name for name in known if "." not in name)}
        self.writes = False
        self.refresh()

    def refresh(self) -> None:
        """Learn which attributes are settings."""
        names = tuple([name for name, value in self.table.items() if _is_setting(name, value)])
        keys, sizes = frozenset(self.table), (len(self.table), len(self.weights))
        self.attributes = Attributes(self.table, *sizes, names, keys, operator.itemgetter(*names))

    def note(self, noted: list[Any]) -> None:
        """Add the settings to a list, for :func:`noted_settings`."""
        table = self.table
        if len(table) != self.attributes.size:
            self.refresh()
        try:
            values = self.attributes.values_in(table)
        except KeyError:
            self.refresh()
            values = self.attributes.values_in(table)
        noted.append(self.attributes)
        noted += values
        parameters = table["_parameters"]
        if len(parameters) < self.attributes.weights:  # a plain tensor was set in a parameter's place
            missing = self.weights.difference(parameters)
            parameters = dict(parameters.items()) | {name: table[name] for name in missing if name in table}
        _note_items(parameters, noted)
        _note_items(table["_buffers"], noted)
        hooked = table["_forward_hooks"] or table["_forward_pre_hooks"]
        noted.append(bool(hooked))
        if hooked:
            for name in _HOOKS:
                _note_items(table[name], noted)

    def put_in(self, settings: Settings, now: Settings) -> None:
        """Have the part be as it was. Attributes that it has got since go."""
        table = self.table
        for name in now.attributes.keys - settings.attributes.keys:
            if not is_deepspeeds(name):
                del table[name]
        for name, value in zip(settings.attributes.names, settings.values, strict=True):
            if table.get(name, _MISSING) is not value:
                table[name] = value
        for name, parameter in settings.parameters.items():
            if parameter is not (there := now.parameters.get(name)) and {type(parameter), type(there)} <= _PLAIN_TENSORS:
                table.pop(name, None)
                table["_parameters"][name] = parameter
        for name, buffer in zip(table["_buffers"], settings.buffers, strict=False):
            table["_buffers"][name] = buffer
        if now.hooks or settings.hooks:
            for name, contents in zip(_HOOKS, settings.hooks or ([],) * len(_HOOKS), strict=True):
                fill_with(table[name], contents)

    def snapshot(self) -> Callable[[], None]:
        """Return a function that puts back, in place, what :meth:`put_in` and a run may change. DeepSpeed's attributes stay."""
        table = self.table
        own = {name: value for name, value in table.items() if not is_deepspeeds(name)}
        held = [
            (value, contents_of(value))
            for name in _OF_EVERY_MODULE
            if type(value := table.get(name)) in _CONTAINERS or name == "_parameters"  # ZeRO-3 has a class of its own
        ]

        def put_back() -> None:
            for name in table.keys() - own.keys():
                if not is_deepspeeds(name):
                    del table[name]
            table.update(own)
            for container, contents in held:
                fill_with(container, contents)

        return put_back

    def places(self) -> Iterator[tuple[dict[str, Any], str, Any]]:
        """Yield each table, name and value of its attributes and buffers."""
        for table in (self.table, self.table["_buffers"]):
            for name, value in table.items():
                if not (is_deepspeeds(name) or name in _OF_EVERY_MODULE):
                    yield table, name, value


def _note_items(table: dict[str, Any], noted: list[Any]) -> None:
    noted.append(len(table))
    for item in table.items():  # past `__getitem__`, by which ZeRO-3 gathers
        noted += item


def _noted_items(noted: Iterator[Any]) -> list[tuple[Any, Any]]:
    return [(next(noted), next(noted)) for _ in range(next(noted))]


def is_same(now: list[Any], then: list[Any]) -> bool:
    """Return True if two lists have the same objects."""
    if (library := follower.library()) is not None:
        return library.is_same(now, then)
    return len(now) == len(then) and all(map(operator.is_, now, then))


def noted_settings(noted: Iterator[Any]) -> Settings:
    """Take the settings of one part from the items that :meth:`ModulePart.note` has added."""
    attributes = next(noted)
    values = [*islice(noted, len(attributes.names))]
    parameters, buffers = dict(_noted_items(noted)), [buffer for _, buffer in _noted_items(noted)]
    hooks = [[one for item in _noted_items(noted) for one in item] for _ in _HOOKS] if next(noted) else []
    return Settings(attributes, values, parameters, buffers, hooks)


def _name(part: ModulePart, name: str) -> str:
    return f"{part.path}.{name}" if part.path else name


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor)


def _is_setting(name: str, value: Any) -> bool:
    if type(value) in (list, tuple):
        return all(type(inner) in PLAIN for inner in value)
    plain = type(value) in PLAIN or (callable(value) and not isinstance(value, (nn.Module, torch.Tensor)))
    return plain and not is_deepspeeds(name)


class LayerState:
    """The parts of a layer, and what its calls have shown of them.

    Args:
        name: of the layer, for messages.
        weights: names of parameters that it had earlier.
    """

    def __init__(self, name: str, module: nn.Module, weights: Sequence[str] = ()) -> None:
        self.name = name
        named = module.named_modules()
        self.parts = [ModulePart(path, part, weights) for path, part in named if not isinstance(part, torch.jit.ScriptModule)]
        self.find_tensors()
        parameters = {name: each for name, each in module.named_parameters() if isinstance(each, nn.Parameter)}
        self.parameters = [*parameters.values()]
        self.weight_names = [*parameters]
        self.number_of = {id(parameter): number for number, parameter in enumerate(self.parameters)}
        self.generators: dict[int, Any] = {}
        """Generators that no attribute holds and the layer draws from, by id."""

    def find_tensors(self) -> None:
        self.tensors = [(part, *place[:2]) for part in self.parts for place in part.places() if _is_tensor(place[2])]

    def note(self) -> list[Any]:
        """Return the settings of all parts, and after them which parameters are trained.

        If the same objects come again in this order, nothing has been set since. C++ makes the list in the usual case.
        """
        library = follower.library()
        if library is not None and (noted := library.note_settings(self.parts, self.parameters)) is not None:
            return noted
        noted = []
        for part in self.parts:
            part.note(noted)
        noted += [parameter.requires_grad for parameter in self.parameters]
        return noted

    def trained_in(self, noted: list[Any]) -> list[bool]:
        """Return which parameters were trained as a list was noted."""
        return noted[len(noted) - len(self.parameters) :]

    def before(self, learns: bool = False) -> Before:
        """Note the state before a call.

        Args:
            learns: True if the call shows what the layer writes.
        """
        return Before(self, learns)


class Before:
    """The state of a layer before one of its calls. The call's graph holds it."""

    def __init__(self, state: LayerState, learns: bool) -> None:
        self.state = state
        self._noted = state.note()
        self._merged = self._merged_now()
        self._values: list[tuple[ModulePart, dict[str, Any], str, Any]] = []
        self._states = states_of((GLOBAL_GENERATORS if learns else state.generators).values())
        self._copies: dict[int, Any] = {}
        self._learns = learns
        for part in [part for part in state.parts if part.writes or learns]:
            self._copy(part)

    def _copy(self, part: ModulePart) -> None:
        self._values += [(part, table, name, _Copy(value, self._copies)) for table, name, value in part.places()]

    # ---- during the forward

    def about_to_write(self, tensor: torch.Tensor) -> None:
        """Copy the part that holds a tensor, if no earlier call has shown that the layer writes to it."""
        storage = storage_of(tensor)
        for part, table, name in self.state.tensors:
            held = table.get(name)
            if not (part.writes or self._learns) and _is_tensor(held) and storage_of(held) == storage:
                part.writes = True
                self._copy(part)

    def about_to_draw(self, generator: torch.Generator) -> None:
        """Note a generator that an op is given. Replays will draw what the forward drew."""
        if generator not in (held for held, _ in self._states):
            self.state.generators[id(generator)] = generator
            self._states.append((generator, state_of(generator)))

    def learn(self) -> list[str]:
        """Find what the call wrote, and forget the rest.

        Returns:
            Names of tensors that were written and are too large for a copy.
        """
        if not self._learns:
            return []
        written = self.changed()
        too_large = [_name(part, name) for part, table, name, copy in self._values if copy.was_written_in_place(table.get(name))]
        for part in self.state.parts:
            part.writes |= any(_name(part, name) in written for _, name, _ in part.places())
        self._values = [held for held in self._values if held[0].writes]
        drawn = [held for held in self._states if state_of(held[0]) != held[1]]
        self.state.generators |= {id(generator): generator for generator, _ in drawn}
        self._states = [held for held in self._states if id(held[0]) in self.state.generators]
        for part in self.state.parts:
            part.refresh()
        self.state.find_tensors()
        self._learns = False
        return too_large

    def changed(self) -> list[str]:
        """Return the names of what the layer holds now and did not before the call, which learns."""
        before = {(id(table), name): copy for _, table, name, copy in self._values}
        return [
            _name(part, name)
            for part in self.state.parts
            for table, name, value in part.places()
            if (id(table), name) not in before or not before[id(table), name].is_like(value)
        ]

    def drew_from(self) -> list[str]:
        """Return the names of the process's generators, except PyTorch's, that the call, which learns, drew from."""
        states = {id(generator): state for generator, state in self._states}
        return [name for name, generator in GLOBAL_GENERATORS.items() if state_of(generator) != states[id(generator)]]

    # ---- the replay

    def around(self, replay: Callable[..., Any]) -> Callable[..., Any]:
        """Return `replay` wrapped so that it finds the layer as its forward did."""

        def run(*args: Any) -> Any:
            now = self.state.note()
            if self._is_as_noted(now):
                with Undoing(partial(_train, self.state.parameters, self.state.trained_in(now))):
                    return replay(*args)
            with self.put_in():
                return replay(*args)

        return run

    def _is_as_noted(self, now: list[Any]) -> bool:
        """Return True in the usual case: the layer is as before the call, and writes nothing that a replay must not find."""
        if self._learns or self._merged or self._states or self._values:
            return False
        return is_same(now, self._noted) and not any([part.writes for part in self.state.parts])

    @contextmanager
    def put_in(self) -> Iterator[None]:
        """Have the layer be as it was before the call, and undo what the block does to it.

        Raises:
            MemoError: adapters were merged into weights since, or unmerged.
        """
        self._refuse_merged()
        state, now = self.state, self.state.note()
        others = self._others(now)
        snapshots = [part.snapshot() for part, _, _ in others]
        drawn = states_of([generator for generator, _ in self._states])
        trained, trained_then = state.trained_in(now), state.trained_in(self._noted)

        def put_back() -> None:
            for snapshot in snapshots:
                snapshot()
            set_states(drawn)
            _train(state.parameters, trained)

        with Undoing(put_back):
            for part, settings, others_now in others:
                part.put_in(settings, others_now)
            if trained != trained_then:
                _train(state.parameters, trained_then)
            copies: dict[int, Any] = {}
            for _, table, name, copy in self._values:
                copy.put_in(table, name, copies)
            set_states(self._states)
            yield

    def _others(self, now: list[Any]) -> list[tuple[ModulePart, Settings, Settings]]:
        """Return the parts that the replay writes or that are set otherwise now, with their settings then and now."""
        parts, then = self.state.parts, self._noted
        written = self._learns or any([part.writes for part in parts])
        if not written and is_same(now, then):  # the usual case
            return []
        settings_then, settings_now = iter(then), iter(now)
        with_settings = [(part, noted_settings(settings_then), noted_settings(settings_now)) for part in parts]
        return [each for each in with_settings if self._learns or each[0].writes or not each[1].are(each[2])]

    def _merged_now(self) -> dict[str, list[str]]:
        return {part.path: [*part.table[_MERGED]] for part in self.state.parts if _MERGED in part.table}

    def _refuse_merged(self) -> None:
        if not self._merged:
            return
        now = self._merged_now()
        for path, was in self._merged.items():
            if now[path] != was:
                raise MemoError(
                    f"layer {self.state.name}: the adapters merged into its {path} were {was} in the forward and are {now[path]} "
                    "in the replay before its backward, so its weights are others. Merge and unmerge after the backward"
                )


class _Copy:
    """A value that a layer may write in place."""

    def __init__(self, value: Any, copies: dict[int, Any]) -> None:
        self._large = None
        if isinstance(value, torch.Tensor) and not is_small(value):
            self._large = id(value), None if value.is_inference() else value._version
        else:
            self._value = copied(value, copies)

    def is_like(self, now: Any) -> bool:
        if self._large is None:
            return alike(now, self._value)
        return id(now) == self._large[0] and not self.was_written_in_place(now)

    def was_written_in_place(self, now: Any) -> bool:
        """Return True for a large tensor that was."""
        same = self._large is not None and id(now) == self._large[0]
        return same and self._large[1] is not None and now._version != self._large[1]

    def put_in(self, table: dict[str, Any], name: str, copies: dict[int, Any]) -> None:
        """Bind the name to a copy of its own. Large tensors stay."""
        if self._large is None:
            table[name] = copied(self._value, copies)


def _train(parameters: list[nn.Parameter], flags: list[bool]) -> None:
    for parameter, flag in zip(parameters, flags, strict=True):
        if parameter.requires_grad is not flag:
            parameter.requires_grad_(flag)


@contextmanager
def unchanged(module: nn.Module) -> Iterator[None]:
    """Have the block run a module on copies of its state, which are dropped: attributes, lists and dicts that they hold, buffers,
    hooks, generators, flags.

    What the block does to parameters, to buffers above SMALL and to attributes in OF_LATEST stays.
    """
    state = LayerState("", module)
    latest: list[tuple[dict[str, Any], str, Any]] = []
    try:
        with state.before(learns=True).put_in():
            try:
                yield
            finally:
                latest += [(part.table, name, part.table[name]) for part in state.parts for name in OF_LATEST & part.table.keys()]
    finally:
        for table, name, value in latest:
            table[name] = value


def is_deepspeeds(name: str) -> bool:
    """Return True for an attribute that DeepSpeed keeps in modules: its hooks count by it in every run."""
    return name.startswith(("ds_", "applied_pre_backward", "_original_parameters", "_external_params"))


def is_small(tensor: torch.Tensor) -> bool:
    """Return True if a tensor is copied and its bytes are compared."""
    plain = type(tensor) in (torch.Tensor, nn.Parameter) and torch._C._has_storage(tensor)
    return plain and tensor.nbytes <= SMALL and not (tensor.is_meta or tensor.is_inference())


def tensors_of(module: nn.Module) -> list[torch.Tensor]:
    """Return a module's parameters and buffers, and the tensors that its parts hold as plain attributes."""
    attributes = (value for part in module.modules() for value in vars(part).values() if isinstance(value, torch.Tensor))
    return [*module.parameters(), *module.buffers(), *attributes]


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
        made = _own(value) if is_small(value) and not isinstance(value, nn.Parameter) else value
    elif type(value) is tuple:
        made = tuple([copied(inner, copies) for inner in value])
    elif type(value) in _CONTAINERS:
        made = value.copy()
        fill_with(made, [copied(inner, copies) for inner in contents_of(value)])
    elif isinstance(value, GENERATORS):
        made = another(value)
    else:
        return value
    copies[id(value)] = made
    return made


def _own(tensor: torch.Tensor) -> torch.Tensor:
    """Copy a tensor, outside its graph. The copy needs a gradient if the tensor does: autograd then saves the same."""
    made = tensor.detach().clone()
    if tensor.requires_grad and not torch.is_inference_mode_enabled():
        with torch.enable_grad():
            made = made.requires_grad_().clone()  # no leaf, which nothing could write to in place
    return made


def alike(a: Any, b: Any) -> bool:
    """Return True if two values are the same object, or equal as far as :func:`copied` copies."""
    if a is b:
        return True
    if type(a) is not type(b):
        return False
    if isinstance(a, torch.Tensor):
        return is_small(a) and same_bytes(a, b)
    if type(a) in (*_CONTAINERS, tuple):
        return len(a) == len(b) and all(map(alike, contents_of(a), contents_of(b)))
    if isinstance(a, GENERATORS):
        return state_of(a) == state_of(b)
    return isinstance(a, (bool, int, float, complex, str, bytes)) and a == b


def same_bytes(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Return True if two tensors have the same dtype, shape and bytes. NaN equals NaN."""
    if a.dtype != b.dtype or a.shape != b.shape or a.device != b.device:
        return False
    return torch.equal(*(x.detach().reshape(-1).contiguous().view(torch.uint8) for x in (a, b)))


TOO_LARGE = (
    f"it writes to its {{}}, which is above {SMALL >> 20} MiB: the replay before its backward finds it as it is then, and writes "
    "to it again"
)
