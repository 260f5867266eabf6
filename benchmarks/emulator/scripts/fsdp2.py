"""A plain torch loop under FSDP2 that knows nothing of lengths.

    python -m benchmarks.rehearsal --ranks 8 --device-gib 80 benchmarks/emulator/scripts/fsdp2.py 262144

Llama-3-8B's width and vocabulary, 8 layers, each a unit of ``fully_shard``, the model's own loss. A second argument is the "memo"
section's JSON; "stock" leaves memo out, and recomputes layers as ``gradient_checkpointing_enable`` does. With "order" behind it,
the last forward and backward look for accesses that nothing orders.
"""

import json
import sys
from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from transformers import LlamaConfig, LlamaForCausalLM

import ds_memo
from benchmarks.emulated_order import Unordered

STEPS = 6
length, memo = int(sys.argv[1]), sys.argv[2] if len(sys.argv) > 2 else "{}"
shape = {"hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8}
dist.init_process_group("nccl")
config = LlamaConfig(vocab_size=128256, num_hidden_layers=8, max_position_embeddings=length, **shape)
with torch.device("meta"):
    model = LlamaForCausalLM(config)
policy = {
    "mesh": init_device_mesh("cuda", (dist.get_world_size(),)),
    "mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
}
for layer in model.model.layers:
    fully_shard(layer, **policy)
fully_shard(model, **policy)
model.to_empty(device="cuda").train()
if memo == "stock":
    model.gradient_checkpointing_enable({"use_reentrant": False})
else:
    ds_memo.attach(model, json.loads(memo))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
for step in range(STEPS):
    ids = torch.randint(0, config.vocab_size, (1, length), device="cuda")
    with Unordered() if step == STEPS - 1 and sys.argv[-1] == "order" else nullcontext() as found:
        outputs = model(input_ids=ids, labels=ids, use_cache=False)
        outputs.loss.backward()
    optimizer.step()
    optimizer.zero_grad()
if found is not None:
    print(found)
