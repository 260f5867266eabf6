"""The probe of sequence parallelism names what mixes tokens outside attention, before training, and lets all else pass."""

from __future__ import annotations

import copy
import functools
import inspect
import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import deepspeed.comm as dist
import pytest
import torch
import torch.nn.functional as F
from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF
from torch import nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import ds_memo
from ds_memo.deepspeed import sequence
from ds_memo.hf import sequence_probe
from ds_memo.runtime.sequence import decoders
from tests import architectures
from tests.deepspeed.matrix import mean_loss
from tests.deepspeed.test_sequence import batch, gradients_of_parts, part, whole_gradients
from tests.distributed_harness.common import DistributedTest
from tests.everyday import everyday
from tests.models import HIDDEN, assert_same_grads, build, generators


def loss_of(forward: Any, input_ids: torch.Tensor, targets: torch.Tensor, **kwargs: Any) -> torch.Tensor:
    """The loss alone, of labels at the positions that predict them."""
    return F.cross_entropy(forward(input_ids=input_ids, **kwargs).logits.flatten(0, 1), targets.flatten())


MIXERS = {
    "openai-gpt": r"transformer\.h\.0\.attn \(Attention\)",
    "xlstm": r"backbone\.blocks\.0\.mlstm_layer\.mlstm_backend \(xLSTMBackend\)",
    "bart": r"decoder\.embed_positions \(BartLearnedPositionalEmbedding\)",
}
"""Model types, and the module in which parts differ from whole sequences."""
TABLES = ("_forward_pre_hooks", "_forward_hooks")


def start(model: nn.Module, stage: int = 0, dtype: str = "fp32", memo: bool = False, **how: Any) -> Any:
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW", "params": {"torch_adam": True}},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "bf16": {"enabled": dtype == "bf16"},
        "memo": {"enabled": memo, "alpha": 0.5, "resident_layers": 1},
        **({} if how else {"sequence_parallel_size": 2}),
    }
    return ds_memo.initialize(model=model, config=config, **how)[0]


class Conv(nn.Module):
    """A causal convolution over tokens that is not caught. With `exchanging`, a rank's first tokens see those before them."""

    exchanging = False

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(HIDDEN, 1, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tail = x[:, -3:].contiguous()
        tails = [torch.empty_like(tail) for _ in range(2)]
        dist.all_gather(tails, tail)
        before = tails[0] if self.exchanging and dist.get_rank() else torch.zeros_like(tail)
        return F.conv1d(torch.cat([before, x], 1).transpose(1, 2), self.weight, groups=HIDDEN).transpose(1, 2)


class Count(nn.Module):
    """An MLP that counts tokens, as routers do for their bias, and draws random numbers."""

    def __init__(self, mlp: nn.Module) -> None:
        super().__init__()
        self.mlp = mlp
        self.register_buffer("tokens", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.tokens += x.shape[1]
        torch.rand(3)
        return self.mlp(x)


class Off(nn.Module):
    """An MLP whose `n`-th call is wrong in one token: another each time, as where a router's choice flips, or the same."""

    def __init__(self, mlp: nn.Module, another: bool) -> None:
        super().__init__()
        self.mlp, self.another = mlp, another
        self.calls = itertools.count(1)  # an int would be put back behind the probe

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.mlp(x)
        out[:, 5 * self.another * next(self.calls)] += x.shape[1] == 37  # in parts
        return out


def whole_loss(model: nn.Module) -> float:
    tokens, positions, labels = batch()
    return mean_loss(model(input_ids=tokens, position_ids=positions, use_cache=False).logits, labels).item()


def needing_more() -> nn.Module:
    model = build("llama")
    forward = model.model.forward
    model.model.forward = lambda *, extra, **kwargs: forward(**kwargs)
    return model


def probed(mlp: Any = None, exchanging: bool = False) -> None:
    """Probe a sequence-parallel Llama, of which one MLP is replaced."""
    torch.manual_seed(0)
    model = build("llama")
    layer = model.model.layers[1]
    layer.mlp = mlp(layer.mlp) if mlp else layer.mlp
    sequence.set_up(model, 2)
    own = decoders[model]

    @contextmanager
    def whole() -> Iterator[None]:
        layer.mlp.exchanging = False
        with own.whole():
            yield
        layer.mlp.exchanging = exchanging

    sequence_probe.refuse_inexact(model, model, own.ranks.group, whole, decoder=own)


class TestProbe(DistributedTest):
    world_size = 2

    @pytest.mark.parametrize(
        "name, stage, dtype",
        everyday([(name, 0, "fp32") for name in MIXERS] + [("bart", 3, "bf16")], [("bart", 3, "bf16")]),
    )
    def test_what_mixes_tokens_is_named_before_training(
        self, name: str, stage: int, dtype: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """On every rank, with memo and without. Without the probe gradients are wrong by more than a tenth."""
        monkeypatch.setitem(architectures.SIZES, "sliding_window", 128)
        with pytest.raises(ds_memo.MemoError, match=MIXERS[name] + ' computes token 37 of 74 .*sequence_parallel_size": 1'):
            start(architectures.build(name), stage, dtype, memo=stage == 3)
        if stage == 0:
            model = architectures.build(name).eval()
            want = whole_gradients(model)
            model.zero_grad()
            sequence.set_up(model, 2)
            with pytest.raises(AssertionError, match="gradient"):
                assert_same_grads(gradients_of_parts(model), want, 0.1)

    def test_what_mixes_nothing_is_let_pass(self) -> None:
        probed()
        asks_for_labels = build("llama")
        asks_for_labels.forward = functools.partial(loss_of, asks_for_labels.forward)
        tokens, positions, labels = map(part, batch())
        want = whole_loss(build("llama"))
        engine = start(asks_for_labels, stage=3)  # whose order of gathers the probe leaves alone
        loss = engine(input_ids=tokens, position_ids=positions, targets=labels)
        loss = sequence.mean_over_ranks(loss, labels, engine)
        assert loss.item() == pytest.approx(want, rel=1e-6)
        engine.backward(loss)
        engine.step()
        probed(lambda mlp: Conv(), exchanging=True)
        probed(lambda mlp: Off(mlp, another=True))
        for wrong in (lambda mlp: Conv(), lambda mlp: Off(mlp, another=False)):
            with pytest.raises(ds_memo.MemoError, match=r"layers\.1\.mlp \((Conv|Off)\)"):
                probed(wrong)

    def test_nothing_is_left_behind(self) -> None:
        model = build("llama", num_attention_heads=4, num_key_value_heads=1)
        model.model.layers[1].mlp = Count(model.model.layers[1].mlp)
        model.model.layers[2].eval()
        before = copy.deepcopy(model), generators()
        sequence.set_up(model, 2)
        hooks = [len(vars(module)[table]) for module in model.modules() for table in TABLES]
        sequence.refuse_inexact(model, model)
        assert torch.equal(before[1], generators())
        assert hooks == [len(vars(module)[table]) for module in model.modules() for table in TABLES]
        for module, was in zip(model.modules(), before[0].modules(), strict=True):
            assert module.training == was.training
            assert getattr(module, "num_key_value_groups", None) == getattr(was, "num_key_value_groups", None)
        assert model.model.layers[1].mlp.tokens == 0
        assert all(map(torch.equal, model.state_dict().values(), before[0].state_dict().values()))
        assert all(parameter.grad is None for parameter in model.parameters())

    def test_what_deepspeed_has_registered_itself(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """As Accelerate does it for ParallelismConfig(sp_size=2), for one length; test_scripts.py has lengths that vary."""
        given = {"seq_length": 48, "seq_length_is_variable": False, "disable_in_eval": True}
        monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS, "sdpa", ALL_ATTENTION_FUNCTIONS["sdpa"])
        mpu = UlyssesSPAttentionHF.register_with_transformers(build("llama"), "sdpa", 2, 2, **given)
        theirs = ALL_ATTENTION_FUNCTIONS["sdpa"]
        uattn = inspect.getclosurevars(theirs).nonlocals["uattn"]
        before = dict(vars(uattn))
        start(build("llama"), memo=True, mpu=mpu).memo.detach()
        assert ALL_ATTENTION_FUNCTIONS["sdpa"] is theirs and vars(uattn) == before
        with pytest.raises(ds_memo.MemoError, match=r"mlp \(Conv\)"):
            model = build("llama")
            model.model.layers[1].mlp = Conv()
            start(model, memo=True, mpu=mpu)
        window = build("mistral")  # of 8 tokens, which sdpa knows by the mask that DeepSpeed drops
        with pytest.raises(ds_memo.MemoError, match=r"layers\.0\.self_attn \(MistralAttention\)"):
            start(window, memo=True, mpu=mpu)

    def test_what_cannot_be_in_parts_is_said_in_a_line(self) -> None:
        for name, message in (
            ("inkling_text", "InklingAttention hands its attention function position_bias, a tensor of shape"),
            ("falcon", "FalconForCausalLM cannot be tried on 74 tokens"),
            ("needs more", r"LlamaForCausalLM cannot be tried on 74 tokens .*\(TypeError: .* argument: 'extra'\)"),
        ):
            with pytest.raises(ds_memo.MemoError, match=message) as refusal:
                start(needing_more() if name == "needs more" else architectures.build(name))
            assert "\n" not in str(refusal.value)
