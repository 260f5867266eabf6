"""Faults in what C++ is told: each must fail the comparison with stock, or a check of the checkpoint."""

from __future__ import annotations

import threading
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import CheckpointError

from ds_memo.errors import MemoError
from ds_memo.remat import checkpoint, follower, op_policy, record, replay
from ds_memo.remat.op_policy import OpKind
from ds_memo.remat.recipe import Gemm
from tests.faults import put_in
from tests.models import Batch, Different, Outcome, build, compare_with_stock, gradients, step
from tests.remat.situations import Lines, toy
from tests.remat.test_in_cpp import Biased, library, ops_in_cpp  # noqa: F401  a fixture
from tests.remat.test_inside_layers import ChangesProducts

pytestmark = [pytest.mark.filterwarnings("ignore::ds_memo.errors.MemoWarning"), pytest.mark.usefixtures("library")]
Patch = pytest.MonkeyPatch
HALF = {"alpha": 0.5, "resident_layers": 0}


class Switches(Lines):
    """Now the one product is needed, now the other."""

    def forward(self, x: torch.Tensor, other: bool) -> torch.Tensor:
        y, z = self.a(x), self.b(x)
        return x + (F.gelu(y * 2) + z * 1 if other else y * 1 + F.gelu(z * 2))


class Looks(Lines):
    """Now a product that is left out decides what is done with another."""

    def forward(self, x: torch.Tensor, other: bool) -> torch.Tensor:
        y, z = self.a(x), self.b(x)
        if other and y.detach().mean() > -9:
            z = z * 2
        return x + y + self.c(F.gelu(z))


def drive(model: nn.Module, number: int) -> Outcome:
    return step(model, Batch.random(2, 17, seed=number))


def switch(model: nn.Module, number: int) -> Outcome:
    return step(model, Batch.random(2, 17, seed=number), other=number == 2)


def in_autocast(model: nn.Module, number: int) -> Outcome:
    batch = Batch.random(2, 17, seed=number)
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(batch.embeds, batch.labels).loss
    loss.backward()
    return Outcome(loss.detach(), gradients(model))


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[nn.Module, int], Outcome]]] = {
    "llama": (lambda: build("llama"), drive),
    "plain": (lambda: build("plain"), drive),
    "biased": (lambda: toy(Biased), drive),
    "changes": (lambda: toy(ChangesProducts), drive),
    "switches": (lambda: toy(Switches), switch),
    "looks": (lambda: toy(Looks), switch),
    "dropout": (lambda: build("gpt2", resid_pdrop=0.2), drive),
    "autocast": (lambda: build("plain"), in_autocast),
}


def compare(name: str) -> None:
    """Compare in a thread of its own, where C++ asks anew what each op is."""
    build_model, drive = MODELS[name]
    errors: list[BaseException] = []

    def run() -> None:
        try:
            compare_with_stock(build_model(), drive, HALF)
        except BaseException as error:
            errors.append(error)

    before = ops_in_cpp()
    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert ops_in_cpp() > before
    if errors:
        raise errors[0]


@pytest.mark.parametrize("name", MODELS)
def test_without_a_fault(name: str) -> None:
    compare(name)


# ---- other recipes than Python has


def told(patch: Patch, mode: types.ModuleType, change: Callable[[int, list[Gemm]], dict[str, Any]]) -> None:
    """Tell C++ something else of products.

    Args:
        mode: record or replay.
        change: takes a product's number and all products. Returns the fields that differ.
    """

    def follow(right: Any, mode: Any, call: Any, recipe: Any, replays: bool) -> Any:
        products = [op for op in recipe.ops if isinstance(op, Gemm)]
        ops = []
        for op in recipe.ops:
            seen = op
            if isinstance(op, Gemm):
                number = next(number for number, product in enumerate(products) if product is op)
                fields = ("flops", "shape", "dtype", "m", "rows", "kept", "wanted", "biased")
                seen = types.SimpleNamespace(**{field: getattr(op, field) for field in fields} | change(number, products))
            ops.append((op.func.name() if hasattr(op.func, "_schema") else "", seen))
        return follower.library().Follower(follower.library().Program(ops), mode, call, replays)

    put_in(patch, mode, "follow", follow)


def a_row_more_is_stored(patch: Patch) -> None:
    told(patch, replay, lambda number, products: {"rows": products[number].rows + 1} if number == 1 else {})


def a_product_is_not_wanted(patch: Patch) -> None:
    told(patch, replay, lambda number, products: {"wanted": number != 1})


def a_bias_is_no_part_of_its_product(patch: Patch) -> None:
    told(patch, replay, lambda number, products: {"biased": False})


def supplied_from_another(patch: Patch) -> None:
    told(patch, replay, lambda number, products: {"kept": products[1 - number].kept} if number < 2 else {})


def kept_as_another(patch: Patch) -> None:
    told(patch, record, lambda number, products: {"kept": products[1 - number].kept} if number < 2 else {})


def nothing_is_left_out(patch: Patch) -> None:
    """Let the forward forget which products the replay leaves out."""
    told(patch, record, lambda number, products: {"wanted": True})


# ---- other ops than Python has


def writes_are_plain(patch: Patch) -> None:
    put_in(patch, follower, "kind_of", lambda right, func: {OpKind.MUTATES: OpKind.PLAIN}.get(right(func), right(func)))


def no_op_reads_values(patch: Patch) -> None:
    put_in(patch, op_policy, "may_read_values", lambda right, func: False)


def attention_is_plain(patch: Patch) -> None:
    """The replay leaves its steps at the next product: an error, not other gradients."""
    put_in(patch, follower, "kind_of", lambda right, func: {OpKind.ATTENTION: OpKind.PLAIN}.get(right(func), right(func)))


# ---- another run of the layer


def packs(patch: Patch, change: Callable[[int, Callable[[torch.Tensor], Any], torch.Tensor], Any]) -> None:
    def again(right: Any, *args: Any) -> None:
        numbers = iter(range(10**6))
        *args, pack = args
        right(*args, lambda tensor: change(next(numbers), pack, tensor))

    put_in(patch, checkpoint, "_again", again)


def a_tensor_too_many_is_saved(patch: Patch) -> None:
    packs(patch, lambda number, pack, tensor: (pack(tensor), pack(tensor))[1] if number == 2 else pack(tensor))


def a_tensor_too_few_is_saved(patch: Patch) -> None:
    packs(patch, lambda number, pack, tensor: tensor if number == 2 else pack(tensor))


def two_saved_tensors_are_swapped(patch: Patch) -> None:
    waiting: list[torch.Tensor] = []

    def swapped(number: int, pack: Callable[[torch.Tensor], Any], tensor: torch.Tensor) -> Any:
        if number == 0:
            waiting.append(tensor)
            return tensor
        if number == 1:
            pack(tensor)
            tensor = waiting.pop()
        return pack(tensor)

    packs(patch, swapped)


def random_states_are_not_put_back(patch: Patch) -> None:
    def again(right: Any, found: Any, inputs: Any, run: Any, states: Any, *others: Any) -> None:
        with torch.random.fork_rng(devices=[]):
            right(found, inputs, run, None, *others)

    put_in(patch, checkpoint, "_again", again)


def autocast_is_not_put_back(patch: Patch) -> None:
    put_in(patch, checkpoint, "autocast_now", lambda right: ())


FAULTS: dict[Callable[[Patch], None], tuple[str, type[BaseException], str]] = {
    a_row_more_is_stored: ("llama", Different, "gradients"),
    a_product_is_not_wanted: ("llama", Different, "gradients"),
    a_bias_is_no_part_of_its_product: ("biased", Different, "gradients"),
    supplied_from_another: ("biased", Different, "gradients"),
    kept_as_another: ("biased", Different, "gradients"),
    nothing_is_left_out: ("switches", Different, "gradients"),
    writes_are_plain: ("changes", Different, "gradients"),
    no_op_reads_values: ("looks", Different, "gradients"),
    attention_is_plain: ("plain", MemoError, "did not repeat its forward: op 1 was aten._scaled_dot"),
    a_tensor_too_many_is_saved: ("llama", CheckpointError, "different metadata|more tensors"),
    a_tensor_too_few_is_saved: ("llama", CheckpointError, "A different number of tensors"),
    two_saved_tensors_are_swapped: ("llama", CheckpointError, "different metadata"),
    random_states_are_not_put_back: ("dropout", Different, "gradients|generator"),
    autocast_is_not_put_back: ("autocast", MemoError, "multiplied by no parameter, now by qkv.weight"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_is_caught(fault: Callable[[Patch], None], monkeypatch: Patch) -> None:
    name, error, words = FAULTS[fault]
    monkeypatch.setattr(torch.nn.functional, "linear", torch._C._nn.linear)  # ZeRO-3 puts its own there, for the whole process
    fault(monkeypatch)
    with pytest.raises(error, match=words):
        compare(name)
