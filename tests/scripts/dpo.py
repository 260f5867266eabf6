"""Preference tuning with TRL's DPOTrainer and a reference model, as in its documentation; it knows nothing of ds_memo.

[ds-memo run] deepspeed dpo.py --deepspeed ds.json --output_dir DIR …                         (TRL's DPOConfig)
[ds-memo run] accelerate launch dpo.py --output_dir DIR …
"""

import copy
import sys

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import HfArgumentParser, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import DPOConfig, DPOTrainer

if any(word.startswith("--deepspeed") for word in sys.argv):
    import deepspeed

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # CPU ranks talk over gloo; nothing has to be compiled


def main() -> None:
    (args,) = HfArgumentParser(DPOConfig).parse_args_into_dataclasses()
    torch.manual_seed(args.seed)
    words = {word: number for number, word in enumerate(["<pad>", "<eos>", *map(str, range(95))])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>")

    def count(start: int, by: int) -> str:
        return " ".join(str((start + by * i) % 95) for i in range(20))

    pairs = [{"prompt": count(start, 1), "chosen": count(start + 20, 1), "rejected": count(start, 3)} for start in range(64)]
    shape = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=97, max_position_embeddings=64, **shape))
    reference = copy.deepcopy(model)
    trainer = DPOTrainer(
        model=model, ref_model=reference, args=args, train_dataset=Dataset.from_list(pairs), processing_class=tokenizer
    )
    trainer.train()


if __name__ == "__main__":
    main()
