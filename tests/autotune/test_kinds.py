"""Models with several kinds of layers, each called in its own way: a tower for pictures before a decoder, an encoder, too."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import deepspeed.comm as dist
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint as torch_checkpoint

import ds_memo
from ds_memo.runtime.handle import MemoHandle
from tests.distributed_harness.common import ON_CPU, DistributedTest
from tests.everyday import everyday
from tests.inside import inside
from tests.models import BF16, HIDDEN, VOCAB, Batch, Block, Outcome, Toy, assert_same, gradients, step

IMAGE, PATCHES = VOCAB - 1, 16
"""The token that stands for a patch, and patches in an image."""
DEVICE = 1.5 / 1024
"""GiB."""


def vision_and_text() -> nn.Module:
    from transformers import CLIPVisionConfig, LlamaConfig, LlavaConfig, LlavaForConditionalGeneration

    heads = {"num_attention_heads": 4, "num_hidden_layers": 3, "intermediate_size": 2 * HIDDEN}
    eye = CLIPVisionConfig(hidden_size=HIDDEN // 2, image_size=56, patch_size=14, projection_dim=HIDDEN, **heads)
    text = LlamaConfig(hidden_size=HIDDEN, vocab_size=VOCAB, pad_token_id=0, bos_token_id=1, eos_token_id=2, **heads)
    torch.manual_seed(0)
    return LlavaForConditionalGeneration(LlavaConfig(vision_config=eye, text_config=text, image_token_index=IMAGE)).train()


def encoder_and_decoder(dropout: float = 0.0) -> nn.Module:
    from transformers import BartConfig, BartForConditionalGeneration

    sizes = {
        "d_model": HIDDEN,
        "encoder_ffn_dim": 2 * HIDDEN,
        "decoder_ffn_dim": 2 * HIDDEN,
        "max_position_embeddings": 256,
    }
    layers = {"encoder_layers": 3, "decoder_layers": 3, "encoder_attention_heads": 4, "decoder_attention_heads": 4}
    torch.manual_seed(0)
    return BartForConditionalGeneration(BartConfig(vocab_size=VOCAB, dropout=dropout, **sizes, **layers)).train()


def batch(length: int, images: int = 0, seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, IMAGE, (1, length), generator=generator)
    labels = ids.clone()
    ids[0, : images * PATCHES] = IMAGE
    pictures = {"pixel_values": torch.randn(images, 3, 56, 56, generator=generator)} if images else {}
    return {"input_ids": ids, "labels": labels, **pictures}


def attached(model: nn.Module, cache: Path, **memo: Any) -> MemoHandle:
    section = {"device_memory_gib": DEVICE, "resident_layers": 1, **memo, "plan": {"enabled": False}, "cache_dir": str(cache)}
    return ds_memo.attach(model, {"enabled": True, **section})


def outcome(model: nn.Module, inputs: dict[str, torch.Tensor]) -> Outcome:
    torch.manual_seed(7)
    loss = model(**inputs).loss
    loss.backward()
    return Outcome(loss.detach(), gradients(model))


def assert_as_predicted(handle: MemoHandle) -> None:
    report = handle.report()
    assert report["predicted"]["stored_bytes_per_layer"] == report["stored_bytes_per_layer"]
    assert report["bytes_to_host"] and not report["warnings"]


@pytest.mark.parametrize("name", ["vision and text", "encoder and decoder"])
def test_each_kind_is_profiled_as_it_is_called(name: str, tmp_path: Path) -> None:
    """The second has dropout: that layers ran in the look has drawn no random number for good."""
    if name == "vision and text":
        model, inputs = vision_and_text(), batch(100, images=2)
    else:
        model, inputs = encoder_and_decoder(dropout=0.1), {**batch(60), "labels": batch(60, seed=1)["labels"]}
    want = outcome(copy.deepcopy(model), inputs)
    handle = attached(model, tmp_path)
    assert_same(outcome(model, inputs), want)
    profile = inside(handle).tuner.profile
    assert profile.layers == (0, 0, 0, 1, 1, 1) and len(profile.kinds) == 2
    assert_as_predicted(handle)
    handle.detach()


def test_under_autocast(tmp_path: Path) -> None:
    """Its cache has weights that were cast without a graph, for the look: the forward must not take those."""
    model, inputs = vision_and_text(), batch(100, images=2)
    stock = copy.deepcopy(model)
    handle = attached(model, tmp_path)
    for _ in range(2):
        with torch.autocast("cpu", torch.bfloat16):
            got, want = outcome(model, inputs), outcome(stock, inputs)
        assert_same(got, want, BF16)
    handle.detach()


def test_a_frozen_tower_keeps_nothing(tmp_path: Path) -> None:
    """And takes no part in the solution."""
    model = vision_and_text()
    model.model.vision_tower.requires_grad_(False)
    stock, inputs = copy.deepcopy(model), batch(100, images=2)
    handle = attached(model, tmp_path)
    assert_same(outcome(model, inputs), outcome(stock, inputs))
    assert inside(handle).tuner.profile.layers == (None, None, None, 0, 0, 0)
    assert handle.report()["stored_bytes_per_layer"][:3] == [0, 0, 0] and handle.report()["layers_on_device"] == [5]
    assert_as_predicted(handle)
    handle.detach()


NOT_CALLED = "CLIPEncoderLayer trains, and in the first pass, which was profiled, not every rank called one that trained: it is "


@pytest.mark.parametrize("first", everyday(["a text", "an image"], ["a text"]))
def test_batches_with_and_without_images(first: str, tmp_path: Path) -> None:
    """The tower is solved for if the first batch calls it; else it is fully recomputed, which is said once."""
    model = vision_and_text()
    stock = copy.deepcopy(model)
    handle = attached(model, tmp_path)
    batches = [batch(100), batch(100, images=2), batch(60), batch(140, images=1)]
    known = first == "an image"
    for inputs in reversed(batches) if known else batches:
        assert_same(outcome(model, inputs), outcome(stock, inputs))
        report, tower = handle.report(), slice(0, 3)
        predicted, stored = report["predicted"]["stored_bytes_per_layer"], report["stored_bytes_per_layer"]
        if not known or "pixel_values" not in inputs:
            assert predicted[tower] == [0, 0, 0]
            stored[tower] = [0, 0, 0]  # not solved for, or of the pass before
        assert predicted == stored
    assert inside(handle).tuner.profile.layers == ((0, 0, 0, 1, 1, 1) if known else (None, None, None, 0, 0, 0))
    assert [said.startswith(NOT_CALLED + "fully recomputed") for said in report["warnings"]] == [True] * (not known)
    assert report["attention_recomputed"] == (0 if known else 2 * 2), "of two batches; Llava does not use the last layer's output"
    assert report["profile"]["changes"] == []
    handle.detach()


@pytest.mark.filterwarnings("ignore::ds_memo.errors.MemoWarning")
def test_a_kind_that_trains_later_is_recomputed_where_all_else_is_not(tmp_path: Path) -> None:
    """How much it takes is not known: room for it without recompute cannot be counted on."""
    model = vision_and_text()
    stock = copy.deepcopy(model)
    handle = ds_memo.attach(model, {"device_memory_gib": 1.0, "plan": {"enabled": False}, "cache_dir": str(tmp_path)})
    for number in range(3):
        for each in (model, stock):
            each.model.vision_tower.requires_grad_(number > 0)
        inputs = batch(100, images=2)
        assert_same(outcome(model, inputs), outcome(stock, inputs))
        report = handle.report()
        assert not report["checkpointing"] and report["attention_recomputed"] == 2 * number
        assert [said.startswith(NOT_CALLED) for said in report["warnings"]] == [True] * (number > 0)
    handle.detach()


class Uneven(Block):
    """Alike by its parameters alone."""

    times = 1

    def feed(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(self.times - 1):
            x = x + super().feed(x)
        return super().feed(x)


class Stacks(nn.Module):
    """Two stacks of blocks; a batch with a second tensor goes through both."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.one = nn.ModuleList(Block() for _ in range(2))
        self.other = nn.ModuleList(Uneven() for _ in range(2))
        self.head = nn.Linear(HIDDEN, VOCAB)

    def forward(self, inputs_embeds: torch.Tensor, second: torch.Tensor | None = None) -> torch.Tensor:
        x = inputs_embeds
        for stack in (self.one,) if second is None else (self.one, self.other):
            for block in stack:
                x = block(x)
        return self.head(x).logsumexp(-1).mean()

    def step(self, length: int, stacks: int) -> Outcome:
        self.zero_grad()
        loss = self(Batch.random(2, length).embeds, *[torch.ones(1)] * (stacks - 1))
        loss.backward()
        return Outcome(loss.detach(), gradients(self))


@pytest.mark.filterwarnings("ignore::ds_memo.errors.MemoWarning")
@pytest.mark.parametrize("first", everyday([1, 2], [1]))
def test_a_kind_behind_all_others(first: int, tmp_path: Path) -> None:
    """A probe ends where the last kind of the first pass comes. A pass that was probed once is known again."""
    model = Stacks()
    stock = copy.deepcopy(model)
    handle = attached(model, tmp_path, layers=["one.0", "one.1", "other.0", "other.1"])
    for length, stacks in ((64, first), (64, 2), (48, 2), (48, 1), (64, 2), (56, 2)):
        assert_same(model.step(length, stacks), stock.step(length, stacks))
        report, solved = handle.report(), 2 * min(first, stacks)
        assert report["predicted"]["stored_bytes_per_layer"][:solved] == report["stored_bytes_per_layer"][:solved]
    assert inside(handle).tuner.profile.layers == ((0, 0, 1, 1) if first == 2 else (0, 0, None, None))
    assert [said.startswith("Uneven trains") for said in report["warnings"]] == [True] * (first == 1)
    handle.detach()


class Stemmed(Toy):
    """What comes before its layers goes through ds_memo.checkpoint, in stock's place of torch's."""

    checkpoint = staticmethod(torch_checkpoint)

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(HIDDEN, HIDDEN)
        self.blocks[2].up.weight.requires_grad_(False)  # a kind of its own

    def forward(self, inputs_embeds: torch.Tensor, labels: torch.Tensor) -> Any:
        return super().forward(self.checkpoint(self.stem, inputs_embeds, use_reentrant=False), labels)


def test_what_is_checkpointed_before_the_last_kind(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Stemmed()
    stock = copy.deepcopy(model)
    model.checkpoint = ds_memo.checkpoint
    handle = attached(model, tmp_path)
    for length in (64, 64, 48):
        assert_same(step(model, Batch.random(2, length)), step(stock, Batch.random(2, length)))
    assert inside(handle).tuner.profile.layers == (0, 0, 1, 0)
    handle.detach()


@pytest.mark.parametrize("times", [1, 2])
def test_layers_that_are_not_what_their_kind_is(times: int, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Toy(Uneven)
    for block in model.blocks[1:]:
        block.times = times
    handle = attached(model, tmp_path)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    step(model, Batch.random(2, 64))
    optimizer.step()
    said = [warning for warning in handle.report()["warnings"] if "do not keep what the profile says" in warning]
    assert len(said) == (times > 1) and all("3 of 4 layers" in warning for warning in said)
    handle.detach()


WITHOUT_TOWER = (None, None, None, 0, 0, 0)


@pytest.mark.skipif(not ON_CPU, reason="two CPU ranks")
class TestKindsOnRanks(DistributedTest):
    world_size = 2
    exec_timeout = 60

    def test_several_kinds(self) -> None:
        """The tower's parameters are gathered for the look, and the forward that follows finds ZeRO-3 as it was."""
        self.compare(3, [(100, 2), (60, 1), (100, 2)])

    def test_images_come_later(self) -> None:
        """The tower is fully recomputed, on both ranks."""
        self.compare(3, [(100, 0), (100, 2), (60, 1)], WITHOUT_TOWER, warns=True)

    def test_images_on_one_rank_only(self) -> None:
        """From the first pass on: that rank recomputes its tower and the other one waits for nothing."""
        rank = dist.get_rank()
        self.compare(0, [(100, 2 * rank), (60, rank), (60, 0)], WITHOUT_TOWER, warns=bool(rank))

    def compare(
        self,
        stage: int,
        passes: list[tuple[int, int]],
        kinds: tuple[int | None, ...] = (0, 0, 0, 1, 1, 1),
        warns: bool = False,
    ) -> None:
        losses = {}
        for memo in (None, {"enabled": True, "device_memory_gib": DEVICE, "resident_layers": 1}):
            config = {
                "train_micro_batch_size_per_gpu": 1,
                "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0, "reduce_bucket_size": 1000},
                "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
                **({"memo": memo} if memo else {}),
            }
            engine = ds_memo.initialize(model=vision_and_text(), config=config)[0]
            losses[bool(memo)] = []
            for number, (length, images) in enumerate(passes):
                loss = engine(**batch(length, images, seed=2 * number + dist.get_rank())).loss
                engine.backward(loss)
                engine.step()
                losses[bool(memo)].append(loss.item())
        assert losses[True] == pytest.approx(losses[False], rel=1e-6)
        report = ds_memo.report(engine)
        assert report["bytes_to_host"]
        assert [said.startswith(NOT_CALLED) for said in report["warnings"]] == [True] * warns
        assert inside(engine.memo).tuner.profile.layers == kinds
