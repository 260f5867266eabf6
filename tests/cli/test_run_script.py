"""python -m ds_memo.run SCRIPT ARGS is python SCRIPT ARGS."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from ds_memo.cli.run_script import OTHERS

SCRIPT = '''
import atexit, pickle, sys
from pathlib import Path

class Thing:
    """Pickled by its place in __main__, at exit as well."""

print(sys.argv, sys.path, __name__, __file__, __spec__, Path(__loader__.path).resolve(), sorted(set(globals()) - {"__cached__"}))
print(sys.modules["__main__"].Thing is Thing, pickle.loads(pickle.dumps(Thing())).__class__ is Thing)
atexit.register(lambda: print("at exit", pickle.dumps(Thing())[-20:]))
assert "torch" not in sys.modules and "deepspeed" not in sys.modules
'''
ENDINGS = {
    "well": "",
    "code": "sys.exit(7)",
    "words": "sys.exit('it went wrong')",
    "error": "def deeper():\n    raise ValueError('no')\n\ndeeper()",
    "chained": "try:\n    1 / 0\nexcept ZeroDivisionError as e:\n    raise KeyError('x') from e",
    "syntax": "a b",
    "interrupt": "raise KeyboardInterrupt",
}
IDLE = "ds_memo.run: the script never imported DeepSpeed, so memo had no effect" + OTHERS + "\n"


POOL = '''
"""A spawned worker that calls a function of this file with an object of this file."""
import multiprocessing, sys
from dataclasses import dataclass


@dataclass
class Sample:
    number: int


def work(sample):
    return sample, multiprocessing.parent_process() is not None


if __name__ == "__main__":
    print(sys.argv, __name__, __file__, __package__, __spec__ and __spec__.name)
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        print(pool.map(work, [Sample(1), Sample(2)]), sys.modules["__main__"].Sample is Sample)
'''
WORKERS = '''
"""A dataset, a collate function and a pickle of things that live in this file, in spawned workers."""
import multiprocessing, pickle, sys
from dataclasses import dataclass

import torch
from torch.utils.data import DataLoader, Dataset


@dataclass
class Sample:
    number: int


class Numbers(Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, index):
        return Sample(index)


def join(samples):
    return [pickle.loads(pickle.dumps(sample)).number for sample in samples], multiprocessing.parent_process() is not None


if __name__ == "__main__":
    print(sys.argv, __name__, __file__, __package__, __spec__ and __spec__.name)
    print(list(DataLoader(Numbers(), 2, collate_fn=join, num_workers=1, multiprocessing_context="spawn")))
    torch.save(Sample(3), sys.argv[1])
    print(torch.load(sys.argv[1], weights_only=False), sys.modules["__main__"].Sample is Sample)
'''


def python(*words: object, cwd: Path) -> tuple[int, str, str]:
    where = os.pathsep.join([str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, *map(str, words)]
    done = subprocess.run(command, cwd=cwd, env=os.environ | {"PYTHONPATH": where}, capture_output=True, text=True, timeout=60)
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize("ending", ENDINGS)
def test_as_the_script_itself(ending: str, tmp_path: Path) -> None:
    (tmp_path / "inner").mkdir()
    script = tmp_path / "inner" / "script.py"
    script.write_text(SCRIPT + ENDINGS[ending] + "\n")
    (tmp_path / "link.py").symlink_to(script)  # sys.path starts where the file really is
    words = ("link.py", "--a", "-m", "b c", "--local_rank=3")
    want, got = python(*words, cwd=tmp_path), python("-m", "ds_memo.run", *words, cwd=tmp_path)
    told = IDLE if ending == "well" else ""
    assert got[:2] == want[:2]
    assert got[2].replace(told, "", 1).replace(str(tmp_path) + "/", "") == want[2].replace(str(tmp_path) + "/", "")
    assert told in got[2]


@pytest.mark.parametrize("flag", [["--local_rank=1"], ["--local-rank", "1"], []])
def test_the_flag_that_launchers_put_first(flag: list[str], tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text("import sys; print(sys.argv)")
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "train.py").write_text("import sys; print(sys.argv[1:], __name__, __spec__.name)")
    code, out, _ = python("-m", "ds_memo.run", *flag, "script.py", "--x", cwd=tmp_path)
    assert (code, out) == (0, f"{['script.py', *flag, '--x']}\n")
    code, out, _ = python("-m", "ds_memo.run", *flag, "-m", "package.train", "--x", cwd=tmp_path)
    assert (code, out) == (0, f"{[*flag, '--x']} __main__ package.train\n")


@pytest.mark.parametrize("as_module", [False, True], ids=["script", "module"])
@pytest.mark.parametrize(
    "script, says",
    [
        (POOL, "[(Sample(number=1), True), (Sample(number=2), True)] True"),
        pytest.param(WORKERS, "[([0, 1], True)", marks=pytest.mark.slow),
    ],
    ids=["pool", "dataloader"],
)
def test_workers_that_are_spawned_and_pickles(script: str, says: str, as_module: bool, tmp_path: Path) -> None:
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "train.py").write_text(script)
    words = (*(("-m", "package.train") if as_module else ("package/train.py",)), "sample.pt")
    want, got = python(*words, cwd=tmp_path), python("-m", "ds_memo.run", *words, cwd=tmp_path)
    assert want[0] == 0 and says in want[1]
    assert got[:2] == want[:2]


@pytest.mark.parametrize("ending", ENDINGS)
def test_as_the_module_itself(ending: str, tmp_path: Path) -> None:
    (tmp_path / "package" / "inner").mkdir(parents=True)
    (tmp_path / "package" / "__init__.py").write_text("import sys; print(sys.argv, __name__)")
    (tmp_path / "package" / "inner" / "__main__.py").write_text(SCRIPT + ENDINGS[ending] + "\n")
    words = ("-m", "package.inner", "--a", "-m", "b c")
    want, got = python(*words, cwd=tmp_path), python("-m", "ds_memo.run", *words, cwd=tmp_path)
    assert got[0] == want[0] and re.sub("0x[0-9a-f]+", "", got[1]) == re.sub("0x[0-9a-f]+", "", want[1])
    shown = re.sub(r'  File "[^"]*runpy[^"]*", .*\n(    .*\n)*', "", want[2])  # the interpreter shows its own frames
    assert got[2].replace(IDLE, "") == shown


LAUNCHERS = {
    "torchrun": ("torchrun", "--nproc_per_node", "1", "--master_port", "0", "-m", "ds_memo.run"),
    "accelerate": ("accelerate", "launch", "--cpu", "--num_processes", "1", "-m", "ds_memo.run"),
    "deepspeed": ("deepspeed", "--num_gpus", "1", "--master_port", "29871", "--module", "ds_memo.run"),
}


@pytest.mark.slow
@pytest.mark.parametrize("as_module", [False, True], ids=["script", "module"])
@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_launchers(launcher: str, as_module: bool, tmp_path: Path) -> None:
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "train.py").write_text("import sys; print('RAN', sys.argv[-2:], __name__, sys.path[0])")
    target = ("-m", "package.train") if as_module else ("package/train.py",)
    words = [str(Path(sys.executable).parent / LAUNCHERS[launcher][0]), *LAUNCHERS[launcher][1:], *target, "--x", "1"]
    where = os.pathsep.join([str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")])
    environment = os.environ | {"PYTHONPATH": where, "LOCAL_SIZE": "1"}
    done = subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120)
    first = tmp_path if as_module else tmp_path / "package"
    assert done.returncode == 0 and f"RAN ['--x', '1'] __main__ {first}\n" in done.stdout, done.stdout + done.stderr


def test_wrong_calls(tmp_path: Path) -> None:
    for words in ([], ["--lokal"], ["-m"], ["--local_rank=0"]):
        code, _, err = python("-m", "ds_memo.run", *words, cwd=tmp_path)
        assert code == 2 and err == "usage: python -m ds_memo.run [--memo JSON] [-m MODULE | SCRIPT] ARGS\n"
    code, out, _ = python("-m", "ds_memo.run", "--help", cwd=tmp_path)
    assert code == 0 and "deepspeed --module ds_memo.run train.py ARGS" in out
    for given, says in (
        ("{", "Expecting property name"),
        ('{"alpha": 1.7}', "memo.alpha: got 1.7"),
        ("7", "must be a JSON object"),
    ):
        code, _, err = python("-m", "ds_memo.run", f"--memo={given}", "missing.py", cwd=tmp_path)
        assert code == 2 and err.startswith(f"ds_memo.run: --memo {given!r}: ") and says in err and len(err.splitlines()) == 1
    code, _, err = python("-m", "ds_memo.run", "missing.py", cwd=tmp_path)
    assert code == 2 and err == f"ds_memo.run: can't open file '{tmp_path}/missing.py': No such file or directory\n"
    code, _, err = python("-m", "ds_memo.run", "-m", "missing.train", cwd=tmp_path)
    assert code == 1 and err.startswith("ds_memo.run: Error while finding module specification for 'missing.train'")
    assert "Traceback" not in err


def test_deepspeed_that_was_never_started(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text("import deepspeed")
    code, _, err = python("-m", "ds_memo.run", "script.py", cwd=tmp_path)
    assert code == 0 and "the script never called deepspeed.initialize, so memo had no effect" in err
