"""A Transformers Trainer that knows nothing of lengths.

    python -m benchmarks.rehearsal --ranks 8 --device-gib 80 benchmarks/emulator/scripts/trainer.py 65536

The model of plain.py. A second argument is the "memo" section's JSON, a third more of TrainingArguments.
"""

import json
import sys
import tempfile

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

import ds_memo

length = int(sys.argv[1])
memo, more = map(json.loads, (*sys.argv[2:4], "{}", "{}")[:2])
ds_memo.install()
arguments = TrainingArguments(
    output_dir=tempfile.mkdtemp(),
    per_device_train_batch_size=1,
    max_steps=4,
    bf16=True,
    report_to=[],
    save_strategy="no",
    disable_tqdm=True,
    deepspeed={
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": "auto", "torch_adam": True}},
        "zero_optimization": {"stage": 3},
        "memo": {"enabled": True} | memo,
    },
    **more,
)
shape = {"hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8}
config = LlamaConfig(vocab_size=128256, num_hidden_layers=8, max_position_embeddings=length, dtype="bfloat16", **shape)
model = LlamaForCausalLM._from_config(config)
rows = [{"input_ids": (ids := torch.randint(0, 128256, (length,))), "labels": ids} for _ in range(8)]
Trainer(model=model, args=arguments, train_dataset=rows).train()
