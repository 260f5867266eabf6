"""Random layers whose calls differ: C++ and Python do the same, and it is stock's. They leave their recipes at random places."""

from __future__ import annotations

import copy
import functools
import random
import re
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import ds_memo
from tests.everyday import everyday
from tests.models import Outcome, assert_same, gradients
from tests.remat.test_in_cpp import compare_ways, library  # noqa: F401  a fixture

pytestmark = [pytest.mark.filterwarnings("ignore::ds_memo.errors.MemoWarning"), pytest.mark.usefixtures("library")]
HIDDEN, STEPS, PROGRAMS = 16, 6, 10
TOLERANCE = 1e-4
"""Products of a few rows are summed in another order, and programs amplify that."""
CONFIGS = [
    {"alpha": 0.5, "resident_layers": 1}, {"alpha": 0.0, "resident_layers": 0}, {"alpha": 0.3, "resident_layers": 0},
    {"alpha": 1.0, "resident_layers": 2},
]  # fmt: skip

STATEMENTS = {
    "N = L(V)": 8,
    "N = (V.flatten(0, 1) @ W.t()).view_as(V)": 3,
    "N = V.flatten(0, 1) @ W.t(); N.add_(B); N = N.view_as(V)": 4,
    "N = V.flatten(0, 1) @ W.t(); N = N.view_as(V); N += B": 2,
    "N = torch.addmm(V.flatten(0, 1), V.flatten(0, 1), W, beta=0.5, alpha=0.7).view_as(V)": 1,
    **dict.fromkeys(["N = F.gelu(V)", "N = F.silu(V)", "N = V.tanh()", "N = V * V", "N = V + V", "N = V - 0.5 * V"], 2),
    **dict.fromkeys(["N = V.exp().clamp(max=3)", "N = F.layer_norm(V, (HIDDEN,))"], 2),
    **dict.fromkeys(["N = V.mul(2.0)", "V.add_(0.1)", "V.mul_(0.9)", "F.relu_(V)", "V[:, 1:].add_(U[:, 1:])", "V.copy_(U)"], 1),
    **dict.fromkeys(["N = F.dropout(V, 0.2)", "N = V.detach()", "N = V.clone()", "N = V.mT.contiguous().mT"], 1),
    "N = F.scaled_dot_product_attention(V.unsqueeze(1), U.unsqueeze(1), V.unsqueeze(1), is_causal=True).squeeze(1)": 2,
    **dict.fromkeys(["N = (V @ U.mT).softmax(-1) @ V", "N = torch.bmm(V, self.each)", "N = torch.baddbmm(V, U, self.each)"], 1),
    "N = U * V.softmax(-1).topk(2, -1)[0].sum(-1, keepdim=True)": 1,
    "with torch.no_grad(): N = L(V)": 1,
    "with torch.no_grad(): N = V.flatten(0, 1) @ W.t(); N.add_(B); N = N.view_as(V)": 1,
    "N = U * (0.5 if V.mean().item() > 0 else 1.5)": 1,
    **dict.fromkeys(
        ["N = x + L(V)", "N = whole(V)", "N = self.table[(V[..., 0].abs() * 3).clamp(max=9).nan_to_num(0).long()]"], 1
    ),
    **dict.fromkeys(["N = torch.where(V > 0, V, U)", "N = torch.cat([V, U], -1)[..., ::2]"], 1),
    **dict.fromkeys(["N = torch.empty_like(V).bernoulli_(0.5) * U", "N = torch.zeros_like(V); N.add_(U)"], 1),
    "N = checkpoint(lambda t: L(F.gelu(t)), V, use_reentrant=False)": 1,
    **dict.fromkeys(["N = V.bfloat16().float()", "N = V.cumsum(1) * 0.1"], 1),
}
"""With how often each comes. N is a new variable, V and U are older ones, L is a linear with weight W, B a bias."""
CALLS = {"": 8, "number % 2": 1, "number % 3 == 2": 1}
"""Conditions of statements on the number that a call is given."""


def program(draw: random.Random) -> str:
    """Return the body of a layer's forward."""
    lines, names = ["x0 = x * 1.0"], ["x0"]
    for number in range(draw.randrange(4, 14)):
        (text,), linear = draw.choices(list(STATEMENTS), list(STATEMENTS.values())), draw.randrange(4)
        old = draw.choice(names[-4:])
        words = {"N": f"v{number}", "V": old, "U": draw.choice(names[-4:]), "L": f"self.l{linear}", "W": f"self.l{linear}.weight"}
        words["B"] = draw.choice([f"self.l{linear}.bias"] * 6 + [f"{old}[0, 0]"])
        text = re.sub(r"\b[NVULWB]\b", lambda found: words[found[0]], text)  # noqa: B023
        makes = words["N"] in text
        (when,) = draw.choices(list(CALLS), list(CALLS.values()))
        if when and not text.startswith("with"):
            text = f"if {when}: {text}" + (f"\nelse: {words['N']} = {old} * 1.0" if makes else "")
        lines += text.split("\n")
        names += [words["N"]] * makes
    return "\n".join([*lines, f"return x + 0.1 * ({' + '.join(draw.sample(names, min(3, len(names))))})"])


class Random(nn.Module):
    """A layer that runs a program."""

    def __init__(self, text: str) -> None:
        super().__init__()
        for number in range(4):
            setattr(self, f"l{number}", nn.Linear(HIDDEN, HIDDEN))
        self.each = nn.Parameter(torch.randn(2, HIDDEN, HIDDEN) * 0.2)
        self.register_buffer("table", torch.randn(10, HIDDEN))
        self.text = text

    def forward(self, x: torch.Tensor, number: int) -> torch.Tensor:
        return compiled(self.text)(self, x, number)


@functools.cache
def compiled(text: str) -> Any:
    names = {"torch": torch, "F": F, "HIDDEN": HIDDEN, "checkpoint": checkpoint, "whole": ds_memo.keep_whole(F.hardswish)}
    exec("def run(self, x, number):\n" + "\n".join(f"    {line}" for line in text.split("\n")), names)
    return names["run"]


class Layers(nn.Module):
    def __init__(self, text: str) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Random(text) for _ in range(2))

    def forward(self, x: torch.Tensor, number: int) -> torch.Tensor:
        for block in self.blocks:
            x = block(x, number)
        return x.square().mean()


def run(seed: int) -> str:
    """Compare a program. Return how it went with stock: "raises", "overflows" or "fine"."""
    draw = random.Random(seed)
    text = program(draw)
    numbers = [draw.randrange(6) for _ in range(STEPS - 1)]
    numbers.insert(0, numbers[0])  # one call at least follows its recipe to the end

    def drive(model: nn.Module, number: int) -> Outcome:
        torch.manual_seed(number)
        x = torch.randn(2, 5, HIDDEN, requires_grad=True)
        loss = model(x, numbers[number])
        loss.backward()
        return Outcome(loss.detach(), {**gradients(model), "x": x.grad})

    torch.manual_seed(seed)
    model = Layers(text)
    stock = copy.deepcopy(model)
    try:
        wants = [drive(stock, number) for number in range(STEPS)]
    except RuntimeError:  # a saved tensor is changed in place
        return "raises"
    if not all(want.loss < 1e6 for want in wants):
        return "overflows"
    for got, want in zip(compare_ways(model, drive, draw.choice(CONFIGS), STEPS).outcomes, wants, strict=True):
        assert_same(got, want, TOLERANCE)
    return "fine"


@pytest.mark.parametrize("first", everyday(range(0, 12 * PROGRAMS, PROGRAMS), [0, PROGRAMS]))
def test_programs(first: int) -> None:
    went = []
    for seed in range(first, first + PROGRAMS):
        try:
            went.append(run(seed))
        except BaseException:
            print(f"program {seed}:\n{program(random.Random(seed))}")
            raise
    assert went.count("fine") >= PROGRAMS // 2
