"""Adapters of Llama-3-8B on one card: 32 layers, frozen in bf16, LoRA of rank 32 on all products, the model's own loss.

    python -m benchmarks.rehearsal --ranks 1 --device-gib 24 --host-gib 64 benchmarks/emulator/scripts/lora.py 131072

A second argument is the "memo" section's JSON. The report's placements are printed at the end.
"""

import collections
import json
import sys

import deepspeed
import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

import ds_memo

PRODUCTS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]

length = int(sys.argv[1])
config = {
    "train_micro_batch_size_per_gpu": 1,
    "bf16": {"enabled": True},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "torch_adam": True}},
    "zero_optimization": {"stage": 2},
    "memo": {"enabled": True} | json.loads(sys.argv[2] if len(sys.argv) > 2 else "{}"),
}
shape = {"hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8}
deepspeed.init_distributed()
torch.set_default_dtype(torch.bfloat16)  # in float32 the weights alone would fill the card
with torch.device("cuda"):
    model = LlamaForCausalLM(LlamaConfig(vocab_size=128256, num_hidden_layers=32, max_position_embeddings=length, **shape))
    torch.set_default_dtype(torch.float32)  # adapters'
    model = get_peft_model(model, LoraConfig(r=32, lora_alpha=32, target_modules=PRODUCTS))
model.enable_input_require_grads()
trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
engine, *_ = ds_memo.initialize(model=model, model_parameters=trained, config=config)
for _ in range(4):
    ids = torch.randint(0, 128256, (1, length), device=engine.device)
    engine.backward(engine(input_ids=ids, labels=ids).loss)
    engine.step()
report = ds_memo.report(engine)
placed = collections.Counter(placement.kind.name for placement in engine.memo._session.policy.pass_solution.solution.placements)
print(f"{length:,} tokens: {dict(placed)}; {report['binding']}; tiles {report['tiles']}")
