"""Models that read images, whole and in parts: towers run on every rank, and the text decoder has this rank's tokens."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from transformers import masking_utils
from transformers.models.gemma3 import modeling_gemma3 as gemma3

import ds_memo
from ds_memo.deepspeed import sequence
from ds_memo.hf import sequence as hf_sequence
from ds_memo.hf import sequence_tables
from ds_memo.sequence.masks import Mask
from tests.distributed_harness.common import DistributedTest
from tests.everyday import everyday
from tests.faults import put_in
from tests.sequence import vision
from tests.sequence.whole_and_parts import assert_within_rounding, mean_loss, memo, off, part


def distances(name: str, ulysses: int, padding: tuple[int, ...], settings: Any = None) -> tuple[float, float, str]:
    return off(lambda: vision.build(name), lambda _: vision.Batch(name, padding), ulysses, settings)


def assert_exact(name: str, ulysses: int, padding: tuple[int, ...] = (0, 0), settings: dict[str, Any] | None = None) -> None:
    assert_within_rounding(name, lambda: distances(name, ulysses, padding, settings))


@pytest.mark.parametrize("window", [None, 9])
def test_a_table_is_the_mask_that_transformers_makes(window, monkeypatch):
    """Read a few rows at a time; padding sees itself."""
    generator = torch.Generator().manual_seed(window or 0)
    monkeypatch.setattr(sequence_tables, "_PAIRS", 150)
    for _ in range(20):
        borders = torch.rand(3, 40, generator=generator) < 0.1
        images = torch.where(torch.rand(3, 1, generator=generator) < 0.8, borders.cumsum(1) - 1, -1)
        images = torch.where(images % 2 == 0, images, -1)
        sees = masking_utils.or_masks(masking_utils.causal_mask_function, masking_utils.blockwise_overlay(images))
        if window is not None:
            sees = masking_utils.and_masks(sees, masking_utils.sliding_window_overlay(window))
        text = torch.ones(3, 40, dtype=torch.bool)
        text[0, :7] = text[2, -5:] = False
        dense = masking_utils.sdpa_mask(3, 40, 40, mask_function=sees, attention_mask=text, allow_is_causal_skip=False)[:, 0]
        lo, hi = sequence_tables._table(sees, 3, 40, torch.device("cpu"), text).table
        key = torch.arange(40)
        got = (key >= lo[..., None]) & (key <= hi[..., None])
        assert torch.equal(got[text], dense[text])
        assert torch.equal(got[~text], torch.eye(40, dtype=torch.bool).expand(3, -1, -1)[~text])


class TestTwoRanks(DistributedTest):
    world_size = 2

    @pytest.mark.parametrize("name", everyday(vision.KINDS, ["qwen3_vl", "gemma3"], ["llava", "paligemma 2"]))
    def test_models(self, name):
        for ulysses in (2, 1):
            assert_exact(name, ulysses)

    @pytest.mark.slow
    @pytest.mark.sweep
    @pytest.mark.parametrize("name", vision.KINDS)
    def test_padding(self, name):
        for ulysses in (2, 1):
            for padding in ((7, 0), (-5, 0), (6, -3)):
                assert_exact(name, ulysses, padding)

    @pytest.mark.parametrize("name", everyday(["qwen3_vl", "gemma3", "qwen3_5", "llama4"], ["gemma3"], ["qwen3_vl"]))
    def test_memo(self, name):
        for ulysses, settings in ((2, memo(0.5)), (1, memo(0.0, tile_tokens=11))):
            assert_exact(name, ulysses, (7, 0), settings)

    def test_without_the_table(self, monkeypatch):
        """Images whose tokens do not see those behind them are another model's."""
        monkeypatch.setattr(sequence_tables, "_table", lambda *args: Mask())
        assert distances("gemma3", 2, (0, 0))[0] > 1e-3

    def test_rows_of_other_tokens(self, monkeypatch):
        """A rank that adds the first rows of the images, as many as it has tokens of them, adds those of other tokens."""
        put_in(monkeypatch, hf_sequence, "_rows_of", lambda right, own: right(own).argsort())
        assert distances("qwen3_vl", 2, (0, 0))[0] > 1e-3

    def test_attention_to_images_themselves(self):
        """A decoder's argument without tokens."""
        model = vision.build("llava")
        sequence.set_up(model, 2)
        tokens = torch.ones(2, 45, dtype=torch.long)
        with pytest.raises(ds_memo.MemoError, match=r"LlamaModel was called with inputs_embeds, a tensor of shape \(2, 44, 64\)"):
            model.model.language_model(input_ids=tokens, inputs_embeds=torch.ones(2, 44, 64))

    def test_a_mask_with_holes(self, monkeypatch):
        batch, model = vision.Batch("gemma3"), vision.build("gemma3")
        sequence.set_up(model, 2)
        for module in (gemma3, masking_utils):
            put_in(monkeypatch, module, "blockwise_overlay", lambda right, images: right(images.clamp(max=0)))
        batch.inputs["token_type_ids"][0, 3] = 1  # an image of its own, now of one block with the other
        with pytest.raises(ds_memo.MemoError, match=r"mask with holes: token 3 of row 0 sees 8 of the tokens 0 to 13"):
            batch.logits(model)

    @pytest.mark.parametrize("stage", everyday([1, 3], [3]))
    def test_trained(self, stage):
        """Losses of three steps as one rank has them. Batches with pixels go to both ranks, labels are cut."""
        batches = [vision.Batch("qwen3_vl", padding, seed) for seed, padding in enumerate(((0, 0), (7, 0), (-5, 3)))]
        model, wants = vision.build("qwen3_vl"), []
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for batch in batches:
            loss = mean_loss(batch.logits(model), batch.labels)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            wants.append(loss.item())
        config = {
            "train_micro_batch_size_per_gpu": 2,
            "sequence_parallel_size": 2,
            "gradient_clipping": 1.0,
            "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
            "zero_allow_untested_optimizer": True,
            "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
            "memo": {"enabled": True, **(memo(0.5, tile_tokens=11) or {})},
        }
        model = vision.build("qwen3_vl")
        engine = ds_memo.initialize(model=model, model_parameters=model.parameters(), config=config)[0]
        own = [{"input_ids": b.tokens, "attention_mask": b.mask, "labels": b.labels, **b.inputs} for b in batches]
        # Both ranks read the same, and train on the first one's: three batches are six parts.
        for given, want in zip(list(sequence.split(own, engine.device, whole=True))[::2], wants, strict=True):
            labels = given.pop("labels")
            logits = engine(**given, use_cache=False).logits
            loss = sequence.mean_over_ranks(mean_loss(logits, labels), labels, engine)
            engine.backward(loss)
            engine.step()
            assert loss.item() == pytest.approx(want, rel=1e-5)

    def test_split(self):
        """Tensors of any shape, lists of them and other things go to both ranks as they are."""
        sequence.set_up(vision.build("llava"), 2)
        mine = torch.full((3, 4 + dist.get_rank(), 5), dist.get_rank(), dtype=torch.bfloat16)
        own = {
            "input_ids": torch.full((2, 45), dist.get_rank()),
            "labels": torch.arange(90).view(2, 45) + 100 * dist.get_rank(),
            "pixel_values": [mine.transpose(1, 2), mine.transpose(1, 2)],
            "sizes": {"grid": torch.tensor(7), "names": ["a", dist.get_rank()]},
        }
        for rank, got in enumerate(sequence.split([own], torch.device("cpu"), whole=True)):
            assert torch.equal(got["input_ids"], torch.full((2, 45), rank))
            assert torch.equal(got["labels"], part(torch.arange(90).view(2, 45) + 100 * rank))
            assert [x.shape for x in got["pixel_values"]] == [(3, 5, 4 + rank)] * 2
            assert all((x == rank).all() and x.dtype == torch.bfloat16 for x in got["pixel_values"])
            assert got["sizes"]["grid"] == 7 and got["sizes"]["names"] == ["a", rank]
        assert rank == 1
