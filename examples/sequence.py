"""torchrun --nproc-per-node 2 examples/sequence.py

Shows two ranks that share each sequence (DeepSpeed's Ulysses) under memo: one key in the configuration and two calls around
the loop's. `sequence.split` gives each rank its half of a sequence, `sequence.mean_over_ranks` returns the whole sequence's loss.
"""

import itertools
import sysconfig
from pathlib import Path

import torch
import torch.nn.functional as F
from transformers import LlamaConfig, LlamaForCausalLM

import ds_memo
from ds_memo.deepspeed import sequence

SEQ, STEPS = 2048, 10  # tokens are bytes; each rank holds SEQ / 2 of a sequence
CONFIG = {
    "sequence_parallel_size": 2,
    "train_micro_batch_size_per_gpu": 1,
    "bf16": {"enabled": torch.cuda.is_available()},  # flash attention on GPUs needs 16 bits
    # torch_adam is PyTorch's AdamW. DeepSpeed's own needs a compiler: nvcc on a GPU, g++ on a CPU.
    "optimizer": {"type": "AdamW", "params": {"lr": 2e-3, "torch_adam": True}},
    "zero_optimization": {"stage": 3},
    # Without alpha and resident_layers both are measured and solved for; a model as small as this one would not swap.
    "memo": {"enabled": True, "alpha": 0.5, "resident_layers": 2},
}

torch.manual_seed(0)
sources = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
data = torch.frombuffer(bytearray(b"".join(file.read_bytes() for file in sources)), dtype=torch.uint8).long()

shape = {"hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 4, "num_attention_heads": 4}
model = LlamaForCausalLM(LlamaConfig(vocab_size=256, max_position_embeddings=SEQ, use_cache=False, **shape))
engine, *_ = ds_memo.initialize(model=model, model_parameters=model.parameters(), config=CONFIG)

# Each rank reads sequences of its own; the two of a group work on the first rank's, then on the second's, and so on.
windows = data.split(SEQ + 1)[engine.global_rank : -1 : engine.world_size]
positions = torch.arange(SEQ)[None]
sequences = ({"input_ids": w[None, :-1], "labels": w[None, 1:], "position_ids": positions} for w in windows)
parts = sequence.split(sequences, engine.device)  # every tensor (1, SEQ / 2)
for step, part in enumerate(itertools.islice(parts, STEPS), start=1):
    logits = engine(input_ids=part["input_ids"], position_ids=part["position_ids"]).logits
    loss = F.cross_entropy(logits[0].float(), part["labels"][0])
    loss = sequence.mean_over_ranks(loss, part["labels"], engine)
    engine.backward(loss)
    engine.step()
    if engine.global_rank == 0:
        print(f"step {step}: loss {loss.item():.4f}")
if engine.global_rank == 0:
    print(ds_memo.report(engine))
torch.distributed.barrier()  # a rank that leaves early breaks the others' last exchange
torch.distributed.destroy_process_group()
