"""A plain DeepSpeed script that knows nothing of lengths.

    python -m benchmarks.rehearsal --ranks 8 --device-gib 80 benchmarks/emulator/scripts/plain.py 65536

Llama-3-8B's width and vocabulary, 8 layers, ZeRO-3, the model's own loss. A second argument is the "memo" section's JSON.
"""

import json
import sys

import deepspeed
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import ds_memo

length = int(sys.argv[1])
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
    model = LlamaForCausalLM(
        LlamaConfig(vocab_size=128256, num_hidden_layers=8, max_position_embeddings=length, dtype="bfloat16", **shape)
    )
engine, *_ = ds_memo.initialize(model=model, model_parameters=model.parameters(), config=config)
for _ in range(4):
    ids = torch.randint(0, 128256, (1, length), device=engine.device)
    engine.backward(engine(input_ids=ids, labels=ids).loss)
    engine.step()
