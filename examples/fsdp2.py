"""torchrun --nproc-per-node 2 examples/fsdp2.py

Shows `ds_memo.attach` in a plain PyTorch loop whose weights FSDP2 (`fully_shard`) divides among the ranks. Attach once the model
is sharded. Trainer, TRL and other scripts that use Accelerate need no change: `ds-memo run accelerate launch script.py`.
"""

import os
import sysconfig
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from transformers import LlamaConfig, LlamaForCausalLM

import ds_memo

SEQ, STEPS = 2048, 10  # tokens are bytes
# Left out, alpha and resident_layers are measured and solved for; a model as small as this one would not swap.
MEMO = {"alpha": 0.5, "resident_layers": 1}

on_gpus = torch.cuda.is_available()
device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpus else torch.device("cpu")
if on_gpus:
    torch.cuda.set_device(device)
dist.init_process_group("nccl" if on_gpus else "gloo")
rank, ranks = dist.get_rank(), dist.get_world_size()

torch.manual_seed(0)  # weights are alike on all ranks
sources = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
data = torch.frombuffer(bytearray(b"".join(file.read_bytes() for file in sources)), dtype=torch.uint8).long()
shape = {"hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 4, "num_attention_heads": 4}
model = LlamaForCausalLM(LlamaConfig(vocab_size=256, max_position_embeddings=SEQ, use_cache=False, **shape)).to(device)

how = {
    "mesh": init_device_mesh(device.type, (ranks,)),
    "mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16) if on_gpus else MixedPrecisionPolicy(),
}
for layer in model.model.layers:
    fully_shard(layer, **how)
fully_shard(model, **how)
handle = ds_memo.attach(model, MEMO, device=device)
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)

for step, window in enumerate(data.split(SEQ)[rank : STEPS * ranks : ranks], start=1):
    tokens = window[None].to(device)
    loss = model(input_ids=tokens, labels=tokens).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if rank == 0:
        print(f"step {step}: loss {loss.item():.4f}")
if rank == 0:
    print(ds_memo.report(handle))
dist.barrier()  # a rank that leaves early breaks the others' last exchange
dist.destroy_process_group()
