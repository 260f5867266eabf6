"""torchrun examples/trainer.py

Shows the Hugging Face Trainer under memo. It takes `ds_memo.install()` before the Trainer is made and a "memo" section in the
DeepSpeed configuration. `ds-memo run torchrun train.py` needs the section alone, and no change of the script.
More ranks: `torchrun --nproc-per-node N examples/trainer.py`.
"""

import sysconfig
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

import ds_memo

SEQ, STEPS = 2048, 10  # tokens are bytes
DEEPSPEED = {
    "train_micro_batch_size_per_gpu": "auto",  # as TrainingArguments say; "memo" allows no "auto"
    "bf16": {"enabled": "auto"},
    # torch_adam is PyTorch's AdamW. DeepSpeed's own needs a compiler: nvcc on a GPU, g++ on a CPU.
    "optimizer": {"type": "AdamW", "params": {"lr": "auto", "weight_decay": "auto", "torch_adam": True}},
    "zero_optimization": {"stage": 3},
    # Without alpha and resident_layers both are measured and solved for; a model as small as this one would not swap.
    "memo": {"enabled": True, "alpha": 0.5, "resident_layers": 2},
}

torch.manual_seed(0)
sources = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
data = torch.frombuffer(bytearray(b"".join(file.read_bytes() for file in sources)), dtype=torch.uint8).long()
windows = [{"input_ids": window, "labels": window} for window in data.split(SEQ)[:-1]]

ds_memo.install()
args = TrainingArguments(
    output_dir="runs/trainer",
    deepspeed=DEEPSPEED,
    bf16=torch.cuda.is_available(),
    per_device_train_batch_size=1,
    learning_rate=2e-3,
    max_steps=STEPS,
    logging_steps=1,
    save_strategy="no",
    report_to="none",
)
shape = {"hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 4, "num_attention_heads": 4}
model = LlamaForCausalLM(LlamaConfig(vocab_size=256, max_position_embeddings=SEQ, use_cache=False, **shape))
trainer = Trainer(model=model, args=args, train_dataset=windows)
trainer.train()
if torch.distributed.get_rank() == 0:
    print(ds_memo.report(trainer.model_wrapped))
torch.distributed.barrier()  # a rank that leaves early breaks the others' last exchange
torch.distributed.destroy_process_group()
