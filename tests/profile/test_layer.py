"""Measuring one layer: the sample matches the layer, and the measurement leaves no trace."""

from __future__ import annotations

import gc
import itertools
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from functorch.compile import make_boxed_func
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch.utils._python_dispatch import _disable_current_modes

from ds_memo.profile.caught_call import CaughtCall, hidden_from_training
from ds_memo.profile.layer import measure
from ds_memo.profile.live import LiveBytes
from ds_memo.profile.stopwatch import Stopwatch
from ds_memo.remat.layer import Layer
from tests.models import HIDDEN, Block
from tests.tiles.test_probe import TilesItsMLP

CPU = torch.device("cpu")
BATCH, LENGTH = 2, 50
TOKENS = BATCH * LENGTH


def call(module: nn.Module, dtype: torch.dtype = torch.float32) -> CaughtCall:
    return CaughtCall(Layer(0, "blocks.0", module), module, (torch.randn(BATCH, LENGTH, HIDDEN, dtype=dtype),), {})


@pytest.mark.parametrize("length, dtype", [(LENGTH, torch.float32), (20, torch.bfloat16)])
def test_sizes_and_work_of_a_block(length: int, dtype: torch.dtype) -> None:
    tokens, size = BATCH * length, dtype.itemsize
    sample = measure(call(Block().to(dtype), dtype), length, CPU)
    assert (sample.batch, sample.length, sample.tokens) == (BATCH, length, tokens)
    assert sample.gemm_flops == 2 * tokens * HIDDEN * (3 + 1 + 2 + 2) * HIDDEN  # qkv, o, up, down
    assert sample.attention_flops == 2 * BATCH * length * length * HIDDEN
    kinds = [output.role for output in sample.outputs]
    assert kinds == ["input", "gemm", "attention", "attention", "gemm", "gemm"]  # attention's is with its log-sum-exp; no down
    sizes = [output.rows * output.row_bytes for output in sample.outputs]
    hidden = tokens * HIDDEN * size
    assert sizes == [hidden, 3 * hidden, hidden, tokens * 4 * 4, hidden, 2 * hidden]
    assert [output.born for output in sample.outputs] == sorted(output.born for output in sample.outputs)
    assert sample.no_recompute_bytes > sum(sizes)
    assert sample.working.backward > 2 * hidden
    assert 0 < sample.gemm_s <= sample.all_gemms_s and 0 < sample.attention_s <= sample.forward_s
    assert 0 < sample.attention_backward_s <= sample.backward_s and sample.replay_s > 0


def unobserved(graph: torch.fx.GraphModule, inputs: Any) -> Callable[..., Any]:
    """A compiler whose kernels no dispatch mode observes, like inductor's."""

    def run(*args: Any) -> Any:
        with _disable_current_modes():
            return graph(*args)

    return make_boxed_func(run)


class PartlyCompiled(nn.Module):
    """A small product in a compiled function before a large one."""

    def __init__(self) -> None:
        super().__init__()
        self.small, self.large = nn.Linear(HIDDEN, HIDDEN), nn.Linear(HIDDEN, 32 * HIDDEN)
        self.compiled = torch.compile(lambda x: self.small(x).tanh(), backend=aot_autograd(fw_compiler=unobserved))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.large(self.compiled(x)).relu()


@pytest.mark.slow
def test_products_of_compiled_functions_are_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A recipe does not list them: later products would get their times."""
    torch._dynamo.reset()
    timed = []
    read = Stopwatch.read
    monkeypatch.setattr(Stopwatch, "read", lambda watch: read(watch) or timed.append(len(watch.seconds)))
    sample = measure(call(PartlyCompiled()), LENGTH, CPU)
    assert timed == [1] and sample.gemm_flops == 2 * TOKENS * HIDDEN * 32 * HIDDEN


@pytest.mark.parametrize("batch", [1, BATCH])
def test_a_length_that_is_the_hidden_size(batch: int) -> None:
    """Only the length is cut, not the hidden size, if a rank with a longer batch has both at 4096."""
    states, mask = torch.randn(batch, HIDDEN, HIDDEN), torch.ones(batch, 1, HIDDEN, HIDDEN, dtype=torch.bool)
    one = CaughtCall(Layer(0, "blocks.0", None), Block(), (states, mask), {"position_ids": torch.arange(HIDDEN)[None]})
    assert one.can_shorten()
    fn, args, (hidden,) = one.at(20)
    assert [tuple(arg.shape) for arg in args] == [(batch, 20, HIDDEN), (batch, 1, 20, 20)]
    assert fn.keywords["position_ids"].shape == (1, 20) and torch.equal(hidden, states[:, :20])


@pytest.mark.parametrize(
    "ends, at_20",
    [
        ([0, 7, 30, LENGTH], [0, 7, 20]),
        ([0, LENGTH, 60, 60, BATCH * LENGTH], [0, 20, 30, 40]),
        ([0, BATCH * LENGTH], [0, 40]),
        ([0, 60, 2 * LENGTH + 1], None),
        ([0, 7], [0, 7]),
        (list(range(LENGTH)), list(range(20))),
    ],
    ids=["one row", "rows end to end", "one document over all rows", "of other tokens", "no ends", "positions"],
)
def test_documents_end_where_they_are_cut(ends: list[int], at_20: list[int] | None) -> None:
    """Hugging Face passes flash-attention's cu_seqlens this way; kernels would read past a cut that left them as they are."""
    told = {"cu_seq_lens_q": torch.tensor(ends, dtype=torch.int32), "max_length_q": 2 * LENGTH, "max_length_k": torch.tensor(9)}
    one = CaughtCall(Layer(0, "blocks.0", None), Block(), (torch.randn(BATCH, LENGTH, HIDDEN),), told)
    assert one.can_shorten() == (at_20 is not None)
    assert one.packed == (ends[-1] >= LENGTH)
    if at_20 is None:
        return
    short = one.at(20)[0].keywords
    assert short["cu_seq_lens_q"].tolist() == at_20 and short["cu_seq_lens_q"].dtype == torch.int32
    longest = max(end - start for start, end in itertools.pairwise(at_20))
    assert (short["max_length_q"], short["max_length_k"]) == ((longest, 9) if one.packed else (2 * LENGTH, 9))
    assert one.at(LENGTH)[0].keywords["cu_seq_lens_q"].unique().tolist() == sorted({*ends})


def test_hooks_of_others_outlive_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    """Saving the buffers may run out of memory, or the profile may fail."""

    def fails(*args: object) -> None:
        raise MemoryError

    saved, x = [], torch.ones(2, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: saved.append(1) or tensor, lambda tensor: tensor):
        with monkeypatch.context() as patch, pytest.raises(MemoryError):
            patch.setattr(torch.Tensor, "clone", fails)
            with hidden_from_training(nn.BatchNorm1d(4)):
                pass
        with pytest.raises(ZeroDivisionError), hidden_from_training(nn.BatchNorm1d(4)):
            x * x, 1 / 0
        assert not saved
        x * x
    assert saved


def test_nothing_is_left() -> None:
    one = call(module := Block(dropout=0.1))
    before, threads = torch.get_rng_state(), threading.active_count()
    with LiveBytes() as count:
        measure(one, LENGTH, CPU)
    assert torch.equal(torch.get_rng_state(), before) and threading.active_count() == threads
    assert all(parameter.grad is None for parameter in module.parameters())
    gc.collect()
    assert count.live == 0


def test_a_backward_that_adds_to_gradients_by_itself() -> None:
    module, reduced = TilesItsMLP(), []
    before = dict(module.named_parameters())
    for parameter in module.parameters():
        parameter.register_post_accumulate_grad_hook(lambda parameter: reduced.append(parameter))
    measure(call(module), LENGTH, CPU)
    assert all(parameter.grad is None for parameter in module.parameters()) and not reduced
    assert {name: id(parameter) for name, parameter in module.named_parameters()} == {n: id(p) for n, p in before.items()}
    module(call(module).hidden).sum().backward()
    assert all(parameter.grad is not None for parameter in module.parameters()) and len(reduced) >= len(before)


def test_hooks_around_the_model_see_no_tensor_of_a_profile() -> None:
    observed, inner = [], []

    def hooks(packed: list) -> Any:
        return torch.autograd.graph.saved_tensors_hooks(lambda x: packed.append(0) or x.detach(), lambda x: x)

    one = call(Block())
    with hooks(observed), hooks(inner):
        measure(one, LENGTH, CPU)
        assert not observed and not inner
        nn.Linear(3, 3)(torch.ones(3))
        first = len(inner)
        assert first and not observed
    with hooks(observed):
        nn.Linear(3, 3)(torch.ones(3))
    assert observed and len(inner) == first
    assert torch._C._autograd._top_saved_tensors_default_hooks(False) is None


def given(*args: torch.Tensor, **kwargs: torch.Tensor) -> CaughtCall:
    states = torch.randn(BATCH, LENGTH, HIDDEN)
    return CaughtCall(Layer(0, "blocks.0", None), Block(), (states, *args), kwargs)


def test_what_else_a_layer_is_given_is_part_of_the_key() -> None:
    """Kept bytes and times depend on a mask."""
    assert given().others() == given(cu_seqlens=torch.tensor([0, 5, LENGTH])).others() == []
    assert given(torch.ones(BATCH, 100)).others() != given(torch.ones(BATCH, 4000)).others()
    assert given(position_ids=torch.arange(LENGTH)[None]).others() == [[1, "length", "torch.int64"]]


@pytest.mark.parametrize(
    "shape, length",
    [
        ((BATCH, 7, HIDDEN), 7),
        ((BATCH, 7, HIDDEN // 2), 7),
        ((BATCH, LENGTH, HIDDEN), 0),
        ((BATCH, 7, HIDDEN // 4), 0),
        ((1, 7, HIDDEN), 0),
        ((BATCH, 7), 0),
    ],
    ids=["states", "narrower states", "as long", "a rotary table", "for all sequences", "a mask"],
)
def test_an_encoder_s_states_are_told_by_batch_width_and_length(shape: tuple[int, ...], length: int) -> None:
    assert given(encoder_hidden_states=torch.randn(shape)).encoder_length == length
