"""ds-memo run COMMAND: processes of the command are under memo, and nothing else changes for them."""

from __future__ import annotations

import fcntl
import os
import pty
import signal
import subprocess
import sys
import termios
from pathlib import Path

import pytest

from ds_memo.cli.run import IDLE, STARTUP
from tests.processes import ROOT, python

pytestmark = pytest.mark.processes

PREFIX = ("-m", "ds_memo.cli", "run")


def prefixed(*words: object, **environment: str | None) -> tuple[int, str, str]:
    done = python(*PREFIX, *words, **environment)
    return done.returncode, done.stdout, done.stderr


LOOK = """
import os, sys, sitecustomize
print(sys.argv, sitecustomize.__file__, __name__, __file__, sorted(sys.modules))
print([folder for folder in sys.path if not folder.endswith("startup")], len(sys.meta_path))
raise ValueError("no")
"""


def test_a_process_that_has_nothing_to_do_with_training(tmp_path: Path) -> None:
    """It has one more folder and finder. The hidden sitecustomize has run, and its failures are reported as usual."""
    hidden, script = tmp_path / "sitecustomize.py", tmp_path / "look.py"
    hidden.write_text("import sys; sys.path.append('/of/the/hidden'); print('hidden', __name__)")
    script.write_text(LOOK)
    paths = {"PYTHONPATH": f"{ROOT}:{tmp_path}"}
    want = python(script, "-c", "--memo", **paths)
    assert want.stdout.startswith("hidden sitecustomize\n") and "/of/the/hidden" in want.stdout
    finders = int(want.stdout.split()[-1])
    received = want.stdout.replace(f" {finders}\n", f" {finders + 1}\n")
    got = prefixed(sys.executable, script, "-c", "--memo", **paths)
    assert got[0] == 1 and got[1:] == ("hidden sitecustomize\n" * 2 + received[len("hidden sitecustomize\n") :], want.stderr)
    hidden.write_text("raise ImportError('of something else')")
    code, _, err = prefixed(sys.executable, "-c", "", **paths)
    assert code == 0 and err.count("of something else") == 2 and err.endswith(IDLE + "\n")  # the prefix is a Python, too


ENDINGS = {
    "well": "",
    "code": "sys.exit(7)",
    "error": "def deeper():\n    raise ValueError('no')\n\ndeeper()",
    "interrupt": "raise KeyboardInterrupt",
}


@pytest.mark.parametrize("ending", ENDINGS)
def test_ends_as_the_command_does(ending: str, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(f"import sys; print(sys.argv, __name__)\n{ENDINGS[ending]}\n")
    words = (tmp_path / "train.py", "--a", "-m", "b c", "--local_rank=3")
    want, got = python(*words), prefixed(sys.executable, *words)
    told = IDLE + "\n" if ending == "well" else ""
    assert got == (want.returncode, want.stdout, want.stderr + told)


@pytest.mark.slow
def test_torchrun(tmp_path: Path) -> None:
    """tests/deepspeed/test_scripts.py trains under the launchers of DeepSpeed and Accelerate."""
    script = tmp_path / "train.py"
    script.write_text(f"import sys; sys.argv[1] = 'RAN'\n{PROBE}")
    command = Path(sys.executable).parent / "torchrun"
    code, out, err = prefixed(command, "--nproc_per_node", "1", "--master_port", "0", script, "--x", LOCAL_SIZE="1")
    assert code == 0 and "RAN (['sitecustomize'], " in out, out + err


PROBE = """
import importlib.util, multiprocessing, sys

def watches():
    return [type(finder).__module__ for finder in sys.meta_path if type(finder).__name__ == "_Watch"]

def probe(_=None):
    before = watches(), "ds_memo" in sys.modules
    importlib.util.find_spec("deepspeed")
    if not before[0]:
        return before
    from ds_memo.runtime import launched_by
    return *before, watches(), launched_by.section, {"torch", "numpy", "deepspeed"} & set(sys.modules)

if __name__ == "__main__":
    print(sys.argv[1], probe())
    if sys.argv[1] == "spawn":
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            print("spawned", pool.map(probe, [0])[0])
"""


def test_which_processes_are_under_memo(tmp_path: Path) -> None:
    """All that read PYTHONPATH, at any depth, once each; the innermost section counts, else DS_MEMO's."""
    probe, memo, nearer = tmp_path / "probe.py", '{"alpha": 0.5}', '{"alpha": 0.25}'
    (tmp_path / "memo.json").write_text(nearer)
    probe.write_text(PROBE)
    own = tmp_path / "own.py"
    own.write_text(f"import ds_memo\nds_memo.install({nearer})\n{PROBE}")
    run = " ".join((sys.executable, *PREFIX))
    lines = (
        f"{sys.executable} {probe} spawn",
        f"PYTHONPATH=$({sys.executable} -c 'import sys; print(*sys.path, sep=chr(58))') {sys.executable} {probe} path",
        f"{sys.executable} -I {probe} -I",
        f"{sys.executable} -S {probe} -S",
        f"DS_MEMO={tmp_path / 'memo.json'} {run} {sys.executable} {probe} again",
        f"{run} --memo '{nearer}' -- {sys.executable} {probe} again",
        f"{run} --memo {tmp_path / 'memo.json'} {sys.executable} {probe} file",
        f"{sys.executable} {own} own",
    )
    code, out, err = prefixed("--memo", memo, "sh", "-c", "; ".join(lines))
    found = "(['sitecustomize'], False, ['ds_memo.integrations.install'], {'alpha': 0.5}, set())"
    installed = (
        "(['ds_memo.integrations.install', 'sitecustomize'], True, ['ds_memo.integrations.install'], {'alpha': 0.25}, set())"
    )
    assert out.splitlines() == [
        f"spawn {found}",
        f"spawned {found}",
        f"path {found}",
        "-I ([], False)",
        "-S ([], False)",
        f"again {found}",
        f"again {found.replace('0.5', '0.25')}",
        f"file {found.replace('0.5', '0.25')}",
        f"own {installed}",
    ]
    assert (code, err) == (0, IDLE + "\n")  # by the outermost, alone
    code, out, _ = prefixed(sys.executable, probe, "variable", DS_MEMO=str(tmp_path / "memo.json"))
    assert code == 0 and out == f"variable {found.replace('0.5', '0.25')}\n"
    code, _, err = prefixed(sys.executable, probe, "variable", DS_MEMO='{"alpha": 7}')
    assert code == 2 and err.startswith("ds-memo run: DS_MEMO '{\"alpha\": 7}': memo.alpha: got 7")


def test_a_python_without_ds_memo(tmp_path: Path) -> None:
    """It runs, and says why it is not under memo when it imports deepspeed or accelerate."""
    (tmp_path / "ds_memo.py").write_text("raise ImportError('No ds_memo in this one')")
    for name in ("deepspeed", "accelerate"):
        (tmp_path / f"{name}.py").write_text("print('stock')")
    (tmp_path / "script.py").write_text("import sys, json, importlib\nfor name in sys.argv[1:]: importlib.import_module(name)")
    python_there = ("env", f"PYTHONPATH={STARTUP}", sys.executable, tmp_path / "script.py")
    assert prefixed(*python_there) == (0, "", IDLE + "\n")
    for name in ("deepspeed", "accelerate"):
        said = f"ds-memo run: {sys.executable} runs {name} without memo: No ds_memo in this one\n"
        assert prefixed(*python_there, name, name) == (0, "stock\n", said + IDLE + "\n")


def test_commands_that_are_not_started(tmp_path: Path) -> None:
    started = tmp_path / "started"
    for words, code, says in (
        ([], 2, "ds-memo run: no command; expected one like ds-memo run deepspeed train.py"),
        (["--num_gpus", "2"], 2, "ds-memo run: unrecognized arguments: --num_gpus"),
        (["--memo", "{", "touch", started], 2, "ds-memo run: --memo '{': Expecting property name"),
        (["--memo=7", "touch", started], 2, "ds-memo run: --memo '7': \"memo\" must be a JSON object"),
        (["--memo", '{"alpha": 1.7, "x": 1}', "touch", started], 2, "memo.alpha: got 1.7"),
        (["no-such-command"], 127, "ds-memo run: no-such-command: No such file or directory\n"),
        (
            ["train.py"],
            127,
            "ds-memo run: train.py: No such file or directory. To start a script: ds-memo run deepspeed train.py",
        ),
        ([tmp_path], 126, f"ds-memo run: {tmp_path}: Permission denied"),
    ):
        ended = prefixed(*words)
        assert ended[:2] == (code, "") and says in ended[2] and len(ended[2].splitlines()) == 1, ended
    assert not started.exists()


SIGNALS = """
import os, signal
awaited = {signal.SIGUSR1, signal.SIGHUP, signal.SIGTERM, signal.SIGINT}
print("ready", *signal.pthread_sigmask(signal.SIG_BLOCK, awaited), flush=True)
patience = 60
while received := signal.sigtimedwait(awaited, patience):
    print(signal.Signals(received.si_signo).name, received.si_pid == os.getppid(), flush=True)
    patience = 0.3 if received.si_signo == signal.SIGINT else 60
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_signals_arrive_once_and_the_exit_is_the_commands(tmp_path: Path) -> None:
    """Signals to `ds-memo run` are passed on; the terminal sends Ctrl-C to both."""
    (tmp_path / "script.py").write_text(SIGNALS)
    ours, theirs = pty.openpty()
    command = [sys.executable, *PREFIX, sys.executable, str(tmp_path / "script.py")]
    running = subprocess.Popen(
        command,
        stdin=theirs,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        start_new_session=True,
        preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
    )
    try:
        assert running.stdout.readline() == "ready\n"
        for number in (signal.SIGUSR1, signal.SIGHUP, signal.SIGTERM):
            running.send_signal(number)
            assert running.stdout.readline() == f"{number.name} True\n"
        os.write(ours, b"\x03")
        assert running.stdout.read() == "SIGINT False\n"
        assert running.wait(30) == -signal.SIGKILL
    finally:
        running.kill()
        os.close(ours)
        os.close(theirs)
