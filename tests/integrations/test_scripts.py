"""Scripts that know nothing of ds_memo (tests/scripts) without DeepSpeed: the same losses with memo, and bytes that moved."""

from __future__ import annotations

import contextlib
import functools
import io
import json
import os
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

import ds_memo
from ds_memo.cli.run import IDLE
from ds_memo.integrations.install import uninstall
from ds_memo.runtime.attach import attached
from ds_memo.runtime.report import report
from tests.distributed_harness.common import ON_CPU, DistributedTest
from tests.everyday import everyday
from tests.integrations.trainers import losses as trainer_losses
from tests.integrations.trainers import trainer
from tests.launch.launcher import cpu_environment, free_port
from tests.models import build
from tests.processes import finished

SCRIPTS = Path(__file__).parents[1] / "scripts"
MEMO = {"alpha": 0.5, "resident_layers": 1}
TIGHT = {"device_memory_gib": 1 / 1024, "host_memory_gib": 1.0}
FSDP2 = {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2", "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP"}
pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(not ON_CPU, reason="two CPU ranks"),
    pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning"),
]


def words(out: Path, **more: Any) -> list[str]:
    options = {
        "output_dir": out, "max_steps": 4, "save_steps": 4, "logging_steps": 1, "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2, "report_to": "none", "disable_tqdm": True, "learning_rate": 1e-2,
        "lr_scheduler_type": "constant", "use_cpu": True, **more,
    }  # fmt: skip
    return [f"--{name}={value}" for name, value in options.items()]


def losses(folder: Path) -> list[float]:
    logged = json.loads((folder / "checkpoint-4" / "trainer_state.json").read_text())["log_history"]
    return [entry["loss"] for entry in logged if "loss" in entry]


def run_here(script: str, arguments: list[str], fsdp: bool) -> list[Any]:
    """Run a script in this rank. Returns the reports of attached models after each optimizer step."""
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=True)
    reports: list[Any] = []
    hook = register_optimizer_step_post_hook(lambda *step: reports.extend(report(session) for session in attached()))
    on_cpu = [str(SCRIPTS / "fsdp_on_cpu.py")] if fsdp else []
    sys.argv[:] = [*on_cpu, str(SCRIPTS / script), *arguments]
    try:
        runpy.run_path(sys.argv[0], run_name="__main__")
    finally:
        hook.remove()
    torch.distributed.barrier()  # what the other rank wrote is read now
    return reports


def compare(
    folder: Path, script: str, memo: dict[str, Any], rel: float = 0.0, fsdp: dict[str, str] | None = None, **options: Any
) -> Any:
    """Run a script without memo and with it. Return the last report."""
    os.environ.update(fsdp or {})
    assert run_here(script, words(folder / "stock", **options), bool(fsdp)) == []
    ds_memo.install(memo)
    try:
        reports = run_here(script, words(folder / "memo", **options), bool(fsdp))
    finally:
        uninstall()
    want, got = losses(folder / "stock"), losses(folder / "memo")
    assert len(want) == 4 and got == pytest.approx(want, rel=rel or 1e-12)
    assert len(reports) == 4  # of one model
    assert reports[-1]["active"] and reports[-1]["attention_recomputed"] == 0
    assert reports[-1]["warnings"] == [], reports[-1]["warnings"]
    return reports[-1]


class TestDDP(DistributedTest):
    world_size = 2

    @pytest.mark.parametrize(
        ("memo", "options"),
        everyday([(MEMO, {"gradient_checkpointing": True}), (TIGHT, {"bf16": True})], [(MEMO, {"gradient_checkpointing": True})]),
        ids=["given", "solved"],
    )
    def test_a_trainer(self, memo: dict[str, Any], options: dict[str, Any], tmp_path: Path) -> None:
        solved = compare(tmp_path, "trainer.py", memo, **options)["predicted"] is not None
        assert solved == (memo == TIGHT)

    @pytest.mark.slow
    def test_sft_with_lora(self, tmp_path: Path) -> None:
        pytest.importorskip("trl", reason="TRL is not installed: pip install trl")
        compare(tmp_path, "sft.py", MEMO, bf16=False)

    @pytest.mark.slow
    def test_dpos_reference_is_left_alone(self, tmp_path: Path) -> None:
        pytest.importorskip("trl", reason="TRL is not installed: pip install trl")
        with contextlib.redirect_stderr(io.StringIO()) as told:
            compare(tmp_path, "dpo.py", MEMO, bf16=False)
        if os.environ["RANK"] == "0":
            assert "ds_memo leaves this LlamaForCausalLM alone: Accelerate prepared it for evaluation" in told.getvalue()


class TestFSDP2(DistributedTest):
    world_size = 2

    @pytest.mark.parametrize(
        ("memo", "fsdp", "options"),
        everyday(
            [
                (MEMO, {"FSDP_ACTIVATION_CHECKPOINTING": "true"}, {}),
                (TIGHT, {"FSDP_CPU_RAM_EFFICIENT_LOADING": "true"}, {"gradient_checkpointing": True, "bf16": True}),
            ],
            [(MEMO, {"FSDP_ACTIVATION_CHECKPOINTING": "true"}, {})],
        ),
        ids=["given, in wrappers", "solved"],
    )
    def test_a_trainer(self, memo: dict[str, Any], fsdp: dict[str, str], options: dict[str, Any], tmp_path: Path) -> None:
        assert compare(tmp_path, "trainer.py", memo, fsdp=FSDP2 | fsdp, **options)["layers"] == 4

    @pytest.mark.slow
    def test_sft_with_lora(self, tmp_path: Path) -> None:
        pytest.importorskip("trl", reason="TRL is not installed: pip install trl")
        compare(tmp_path, "sft.py", MEMO, fsdp=FSDP2, bf16=False)

    @pytest.mark.slow
    def test_dpos_reference_is_left_alone(self, tmp_path: Path) -> None:
        pytest.importorskip("trl", reason="TRL is not installed: pip install trl")
        compare(tmp_path, "dpo.py", MEMO, fsdp=FSDP2, bf16=False)

    @pytest.mark.slow
    def test_a_model_that_transformers_shards_as_it_loads(self, tmp_path: Path) -> None:
        """The Trainer prepares it for evaluation, so that Accelerate does not shard it, too."""
        from transformers import LlamaForCausalLM
        from transformers.distributed import DistributedConfig

        def trained(model: Any) -> Any:
            made = trainer(tmp_path, model=model)
            made.train()
            return made

        if os.environ["RANK"] == "0":
            build("llama").save_pretrained(tmp_path)
        torch.distributed.barrier()
        load = functools.partial(LlamaForCausalLM.from_pretrained, tmp_path)
        want = trained(load(distributed_config=DistributedConfig(fsdp_size=2)))
        ds_memo.install(MEMO)
        got = trained(load(distributed_config=DistributedConfig(fsdp_size=2)))
        assert trainer_losses(got) == trainer_losses(want) and ds_memo.report(got.model)["active"]


# ---- commands

RUN = ("python", "-m", "ds_memo.cli", "run", "--memo", json.dumps(MEMO))
LAUNCH = "accelerate launch --num_machines 1 --mixed_precision no --dynamo_backend no"
WITHOUT_THE_SEAM = """
import runpy, sys
import accelerate
from ds_memo.integrations.install import uninstall
uninstall()
sys.argv[:] = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def printed(*command: object) -> str:
    """Return what a command of this Python's printed, run as a person would."""
    done = finished([Path(sys.executable).parent / str(command[0]), *command[1:]], cpu_environment(2), timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def test_a_command_under_memo(tmp_path: Path) -> None:
    """And the negative control: without the seam nothing is attached, and a line says so."""
    launch = (*LAUNCH.split(), "--cpu", "--num_processes", 1)
    told = printed(*RUN, *launch, SCRIPTS / "trainer.py", *words(tmp_path / "memo"))
    assert told.count("ds_memo is active: ") == 1 and IDLE not in told
    (tmp_path / "without.py").write_text(WITHOUT_THE_SEAM)
    told = printed(*RUN, "python", tmp_path / "without.py", SCRIPTS / "trainer.py", *words(tmp_path / "stock"))
    assert "ds_memo is active: " not in told and told.count(IDLE) == 1
    assert losses(tmp_path / "memo") == losses(tmp_path / "stock")


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["--multi_gpu", "--use_fsdp --fsdp_version 2 --fsdp_auto_wrap_policy TRANSFORMER_BASED_WRAP"])
def test_a_command_of_two_ranks(kind: str, tmp_path: Path) -> None:
    on_cpu = [SCRIPTS / "fsdp_on_cpu.py"] if "fsdp" in kind else []
    launch = (*LAUNCH.split(), *kind.split(), "--num_processes", 2, "--main_process_port", free_port())
    told = printed(*RUN, *launch, *on_cpu, SCRIPTS / "trainer.py", *words(tmp_path))
    assert told.count("ds_memo is active: ") == 1 and IDLE not in told and len(losses(tmp_path)) == 4
