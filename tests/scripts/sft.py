"""Supervised fine-tuning with TRL's SFTTrainer and LoRA from PEFT, as in its documentation; it knows nothing of ds_memo.

[ds-memo run] deepspeed sft.py --deepspeed ds.json --output_dir DIR …                         (TRL's SFTConfig)
[ds-memo run] accelerate launch sft.py --output_dir DIR …
"""

import sys

import torch
from datasets import Dataset
from peft import LoraConfig
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import HfArgumentParser, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

if any(word.startswith("--deepspeed") for word in sys.argv):
    import deepspeed

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # CPU ranks talk over gloo; nothing has to be compiled


def main() -> None:
    (args,) = HfArgumentParser(SFTConfig).parse_args_into_dataclasses()
    torch.manual_seed(args.seed)
    words = {word: number for number, word in enumerate(["<pad>", "<eos>", *map(str, range(95))])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>")
    texts = [" ".join(str((start + i) % 95) for i in range(40)) for start in range(64)]
    shape = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=97, max_position_embeddings=64, **shape))
    trainer = SFTTrainer(
        model=model,
        args=args,
        train_dataset=Dataset.from_dict({"text": texts}),
        processing_class=tokenizer,
        peft_config=LoraConfig(r=4, target_modules=["q_proj", "v_proj"]),
    )
    trainer.train()


if __name__ == "__main__":
    main()
