"""The longest evaluation with labels, as a Trainer makes it: stock, under memo with whole layers, and under memo.

    python -m benchmarks.rehearsal --ranks 1 --device-gib 24 benchmarks/emulator/scripts/evaluate.py

Four layers of Llama-3-8B's width and vocabulary. Lengths double until the device refuses memory.
"""

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import ds_memo

shape = {"hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8}
config = LlamaConfig(vocab_size=128256, num_hidden_layers=4, max_position_embeddings=1 << 20, **shape)
with torch.device("cuda"):
    model = LlamaForCausalLM._from_config(config, dtype=torch.bfloat16).eval()
for name, memo in (("stock", None), ("memo, whole layers", {"tile_tokens": 0}), ("memo", {})):
    handle = None if memo is None else ds_memo.attach(model, {"enabled": True} | memo)
    longest, length = 0, 4096
    try:
        while length <= 1 << 20:
            ids = torch.zeros(1, length, dtype=torch.long, device="cuda")
            with torch.no_grad():
                output = model(input_ids=ids, labels=ids)
                output.logits.argmax(-1)
            del output
            longest, length = length, 2 * length
    except torch.OutOfMemoryError as error:
        print(f"{name}: {length:,} tokens: {str(error)[:60]}")
    if handle is not None:
        handle.detach()
    torch.cuda.empty_cache()
    print(f"{name}: {longest:,} tokens")
