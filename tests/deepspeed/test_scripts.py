"""Scripts that know nothing of ds_memo (tests/scripts), on two ranks: the same losses with memo, and bytes that moved."""

from __future__ import annotations

import contextlib
import io
import json
import os
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest

import ds_memo
from ds_memo.runtime.attach import attached
from tests.distributed_harness.common import ON_CPU, DistributedTest
from tests.everyday import everyday
from tests.launch.launcher import cpu_environment, free_port
from tests.processes import finished

SCRIPTS = Path(__file__).parents[1] / "scripts"
MEMO = {"enabled": True, "alpha": 0.5, "resident_layers": 1}
TILES = MEMO | {"tile_tokens": 16}
pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(not ON_CPU, reason="two CPU ranks"),
    pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning"),
]


def ds_config(folder: Path, stage: int, memo: dict[str, Any] | None, optimizer: bool = True, **more: Any) -> str:
    """A DeepSpeed JSON as the Trainer's documentation has it; Accelerate takes the script's own optimizer."""
    config = {
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
        "zero_optimization": {
            "stage": stage, "stage3_param_persistence_threshold": 0, "stage3_gather_16bit_weights_on_model_save": True
        },
        "optimizer": {
            "type": "AdamW",
            "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto", "torch_adam": True},
        },
        "zero_allow_untested_optimizer": True,
        "memo": memo or {"enabled": False},
        **more,
    }  # fmt: skip
    if not optimizer:
        del config["optimizer"]
    path = folder / f"stage{stage}{'-memo' if memo else ''}.json"
    written = path.with_suffix(f".{os.getpid()}")  # every rank writes it, and may read while another one writes
    written.write_text(json.dumps(config))
    written.replace(path)
    return str(path)


def trainer_words(out: Path, config: str, steps: int = 4, **more: Any) -> list[str]:
    options = {
        "deepspeed": config, "output_dir": out, "max_steps": steps, "save_steps": 2, "logging_steps": 1,
        "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "use_cpu": True, "report_to": "none",
        "disable_tqdm": True, "learning_rate": 1e-2, "lr_scheduler_type": "constant", **more,
    }  # fmt: skip
    return [f"--{name}={value}" for name, value in options.items()]


def run_here(script: str, words: list[str]) -> list[Any]:
    """Run a script in this rank under install(). Returns the reports of the engines it made."""
    import deepspeed
    import deepspeed.comm as dist
    from accelerate.state import AcceleratorState

    from ds_memo.deepspeed import initialize as ours

    AcceleratorState._reset_state(reset_partial_state=True)
    reports, memos = [], set()
    take_step = deepspeed.DeepSpeedEngine._take_model_step

    def step_and_report(engine: Any, *args: Any, **kwargs: Any) -> None:
        take_step(engine, *args, **kwargs)
        memo = getattr(engine, "memo", None)
        if memo:
            memos.add(memo)
        reports.append(memo.report() if memo else None)

    deepspeed.DeepSpeedEngine._take_model_step = step_and_report
    os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"
    ds_memo.install()
    sys.argv[:] = [script, *words]
    try:
        runpy.run_path(str(SCRIPTS / script), run_name="__main__")
    finally:
        deepspeed.DeepSpeedEngine._take_model_step = take_step
        for memo in memos:  # DeepSpeed keeps engines alive
            memo.detach()
    assert ours.initialized and reports
    dist.barrier()  # what the other rank wrote is read now
    return reports


def logged(folder: Path, name: str = "loss") -> list[float]:
    return [entry[name] for entry in json.loads((folder / "trainer_state.json").read_text())["log_history"] if name in entry]


def assert_same_losses(
    folder: Path,
    stage: int,
    script: str = "trainer.py",
    section: dict[str, Any] = MEMO,
    rel: float = 1e-6,
    config: dict[str, Any] | None = None,
    under_memo: dict[str, Any] | None = None,
    **options: Any,
) -> dict[str, Any]:
    """Run a Trainer's script without memo and with it. Return the last report.

    Args:
        config: other sections of the DeepSpeed JSON.
        under_memo: options of the script's second run alone.
        options: options of both.
    """
    for memo in (None, section):
        words = trainer_words(
            folder / str(bool(memo)), ds_config(folder, stage, memo, **config or {}), **options, **((memo and under_memo) or {})
        )
        reports = run_here(script, words)
    assert_worked(reports)
    want, got = (logged(folder / name / "checkpoint-4") for name in ("False", "True"))
    assert len(want) == 4 and got == pytest.approx(want, rel=rel)
    return reports[-1]


def assert_worked(reports: list[Any]) -> None:
    report = reports[-1]
    assert report["active"] and report["bytes_from_host"] >= report["bytes_to_host"] > 0
    if report["tiles"] is None:
        assert report["bytes_from_host"] == report["bytes_to_host"]
    else:
        assert report["tiles"]["layers"] == [0, 1, 2, 3] and report["tiles"]["not_tiled"] == {}
    assert report["attention_recomputed"] == 0 and report["warnings"] == []


class TestTrainer(DistributedTest):
    world_size = 2

    @pytest.mark.slow
    def test_half_precision(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """fp16 starts with a loss scale that is too large: steps are skipped until it fits."""
        from deepspeed.accelerator import get_accelerator

        monkeypatch.setattr(get_accelerator(), "is_fp16_supported", lambda: True)  # slow on a CPU, and right
        scale = {"fp16": {"enabled": True, "initial_scale_power": 16}}
        assert_same_losses(tmp_path, 2, rel=1e-2, config=scale, fp16=True)

    def test_accelerates_own_sequence_parallelism(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """ParallelismConfig(sp_size=2), which sets DeepSpeed's Ulysses up by itself, for lengths that vary."""
        from deepspeed.runtime.sequence_parallel import parallel_state_sp
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

        stock, run = ALL_ATTENTION_FUNCTIONS["sdpa"], run_here

        def set_up_anew(*args: Any, **kwargs: Any) -> Any:
            """DeepSpeed does it once in a process."""
            for name in ("_SEQUENCE_PARALLEL_GROUP", "_SEQUENCE_DATA_PARALLEL_GROUP"):
                monkeypatch.setattr(parallel_state_sp, name, None)
            monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS, "sdpa", stock)
            return run(*args, **kwargs)

        monkeypatch.setitem(globals(), "run_here", set_up_anew)
        assert_same_losses(tmp_path, 3, sp_size=2)

    @pytest.mark.parametrize("section", everyday([MEMO, TILES], [MEMO]), ids=["whole layers", "tiles"])
    def test_the_same_losses_and_checkpoints_that_go_both_ways(self, section: dict[str, Any], tmp_path: Path) -> None:
        stock, memo = ds_config(tmp_path, 3, None), ds_config(tmp_path, 3, section)
        assert set(run_here("trainer.py", trainer_words(tmp_path / "stock", stock))) == {None}
        # The Trainer switches gradient checkpointing on before DeepSpeed starts; memo takes its place.
        assert_worked(run_here("trainer.py", trainer_words(tmp_path / "memo", memo, gradient_checkpointing=True)))
        want = logged(tmp_path / "stock" / "checkpoint-4")
        assert len(want) == 4 and want[3] < want[0]
        for name in ("loss", "grad_norm"):
            got = logged(tmp_path / "memo" / "checkpoint-4", name)
            assert got == pytest.approx(logged(tmp_path / "stock" / "checkpoint-4", name), rel=1e-6 if name == "loss" else 1e-4)

        resumed = {"memo": stock, "stock": memo}  # each goes on with the other's checkpoint
        for saved, config in resumed.items():
            folder = tmp_path / f"from-{saved}"
            words = trainer_words(folder, config, resume_from_checkpoint=tmp_path / saved / "checkpoint-2")
            reports = run_here("trainer.py", words)
            if config == memo:
                assert_worked(reports)
            assert logged(folder / "checkpoint-4") == pytest.approx(want, rel=1e-6)


class TestSFTTrainer(DistributedTest):
    world_size = 2

    @pytest.mark.slow
    def test_lora(self, tmp_path: Path) -> None:
        pytest.importorskip("trl", reason="TRL is not installed: pip install trl")
        assert_same_losses(tmp_path, 3, "sft.py", bf16=False)


@pytest.mark.slow
class TestDPOTrainer(DistributedTest):
    world_size = 2

    def test_the_reference_model_is_left_alone(self, tmp_path: Path) -> None:
        pytest.importorskip("trl", reason="TRL is not installed: pip install trl")
        with contextlib.redirect_stderr(io.StringIO()) as told:
            report = assert_same_losses(tmp_path, 3, "dpo.py", bf16=False)
        assert report["plan"]["hits"] > 0
        assert len(attached()) == 0  # run_here detached the engines that took steps, and the reference was never attached
        if os.environ["RANK"] == "0":
            left = "ds_memo leaves this LlamaForCausalLM alone: neither the call nor the JSON has an optimizer"
            assert left in told.getvalue()


class TestAccelerate(DistributedTest):
    world_size = 2

    @pytest.mark.parametrize("section", everyday([MEMO, TILES], [MEMO]), ids=["whole layers", "tiles"])
    def test_a_loop_with_adapters(self, section: dict[str, Any], tmp_path: Path) -> None:
        losses = []
        for memo in (None, section):
            os.environ["ACCELERATE_DEEPSPEED_CONFIG_FILE"] = ds_config(tmp_path, 3, memo, optimizer=False)
            os.environ["ACCELERATE_GRADIENT_ACCUMULATION_STEPS"] = "2"
            reports = run_here("accelerate_loop.py", ["--lora", str(tmp_path / "losses.json")])
            losses.append(json.loads((tmp_path / "losses.json").read_text()))
        assert_worked(reports)
        assert len(set(losses[0])) == 8
        assert losses[1] == pytest.approx(losses[0], rel=1e-6)


def launch(*command: object, ranks: int = 2, **environment: str) -> str:
    """Run a command of this Python's as a person would; returns what it printed."""
    words = [Path(sys.executable).parent / str(command[0]), *command[1:]]
    done = finished(words, cpu_environment(ranks) | environment, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "no effect" not in done.stderr
    assert (done.stdout + done.stderr).count("ds_memo is active: ") == 1
    return done.stdout + done.stderr


UNDER_MEMO = ("python", "-m", "ds_memo.cli", "run")


def test_a_command_under_memo(tmp_path: Path) -> None:
    """It knows nothing of memo, nor does its configuration."""
    path = Path(ds_config(tmp_path, 2, None, optimizer=False))
    config = json.loads(path.read_text())
    del config["memo"]
    path.write_text(json.dumps(config))
    of_accelerate = {"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_DEEPSPEED_CONFIG_FILE": str(path)}
    rank = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    command = f"{sys.executable} {SCRIPTS / 'accelerate_loop.py'} {tmp_path / 'losses.json'}; exit $?"
    launch(*UNDER_MEMO, "--memo", json.dumps(MEMO), "sh", "-c", command, ranks=1, **of_accelerate, **rank)
    assert len(json.loads((tmp_path / "losses.json").read_text())) == 8


@pytest.mark.slow
def test_deepspeeds_launcher(tmp_path: Path) -> None:
    words = trainer_words(tmp_path / "out", ds_config(tmp_path, 3, MEMO), steps=2)
    launch(*UNDER_MEMO, "deepspeed", "--num_gpus", 2, "--master_port", free_port(), SCRIPTS / "trainer.py", *words)
    assert len(logged(tmp_path / "out" / "checkpoint-2")) == 2


@pytest.mark.slow
def test_accelerates_launcher(tmp_path: Path) -> None:
    config = ds_config(tmp_path, 2, MEMO, optimizer=False)
    options = ["--use_deepspeed", "--deepspeed_config_file", config, "--num_processes", 2, "--main_process_port", free_port()]
    launch(*UNDER_MEMO, "accelerate", "launch", *options, SCRIPTS / "accelerate_loop.py", tmp_path / "losses.json")
    assert len(json.loads((tmp_path / "losses.json").read_text())) == 8
