"""Every command that README, docs/quickstart.md and docs/tutorial.md show runs, in their order, in an environment of its own.

The machine is one without a GPU. So models and lengths are made smaller, and what only a reader has (a script, a checkpoint,
LLaMA-Factory) is put into the folder. Everything else is the pages' own text: one shell goes through them, as a reader's does.
"""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

from tests.launch.launcher import free_port
from tests.processes import ROOT, finished

PAGES = ("README.md", "docs/quickstart.md", "docs/tutorial.md")
COMMANDS = ("git", "bash", ".", "pip", "ds-memo", "torchrun", "deepspeed")
SMALLER = {
    "--model ds_configs/models/llama3-8b.json --seq-length 131072 --steps 100": "--model ds_configs/models/tiny.json "
    "--seq-length 1024 --steps 2",
    "--data documents/ --seq-length 128K": "--data documents/ --seq-length 1K --steps 2",
    "--steps 1000": "",
    "--steps 2000": "--steps 3",
    "--save-every 100": "--save-every 1",
    "flash_attention_2": "sdpa",
    "ARGS": "",
}
"""Words of the pages, and those that a small machine runs in their place."""
TRAIN = """\
import os, torch, deepspeed
for name, value in {{"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 1, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": {port}}}.items():
    os.environ.setdefault(name, str(value))
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
model = torch.nn.Linear(8, 8)
adam = {{"type": "AdamW", "params": {{"torch_adam": True}}}}
config = {{"train_micro_batch_size_per_gpu": 1, "optimizer": adam, "memo": {{"enabled": False}}}}
engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
engine.backward(engine(torch.ones(2, 8)).sum())
engine.step()
"""
ACCELERATE = "compute_environment: LOCAL_MACHINE\ndistributed_type: 'NO'\nnum_processes: 1\nuse_cpu: true\n"


def commands(page: str) -> list[str]:
    """Return the commands in a page's code, each on one line, without the comment behind it."""
    text = re.sub(r" *\\\n +", " ", (ROOT / page).read_text())
    first = "|".join(map(re.escape, COMMANDS))
    found = re.findall(rf"^(?: {{4}}| {{8}})((?:{first}) .+)$", text, re.MULTILINE)
    return [re.sub(r" +# .*$", "", command) for command in found]


def smaller(command: str, before: str) -> str:
    """Return a command for a small machine. Three dots stand for the options of the command before."""
    if "..." in command:
        command = command.replace("...", before.partition("launch/train.py ")[2])
    if "launch/train.py" in command or command.startswith("ds-memo run"):
        for words, few in SMALLER.items():
            command = command.replace(words, few)
    return command


def test_the_pages_have_commands() -> None:
    found = {page: commands(page) for page in PAGES}
    assert all(len(of_page) >= 3 for of_page in found.values())
    assert not [c for of_page in found.values() for c in of_page if c.count("'") % 2 or c.endswith("\\")]
    everywhere = " ".join(c for of_page in found.values() for c in of_page)
    assert not [words for words in SMALLER if words not in everywhere]


def clone(where: Path) -> None:
    """Copy the files of the repository that git tracks, or would."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True
    )
    if listed.returncode:
        pytest.skip("not a git checkout")
    for name in filter(lambda name: (ROOT / name).exists(), listed.stdout.splitlines()):
        (where / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, where / name, follow_symlinks=False)


def environment(where: Path) -> None:
    """Make .venv as launch/setup_env.sh does, with the packages that this Python has, but for ds_memo and its command."""
    venv.create(where, symlinks=True, with_pip=False)
    (packages,) = where.glob("lib/python*/site-packages")
    folders = dict.fromkeys(path for path in (sysconfig.get_path("purelib"), *sys.path) if path.endswith("site-packages"))
    (packages / "parent.pth").write_text("\n".join(folders))
    for name in ("pip", "torchrun", "deepspeed", "accelerate", "ninja", "ruff", "lint-imports"):
        script = Path(sys.executable).parent / name
        if script.exists():
            first, _, rest = script.read_bytes().partition(b"\n")
            ours = f"#!{where}/bin/python".encode() if b"python" in first else first
            (where / "bin" / name).write_bytes(ours + b"\n" + rest)
            (where / "bin" / name).chmod(0o755)
    (where / "bin" / "llamafactory-cli").write_text("#!/bin/sh\nexec python train.py\n")
    (where / "bin" / "llamafactory-cli").chmod(0o755)


def what_the_reader_has(folder: Path) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    folder.mkdir()
    (folder / "train.py").write_text(TRAIN.format(port=free_port()))
    (folder / "c.yaml").write_text(ACCELERATE)
    (folder / "cfg.yaml").touch()
    (folder / "ds.json").write_text("{}")
    shutil.copytree(ROOT / "docs", folder / "documents")
    shutil.copy(next((ROOT / "tests" / "data").rglob("*.pickle*")), folder / "run.pickle")
    config = AutoConfig.from_pretrained(ROOT / "ds_configs" / "models" / "tiny.json")
    AutoModelForCausalLM.from_config(config).save_pretrained(folder / "path" / "to" / "checkpoint")


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the clone, its .venv, and the reader's own files beside it. The pages share it, in their order."""
    folder = tmp_path_factory.mktemp("home")
    clone(folder / "ds_memo")
    environment(folder / "ds_memo" / ".venv")
    what_the_reader_has(folder / "reader")
    return folder


@pytest.mark.slow
@pytest.mark.sweep
@pytest.mark.processes
@pytest.mark.parametrize("page", PAGES)
def test_every_command_runs(page: str, home: Path) -> None:
    script = ["set -e", "trap 'echo FAILED: $BASH_COMMAND' ERR", f"cd {shlex.quote(str(home))}"]
    script.append(". ds_memo/.venv/bin/activate" if page == PAGES[0] else "cd ds_memo && . .venv/bin/activate")
    before = ""
    for command in commands(page):
        if command.startswith("ds-memo run") and not before.startswith("ds-memo run"):  # lint would find a second train.py
            script.append("cp -r ../reader/. .")
        cloned = command.replace("git clone URL", "test -d")
        script += [f"echo {shlex.quote(f'== {command}')}", smaller(cloned, before)]
        before = command
    # No index is asked: the packages are this Python's. pip reads 0 as --no-build-isolation.
    variables = {
        "HOME": str(home), "PATH": "/usr/bin:/bin", "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "LOCAL_SIZE": "1",
        "PIP_NO_DEPS": "1", "PIP_NO_INDEX": "1", "PIP_NO_BUILD_ISOLATION": "0", "STEPS": "2", "PET_STANDALONE": "1",
        "PYTEST_ADDOPTS": "--collect-only -q tests/test_shapes.py", "TORCH_EXTENSIONS_DIR": str(home / "extensions"),
    }  # fmt: skip
    done = finished(["bash", "-c", "\n".join(script)], variables, timeout=580)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-6000:]
