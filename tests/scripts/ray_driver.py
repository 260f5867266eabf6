"""A driver whose two Ray actors, or workers of Ray Train, are the ranks of a DeepSpeed training; they know nothing of ds_memo.

[ds-memo run] python ray_driver.py [--install] [--hook function|name] [--train] RESULT.json
"""

import argparse
import json
import os
import socket
import tempfile
from typing import Any

import ray

import ds_memo

MEMO = {"enabled": True, "alpha": 0.5, "resident_layers": 1}
HOOKS = {"function": lambda: ds_memo.ray_setup(MEMO), "name": lambda: "ds_memo.ray_setup"}
TIMEOUT_S = 120


def train(rank: int, memo: dict[str, Any] | None) -> tuple[list[float], int]:
    """Return the losses and the bytes that went to the host. DeepSpeed's configuration has this section, or none."""
    import deepspeed
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # CPU ranks talk over gloo; nothing has to be compiled
    torch.manual_seed(0)
    shape = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=97, max_position_embeddings=64, **shape))
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
    }
    config |= {} if memo is None else {"memo": memo}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    engine = deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]
    losses = []
    for step in range(4):
        batch = (step + 3 * rank + torch.arange(2)[:, None] + torch.arange(48)) % 97
        loss = engine(input_ids=batch, labels=batch).loss
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses, engine.memo.report()["bytes_to_host"] if hasattr(engine, "memo") else 0


@ray.remote(num_cpus=1)
class Rank:
    def __init__(self, rank: int, port: int) -> None:
        os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_SIZE": "2"}
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        self.rank = rank

    def train(self, memo: dict[str, Any] | None) -> tuple[list[float], int]:
        return train(self.rank, memo)


def by_actors(sections: list[dict[str, Any] | None]) -> list[Any]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    ranks = [Rank.remote(rank, port) for rank in range(2)]
    return [ray.get([rank.train.remote(memo) for rank in ranks], timeout=TIMEOUT_S) for memo in sections]


def by_ray_train(sections: list[dict[str, Any] | None], folder: str) -> list[Any]:
    """Return what the ranks have written: Ray Train hands on no values without a checkpoint."""
    from ray.train import RunConfig, ScalingConfig, get_context
    from ray.train.torch import TorchTrainer

    def loop(config: dict[str, Any]) -> None:
        rank = get_context().get_world_rank()
        runs = [train(rank, memo) for memo in config["sections"]]
        with open(f"{folder}/{rank}.json", "w") as file:
            json.dump(runs, file)

    scaling, run = ScalingConfig(num_workers=2), RunConfig(storage_path=folder)
    TorchTrainer(loop, train_loop_config={"sections": sections}, scaling_config=scaling, run_config=run).fit()
    by_rank = []
    for rank in range(2):
        with open(f"{folder}/{rank}.json") as file:
            by_rank.append(json.load(file))
    return list(zip(*by_rank, strict=True))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--install", action="store_true")
    parser.add_argument("--hook", choices=HOOKS)
    parser.add_argument("--train", action="store_true")
    parser.add_argument("result")
    args = parser.parse_args()
    if args.install:
        ds_memo.install()
    environment = {"worker_process_setup_hook": HOOKS[args.hook]()} if args.hook else {}
    sections = [{"enabled": False}, MEMO if args.hook == "name" else None]
    with tempfile.TemporaryDirectory(prefix="ray", ignore_cleanup_errors=True) as folder:
        small = {"num_cpus": 3, "include_dashboard": False, "object_store_memory": 80 * 2**20}
        ray.init(_temp_dir=folder, runtime_env=environment, **small)
        try:
            runs = by_ray_train(sections, folder) if args.train else by_actors(sections)
        finally:
            ray.shutdown()
    with open(args.result, "w") as file:
        json.dump(runs, file)


if __name__ == "__main__":
    main()
