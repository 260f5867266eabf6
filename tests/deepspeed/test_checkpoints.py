"""DeepSpeed checkpoints: written under memo and read without, and the other way round, universal ones too."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import deepspeed.comm as dist
import pytest
from deepspeed.checkpoint import ds_to_universal

import ds_memo
from tests.deepspeed.engines import MEMO, ds_config
from tests.distributed_harness.common import ON_CPU, DistributedTest
from tests.models import Batch, build

pytestmark = pytest.mark.skipif(not ON_CPU, reason="two CPU ranks")


def start(stage: int, memo: bool, universal: bool = False) -> Any:
    more = {"gradient_clipping": 1.0, "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}}}
    config = ds_config(stage, checkpoint={"load_universal": universal}, memo=MEMO if memo else {"enabled": False}, **more)
    return ds_memo.initialize(model=build("llama"), config=config)[0]


def train(engine: Any, first: int) -> list[float]:
    """Two optimizer steps from micro-batch `first` on."""
    losses = []
    for number in range(first, first + 4):
        batch = Batch.random(2, 17, seed=2 * number + dist.get_rank())
        loss = engine(inputs_embeds=batch.embeds, labels=batch.labels).loss
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    if hasattr(engine, "memo"):
        report = engine.memo.report()
        assert report["active"] and report["warnings"] == []
        engine.memo.detach()
    return losses


def to_universal(folder: Path) -> Path:
    """DeepSpeed's own conversion; on one rank while the others wait."""
    out = folder.parent / f"{folder.name}-universal"
    if dist.get_rank() == 0:
        options = {"num_extract_workers": 1, "num_merge_workers": 1, "keep_temp_folder": False, "strict": True}
        options |= {"inject_missing_state": True}  # ZeRO 1 and 2 write what a universal checkpoint needs only for Megatron
        args = argparse.Namespace(input_folder=str(folder / "tag"), output_folder=str(out / "tag"), **options)
        ds_to_universal.main(args)
        (out / "latest_universal").write_text("tag")
        (out / "latest").write_text("tag")
    dist.barrier()
    return out


class TestCheckpoints(DistributedTest):
    world_size = 2

    @pytest.mark.parametrize("stage, universal", [(1, True), (3, False), (3, True)])
    def test_both_ways(self, stage: int, universal: bool, tmp_path: Path) -> None:
        engines = {written: start(stage, memo=written) for written in (False, True)}
        before = {written: train(engine, first=0) for written, engine in engines.items()}
        for written, engine in engines.items():
            engine.save_checkpoint(tmp_path / f"memo-{written}", tag="tag")
        assert not any("memo" in name for name in engines[True].module.state_dict())
        want = before[False] + train(engines[False], first=4)
        for written, read in ((True, False), (False, True)):
            folder = tmp_path / f"memo-{written}"
            from_here = to_universal(folder) if universal else folder
            resumed = start(stage, read, universal=universal)
            resumed.load_checkpoint(from_here, tag="tag")
            assert before[written] + train(resumed, first=4) == pytest.approx(want, rel=1e-6)
