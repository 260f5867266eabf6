"""verl's FSDP engine trains on gloo ranks, without memo and with it, on the platform of verl_cpu_platform.py.

torchrun --nproc_per_node 2 verl_on_cpu.py FOLDER
"""

import json
import sys
from typing import Any

import torch
from tensordict import TensorDict
from transformers import LlamaConfig, LlamaForCausalLM
from verl.trainer.config import CheckpointConfig
from verl.utils import tensordict_utils
from verl.workers.config import FSDPEngineConfig, FSDPOptimizerConfig, HFModelConfig
from verl.workers.engine.fsdp import transformer_impl
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead
from verl.workers.utils.losses import sft_loss

import ds_memo

pinned = transformer_impl.CPUOffloadPolicy  # of references; there is no device to pin memory for
transformer_impl.CPUOffloadPolicy = lambda pin_memory: pinned(pin_memory=False)
MEMO = {"alpha": 0.5, "resident_layers": 1}
CASES: dict[str, dict[str, Any]] = {
    "packed": {},
    "padded": {"data": {"use_remove_padding": False}},
    "entropy": {"data": {"temperature": 0.7, "calculate_entropy": True, "micro_batch_size_per_gpu": 1}},
    "lora": {"model": {"lora_rank": 4}},
    "offloaded": {"engine": {"param_offload": True, "optimizer_offload": True}},
    "bf16": {"engine": {"mixed_precision": {"param_dtype": "bf16", "reduce_dtype": "fp32", "buffer_dtype": "fp32"}}},
}


def batch(seed: int, **options: Any) -> TensorDict:
    """Two sequences of different lengths, as verl's data has them."""
    generator, lengths = torch.Generator().manual_seed(seed), [40, 24]
    rows = {
        "input_ids": [torch.randint(0, 97, (length,), generator=generator) for length in lengths],
        "position_ids": [torch.arange(length) for length in lengths],
        "loss_mask": [torch.ones(length, dtype=torch.long) for length in lengths],
    }
    data = TensorDict({name: torch.nested.as_nested_tensor(row, layout=torch.jagged) for name, row in rows.items()}, batch_size=2)
    options = {"temperature": 1.0, "use_dynamic_bsz": False, "micro_batch_size_per_gpu": 2, **options}
    tensordict_utils.assign_non_tensor(data, **options)
    return data


def loss_of(model_output: dict, data: TensorDict, dp_group: Any = None) -> Any:
    loss, metrics = sft_loss(None, model_output, data, dp_group)
    if "entropy" in model_output:
        loss = loss - 0.1 * model_output["entropy"].values().mean()
    return loss, metrics


def engine_of(folder: str, external: str | None, **options: Any) -> FSDPEngineWithLMHead:
    fp32 = {"param_dtype": "fp32", "reduce_dtype": "fp32", "buffer_dtype": "fp32"}
    parts = {"mixed_precision": fp32, "use_torch_compile": False, **options.get("engine", {})}
    torch.manual_seed(0)
    engine = FSDPEngineWithLMHead(
        HFModelConfig(
            path=folder,
            load_tokenizer=False,
            external_lib=external,
            override_config={"attn_implementation": "sdpa"},
            **options.get("model", {}),
        ),
        FSDPEngineConfig(strategy="fsdp2", **parts),
        FSDPOptimizerConfig(lr=1e-2, total_training_steps=4),
        CheckpointConfig(),
    )
    engine.initialize()
    return engine


def train(trained: FSDPEngineWithLMHead, **case: Any) -> list[Any]:
    """Return, of each step, loss, norm of the gradients and log probabilities afterwards; last, what goes to the rollout."""
    seen: list[Any] = []
    for step in range(3):
        data = batch(2 * step + torch.distributed.get_rank(), **case.get("data", {}))
        with trained.train_mode():
            out = trained.train_batch(data, loss_of)
        with trained.eval_mode():
            after = trained.infer_batch(data, None)
        log_probs = after["model_output"]["log_probs"]
        seen.append([out["loss"], out["metrics"]["grad_norm"], log_probs.values().tolist()])
    return [*seen, [[name, weight.float().sum().item()] for name, weight in trained.get_per_tensor_param()[0]]]


def main() -> None:
    folder = sys.argv[1]
    torch.distributed.init_process_group("gloo")
    rank = torch.distributed.get_rank()
    if rank == 0:
        torch.manual_seed(0)
        shape = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4}
        LlamaForCausalLM(LlamaConfig(vocab_size=97, max_position_embeddings=64, **shape)).save_pretrained(folder)
    torch.distributed.barrier()
    result: dict[str, dict[str, Any]] = {}
    for name, case in CASES.items():
        result[name] = {"want": train(engine_of(folder, None, **case), **case)}
    ds_memo.install(MEMO)
    for name, case in CASES.items():
        engine = engine_of(folder, "ds_memo.integrations.verl", **case)
        result[name] |= {"got": train(engine, **case), "bytes_to_host": engine.memo.report()["bytes_to_host"]}
        engine.memo.detach()
    reference = engine_of(folder, "ds_memo.integrations.verl", engine={"forward_only": True})
    result["reference"] = {"has memo": hasattr(reference, "memo")}
    with open(f"{folder}/rank{rank}.json", "w") as file:
        json.dump(result, file)


if __name__ == "__main__":
    main()
