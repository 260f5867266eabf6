"""The tiled loss under ZeRO 2 and 3, tied and untied, on two ranks with gradient accumulation, against torch alone.

The change of a parameter under SGD is its gradient times the learning rate. Two micro-batches a step, so that the accumulation's
division is in it; ranks see different data.
"""

import copy
import itertools
import sys
from pathlib import Path

import deepspeed
import torch
import torch.distributed as dist
import torch.nn.functional as F
from transformers import AutoConfig, AutoModelForCausalLM

from tests.distributed_harness.common import DistributedTest

sys.path.insert(0, str(Path(__file__).parents[2] / "launch"))  # the ranks import this file too, without conftest.py
from loss import use_tiled_loss
from model import build

MICRO = 2
LR = 1024.0  # the change then drowns the parameter: little is lost to rounding


def model_config(tied: bool):
    return AutoConfig.for_model(
        "llama", vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        tie_word_embeddings=tied, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip


def batches(rank: int) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(rank)
    tokens = torch.randint(0, 64, (MICRO, 2, 18), generator=generator)
    return [{"input_ids": t[:, :-1], "labels": t[:, 1:]} for t in tokens]


def stock_gradients(model) -> dict[str, torch.Tensor]:
    """Gradients of the mean loss over all ranks' micro-batches, by the model's own untiled head."""
    every = [batch for rank in range(dist.get_world_size()) for batch in batches(rank)]
    for batch in every:
        logits = model(input_ids=batch["input_ids"], use_cache=False).logits
        (F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten()) / len(every)).backward()
    return {name: p.grad for name, p in model.named_parameters()}


class TestTiledLoss(DistributedTest):
    world_size = 2

    def test_gives_the_stock_gradients(self):
        for stage, tied in itertools.product((2, 3), (False, True)):
            config = model_config(tied)
            ds_config = {
                "train_micro_batch_size_per_gpu": 2,
                "gradient_accumulation_steps": MICRO,
                "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
                "zero_allow_untested_optimizer": True,
            }
            torch.manual_seed(0)
            if stage == 3:
                model = build(Path("none.json"), config, ds_config, torch.float32, "sdpa")
            else:
                model = AutoModelForCausalLM.from_config(config)

            def full(module, enabled=stage == 3) -> dict[str, torch.Tensor]:
                with deepspeed.zero.GatheredParameters(list(module.parameters()), enabled=enabled):
                    return {name: p.detach().clone() for name, p in module.named_parameters()}

            before = full(model)
            reference = AutoModelForCausalLM.from_config(copy.deepcopy(config))
            reference.load_state_dict(before, strict=False)
            reference.tie_weights()
            expected = stock_gradients(reference)

            use_tiled_loss(model, tile_rows=5)
            optimizer = torch.optim.SGD(model.parameters(), lr=LR)
            engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=ds_config)
            for batch in batches(dist.get_rank()):
                engine.backward(engine(**batch))
                engine.step()
            after = full(engine.module)
            assert after.keys() == expected.keys()
            for name, gradient in expected.items():
                error = ((before[name] - after[name]) / LR - gradient).norm() / gradient.norm()
                assert error <= 2e-6, f"stage {stage}, tied {tied}: {name} is off by {error:.1e}"
            engine.destroy()
