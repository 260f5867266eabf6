"""A plain DeepSpeed script that knows nothing of lengths.

    python -m benchmarks.rehearsal --ranks 8 --device-gib 80 benchmarks/emulator/scripts/plain.py 65536

Llama-3-8B's width and vocabulary, 8 layers, ZeRO-3, the model's own loss. A second argument is the "memo" section's JSON. A
third, "alst", has DeepSpeed's tiled loss take the place of the model's.
"""

import json
import sys

import deepspeed
import torch
import torch.nn.functional as F
from deepspeed.runtime.sequence_parallel.ulysses_sp import TiledFusedLogitsLoss
from transformers import LlamaConfig, LlamaForCausalLM

import ds_memo


def loss_of_tile(model, hidden, labels):
    return F.cross_entropy(model.lm_head(hidden).float(), labels)


class TiledLoss(LlamaForCausalLM):
    """ALST's: the script shifts the labels, and the loss is all that it gets."""

    def forward(self, input_ids, labels):
        hidden = self.model(input_ids=input_ids, use_cache=False).last_hidden_state
        shards = labels.shape[1] // 384  # as many tokens as lazy logits have in a tile
        return TiledFusedLogitsLoss.apply(loss_of_tile, self, hidden, labels, None, shards, [self.lm_head.weight], "mean")


length = int(sys.argv[1])
alst = sys.argv[3:] == ["alst"]
config = {
    "train_micro_batch_size_per_gpu": 1,
    "bf16": {"enabled": True},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-5, "torch_adam": True}},
    "zero_optimization": {"stage": 3},
    "memo": {"enabled": True} | json.loads(sys.argv[2] if len(sys.argv) > 2 else "{}"),
}
shape = {"hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8}
deepspeed.init_distributed()
with deepspeed.zero.Init(config_dict_or_path=config), torch.device("cuda"):
    model = (TiledLoss if alst else LlamaForCausalLM)(
        LlamaConfig(vocab_size=128256, num_hidden_layers=8, max_position_embeddings=length, dtype="bfloat16", **shape)
    )
engine, *_ = ds_memo.initialize(model=model, model_parameters=model.parameters(), config=config)
for _ in range(4):
    ids = torch.randint(0, 128256, (1, length), device=engine.device)
    loss = engine(input_ids=ids, labels=ids)
    loss = loss if alst else loss.loss
    engine.backward(loss)
    engine.step()
