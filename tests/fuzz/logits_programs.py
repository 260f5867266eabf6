"""Random programs on logits, run with stock and with lazy logits: every value and gradient must be the same.

    python -m tests.fuzz.logits_programs [PROGRAMS [SEED]]

prints each defect with its program, and how many programs had which outcome:

    exact: as stock            whole: as stock, a statement warned     refused: a statement raised MemoError
    unread: MemoError only when every value was read at the end        different, crash: a defect
    stock raises               unstable: results with stock change when weights change by 10⁻¹⁴ (1/x near 0, say)

Hidden states and weights are multiples of 2⁻¹⁰: logits are the same to the last bit for any number of rows in a tile. Only what
later ops round can differ.
"""

from __future__ import annotations

import copy
import math
import random
import re
import sys
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch import nn

import ds_memo
from tests.fuzz.logits_writer import GIVEN, HIDDEN, VOCAB, Writer, compiled, drawn, values

TILE = 4
"""The logits have 10 rows: two tiles and a rest."""
MEMO = {"enabled": True, "alpha": 1.0, "resident_layers": 0, "plan": {"enabled": False}}
SETTINGS = {"trained": 16, "frozen head": 3, "frozen": 3, "no_grad": 3, "inference_mode": 1, "model": 1}
"""What needs gradients, with how often; "model": all, and logits of the whole model."""
MODES = {"no_grad": torch.no_grad, "inference_mode": torch.inference_mode}
DEFECTS = ("different", "crash")


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
        self.memo(input_ids=GIVEN["ids"])  # the head is looked at, and has its own number of rows
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
                # torch calls a view a leaf that needs a gradient if no_grad made it of what needs one
                how = getattr(each, "how", None)
                base = how.of if how else each._base if type(each) is torch.Tensor else None
                view = each.is_leaf and base is not None and base.requires_grad
                yield f"{name}.requires_grad", each.requires_grad and not view
                if each.requires_grad and each.is_leaf and not view:
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
            least = tolerance * max(a[a.isfinite()].abs().max().item() if a.isfinite().any() else 0.0, 1e-2)
            # A factor that is not finite makes stock's gradients NaN or infinite as it rounds, and 0 times infinity in other rows
            free = ~a.isfinite() if name.endswith(".grad") or not want["loss"].isfinite().all() else False
            same = (a == b) | (a.isnan() & b.isnan()) | ((a - b).abs() <= least) | free
            if not same.all():
                found[name] = f"off by {(a - b).abs()[~same].nan_to_num(math.inf).max().item():.3g}"
    return found


# ---- many programs


class Failure(NamedTuple):
    number: int
    setting: str
    outcome: str
    seen: str
    program: list[str]


def fuzz(programs: int, seed: int, sides: Sides) -> tuple[Counter[str], list[Failure]]:
    """Return how many programs had each outcome, and the defects."""
    counts: Counter[str] = Counter()
    failures = []
    for number in range(programs):
        setting, program = sides.write(seed, number)
        outcome, seen = sides.judge(setting, program)
        counts[outcome] += 1
        if outcome in DEFECTS:
            failures.append(Failure(number, setting, outcome, seen, program))
    return counts, failures


def main(programs: str = "20000", seed: str = "0") -> int:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    counts, failures = fuzz(int(programs), int(seed), Sides())
    for failure in failures:
        print(f"\n# program {failure.number}, {failure.setting}: {failure.outcome}, {failure.seen}", *failure.program, sep="\n")
    print(", ".join(f"{outcome} {count}" for outcome, count in counts.most_common()))
    return int(bool(failures))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
