"""A training script with the Hugging Face Trainer, as in its documentation; it knows nothing of ds_memo.

[ds-memo run] deepspeed trainer.py --deepspeed ds.json --output_dir DIR …        (Hugging Face TrainingArguments)
[ds-memo run] accelerate launch trainer.py --output_dir DIR …
"""

import os
import sys
from dataclasses import dataclass

import torch
from accelerate import ParallelismConfig
from accelerate.utils import DeepSpeedSequenceParallelConfig
from transformers import HfArgumentParser, LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

if any(word.startswith("--deepspeed") for word in sys.argv):
    import deepspeed

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # CPU ranks talk over gloo; nothing has to be compiled


class Numbers(torch.utils.data.Dataset):
    """Sequences that count up from a random start."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        start = torch.randint(0, 97, (1,), generator=torch.Generator().manual_seed(index))
        tokens = (start + torch.arange(48)) % 97
        return {"input_ids": tokens, "labels": tokens, "position_ids": torch.arange(48)}  # sequence parallelism asks for them


@dataclass
class Ulysses:
    """Accelerate's sequence parallelism, as in docs/tutorial.md."""

    sp_size: int = 1
    sp_seq_length: int | None = None


def main() -> None:
    args, ulysses = HfArgumentParser((TrainingArguments, Ulysses)).parse_args_into_dataclasses()
    if ulysses.sp_size > 1:
        handler = DeepSpeedSequenceParallelConfig(
            sp_attn_implementation="sdpa",
            sp_seq_length=ulysses.sp_seq_length,
            sp_seq_length_is_variable=ulysses.sp_seq_length is None,
        )
        args.parallelism_config = ParallelismConfig(sp_size=ulysses.sp_size, sp_backend="deepspeed", sp_handler=handler)
    torch.manual_seed(args.seed)
    shape = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=97, max_position_embeddings=64, **shape))
    trainer = Trainer(model=model, args=args, train_dataset=Numbers())
    trainer.train(resume_from_checkpoint=args.resume_from_checkpoint)
    trainer.save_model(os.path.join(args.output_dir, "final"))
    if torch.distributed.is_initialized():
        torch.distributed.barrier()  # gloo's threads let go of the last tensors here; as the interpreter ends they would abort


if __name__ == "__main__":
    main()
