"""Random programs on logits, run with stock and with lazy logits: every value and gradient must be the same.

    python -m tests.fuzz.logits_programs --programs 20000 --seed 0

prints how many programs are exact, warn of whole logits, are refused, differ or crash; then each kind of failure with a program
cut to the statements that it needs.

A program is a list of statements. The writer runs each with stock at once, and drops those that stock refuses. Hidden states and
weights are multiples of 2⁻¹⁰, so logits are the same to the last bit for any number of rows in a tile. Later ops may differ in the
last bit. A program whose results with stock itself change when its weights change in the last bits is counted apart ("unstable").
"""

from __future__ import annotations

import argparse
import collections
import copy
import functools
import inspect
import math
import random
import re
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

import ds_memo

BATCH, LENGTH, HIDDEN, VOCAB, TILE = 2, 5, 4, 7, 4
"""10 rows: two tiles and a rest."""
MEMO = {"enabled": True, "alpha": 1.0, "resident_layers": 0, "plan": {"enabled": False}}
SETTINGS = {"trained": 12, "frozen head": 3, "frozen": 3, "no_grad": 3, "inference_mode": 1, "model": 1}
"""What needs gradients, with how often; "model": logits of the whole model."""
MODES = {"no_grad": torch.no_grad, "inference_mode": torch.inference_mode}
OUTCOMES = ("exact", "whole", "refused", "unread", "different", "crash", "stock raises", "unstable", "left out")


# ---- what programs call


def values(seed: int, *shape: int) -> torch.Tensor:
    return torch.randint(-2048, 2049, shape, generator=torch.Generator().manual_seed(seed)).double() / 1024


def mask(seed: int, *shape: int) -> torch.Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed)) < 0.5


def index(seed: int, high: int, *shape: int) -> torch.Tensor:
    return torch.randint(0, high, shape, generator=torch.Generator().manual_seed(seed))


def labels(seed: int, high: int, *shape: int) -> torch.Tensor:
    """Return labels, of which a third do not count; of seed 0 none counts."""
    found = index(seed, high, *shape)
    return torch.where(mask(seed + 1, *shape) & mask(seed + 2, *shape) | (seed == 0), -100, found)


class Square(torch.autograd.Function):
    """As kernels do."""

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(logits)
        return logits * logits

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return 2 * ctx.saved_tensors[0] * gradient


GIVEN = {"torch": torch, "F": F, "math": math, "nn": nn, "values": values, "mask": mask, "index": index, "labels": labels}
GIVEN |= {"Square": Square, "checkpoint": functools.partial(torch.utils.checkpoint.checkpoint, use_reentrant=False)}
GIVEN["ids"] = index(1, VOCAB, BATCH, LENGTH)


# ---- forms of arguments, found by trying

TEMPLATES = (
    *("", "N", "INT", "FULL", "VEC", "ROW", "LIKE", "FULL, FULL", "FULL, N", "N, N", "N, FULL", "MASK", "MASK, N", "MASK, FULL"),
    *("DIM", "DIM, DIM", "DIM, INT", "INT, DIM", "DIM, 0, 2", "-1, WHERE", "-1, WHERE, N", "-1, WHERE, PART", "-1, SOME"),
    *("-1, WHERE, PART, 'sum'", "-1, WHERE, PART, 'amax'", "-1, SOME, N", "-1, SOME, COLS", "-1, SOME, COLS, 'mean'"),
    *("(SOME0,), SCALAR", "(MASK,), SCALAR", "index(1, NUMEL, 2), values(2, 2)", "2, 0, 1.0", "SHAPE", "torch.float64"),
)  # fmt: skip
_BARRED = (
    "sparse|cuda|hpu|xpu|mtia|ipu|share|storage|pin_|names|align|rename|refine|dlpack|module_load|mkldnn|resize|^set_|map|apply|"
    "retain|quant|crow|ccol|indices$|^is_|^new_|as_strided|requires|svd|qr|^lu|inverse|coalesce|philox|backward|register|numpy|"
    "dense|_philox|stft|tolist|item|numel|nelement|element_size|untyped|get_device|dim_order|nonzero_static|hsplit|grad"
)  # fmt: skip
_TOKEN = re.compile(r"\b(?:[A-Z]{2,}0?|N)\b")


def fill(template: str, t: torch.Tensor, pick: random.Random, like: str) -> str:
    """Write arguments for a call on `t`."""
    lead, last, seed = t.shape[:-1], t.shape[-1] if t.dim() else 1, lambda: pick.randrange(1, 90)

    def word(match: re.Match) -> str:
        shape, part = ", ".join(map(str, t.shape)), ", ".join(map(str, (*lead, 2)))
        return {
            "N": lambda: pick.choice(["0.5", "2", "-1.5", "0.25"]),
            "INT": lambda: pick.choice(["1", "2", "0"]),
            "DIM": lambda: str(pick.randrange(-t.dim(), t.dim() or 1)),
            "FULL": lambda: f"values({seed()}, {shape})",
            "VEC": lambda: f"values({seed()}, {last})",
            "ROW": lambda: f"values({seed()}, {', '.join(map(str, (*lead, 1)))})",
            "LIKE": lambda: like,
            "MASK": lambda: f"mask({seed()}, {shape})",
            "WHERE": lambda: f"index({seed()}, {last}, {part})",
            "PART": lambda: f"values({seed()}, {part})",
            "SOME": lambda: f"torch.tensor({sorted(pick.sample(range(last), min(2, last)))})",
            "COLS": lambda: f"values({seed()}, {part})",
            "SOME0": lambda: f"index({seed()}, {t.shape[0] if t.dim() else 1}, 2)",
            "SCALAR": lambda: "torch.tensor(0.5, dtype=torch.float64)",
            "NUMEL": lambda: str(t.numel()),
            "SHAPE": lambda: f"({', '.join(map(str, t.shape[::-1]))},)",
        }[match[0]]()

    return _TOKEN.sub(word, template)


def forms(call: Callable[[str], str], sample: str = "values(1, 2, 5, 7)") -> list[str]:
    """Return the templates that a call takes. Its value, if it has one, must be tensors."""
    found, pick = [], random.Random(0)
    for template in TEMPLATES:
        space = {**GIVEN, "y": eval(sample, GIVEN)}
        try:
            got = eval(call(fill(template, space["y"], pick, "y")), space)
        except Exception:
            continue
        if any(isinstance(each, torch.Tensor) for each in (got if isinstance(got, (tuple, list)) else [got])) or got is None:
            found.append(template)
    return found


@functools.cache
def known_calls() -> dict[str, list[str]]:
    """Return calls of `Y` by what they are, as texts."""
    named = [name for name in dir(torch.Tensor) if not name.startswith("_") and not re.search(_BARRED, name)]
    inplace = [name for name in named if name.endswith("_")]
    found: dict[str, list[str]] = {"in place": [], "new": [], "foreach": [], "out": []}
    for name in named:
        found["in place" if name in inplace else "new"] += [f"Y.{name}({each})" for each in forms(lambda a: f"y.{name}({a})")]
    for name in dir(torch):
        if name.startswith("_foreach_") and name.endswith("_"):
            for how in ("", ", N", ", [LIKE]", ", [FULL]", ", [FULL], [FULL]", ", [FULL], N"):
                found["foreach"] += [f"torch.{name}([Y]{how})"] * bool(_runs(f"torch.{name}([y]{how})"))
    for name in (each.rstrip("_") for each in named):
        if hasattr(torch, name):
            found["out"] += [
                f"torch.{name}(Y, {a}, out=OUT)" for a in forms(lambda a: f"torch.{name}(y, {a}, out=y.clone())") if a
            ]
    functions = [name for name, fn in vars(F).items() if inspect.isfunction(fn) and "inplace" in inspect.signature(fn).parameters]
    found["inplace="] = [f"F.{name}(Y, inplace=True)" for name in functions if _runs(f"F.{name}(y, inplace=True)")]
    found["inplace="] += ["F.threshold_(Y, 0.1, 1.0)", "nn.init.zeros_(Y)", "F.hardtanh_(Y)", "nn.init.constant_(Y, 2.0)"]
    return found


def _runs(text: str) -> bool:
    space = {**GIVEN, "y": values(1, 2, 5, 7)}
    try:
        exec(fill(text, space["y"], random.Random(0), "y"), space)
    except Exception:
        return False
    return True


# ---- the writer


COMMON = ("do_view", "do_op", "do_reduce", "do_common_method", "do_term", "do_call_again", "do_gradient", "do_hook")


class Writer:
    """Writes one program, and runs it with stock as it goes."""

    def __init__(self, pick: random.Random, setting: str, space: dict[str, Any]) -> None:
        self.pick, self.setting, self.space = pick, setting, space
        self.program: list[str] = []
        self.logits: list[str] = []
        self.others: list[str] = []
        self.terms: list[str] = []
        self.count = 0

    def write(self) -> list[str]:
        self.begin()
        kinds = [method for name, method in inspect.getmembers(self, inspect.ismethod) if name.startswith("do_")]
        weights, most = [int(method.__doc__) for method in kinds], 9
        if self.pick.random() < 0.4:  # most of these stay lazy
            weights, most = [weight * (method.__name__ in COMMON) for method, weight in zip(kinds, weights, strict=True)], 4
        for method in self.pick.choices(kinds, weights, k=self.pick.randint(1, most)):
            method()
        self.end()
        return self.program

    def say(self, statement: str, plain: bool = False) -> bool:
        """Add a statement that stock takes, at times under a mode."""
        if not plain:
            modes = ["", "with torch.no_grad(): ", "with torch.inference_mode(): ", "with torch.enable_grad(): "]
            statement = self.pick.choices(modes, [90, 7, 1, 2])[0] + statement
        try:
            exec(compiled(statement), self.space)
        except Exception:
            return False
        self.program.append(statement)
        return True

    def new(self, expression: str, kind: str = "v", plain: bool = False) -> str | None:
        """Add ``v3 = expression``, and return its name."""
        self.count += 1
        name = f"{kind}{self.count}"
        return name if self.say(f"{name} = {expression}", plain) else None

    def keep(self, name: str | None, into: list[str]) -> None:
        if name is not None:
            got = self.space[name]
            if isinstance(got, (tuple, list)):
                into += [f"{name}[{i}]" for i, each in enumerate(got) if isinstance(each, torch.Tensor)]
            elif isinstance(got, torch.Tensor):
                into.append(name)

    def some(self, view: float = 0.25) -> tuple[str, torch.Tensor]:
        """Return logits, or a view of them: the text and the tensor."""
        name = self.pick.choice([*self.logits[:1], *self.logits, *self.logits[-2:]])
        if self.pick.random() < view:
            text = self.view(name, self.space_of(name))
            if (t := self.space_of(text)) is not None and not isinstance(t, (tuple, list)):
                return text, t
        return name, self.space_of(name)

    def space_of(self, text: str) -> Any:
        try:
            return eval(compiled(text, "eval"), self.space)
        except Exception:
            return None

    def number(self) -> str:
        return self.pick.choice(["0.5", "2", "-1.5", "3", "0.25"])

    def operand(self, t: torch.Tensor) -> str:
        """Return what broadcasts to `t`: a number, a vector, a value per row, as large a tensor, other logits, a leaf."""
        same = [name for name in self.logits + self.others if getattr(self.space_of(name), "shape", None) == t.shape]
        choices = ["N", "N", "VEC", "ROW", "FULL", "SCALAR", *same[-3:]]
        return fill(self.pick.choice(choices), t, self.pick, "x")

    def key(self, name: str, t: torch.Tensor) -> str:
        pick, last = self.pick, t.shape[-1] if t.dim() else 1
        a = pick.randrange(last) if last else 0
        parts = [":", ":", ":-1", "1:", "::2", "0", "-1", "[1, 0]", "[0]", "None", "1:1"]
        lead = ", ".join(map(str, t.shape[:-1]))
        return pick.choice([
            f"..., {a}", f"..., {a}:", f"..., :{a}", f"..., {a // 2}:{a + 1}", f"..., [{a}, {a // 2}]", f"..., mask(5, {last})",
            f"..., torch.tensor([{a}, 0])", ":, :-1", ":, 1:", ":, -1", "0", ":1", "1:", "..., :-1, :", "None", "...",
            f"mask({pick.randrange(9)}, {lead})", f"{name} > 0.5", f"mask(3, {', '.join(map(str, t.shape))})", "[1, 0, 1]",
            f"index(2, {t.shape[0] if t.dim() else 1}, 3)", ", ".join(pick.choice(parts) for _ in range(max(t.dim(), 1))),
            f"torch.arange({t.shape[0] if t.dim() else 1}), index(4, {t.shape[1] if t.dim() > 1 else 1}, {t.shape[0] if t.dim() else 1})",
        ])  # fmt: skip

    def view(self, name: str, t: torch.Tensor) -> str:
        pick, dims = self.pick, t.dim()
        dim = pick.randrange(-dims, dims) if dims else 0
        last = t.shape[-1] if dims else 1
        if pick.random() < 0.45:
            return f"{name}[{self.key(name, t)}]"
        return name + pick.choice([
            f".view(-1, {last})", f".reshape(-1, {last})", ".flatten(0, 1)", ".flatten()", ".view(-1)", ".transpose(-1, -2)", ".mT",
            ".transpose(1, 2)", ".movedim(-1, 1)", ".permute(0, 2, 1)", ".permute(2, 0, 1)", ".swapaxes(0, 1)", ".transpose(0, 1)",
            f".unsqueeze({dim})", ".squeeze()", f".squeeze({dim})", f".expand(2, *{tuple(t.shape)})", ".detach()", ".detach()",
            ".clone()", ".contiguous()", ".data", f".chunk(2, {dim})", f".split(2, {dim})", f".unbind({dim})", f".narrow({dim}, 0, 1)",
            f".select({dim}, 0)", f".index_select({dim}, torch.tensor([0, 0]))", ".double()", ".to(torch.float64)", ".view_as(x)",
            f".take_along_dim(index(3, {last}, {', '.join(map(str, (*t.shape[:-1], 2)))}), -1)", f".diagonal(0, 0, {dim})",
            f".unflatten({dim}, (-1, 1))", f".unfold({dim}, 1, 1)", ".requires_grad_()", ".view(torch.int64)", ".view(torch.float64)",
            f".tensor_split(2, {dim})", ".T", ".cpu()", ".to('cpu')", f".view(*{tuple(t.shape)})", ".reshape(-1)", ".roll(1, 0)",
            *([".float()", ".to(torch.float32)", ".bfloat16()"] if pick.random() < 0.1 else []),
        ])  # fmt: skip

    # ---- statements: do_*, whose docstring is their weight

    def begin(self) -> None:
        pick = self.pick
        if self.setting == "model":
            self.say("x = model(input_ids=ids).logits", plain=True)
        else:
            shape = pick.choices([(BATCH, LENGTH), (BATCH * LENGTH,), (2, 1, 5)], [8, 2, 1])[0]
            leaf = f"values({pick.randrange(1, 99)}, {', '.join(map(str, shape))}, {HIDDEN})"
            grad = ".requires_grad_()" if self.setting in ("trained", "frozen head") else ""
            self.say(f"h0 = {leaf}{grad}", plain=True)
            self.say(f"h = {pick.choice(['h0 * 1', 'h0 * 1', 'h0', 'h0[:]'])}", plain=True)
            self.say("x = head(h)")
        self.logits.append("x")

    def do_view(self) -> None:
        """20"""
        name, t = self.some(0)
        self.keep(self.new(self.view(name, t)), self.logits)

    def do_set_item(self) -> None:
        """10"""
        name, t = self.some(0.15)
        key = self.key(name, t)
        part = self.space_of(f"{name}[{key}]")
        if part is not None:
            how = self.pick.choice(["=", "=", "=", "+=", "*=", "-=", "/="])
            self.say(f"{name}[{key}] {how} {self.operand(part)}")

    def do_in_place(self) -> None:
        """16"""
        self.call("in place")

    def do_foreach(self) -> None:
        """3"""
        self.call("foreach")

    def do_inplace_argument(self) -> None:
        """2"""
        self.call("inplace=")

    def call(self, which: str) -> None:
        for _ in range(3):
            name, t = self.some()
            text = self.pick.choice(known_calls()[which]).replace("Y", name)
            if self.say(fill(text, t, self.pick, self.some(0)[0])):
                return

    def do_out(self) -> None:
        """3"""
        for _ in range(3):
            (name, t), (out, _) = self.some(), self.some()
            text = self.pick.choice(known_calls()["out"]).replace("Y", self.pick.choice([name, "FULL"])).replace("OUT", out)
            if self.say(fill(text, t, self.pick, self.some(0)[0])):
                return

    def do_arithmetic(self) -> None:
        """8"""
        name, t = self.some(0)
        self.say(f"{name} {self.pick.choice(['+=', '-=', '*=', '/=', '**=', '//=', '%='])} {self.operand(t)}")

    def do_common_method(self) -> None:
        """8"""
        name, t = self.some(0.4)
        method = self.pick.choice(
            ["add_", "sub_", "mul_", "div_", "copy_", "fill_", "clamp_", "zero_", "masked_fill_", "neg_", "tanh_"]
        )
        arguments = {
            "clamp_": "-1, 1",
            "fill_": "0.5",
            "zero_": "",
            "neg_": "",
            "tanh_": "",
            "masked_fill_": fill("MASK, N", t, self.pick, "x"),
        }
        self.say(f"{name}.{method}({arguments.get(method, self.operand(t))})")

    def do_ordinary_target(self) -> None:
        """8"""
        (name, t), pick = self.some(), self.pick
        if t is None or not t.dim():
            return
        shape = ", ".join(map(str, t.shape))
        b = self.new(f"values({pick.randrange(99)}, {shape})", "b", plain=True)
        big = ", ".join(map(str, (t.shape[0] + 2, *t.shape[1:])))
        self.keep(b, self.others)
        self.say(pick.choice([
            f"{b} += {name}", f"{b} -= {name}", f"{b}.mul_({name})", f"{b}.copy_({name})", f"{b}[{name} > 0.5] = 0", f"{b}[0] = {name}[0]",
            f"{b}[{name} > 0.5] += 1", f"{b}[:] = {name}", f"{b}[..., :1] = {name}[..., :1]", f"{b}.lerp_({name}, 0.5)",
            f"{b}.masked_fill_({name} > 0, 1.0)", f"{b} = torch.zeros({big}, dtype=torch.float64); {b}[1:-1] = {name}",
            f"{b}.addcmul_({name}, {name})", f"{b}[{name}.argmax(-1)[..., 0]] = 1.0", f"{b}.data = {name}", f"{b}.index_put_((torch.tensor([0]),), {name}[0])",
            f"{b} = {b}.where({name} > 0, {name})", f"torch._foreach_add_([{b}], [{name}])", f"torch.add({b}, 1.0, out={b}); {b} *= {name}",
            f"{b}.scatter_(-1, {name}.argmax(-1, keepdim=True), 1.0)", f"{b}.masked_scatter_({b} > 0, {name})", f"{b} = [{b}]; {b}[0] += {name}",
        ]))  # fmt: skip

    def do_leaf(self) -> None:
        """3"""
        _, t = self.some()
        if t is not None:
            text = fill(self.pick.choice(["FULL", "VEC", "ROW", "FULL"]), t, self.pick, "x")
            self.keep(self.new(f"{text}.requires_grad_()", "w", plain=True), self.others)

    def do_op(self) -> None:
        """10"""
        name, t = self.some()
        other = self.operand(t)
        self.keep(self.new(self.pick.choice([
            f"{name} + {other}", f"{name} * {other}", f"{other} - {name}", f"{name} / {other}", f"{name} ** 2", f"-{name}", f"{name}.softmax(-1)",
            f"{name}.log_softmax(-1)", f"2 * torch.tanh({name} / 2)", f"{name}.exp()", f"{name}.sigmoid()", f"{name}.clamp(-1, 1)", f"{name}.clamp(min={other})",
            f"{name}.masked_fill({fill('MASK', t, self.pick, 'x')}, -1e9)", f"torch.where({name} > 0, {name}, {other})", f"{name}.nan_to_num()",
            f"torch.where({fill('MASK', t, self.pick, 'x')}, {other}, {name})", f"{name} * {name}", f"torch.maximum({name}, {other})", f"{name}.relu()",
            f"F.dropout({name}, 0.5)", f"F.softmax({name}, dim=-1)", f"torch.add({name}, {other}, alpha=2)", f"{name}.softmax(0)",
            f"torch.lerp({name}, {other}, 0.3)", f"checkpoint(torch.tanh, {name})", f"Square.apply({name})", f"{other} / (1 + {name}.abs())", f"{name}.softmax(1)",
        ])), self.logits)  # fmt: skip

    def do_method(self) -> None:
        """8"""
        for _ in range(3):
            name, t = self.some()
            text = self.pick.choice(known_calls()["new"]).replace("Y", name)
            made = self.new(fill(text, t, self.pick, self.some(0)[0]), "o")
            if made is not None:
                self.keep(made, self.others)
                return

    def do_reduce(self) -> None:
        """8"""
        (name, t), pick = self.some(), self.pick
        if t is None or not t.dim():
            return
        dim, last = pick.choice([-1, -1, -1, 0, 1, (0, 1), (-1,), None]), t.shape[-1]
        flat = pick.choice([f"{dim}", f"{dim}, keepdim=True", f"dim={dim}"])
        where = fill("WHERE", t, pick, "x") if last else "ids"
        self.keep(self.new(pick.choice([
            *(f"{name}.{fn}({flat})" for fn in ("sum", "mean", "amax", "amin", "logsumexp", "std", "nansum", "argmax", "any", "all", "var", "norm")),
            *(f"{name}.{fn}()" for fn in ("sum", "mean", "max", "min", "argmax", "std", "norm", "any", "isnan().any", "amax")),
            f"{name}.max(-1)", f"{name}.min(-1).values", f"{name}.topk(2)", f"{name}.topk(2, -1).values", f"{name}.sort(-1)", f"{name}.cumsum(-1)",
            f"{name}.gather(-1, {where})", f"{name}.kthvalue(2, -1).values", f"torch.logsumexp({name}, -1)", f"{name} > {self.operand(t)}",
            f"{name} == {name}.max(-1, keepdim=True).values", f"{name}.cumsum(0)", f"{name}.cumsum(1)", f"({name} <= 0).sum(-1)", f"{name}.argsort(-1)",
            f"torch.sum(input={name}, dim=-1)", f"torch.distributions.Categorical(logits={name}).entropy()", f"{name}.median(-1).values", f"len({name})",
            f"{name}.max().item()", f"{name}.tolist()", f"bool(({name} > 50).any())", f"list({name})", f"[*{name}]", f"{name}.detach().numpy().sum()",
        ]), "r"), self.others)  # fmt: skip

    def do_mix(self) -> None:
        """6"""
        (a, t), (b, _) = self.some(), self.some()
        if t is None or not t.dim():
            return
        last = t.shape[-1]
        dim = self.pick.choice(["0", "-1", "1"])
        self.keep(self.new(self.pick.choice([
            f"torch.cat([{a}, {b}], {dim})", f"torch.stack([{a}, {b}], {dim})", f"torch.cat([{a}, {a}], {dim})", f"{a} @ values(3, {last}, 2)",
            f"torch.einsum('...v,vw->...w', {a}, values(4, {last}, 3))", f"{a} + {b}", f"{a} * {b}", f"torch.stack([{a}, {a} * 2], {dim})",
            f"{a} @ {b}.mT", f"torch.where({a} > {b}, {a}, {b})", f"{a}.type_as({b})", f"F.linear({a}, values(5, 3, {last}))", f"{a}.equal({b})",
            f"F.one_hot({a}.argmax(-1), {last})", f"({a} == {b}).sum()", f"F.pad({a}, (0, 1))", f"torch.outer({a}.flatten(), {b}.flatten())",
            f"torch.allclose({a}, {b})", f"torch.nn.utils.rnn.pad_sequence([{a}, {b}])", f"torch.cat([{b}, values(2, *{a}.shape)], 0)", f"copy.deepcopy({a}.detach())",
        ])), self.logits)  # fmt: skip

    def do_hidden(self) -> None:
        """3"""
        how = self.pick.choice(
            ["h.mul_(2)", "h[0] = 1.0", "h.data.mul_(2)", "h.add_(h)", "h0.data.add_(1)", "h.zero_()", "h.detach().neg_()"]
        )
        self.say(how)

    def do_weight(self) -> None:
        """3"""
        self.say(self.pick.choice([
            "head.weight.data.mul_(2)", "with torch.no_grad(): head.weight.mul_(2)", "head.bias.data.add_(1)", "head.weight.data = head.weight.data * 2",
            "with torch.no_grad(): head.bias.copy_(values(3, *head.bias.shape))", "head.weight.data[2] = 0", "head.weight.detach().mul_(2)",
            "with torch.no_grad(): nn.init.ones_(head.weight)", "torch.optim.SGD(head.parameters(), 0.5).step()", "head.requires_grad_(False)",
            "head.weight = nn.Parameter(head.weight.detach() * 2)", "opt = torch.optim.AdamW(head.parameters(), 0.1, foreach=False); opt.step(); opt.zero_grad()",
        ]), plain=True)  # fmt: skip

    def do_call_again(self) -> None:
        """3"""
        if self.setting == "model":
            self.keep(self.new("model(input_ids=ids).logits"), self.logits)
        else:
            self.keep(
                self.new(self.pick.choice(["head(h)", "head(h)", "head(h * 2)", "head(h.detach())", "head(h[..., :1, :])"])),
                self.logits,
            )

    def do_hook(self) -> None:
        """4"""
        name, t = self.some(0)
        if t is None or t._is_view():  # torch 2.13 itself dies where a changed base has a view with hooks
            return
        how = self.pick.choices(
            ["lambda g: g * 2", "lambda g: g / 4", "lambda g: None", "lambda g: g.clamp(-0.1, 0.1)", "lambda g: -g"],
            [4, 3, 1, 1, 1],
        )[0]
        if self.pick.random() < 0.4:
            self.say(f"{name}.retain_grad()", plain=True)
        else:
            self.say(f"{name}.register_hook({how})", plain=True)

    def do_transform(self) -> None:
        """1"""
        name, _ = self.some(0)
        self.keep(self.new(self.pick.choice([
            f"torch.func.vmap(lambda r: r.softmax(-1))({name})", f"torch.func.grad(lambda y: y.logsumexp(-1).sum())({name}.detach())",
            f"torch.func.jvp(torch.tanh, ({name},), ({name},))[1]", f"torch.func.vmap(lambda s: {name} * s)(values(3, 2))",
        ])), self.others)  # fmt: skip

    def do_backward_now(self) -> None:
        """2"""
        self.term()
        self.say("loss.backward(retain_graph=True)", plain=True)

    def do_gradient(self) -> None:
        """3"""
        self.term()
        name, _ = self.some(0)
        self.new(f"torch.autograd.grad(loss, {name}, retain_graph=True, allow_unused=True)[0]", "g", plain=True)

    def do_term(self) -> None:
        """8"""
        self.term()

    def term(self) -> None:
        """Add a term to the loss."""
        for _ in range(4):
            name, t = self.some()
            if t is not None and t.dim() and t.shape[-1] and self.add_term(name, t):
                return

    def add_term(self, name: str, t: torch.Tensor) -> bool:
        pick, last, rows = self.pick, t.shape[-1], t.numel() // t.shape[-1]
        lead = ", ".join(map(str, t.shape[:-1]))
        seed = pick.choice([0, 3, 4, 5, 6, 7])
        y, flat = f"labels({seed}, {last}, {rows})", f"{name}.reshape(-1, {last})"
        how = pick.choice(
            ["", "", "", ", reduction='sum'", ", label_smoothing=0.1", f", weight=values(2, {last}).abs()", ", ignore_index=2"]
        )
        how += pick.choice(["", "", "", f", weight=values(2, {last}).abs(), label_smoothing=0.2"]) * (not how)
        term = pick.choice([
            f"F.cross_entropy({flat}, {y}{how})", f"F.cross_entropy({flat}, {y}{how})", f"F.cross_entropy({flat}, {y}{how})",
            f"F.cross_entropy({name}[mask({seed}, {lead})], labels({seed}, {last}, {lead})[mask({seed}, {lead})]{how})",
            f"F.cross_entropy({flat}, {y}, reduction='none').sum()", f"(F.cross_entropy({flat}, {y}, reduction='none') * values(3, {rows})).mean()",
            f"F.cross_entropy({flat}, {y}, reduction='sum') / ({y} >= 0).sum()", f"F.nll_loss({flat}.log_softmax(-1), {y})",
            f"F.cross_entropy({name}.transpose(1, 2), labels({seed}, {last}, {lead}))", f"F.cross_entropy({flat}, values(4, {rows}, {last}).softmax(-1){how})",
            f"F.cross_entropy({flat}[:0], {y}[:0]{how})", f"F.kl_div({flat}.log_softmax(-1), values(5, {rows}, {last}).softmax(-1), reduction='batchmean')",
            f"F.binary_cross_entropy_with_logits({name}, (values(6, *{tuple(t.shape)}) > 0).double())", f"F.mse_loss({name}, values(7, *{tuple(t.shape)}))",
            f"{name}.logsumexp(-1).pow(2).mean()", f"({name}.softmax(-1) * {name}.log_softmax(-1)).sum()", f"{name}.sum()", f"{name}.mean()", f"{name}.max(-1).values.sum()",
            f"({name} * values(8, *{tuple(t.shape)})).sum()", f"{name}.log_softmax(-1).gather(-1, {fill('WHERE', t, pick, 'x')}).sum()", f"{name}.std(-1).sum()",
            f"({name}.logsumexp(-1) * mask({seed}, {lead})).sum() / mask({seed}, {lead}).sum()", f"F.multi_margin_loss({flat}, index(2, {last}, {rows}))",
            f"nn.CrossEntropyLoss()({flat}, {y})", f"F.kl_div({flat}.log_softmax(-1), {flat}.detach().roll(1, 0).log_softmax(-1), log_target=True, reduction='sum')",
            f"F.cross_entropy({name}[..., :-1, :].contiguous().view(-1, {last}), labels({seed}, {last}, {lead})[..., 1:].reshape(-1))",
        ])  # fmt: skip
        term = pick.choices(["{}", "{}.nan_to_num()", "{} * 0", "0.5 * {}", "{} * math.inf", "{} / 0"], [12, 4, 1, 3, 1, 1])[
            0
        ].format(term)
        if not self.say(f"t = {term}") or not self.say("loss = loss + t.double()", plain=True):
            return False
        if self.program[-2].startswith("t = "):
            self.program[-2:] = [f"loss = loss + ({term})"]
        return True

    def end(self) -> None:
        if self.pick.random() < 0.9:
            for _ in range(self.pick.randint(1, 2)):
                self.term()
            if self.say(
                "loss.backward()" if self.pick.random() < 0.8 else "loss.backward(retain_graph=True); loss.backward()", plain=True
            ):
                for _ in range(self.pick.choice([0, 0, 1, 2])):
                    self.pick.choice([self.do_reduce, self.do_view, self.do_in_place, self.do_weight, self.do_term])()
        for name in {match for line in self.program for match in re.findall(r"(\w+)\.retain_grad", line)}:
            self.new(f"{name}.grad", "g", plain=True)


# ---- running


@functools.lru_cache(20_000)
def compiled(text: str, how: str = "exec") -> Any:
    return compile(text, "<program>", how)


class Run(NamedTuple):
    found: dict[str, Any]
    error: Exception | None
    ended: bool
    """False if a statement raised, not a look at the results."""
    warned: bool
    """True if a statement warned: at the end all are made whole."""


class Sides:
    """A small model as stock and its copy with memo."""

    def __init__(self) -> None:
        from transformers import LlamaConfig, LlamaForCausalLM

        torch.manual_seed(0)
        sizes = {
            "vocab_size": VOCAB,
            "hidden_size": HIDDEN,
            "intermediate_size": 6,
            "num_hidden_layers": 1,
            "num_attention_heads": 1,
        }
        self.stock = LlamaForCausalLM(LlamaConfig(**sizes, initializer_range=0.5)).double().train()
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
        """Return the names that a program begins with; the model as it was before the first.

        Args:
            shift: relative change of each weight, at random.
        """
        torch.manual_seed(3)
        for name, start in self.start.items():
            owner, _, last = name.rpartition(".")
            parameter = nn.Parameter(start.detach() * (1 + shift * (2 * torch.rand_like(start) - 1) if shift else 1))
            parameter.requires_grad_(
                setting not in ("frozen", "frozen head") or (setting == "frozen head" and "lm_head" not in name)
            )
            setattr(model.get_submodule(owner), last, parameter)
        return {**GIVEN, "copy": copy, "head": model.lm_head, "model": model, "loss": torch.zeros((), dtype=torch.float64)}

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

    def program(self, seed: int, number: int) -> tuple[str, list[str]]:
        pick = random.Random(seed * 1_000_003 + number)
        setting = pick.choices(list(SETTINGS), list(SETTINGS.values()))[0]
        with MODES.get(setting, nullcontext)():
            return setting, Writer(pick, setting, self.space(self.stock, setting)).write()

    def judge(self, setting: str, program: list[str]) -> tuple[str, str]:
        """Return an outcome, and what was seen."""
        want = self.run(self.stock, setting, program)
        if want.error is not None:
            return "stock raises", type(want.error).__name__
        got = self.run(self.memo, setting, program)
        if got.error is not None:
            outcome = ("refused" if not got.ended else "unread") if isinstance(got.error, ds_memo.MemoError) else "crash"
            return outcome, f"{type(got.error).__name__}: {str(got.error).splitlines()[0] if str(got.error) else ''}"[:150]
        tolerance = tolerance_of(program)
        if off := difference(got.found, want.found, tolerance):
            moved = self.run(self.stock, setting, program, tolerance / 100)
            stable = moved.error is None and not difference(moved.found, want.found, tolerance)
            return ("different" if stable else "unstable"), off
        return ("whole" if got.warned else "exact"), ""

    def shrink(self, setting: str, program: list[str]) -> list[str]:
        """Drop statements as long as the outcome is the same."""
        outcome, seen = self.judge(setting, program)
        changed = True
        while changed:
            changed = False
            for at in reversed(range(len(program))):
                bare = re.sub(r"^with [^:]*: |; loss.backward\(\)$", "", program[at])
                for instead in ([], [bare]) if bare != program[at] else ([],):
                    fewer = program[:at] + instead + program[at + 1 :]
                    now, what = self.judge(setting, fewer)
                    if now == outcome and (now != "crash" or what.partition(":")[0] == seen.partition(":")[0]):
                        program, changed = fewer, True
                        break
        return program


def tolerance_of(program: list[str]) -> float:
    text = " ".join(program)
    return 3e-2 if re.search("half|bfloat16|float16", text) else 1e-5 if re.search(r"float\(|float32", text) else 1e-10


def read(space: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield every value that a program made, by name, and the gradients of leaves."""
    for name, value in space.items():
        if name in GIVEN:
            continue
        if isinstance(value, nn.Linear):
            value = [value.weight, value.bias]
        for number, each in enumerate(value if isinstance(value, (tuple, list)) else [value]):
            if isinstance(each, torch.Tensor):
                yield f"{name} {number}", plain(each)
                yield f"{name} {number} requires_grad", each.requires_grad
                if each.requires_grad and each.is_leaf:
                    yield f"{name} {number} grad", None if each.grad is None else plain(each.grad)
            elif isinstance(each, (bool, int, float)):
                yield f"{name} {number}", torch.tensor(each)
    if "x" in space and isinstance(space.get("model"), nn.Module):
        for name, parameter in space["model"].named_parameters():
            yield f"{name} grad", None if parameter.grad is None else plain(parameter.grad)


def plain(tensor: torch.Tensor) -> torch.Tensor:
    if type(tensor) in (torch.Tensor, nn.Parameter):
        return tensor.detach().clone()
    return torch.tensor(tensor.detach().tolist(), dtype=tensor.dtype).reshape(tensor.shape)


def difference(got: dict[str, Any], want: dict[str, Any], tolerance: float) -> str:
    """Return what differs first; empty: nothing."""
    for name, a in want.items():
        b = got.get(name, "missing")
        if not isinstance(a, torch.Tensor) or not isinstance(b, torch.Tensor):
            if a is not b:
                return f"{name}: {_brief(b)}, stock {_brief(a)}"
        elif a.shape != b.shape or a.dtype != b.dtype:
            return f"{name}: {tuple(b.shape)} {b.dtype}, stock {tuple(a.shape)} {a.dtype}"
        else:
            a, b = a.double(), b.double()
            finite = a[a.isfinite()].abs()
            least = tolerance * max(float(finite.max()) if finite.numel() else 0.0, 1e-3)
            if not bool(((a == b) | (a.isnan() & b.isnan()) | ((a - b).abs() <= least)).all()):
                return f"{name}: off by {float((a - b).abs().nan_to_num(math.inf).max()):.3g}"
    return ""


def _brief(value: Any) -> str:
    return f"tensor {tuple(value.shape)}" if isinstance(value, torch.Tensor) else str(value)


def show(setting: str, program: str) -> None:
    """Print the outcome of a program."""
    print(*Sides().judge(setting, program.strip().splitlines()))


KINDS = {
    "hidden states changed": r"^h0?[.\[]",
    "weights changed": r"head\.(weight|bias) ?=|head\.(weight|bias)(\.data|\.detach\(\))?[.\[]\w+_|head\.\w+\.data|optim|init\.ones_|requires_grad_\(F",
    "gradient of logits": r"autograd\.grad",
    "gradient kept, or a hook": r"retain_grad|register_hook",
    "torch.func": r"torch\.func",
    "no row counts, 0 or inf": r"labels\(0|:0\]|mask\(0|math\.inf|/ 0",
    "foreach": r"_foreach_",
    "out=": r"out=",
    "an ordinary tensor changed": r"\bb\d+(\[.*\])? ?[-+*]?=|\bb\d+\.\w+_\(",
    "inplace=True, nn.init": r"inplace=|init\.|hardtanh_\(|threshold_\(",
    "in place, by a method": r"\.\w+_\(",
    "entries set": r"\] [-+*/]?= ",
    "augmented assignment": r"\w (\*\*|//|[-+*/%])= ",
}  # fmt: skip
"""Kinds of failures: what is found first in the statements of the shortest program."""


def kind_of(outcome: str, seen: str, program: list[str]) -> str:
    lines = [re.sub(r"^with [^:]*: ", "", line) for line in program if not re.match(r"h0 = |h = ", line)]
    kind = next((kind for kind, what in KINDS.items() if any(re.search(what, line) for line in lines)), "another")
    return f"{outcome}: {re.sub('[0-9]+', '#', seen)[:90]}" if outcome == "crash" else f"{outcome}: {kind}"


def fuzz(
    programs: int, seed: int, sides: Sides | None = None, shrunk: int = 200, without: str = "$^"
) -> tuple[collections.Counter, dict[str, list]]:
    """Return how many programs had each outcome, and the failures by kind: settings and programs.

    Args:
        shrunk: failures that are cut to the statements that they need; later ones are only counted.
        without: no program with a statement that this pattern finds.
    """
    sides, counts, kinds = sides or Sides(), collections.Counter(), collections.defaultdict(list)
    for number in range(programs):
        setting, program = sides.program(seed, number)
        if re.search(without, "\n".join(program)):
            counts["left out"] += 1
            continue
        outcome, seen = sides.judge(setting, program)
        counts[outcome] += 1
        if outcome in ("refused", "unread", "unstable"):
            kinds[f"{outcome}: {re.sub('[0-9]+', '#', seen)[:90]}"].append((number, setting, seen, program))
        if outcome in ("different", "crash") and shrunk > 0:
            shrunk -= 1
            program = sides.shrink(setting, program)
            outcome, seen = sides.judge(setting, program)
            kinds[kind_of(outcome, seen, program)].append((number, setting, seen, program))
    return counts, kinds


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--programs", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--shrink", type=int, default=200, help="failures that are cut to the statements that they need")
    parser.add_argument("--without", default="$^", help="leave out programs in which this pattern is found")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    began = time.perf_counter()
    counts, kinds = fuzz(arguments.programs, arguments.seed, shrunk=arguments.shrink, without=arguments.without)
    for kind, failures in sorted(kinds.items(), key=lambda item: -len(item[1])):
        if not kind.startswith(("different", "crash")):
            print(f"{kind}: {len(failures)} times, programs {[number for number, *_ in failures[:3]]}")
            continue
        number, setting, seen, program = min(failures, key=lambda failure: len(" ".join(failure[-1])))
        print(f"\n# {kind} ({len(failures)} times; program {number}) {seen}\nshow({setting!r}, r'''")
        print("\n".join(program) + "\n''')")
    print(f"\n{arguments.programs} programs, seed {arguments.seed}, {time.perf_counter() - began:.0f} s")
    print(" / ".join(f"{outcome} {counts[outcome]}" for outcome in OUTCOMES))
    return int(bool(counts["different"] + counts["crash"]))


if __name__ == "__main__":
    raise SystemExit(main())
