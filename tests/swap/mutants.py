"""The swap engine with one of its waits taken out: negative controls for the checkers.

Every `self.streams.wait(…)` of ds_memo/swap/engine.py is found in its source, so a wait that is added later is controlled too.
"""

from __future__ import annotations

import ast
import sys
import types
from pathlib import Path

from ds_memo.swap import engine


def waits() -> list[str]:
    """Return one name per wait, in source order: its method and its source, with a number if that is not unique."""
    names = [f"{method}: {ast.unparse(call)}" for method, call in _waits(_parse())]
    return [f"{name} #{names[:index].count(name) + 1}" if names.count(name) > 1 else name for index, name in enumerate(names)]


def engine_without(wait: str) -> type[engine.SwapEngine]:
    tree = _parse()
    _, unwanted = list(_waits(tree))[waits().index(wait)]

    class Remove(ast.NodeTransformer):
        def visit_Expr(self, node: ast.Expr) -> ast.AST:
            return ast.copy_location(ast.Pass(), node) if node.value is unwanted else node

    module = types.ModuleType(f"{engine.__name__}_without_a_wait")
    sys.modules[module.__name__] = module  # dataclasses look their module up
    exec(compile(ast.fix_missing_locations(Remove().visit(tree)), engine.__file__, "exec"), module.__dict__)
    return module.SwapEngine


def _parse() -> ast.Module:
    return ast.parse(Path(engine.__file__).read_text())


def _waits(tree: ast.Module):
    (cls,) = (node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "SwapEngine")
    for method in (node for node in cls.body if isinstance(node, ast.FunctionDef)):
        for node in ast.walk(method):
            call = node.value if isinstance(node, ast.Expr) else None
            if isinstance(call, ast.Call) and ast.unparse(call.func) == "self.streams.wait":
                yield method.name, call
