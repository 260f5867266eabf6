"""Random programs on logits, run with stock and with lazy logits: every value and gradient must be the same.

    python -m tests.fuzz.logits_programs --programs 20000 --seed 0

prints each kind of failure, with a program cut to the statements that it needs, and how many programs had which outcome:

    exact: as stock            whole: as stock, a statement warned     refused: a statement raised MemoError
    unread: MemoError only when every value was read at the end        different, crash: a defect
    stock raises               unstable: results with stock change when weights change by 10⁻¹⁴ (1/x near 0, say)

The writer runs each statement with stock at once, and drops what stock refuses. Hidden states and weights are multiples of 2⁻¹⁰:
logits are the same to the last bit for any number of rows in a tile. Only what later ops round can differ.
"""

from __future__ import annotations

import argparse
import copy
import functools
import inspect
import math
import pickle
import random
import re
import time
import warnings
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

import ds_memo

GRAMMAR = Path(__file__).resolve().parents[1] / "data" / "fuzz" / "logits.txt"
BATCH, LENGTH, HIDDEN, VOCAB, TILE = 2, 5, 4, 7, 4
"""10 rows: two tiles and a rest."""
MEMO = {"enabled": True, "alpha": 1.0, "resident_layers": 0, "plan": {"enabled": False}}
SETTINGS = {"trained": 16, "frozen head": 3, "frozen": 3, "no_grad": 3, "inference_mode": 1, "model": 1}
"""What needs gradients, with how often; "model": all, and logits of the whole model."""
MODES = {"no_grad": torch.no_grad, "inference_mode": torch.inference_mode}
UNDER = {"": 90, "with torch.no_grad(): ": 7, "with torch.inference_mode(): ": 1, "with torch.enable_grad(): ": 2}
COMMON = ("view", "op", "reduce", "common", "term", "again", "gradient", "hook")
"""Kinds of statements of programs most of which stay lazy."""
KEPT = ("X", "KEY", "SEED", "B", "LABELS")
"""Words that mean the same at each place in a template; others are drawn again."""
DEFECTS = ("different", "crash")
OUTCOMES = ("exact", "whole", "refused", "unread", *DEFECTS, "stock raises", "unstable", "left out")


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
            return
        shape = self.pick.choice([f"{BATCH}, {LENGTH}"] * 8 + [f"{BATCH * LENGTH}"] * 2 + [f"{BATCH}, 1, {LENGTH}"])
        grad = ".requires_grad_()" if self.setting in ("trained", "frozen head") else ""
        self.say(f"h0 = values({self.pick.randrange(1, 99)}, {shape}, {HIDDEN}){grad}")
        self.say(f"h = {self.pick.choice(['h0 * 1', 'h0 * 1', 'h0', 'h0[:]'])}")
        if not self.say(self.mode() + "x = head(h)"):
            self.say("x = head(h)")

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
            if kind == "hook" and not x.is_inference() and x._is_view() and x._version:  # torch 2.13 itself dies of some of these
                continue
            before, text = "" if "plain" in flags else self.mode(), self.fill(template, name, x)
            into = next((flag for flag in flags if flag in self.names), None)
            if into and self.new(text, before, self.names[into]):
                return
            if "loss" in flags:
                text = f"loss = loss + ({text})"
            if not into and self.say(before + text):
                return

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


# ---- both sides


class Run(NamedTuple):
    found: dict[str, Any]
    error: Exception | None
    ended: bool
    """False if a statement raised, not a look at the results."""
    warned: bool
    """True if a statement warned: at the end all are made whole."""


class Sides:
    """A small model as stock, and its copy with memo."""

    def __init__(self) -> None:
        from transformers import LlamaConfig, LlamaForCausalLM

        torch.manual_seed(0)
        sizes = {"vocab_size": VOCAB, "hidden_size": HIDDEN, "intermediate_size": 6, "num_hidden_layers": 1}
        self.stock = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=1, initializer_range=0.5)).double().train()
        self.stock.lm_head = nn.Linear(HIDDEN, VOCAB, dtype=torch.float64)
        with torch.no_grad():
            self.stock.lm_head.weight.copy_(values(7, VOCAB, HIDDEN))
            self.stock.lm_head.bias.copy_(values(8, VOCAB))
        self.memo = copy.deepcopy(self.stock)
        self.start = copy.deepcopy(dict(self.stock.named_parameters()))
        self.handle = ds_memo.attach(self.memo, MEMO)
        for head in self.handle._session.heads:
            head.rows = TILE

    def space(self, model: nn.Module, setting: str, shift: float = 0.0) -> dict[str, Any]:
        """Return the names that a program begins with, and the model as it was before the first.

        Args:
            shift: relative change of each weight, at random.
        """
        frozen = {"frozen": "", "frozen head": "lm_head"}.get(setting, "no parameter")
        for name, start in self.start.items():
            owner, _, last = name.rpartition(".")
            noise = 2 * torch.rand(start.shape, generator=drawn(len(name))) - 1
            parameter = nn.Parameter(start.detach() * (1 + shift * noise), requires_grad=frozen not in name)
            setattr(model.get_submodule(owner), last, parameter)
        torch.manual_seed(3)
        return {**GIVEN, "head": model.lm_head, "model": model, "loss": torch.zeros((), dtype=torch.float64), "seen": []}

    def write(self, seed: int, number: int) -> tuple[str, list[str]]:
        """Return a setting and a program."""
        pick = random.Random(seed * 1_000_003 + number)
        setting = pick.choices(list(SETTINGS), list(SETTINGS.values()))[0]
        with MODES.get(setting, nullcontext)():
            return setting, Writer(pick, setting, self.space(self.stock, setting)).write()

    def run(self, model: nn.Module, setting: str, program: list[str], shift: float = 0.0) -> Run:
        space, session, ended, warned = self.space(model, setting, shift), self.handle._session, False, False
        session._warned.clear()
        session.warnings.clear()
        try:
            with MODES.get(setting, nullcontext)():
                for statement in program:
                    exec(compiled(statement), space)
                ended, warned = True, bool(session.warnings)
                return Run(dict(read(space)), None, ended, warned)
        except Exception as error:
            return Run({}, error, ended, warned)

    def judge(self, setting: str, program: list[str]) -> tuple[str, str]:
        """Return an outcome, and what was seen."""
        want = self.run(self.stock, setting, program)
        if want.error is not None:
            return "stock raises", type(want.error).__name__
        got = self.run(self.memo, setting, program)
        if got.error is not None:
            refused = "unread" if got.ended else "refused"
            text = next(iter(str(got.error).splitlines()), "")
            return refused if isinstance(got.error, ds_memo.MemoError) else "crash", f"{type(got.error).__name__}: {text}"
        tolerance = tolerance_of(program)
        off = differences(got.found, want.found, tolerance)
        if off:
            moved = self.run(self.stock, setting, program, 1e-14 if tolerance < 1e-9 else tolerance / 100)
            unstable = off.keys() if moved.error else differences(moved.found, want.found, tolerance)
            stable = [f"{name}: {text}" for name, text in off.items() if name not in unstable]
            return ("different", stable[0]) if stable else ("unstable", next(iter(off)))
        return ("whole" if got.warned else "exact"), ""

    def shrink(self, setting: str, program: list[str]) -> list[str]:
        """Drop statements and modes as long as the outcome is the same."""
        outcome, seen = self.judge(setting, program)
        changed = True
        while changed:
            changed = False
            for at in reversed(range(len(program))):
                bare = re.sub(r"^with [^:]*: |; loss.backward\(\)$", "", program[at])
                for instead in [[], [bare]] if bare != program[at] else [[]]:
                    fewer = program[:at] + instead + program[at + 1 :]
                    now, what = self.judge(setting, fewer)
                    if now == outcome and (now != "crash" or what.partition(":")[0] == seen.partition(":")[0]):
                        program, changed = fewer, True
                        break
        return program


def tolerance_of(program: list[str]) -> float:
    text = "\n".join(program)
    return 3e-2 if re.search("half|float16", text) else 1e-5 if re.search(r"\.float\(|float32", text) else 1e-10


def read(space: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield every value that a program made, by name, and the gradients of leaves and parameters."""
    model, head = space["model"], space["head"]
    made = [(name, value) for name, value in space.items() if name not in GIVEN and name not in ("model", "head", "loss")]
    for name, value in [*made, ("loss", space["loss"]), ("head.weight", head.weight), ("head.bias", head.bias)]:
        parts = value if isinstance(value, (tuple, list)) else [value]
        for number, each in enumerate(parts):
            name = f"{name.partition('[')[0]}[{number}]" if parts is value else name
            if isinstance(each, torch.Tensor):
                yield name, plain(each)
                yield f"{name}.requires_grad", each.requires_grad
                if each.requires_grad and each.is_leaf:
                    yield f"{name}.grad", plain(each.grad)
            elif isinstance(each, (bool, int, float)):
                yield name, torch.tensor(each)
    for name, parameter in model.named_parameters():
        yield f"{name}.grad", plain(parameter.grad)


def plain(value: torch.Tensor | None) -> torch.Tensor | None:
    if value is None or type(value) in (torch.Tensor, nn.Parameter):
        return None if value is None else value.detach().clone()
    return torch.tensor(value.detach().tolist(), dtype=value.dtype).reshape(value.shape)


def differences(got: dict[str, Any], want: dict[str, Any], tolerance: float) -> dict[str, str]:
    """Return by name what is not the same to `tolerance` of the largest finite value."""

    def brief(value: Any) -> str:
        return f"{tuple(value.shape)} {value.dtype}" if isinstance(value, torch.Tensor) else str(value)

    found = {}
    for name, a in want.items():
        b = got.get(name, "missing")
        if brief(a) != brief(b):
            found[name] = f"{brief(b)}, stock {brief(a)}"
        elif isinstance(a, torch.Tensor):
            a, b = a.double(), b.double()
            least = tolerance * max(a[a.isfinite()].abs().max().item() if a.isfinite().any() else 0.0, 1e-3)
            if not ((a == b) | (a.isnan() & b.isnan()) | ((a - b).abs() <= least)).all():
                found[name] = f"off by {(a - b).abs().nan_to_num(math.inf).max().item():.3g}"
    return found


# ---- many programs

KINDS = {
    "hidden states changed": r"^h0?[.\[]|out=h\b",
    "weights changed": r"head\.\w+(\.data)? = |head\.\w+(\.data|\.detach\(\))?[.\[]\w+[(\]]|optim|init\.ones_|head\.requires",
    "gradient of logits": r"autograd\.grad|\.backward\(v",
    "gradient kept, or a hook": r"retain_grad|register_hook",
    "torch.func": r"torch\.func",
    "memory shared": r"numpy|dlpack|storage|as_strided|set_\(|\.data = ",
    "a factor of inf": r"math\.inf|/ 0\b",
    "no row counts": r"labels\(0|:0\]|mask\(0",
    "foreach": r"_foreach_",
    "out=": r"out=",
    "inplace=True, nn.init": r"inplace=|init\.|hardtanh_\(|threshold_\(",
    "in place, by a method": r"\.\w+_\(",
    "entries set": r"\] [-+*/]?= ",
    "augmented assignment": r"\w (\*\*|//|[-+*/%])= ",
}  # fmt: skip
"""Kinds of wrong values: what is found first in the shortest program."""


def kind_of(outcome: str, seen: str, program: list[str]) -> str:
    if outcome != "different":
        return f"{outcome}: {re.sub('-?[0-9]+', '#', seen)[:90]}"
    if "requires_grad" in seen:
        return f"{outcome}: requires_grad"
    text = "\n".join(re.sub(r"^with [^:]*: ", "", line) for line in program if not re.match(r"h0? = ", line))
    return f"{outcome}: {next((kind for kind, what in KINDS.items() if re.search(what, text, re.MULTILINE)), 'another')}"


class Failure(NamedTuple):
    number: int
    setting: str
    seen: str
    program: list[str]


def fuzz(
    programs: int, seed: int, sides: Sides | None = None, shrunk: int = 200, without: str = "$^", verbose: bool = False
) -> tuple[Counter[str], dict[str, list[Failure]]]:
    """Return how many programs had each outcome, and by kind those that are not as stock.

    Args:
        shrunk: defects that are cut to the statements that they need; later ones are as they were written.
        without: no program in which this pattern is found.
    """
    sides, counts, kinds = sides or Sides(), Counter(), defaultdict(list)
    for number in range(programs):
        setting, program = sides.write(seed, number)
        if verbose:
            print(f"# program {number}", setting, *program, sep="\n", flush=True)
        outcome, seen = ("left out", "") if re.search(without, "\n".join(program)) else sides.judge(setting, program)
        counts[outcome] += 1
        if outcome in DEFECTS and shrunk > 0:
            shrunk -= 1
            program = sides.shrink(setting, program)
            outcome, seen = sides.judge(setting, program)
        if outcome in (*DEFECTS, "refused", "unread", "unstable"):
            kinds[kind_of(outcome, seen, program)].append(Failure(number, setting, seen, program))
    return counts, kinds


def show(setting: str, program: str) -> None:
    """Print the outcome of a program."""
    print(*Sides().judge(setting, program.strip().splitlines()))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--programs", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--shrink", type=int, default=200, help="defects that are cut to the statements that they need")
    parser.add_argument(
        "--verbose", action="store_true", help="print each program before it runs: what a segmentation fault needs"
    )
    parser.add_argument("--without", default="$^", help="leave out programs in which this pattern is found")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    began = time.perf_counter()
    counts, kinds = fuzz(arguments.programs, arguments.seed, None, arguments.shrink, arguments.without, arguments.verbose)
    for kind, failures in sorted(kinds.items(), key=lambda item: -len(item[1])):
        number, setting, seen, program = min(failures, key=lambda failure: len("\n".join(failure.program)))
        print(f"\n# {kind} ({len(failures)} times; this is program {number}): {seen[:200]}")
        if kind.startswith(DEFECTS):
            print(f"show({setting!r}, r'''", *program, "''')", sep="\n")
    print(f"\n{arguments.programs} programs, seed {arguments.seed}, {time.perf_counter() - began:.0f} s")
    print(" / ".join(f"{outcome} {counts[outcome]}" for outcome in OUTCOMES))
    return int(any(counts[outcome] for outcome in DEFECTS))


if __name__ == "__main__":
    raise SystemExit(main())
