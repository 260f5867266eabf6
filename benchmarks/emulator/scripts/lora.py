"""Adapters of Llama-3-8B on one card: 32 layers, frozen in bf16, LoRA of rank 32 on all products, the model's own loss.

    python -m benchmarks.rehearsal --ranks 1 --device-gib 24 --host-gib 64 benchmarks/emulator/scripts/lora.py 131072

With `--qlora` the frozen weights are bitsandbytes' (NF4, absmax quantised too); embeddings, norms and head stay in bf16. `--memo`
is the "memo" section's JSON. The report's placements are printed at the end.
"""

import argparse
import collections
import json

import deepspeed
import torch
from accelerate import init_empty_weights
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

import ds_memo

parser = argparse.ArgumentParser()
parser.add_argument("length", type=int)
parser.add_argument("--qlora", action="store_true")
parser.add_argument("--memo", type=json.loads, default={})
parser.add_argument("--steps", type=int, default=4)
asked = parser.parse_args()


def fill(module: nn.Module, name: str) -> None:
    """Give a parameter memory on the device: 4-bit memory if it is the weight of a product, and --qlora is given."""
    weight = torch.empty(getattr(module, name).shape, dtype=torch.bfloat16, device="cuda")
    if asked.qlora and isinstance(module, Linear4bit):
        module.weight = Params4bit(weight, requires_grad=False, quant_type="nf4", module=module).to("cuda")
    else:
        setattr(module, name, nn.Parameter(weight))


config = {
    "train_micro_batch_size_per_gpu": 1,
    "bf16": {"enabled": True},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "torch_adam": True}},
    "zero_optimization": {"stage": 2},
    "memo": {"enabled": True} | asked.memo,
}
shape = {"hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8}
deepspeed.init_distributed()
with init_empty_weights(include_buffers=False):
    model = LlamaForCausalLM(LlamaConfig(vocab_size=128256, num_hidden_layers=32, max_position_embeddings=asked.length, **shape))
if asked.qlora:
    from bitsandbytes.nn import Linear4bit, Params4bit

    for part in [part for layer in model.model.layers for part in layer.modules()]:
        for name, product in part.named_children():
            if isinstance(product, nn.Linear):
                sizes = product.in_features, product.out_features
                setattr(part, name, Linear4bit(*sizes, bias=False, compute_dtype=torch.bfloat16, quant_type="nf4", device="meta"))
    model.is_loaded_in_4bit = True  # as Transformers says it to PEFT
for part in model.modules():
    for name in list(part._parameters):
        if part._parameters[name] is not None:
            fill(part, name)
model.to("cuda")
with torch.device("cuda"):
    model = get_peft_model(model, LoraConfig(r=32, lora_alpha=32, target_modules="all-linear"))
model.enable_input_require_grads()
trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
engine, *_ = ds_memo.initialize(model=model, model_parameters=trained, config=config)
before = torch.cuda.memory_allocated() / 2**30
print(f"{before:.2f} GiB before the first step, {sum(p.numel() for p in trained):,} trained parameters")
for _ in range(asked.steps):
    ids = torch.randint(0, 128256, (1, asked.length), device=engine.device)
    engine.backward(engine(input_ids=ids, labels=ids).loss)
    engine.step()
report = ds_memo.report(engine)
placed = collections.Counter(placement.kind.name for placement in engine.memo._session.policy.pass_solution.solution.placements)
print(f"{asked.length:,} tokens: {dict(placed)}; {report['binding']}; tiles {report['tiles']}")
print(f"most at once {torch.cuda.max_memory_allocated() / 2**30:.2f} GiB, alpha {report['alpha']}")
