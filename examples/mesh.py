"""torchrun --nproc-per-node 2 examples/mesh.py

Shows a DeviceMesh whose "sp" ranks share each sequence, with FSDP2 over all ranks and no DeepSpeed engine. `share_sequences`
takes the mesh, `split` gives each rank its part of a sequence, `mean_loss` returns the whole sequence's loss.
"""

import itertools
import os
import sysconfig
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from transformers import LlamaConfig, LlamaForCausalLM

import ds_memo

SEQ, STEPS, SP = 2048, 10, 2  # tokens are bytes; each rank holds SEQ / SP of a sequence
device = torch.accelerator.current_accelerator() or torch.device("cpu")
mesh = init_device_mesh(device.type, (int(os.environ["WORLD_SIZE"]) // SP, SP), mesh_dim_names=("dp", "sp"))

torch.manual_seed(0)
sources = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
data = torch.frombuffer(bytearray(b"".join(file.read_bytes() for file in sources)), dtype=torch.uint8).long()

shape = {"hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 4, "num_attention_heads": 4}
model = LlamaForCausalLM(LlamaConfig(vocab_size=256, max_position_embeddings=SEQ, use_cache=False, **shape)).to(device)
shared = ds_memo.share_sequences(model, mesh["sp"])
half = {"mp_policy": MixedPrecisionPolicy(torch.bfloat16)} if device.type == "cuda" else {}  # flash attention needs 16 bits
for layer in model.model.layers:
    fully_shard(layer, **half)  # without a mesh: over all ranks, dp and sp
fully_shard(model, **half)
# Without alpha and resident_layers both are measured and solved for; a model as small as this one would not swap.
handle = ds_memo.attach(model, {"alpha": 0.5, "resident_layers": 2})
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)

# Each rank reads sequences of its own; the two of a group work on the first rank's, then on the second's, and so on.
windows = data.split(SEQ + 1)[dist.get_rank() : -1 : dist.get_world_size()]
positions = torch.arange(SEQ)[None]
sequences = ({"input_ids": w[None, :-1], "labels": w[None, 1:], "position_ids": positions} for w in windows)
for step, part in enumerate(itertools.islice(shared.split(sequences, device), STEPS), start=1):  # every tensor (1, SEQ / SP)
    logits = model(input_ids=part["input_ids"], position_ids=part["position_ids"]).logits
    loss = shared.mean_loss(F.cross_entropy(logits[0].float(), part["labels"][0]), part["labels"])
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if dist.get_rank() == 0:
        print(f"step {step}: loss {loss.item():.4f}")
if dist.get_rank() == 0:
    print(handle.report())
handle.detach()
dist.barrier()  # a rank that leaves early breaks the others' last exchange
dist.destroy_process_group()
