"""Names that modules took from elsewhere (``from deepspeed import initialize``) before what they name was replaced."""

from __future__ import annotations

import functools
import gc
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

Taken = tuple[dict[str, Any], str]
"""A module's globals, and the name in them."""


def replace_in_modules(before: Callable[..., Any], after: Callable[..., Any]) -> list[Taken]:
    """Give every module-level name of `before` the value `after`, whatever the name is.

    Also in namespaces that are in no ``sys.modules``, such as those of scripts that are run by a runner.

    Returns:
        What was replaced, for :func:`restore`.
    """
    # By modules too: objects that gc.freeze() has put aside are not found as referrers.
    of_modules = [vars(module) for module in list(sys.modules.values()) if isinstance(module, types.ModuleType)]
    others = [holder for holder in gc.get_referrers(before) if _is_module_globals(holder)]
    spaces = {id(names): names for names in (*of_modules, *others)}
    taken = [(names, name) for names in spaces.values() for name, value in list(names.items()) if value is before]
    for names, name in taken:
        names[name] = after
    return taken


def restore(taken: list[Taken], before: Callable[..., Any], after: Callable[..., Any]) -> None:
    """Undo replace_in_modules(), except where other code has put another function since."""
    while taken:
        names, name = taken.pop()
        if names.get(name) is after:
            names[name] = before


def other_holders(function: Callable[..., Any]) -> list[str]:
    """Name holders of a function that cannot be replaced: partials, defaults of arguments, closures, attributes of classes."""
    return sorted(set(_owners(function)))


def _owners(held: Any, depth: int = 3) -> Iterator[str]:
    for holder in gc.get_referrers(held):
        if isinstance(holder, functools.partial):
            yield f"a functools.partial{_in_module(holder)}"
        elif isinstance(holder, types.FunctionType) and _holds(holder, held):
            yield f"function {holder.__module__}.{holder.__qualname__}"
        elif isinstance(holder, type):
            yield f"class {holder.__module__}.{holder.__qualname__}"
        elif depth and _is_part_of_an_owner(holder):
            yield from _owners(holder, depth - 1)


def _is_part_of_an_owner(holder: Any) -> bool:
    """Return True for a closure's cell, a tuple of cells or defaults, a dict of keyword defaults or of a class."""
    return isinstance(holder, (types.CellType, tuple, staticmethod, classmethod)) or (
        isinstance(holder, dict) and not _is_module_globals(holder)
    )


def _holds(function: types.FunctionType, held: Any) -> bool:
    return any(held is part for part in (function.__closure__, function.__defaults__, function.__kwdefaults__))


def _is_module_globals(holder: Any) -> bool:
    return isinstance(holder, dict) and "__name__" in holder and "__spec__" in holder


def _in_module(value: Any) -> str:
    names = (n["__name__"] for n in gc.get_referrers(value) if _is_module_globals(n))
    return next((f" in module {name}" for name in names), "")
