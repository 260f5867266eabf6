"""Writes random programs on logits, by the grammar of tests/data/fuzz/logits.txt: lists of statements of Python.

Each statement runs with stock at once; one that stock refuses is dropped. So a program never breaks off with stock, but for
what a dropped statement left behind.
"""

from __future__ import annotations

import copy
import functools
import inspect
import math
import pickle
import random
import re
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._pytree import tree_leaves

GRAMMAR = Path(__file__).resolve().parents[1] / "data" / "fuzz" / "logits.txt"
BATCH, LENGTH, HIDDEN, VOCAB = 2, 5, 4, 7
UNDER = {"": 90, "with torch.no_grad(): ": 7, "with torch.inference_mode(): ": 1, "with torch.enable_grad(): ": 2}
"""What a statement begins with, with how often."""
COMMON = ("view", "op", "reduce", "common", "term", "again", "gradient", "hook")
"""Kinds of statements of programs most of which stay lazy."""
KEPT = ("X", "KEY", "SEED", "B", "LABELS")
"""Words that mean the same at each place in a template; others are drawn again."""


# ---- what programs call


def drawn(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def values(seed: int, *shape: int) -> torch.Tensor:
    return torch.randint(-2048, 2049, shape, generator=drawn(seed)).double() / 1024


def mask(seed: int, *shape: int) -> torch.Tensor:
    """Return a mask; of seed 0 it has no True."""
    return (torch.rand(shape, generator=drawn(seed)) < 0.5) & (seed > 0)


def index(seed: int, high: int, *shape: int) -> torch.Tensor:
    return torch.randint(0, high, shape, generator=drawn(seed))


def labels(seed: int, high: int, *shape: int) -> torch.Tensor:
    """Return labels, of which a quarter does not count; of seed 0 none counts."""
    ignored = mask(seed + 1, *shape) & mask(seed + 2, *shape) | (seed == 0)
    return torch.where(ignored, -100, index(seed, high, *shape))


class Square(torch.autograd.Function):
    """As kernels do."""

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(logits)
        return logits * logits

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return 2 * ctx.saved_tensors[0] * gradient


GIVEN = {each.__name__: each for each in (values, mask, index, labels, Square, copy, math, pickle, torch)} | {"F": F, "nn": nn}
GIVEN |= {"checkpoint": functools.partial(torch.utils.checkpoint.checkpoint, use_reentrant=False)}
GIVEN |= {"ids": index(1, VOCAB, BATCH, LENGTH)}


@functools.lru_cache(20_000)
def compiled(text: str, how: str = "exec") -> Any:
    return compile(text, "<program>", how)


# ---- the grammar


class Kind(NamedTuple):
    weight: int
    flags: list[str]
    templates: list[str]


@functools.cache
def grammar() -> dict[str, Kind]:
    kinds: dict[str, Kind] = {}
    for line in GRAMMAR.read_text().splitlines():
        if head := re.fullmatch(r"\[(\w+) (\d+)(.*)\]", line):
            kinds[head[1]] = kind = Kind(int(head[2]), head[3].split(), [])
        elif line and not line.startswith("# "):
            kind.templates.extend(re.split(" {2,}", line))
    return kinds


CALLS = {
    "INPLACE": "X.{}(A)",
    "METHOD": "X.{}(A)",
    "FOREACH": "torch.{}([X], A)",
    "FUNCTION": "F.{}(X, A, inplace=True)",
    "OUT": "torch.{}(Z, A, out=X)",
}
"""Words for a call of any name that torch has, with A for the arguments."""
SHAPES = ((BATCH, LENGTH, VOCAB), (BATCH * LENGTH, VOCAB))
LISTS = ("", "NUMBER", "[Z]", "[FULL]", "[FULL], [FULL]", "[FULL], NUMBER")
ARGUMENTS = (
    *("", "NUMBER", "INT", "FULL", "VEC", "ROW", "Z", "FULL, FULL", "FULL, NUMBER", "NUMBER, NUMBER", "NUMBER, FULL", "MASK"),
    *("MASK, NUMBER", "MASK, FULL", "DIM", "DIM, DIM", "DIM, INT", "INT, DIM", "DIM, 0, 2", "-1, WHERE", "-1, WHERE, NUMBER"),
    *("-1, WHERE, PIECE", "-1, WHERE, PIECE, 'sum'", "-1, WHERE, PIECE, 'amax'", "-1, SOME", "-1, SOME, NUMBER"),
    *("-1, SOME, PIECE", "-1, SOME, PIECE, 'mean'", "(index(1, FIRST, 2),), SCALAR", "(MASK,), SCALAR", "2, 0, 1.0", "[SHAPE]"),
    *("index(1, NUMEL, 2), values(2, 2)", "torch.float64", "values(1, FIRST, SECOND, 3), values(2, FIRST, 3, LAST)"),
    *("values(1, FIRST, 3), values(2, 3, LAST)", "values(1, FIRST), values(2, LAST)", "values(1, FIRST, 3), values(2, 3)"),
)  # fmt: skip
_BARRED = re.compile(
    "sparse|cuda|hpu|xpu|mtia|ipu|share|storage|pin_|names|align|rename|refine|dlpack|module_load|mkldnn|resize|^set_|map|apply|"
    "retain|quant|crow|ccol|indices$|^is_|^new_|as_strided|requires|svd|^qr|gqr|mqr|^lu|inverse|coalesce|philox|backward|register|numpy|"
    "dense|stft|tolist|item|nelement|element_size|get_device|dim_order|grad"
)
"""Methods that no program calls by trying: they need other tensors, read no values, or are in the grammar by hand."""
_UNSEEN = re.compile(r"numpy\(\)(\.fill|\)|\[)|dlpack|storage|\.data( =|\.\w+_\(|\[)|detach\(\)\.\w+_\(|map_\(|apply_\(")
"""Writes that no version counts, or that stock's own graph does not see."""


@functools.cache
def named(word: str) -> list[str]:
    """Return the names in torch that a word stands for a call of."""
    methods = [name for name in dir(torch.Tensor) if not name.startswith("_") and not _BARRED.search(name)]
    return {
        "INPLACE": [name for name in methods if name.endswith("_")],
        "METHOD": [name for name in methods if not name.endswith("_")],
        "FOREACH": [name for name in dir(torch) if name.startswith("_foreach_") and name.endswith("_")],
        "FUNCTION": [name for name, fn in vars(F).items() if inspect.isfunction(fn) and "inplace" in fn.__code__.co_varnames],
        "OUT": [name for name in methods if hasattr(torch, name)],
    }[word]


@functools.cache
def calls(word: str, name: str) -> list[str]:
    """Return the calls of a name that stock takes, found by trying."""
    text, arguments = CALLS[word].format(name), LISTS if word == "FOREACH" else ARGUMENTS
    tried = [text.replace("A", each) if each else re.sub("(, )?A", "", text) for each in arguments]
    with torch.inference_mode(False), torch.enable_grad(), torch.random.fork_rng([]):
        return [call for call in dict.fromkeys(tried) if any(_runs(call, shape) for shape in SHAPES)]


def _runs(call: str, shape: tuple[int, ...]) -> bool:
    """Return True if a call gives tensors, or nothing."""
    space = {**GIVEN, "x": values(1, *shape)}
    try:
        got = eval(Writer(random.Random(0), "", space).fill(call, "x", space["x"]), space)
    except Exception:
        return False
    return got is None or any(isinstance(each, torch.Tensor) for each in (got if isinstance(got, (tuple, list)) else [got]))


class Writer:
    """Writes one program, and runs it with stock as it goes.

    Args:
        space: the names that a program begins with.
    """

    def __init__(self, pick: random.Random, setting: str, space: dict[str, Any]) -> None:
        self.pick, self.setting, self.space = pick, setting, space
        self.program: list[str] = []
        self.names: dict[str, list[str]] = {"logits": ["x"], "others": []}
        self.count = 0
        self.begun = ""

    def write(self) -> list[str]:
        pick = self.pick
        self.begin()
        weights, most = {name: kind.weight for name, kind in grammar().items()}, 9
        if pick.random() < 0.4:
            weights, most = {name: weights[name] for name in COMMON}, 4
        for kind in pick.choices(list(weights), list(weights.values()), k=pick.randint(1, most)):
            self.add(kind)
        for kind in ["term"] * pick.randint(0, 2):
            self.add(kind)
        if self.say(pick.choice(["loss.backward()"] * 4 + ["loss.backward(retain_graph=True); loss.backward()"])):
            for kind in pick.choices(["reduce", "view", "called", "weight", "term"], k=pick.choice([0, 0, 1, 2])):
                self.add(kind)
        for name in re.findall(r"(\w+)\.retain_grad", "\n".join(self.program)):
            self.new(f"{name}.grad")
        return self.program

    def begin(self) -> None:
        if self.setting == "model":
            self.say("x = model(input_ids=ids).logits")
            self.begun = self.program[-1]
            return
        shape = self.pick.choice([f"{BATCH}, {LENGTH}"] * 8 + [f"{BATCH * LENGTH}"] * 2 + [f"{BATCH}, 1, {LENGTH}"])
        grad = ".requires_grad_()" if self.setting in ("trained", "frozen head") else ""
        self.say(f"h0 = values({self.pick.randrange(1, 99)}, {shape}, {HIDDEN}){grad}")
        self.say(f"h = {self.pick.choice(['h0 * 1', 'h0 * 1', 'h0', 'h0[:]'])}")
        if not self.say(self.mode() + "x = head(h)"):
            self.say("x = head(h)")
        self.begun = self.program[-1]

    def add(self, kind: str) -> None:
        """Add a statement of a kind; three tries."""
        _, flags, templates = grammar()[kind]
        if kind in ("gradient", "backward"):
            self.add("term")
        for _ in range(3):
            name = self.pick.choice([*self.names["logits"], *self.names["logits"][-2:], "x"])
            if "name" not in flags and self.pick.random() < 0.25:
                name = self.fill(self.pick.choice(grammar()["view"].templates), name, self.value(name))
            x, template = self.value(name), self.pick.choice(templates)
            if not isinstance(x, torch.Tensor):
                continue
            if kind == "hook" and self.changed():  # torch 2.13 itself dies of a hook on a view whose base has changed
                continue
            before, text = "" if "plain" in flags else self.mode(), self.fill(template, name, x)
            if _UNSEEN.search(text) and self.program[-1] != self.begun:  # autograd may have saved it: garbage with stock
                continue
            into = next((flag for flag in flags if flag in self.names), None)
            if into and self.new(text, before, self.names[into]):
                return
            if "loss" in flags:
                text = f"loss = loss + ({text})"
            if not into and self.say(before + text):
                return

    def changed(self) -> bool:
        """Return True if a tensor has been changed in place."""
        tensors = [each for each in tree_leaves(list(self.space.values())) if isinstance(each, torch.Tensor)]
        return any(not each.is_inference() and each._version for each in tensors if not isinstance(each, torch.nn.Parameter))

    def mode(self) -> str:
        return self.pick.choices(list(UNDER), list(UNDER.values()))[0]

    def new(self, expression: str, mode: str = "", into: list[str] | None = None) -> bool:
        """Add ``v3 = expression``."""
        self.count += 1
        name = f"v{self.count}"
        if not self.say(f"{mode}{name} = {expression}"):
            return False
        got = self.space[name]
        parts = [(f"{name}[{i}]", part) for i, part in enumerate(got)] if isinstance(got, (tuple, list)) else [(name, got)]
        if into is not None:
            into += [text for text, part in parts if isinstance(part, torch.Tensor)]
        return True

    def say(self, statement: str) -> bool:
        """Add a statement, if stock takes it."""
        try:
            exec(compiled(statement), self.space)
        except Exception:
            return False
        self.program.append(statement)
        return True

    def value(self, text: str) -> Any:
        try:
            return eval(compiled(text, "eval"), self.space)
        except Exception:
            return None

    def fill(self, template: str, name: str, x: Any) -> str:
        """Write a template for the logits that `name` is a text of."""
        if not isinstance(x, torch.Tensor):
            return name
        known = {"X": name}

        def word(match: re.Match) -> str:
            if match[0] not in known:
                known[match[0]] = self.word(match[0], name, x, known)
            return known[match[0]] if match[0] in KEPT else known.pop(match[0])

        return re.sub(r"\b(?:[A-Z]{2,}|[XZB])\b", word, template)

    def word(self, word: str, name: str, x: torch.Tensor, known: dict[str, str]) -> str:
        pick, shape = self.pick, x.shape
        first, last, lead = shape[0] if shape else 1, shape[-1] if shape else 1, shape[:-1]

        def numbers(sizes: torch.Size) -> str:
            return ", ".join(map(str, sizes))

        def value() -> str:
            part = f"{name}[{known['KEY']}]"
            return self.fill(pick.choice(grammar()["other"].templates), part, self.value(part))

        def same() -> str:
            named = [each for names in self.names.values() for each in names]
            return pick.choice([each for each in named if getattr(self.value(each), "shape", None) == shape] or [name])

        def ordinary() -> str:
            self.new(self.fill("FULL", name, x), into=self.names["others"])
            return f"v{self.count}"

        plain = {
            "Z": lambda: pick.choice(self.names["logits"]), "B": ordinary, "VALUE": value, "SAME": same,
            "DRAWN": lambda: str(pick.randrange(1, 90)), "COLUMN": lambda: str(pick.randrange(last or 1)),
            "DIM": lambda: str(pick.randrange(-max(x.dim(), 1), max(x.dim(), 1))), "SHAPE": lambda: numbers(shape),
            "LEAD": lambda: numbers(lead), "FIRST": lambda: str(first), "LAST": lambda: str(last),
            "SECOND": lambda: numbers(shape[1:2]), "NUMEL": lambda: str(x.numel()), "ROWS": lambda: str(lead.numel()),
            "PARTS": lambda: ", ".join(pick.choice(grammar()["part"].templates) for _ in shape),
        }  # fmt: skip
        if word in plain:
            return plain[word]()
        if word in CALLS:
            templates = []
            while not templates:
                templates = calls(word, pick.choice(named(word)))
        else:
            templates = grammar()[word.lower()].templates if word.lower() in grammar() else [word]
        return self.fill(pick.choice(templates), name, x) if templates != [word] else word
