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
_PARTS_OF_OWNERS = (types.CellType, tuple, staticmethod, classmethod, dict)
"""A closure's cell, a tuple of cells or defaults, a dict of keyword defaults or of a class."""


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
            names = (n["__name__"] for n in gc.get_referrers(holder) if _is_module_globals(n))
            yield next((f"a functools.partial in module {name}" for name in names), "a functools.partial")
        elif isinstance(holder, types.FunctionType) and any(
            held is part for part in (holder.__closure__, holder.__defaults__, holder.__kwdefaults__)
        ):
            yield f"function {holder.__module__}.{holder.__qualname__}"
        elif isinstance(holder, type):
            yield f"class {holder.__module__}.{holder.__qualname__}"
        elif depth and isinstance(holder, _PARTS_OF_OWNERS) and not _is_module_globals(holder):
            yield from _owners(holder, depth - 1)


def _is_module_globals(holder: Any) -> bool:
    return isinstance(holder, dict) and "__name__" in holder and "__spec__" in holder
