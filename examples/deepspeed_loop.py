"""torchrun examples/deepspeed_loop.py

Shows a plain DeepSpeed training loop: `ds_memo.initialize` takes and returns what `deepspeed.initialize` does, and the
"memo" section of the configuration says what happens to the layers' activations. The loop itself stays as it was.
More ranks: `torchrun --nproc-per-node N examples/deepspeed_loop.py`.
"""

import itertools
import sysconfig
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import ds_memo

SEQ, STEPS = 2048, 10  # tokens are bytes
CONFIG = {
    "train_micro_batch_size_per_gpu": 1,
    "gradient_clipping": 1.0,
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
windows = [{"input_ids": window, "labels": window} for window in data.split(SEQ)[:-1]]

shape = {"hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 4, "num_attention_heads": 4}
model = LlamaForCausalLM(LlamaConfig(vocab_size=256, max_position_embeddings=SEQ, use_cache=False, **shape))
engine, _, loader, _ = ds_memo.initialize(model=model, model_parameters=model.parameters(), training_data=windows, config=CONFIG)
for step, batch in enumerate(itertools.islice(loader, STEPS), start=1):
    loss = engine(**{name: tensor.to(engine.device) for name, tensor in batch.items()}).loss
    engine.backward(loss)
    engine.step()
    if engine.global_rank == 0:
        print(f"step {step}: loss {loss.item():.4f}")
if engine.global_rank == 0:
    print(ds_memo.report(engine))
torch.distributed.barrier()  # a rank that leaves early breaks the others' last exchange
torch.distributed.destroy_process_group()
