"""Every message that ds_memo and launch warn with or raise, read from the source, and what each of them must have.

A message is returned as a template: `…` stands for a value that the program fills in. It says what was seen and what to do:
`says_what_to_do` looks for the verb of a cure at the begin of a clause, for what is expected, or for how the run goes on.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

REPO = Path(__file__).parents[1]
SAYS = {
    *("warn", "_warn", "MemoWarning", "MemoError", "MemoConfigError", "NothingFits", "Refused"),
    *("UsageError", "DataError", "ModelError"),
}
"""Functions and classes whose first text is for the user."""
YIELDS = ("ds_memo/runtime/steps.py", "ds_memo/remat/diagnostics.py")
"""Files whose functions yield texts."""
ELSEWHERE = {
    ("ds_memo/config.py", "'\\n'.join(lines)"): "_explain() words them: memo.…: got …; allowed: …",
    ("ds_memo/errors.py", "f'ds_memo: {message}'"): "passes a text on",
    ("ds_memo/runtime/session.py", "message"): "passes a text on",
    ("ds_memo/runtime/steps.py", "message"): "passes a text on",
    ("ds_memo/remat/layer_host.py", "f'layer {layer.name}: {reason}'"): "of remat/diagnostics.py and compiled_layers/layers.py",
    (
        "ds_memo/autotune/policy.py",
        "host_too_small(f'{swapped} swapped layers like {layer.name}', need, least, budget, fits)",
    ): "as too_little_host_memory",
    ("ds_memo/solve/refusals.py", "message"): "worded in host_too_small()",
    ("ds_memo/autotune/ranks.py", "f'rank {rank}: {message}'"): "another rank's NothingFits",
    ("ds_memo/solve/refusals.py", "f'{what}: {missing}. What helps: {ranks}, {others}.'"): "worded in nothing_fits()",
}
"""Texts that are put together in several steps."""


VERBS = """
    add attach begin build call check choose clone convert correct cut detach drop end export fix free give install join keep
    leave let load look lower make mend merge move name number pad pass pip print quote raise read register remove report run
    send set shorten start switch take train try turn use wait watch wrap write
"""
_CURE = re.compile(rf"(?:^|[.;:,(?] |\b(?:and|or|then) )(?:{'|'.join(VERBS.split())})\b", re.IGNORECASE)
_GOES_ON = re.compile(
    r"\b(?:expected|allowed|goes on|needs nothing|again|anew|helps?|whole|stays in|(?:is|are) used|measured at)\b"
)
_DEFECT = "a defect of ds_memo, which no user can cause"
_PASSED_ON = "the value that ends it says what to do"
_MEASURING = "stands inside `no profile could be made (…)`, which says what to set"
NO_CURE = {
    "frame … cannot go from '…' to '…'": _DEFECT,
    "frame … was read while '…'; only a 'ready' frame can be read": _DEFECT,
    "the host slab was closed while … bytes of it were allocated": _DEFECT,
    "a block in files cannot go from '…' to '…'": _DEFECT,
    "layer … has nothing to train": _MEASURING,
    "layer … runs other products each time (parts are skipped, experts in a loop)": _MEASURING,
    "… ran a training forward without calling a layer": _MEASURING,
    "layer … takes no hidden states (batch, length, …) that a profile could vary": _MEASURING,
    "layer … has … GiB of parameters, … GiB of the device are free": _MEASURING,
    "cannot write …: …": _PASSED_ON,
    "cannot read …: …": _PASSED_ON,
    "rank … could not … its file in …: …": "stands inside the two messages of nvme/file_home.py",
    "… was given to ds_memo.keep_whole, but …": _PASSED_ON,
    "this … runs without memo: …": _PASSED_ON,
    "layer calls are recomputed for which the system has no host memory: …": _PASSED_ON,
    "memo.head_groups: … groups are not used in …'s attention: …": _PASSED_ON,
    "host memory: … needs … GiB more; …": _PASSED_ON,
    "… Those of memo.nvme are not enough: ….": _PASSED_ON,
}
"""Messages that name no cure, and why."""


def says_what_to_do(message: str) -> bool:
    """Return True if the message names a cure, what is expected, or how the run goes on."""
    return bool(_CURE.search(message) or _GOES_ON.search(message))


def messages() -> Iterator[tuple[str, str]]:
    """Yield file and template of each text.

    Raises:
        AssertionError: a text is made in a way that this file cannot read, and ELSEWHERE does not name it.
    """
    files = [*REPO.glob("ds_memo/**/*.py"), *REPO.glob("ops/*.py"), *REPO.glob("launch/*.py")]
    trees = {path.relative_to(REPO).as_posix(): ast.parse(path.read_text()) for path in files}
    constants = {name: value for tree in trees.values() for name, value in _constants(tree)}
    for path, tree in trees.items():
        for node in _texts(path, tree):
            if (path, ast.unparse(node)) in ELSEWHERE:
                continue
            text = _template(node, constants)
            assert text and re.search("[a-z]{3}|JSON", text), f"{path}:{node.lineno}: cannot read {ast.unparse(node)}"
            yield path, " ".join(text.split())


def _texts(path: str, tree: ast.Module) -> Iterator[ast.expr]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and _name(node.func) in SAYS:
            yield from node.args[:1]
        elif isinstance(node, ast.Yield) and path in YIELDS:
            yield node.value


def _constants(tree: ast.Module) -> Iterator[tuple[str, ast.expr]]:
    for node in tree.body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            yield node.targets[0].id, node.value


def _name(node: ast.expr) -> str:
    return node.id if isinstance(node, ast.Name) else getattr(node, "attr", "")


def _template(node: ast.expr, constants: dict[str, ast.expr]) -> str | None:
    """Return the text of an expression, or None where it is not a text that stands in the source."""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else None
    if isinstance(node, ast.FormattedValue):
        constant = constants.get(_name(node.value))
        return _template(constant, {}) or "…" if constant is not None else "…"
    if isinstance(node, ast.JoinedStr):
        return "".join(_template(part, constants) or "…" for part in node.values)
    if isinstance(node, ast.BinOp):
        return (_template(node.left, constants) or "…") + (_template(node.right, constants) or "…")
    if isinstance(node, ast.Call) and _name(node.func) == "format":
        return re.sub(r"\{[^}]*\}", "…", _template(node.func.value, constants) or "")
    if _name(node) in constants:
        return _template(constants[_name(node)], constants)
    return None
