"""A training loop with Accelerate and its DeepSpeed plug-in, as in its documentation; it knows nothing of ds_memo.

[ds-memo run] accelerate launch --use_deepspeed --deepspeed_config_file ds.json accelerate_loop.py [--lora] LOSSES.json
"""

import argparse
import json

import deepspeed
import torch
from accelerate import Accelerator
from transformers import LlamaConfig, LlamaForCausalLM, set_seed

deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # CPU ranks talk over gloo; nothing has to be compiled


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--lora", action="store_true")
    parser.add_argument("losses")
    args = parser.parse_args()
    set_seed(0)
    accelerator = Accelerator()
    shape = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=97, max_position_embeddings=64, **shape))
    if args.lora:
        from peft import LoraConfig, get_peft_model

        model = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False))
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    data = [{"input_ids": (i + torch.arange(48)) % 97} for i in range(16)]
    loader = torch.utils.data.DataLoader(data, batch_size=2)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    accelerator.unwrap_model(model).gradient_checkpointing_enable()  # after, as some do
    losses = []
    for batch in loader:
        with accelerator.accumulate(model):
            loss = model(**batch, labels=batch["input_ids"]).loss
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    if torch.distributed.get_rank() == 0:  # on a CPU, Accelerate takes every rank for the main process
        with open(args.losses, "w") as file:
            json.dump(losses, file)
    accelerator.wait_for_everyone()  # gloo's threads let go of the last tensors here: as the interpreter ends they would abort


if __name__ == "__main__":
    main()
