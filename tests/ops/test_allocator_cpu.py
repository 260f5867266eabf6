"""The op on CPU, in every situation that could end the process, spoil memory or block forever."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
import traceback
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch

from tests.haste import forkserver
from tests.ops.compiling import compiler, lacks
from tests.ops.cpu_scenarios import CONTROLS, RAW_BLOCKS, SCENARIOS

pytestmark = [pytest.mark.processes, pytest.mark.skipif(bool(lacks()), reason=str(lacks()))]
TIMEOUT_S = 60
HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def server():
    """A server that forks processes without the op installed."""
    from ds_memo.ops import library

    library.load("cpu")  # compiled here, so that no scenario's time goes to the compiler
    return forkserver()


def perform(name: str, environment: dict[str, str], result: Connection) -> None:
    torch.set_num_threads(1)
    os.environ |= environment
    try:
        (SCENARIOS | CONTROLS)[name]()
    except BaseException:
        result.send(traceback.format_exc())
    else:
        result.send("")


def what_went_wrong(server: multiprocessing.context.BaseContext, name: str, **environment: str) -> str:
    receiver, sender = server.Pipe(duplex=False)
    process = server.Process(target=perform, args=(name, environment, sender), name=name)
    process.start()
    sender.close()
    process.join(TIMEOUT_S)
    if process.exitcode is None:
        process.kill()
        process.join()
        return f"{name} was still running after {TIMEOUT_S} s"
    try:
        said = receiver.recv()
    except EOFError:
        said = "it died without a word"
    return said if process.exitcode == 0 else f"exit code {process.exitcode}; {said}"


@pytest.fixture(scope="module")
def raw_blocks(tmp_path_factory):
    out = tmp_path_factory.mktemp("raw") / "raw_blocks.so"
    root = Path(torch.__file__).parent
    flags = ["-std=c++20", "-shared", "-fPIC", f"-I{root / 'include'}", f"-L{root / 'lib'}"]
    subprocess.run([*compiler(), *flags, HERE / "raw_blocks.cpp", "-lc10", "-o", out], check=True)
    return out


@pytest.mark.parametrize("name", SCENARIOS)
def test(server, name, request):
    environment = {RAW_BLOCKS: str(request.getfixturevalue("raw_blocks"))} if name == "raw_blocks" else {}
    if wrong := what_went_wrong(server, name, **environment):
        pytest.fail(wrong, pytrace=False)


@pytest.mark.parametrize(
    ("name", "says"), {"a_wrong_byte": "AssertionError", "a_crash": "exit code -11", "a_deadlock": "still running"}.items()
)
def test_what_goes_wrong_is_noticed(server, name, says, monkeypatch):
    """Negative controls of the tests above."""
    monkeypatch.setattr(sys.modules[__name__], "TIMEOUT_S", 2 if name == "a_deadlock" else TIMEOUT_S)
    assert says in what_went_wrong(server, name)


@pytest.mark.parametrize("uninstalled", [False, True])
def test_the_interpreter_ends_with_live_blocks(server, uninstalled):
    code = f"""
import torch
from tests.ops.rig import Rig
rig = Rig(torch.device("cpu"))
in_a_retired_arena = rig.a_block()
rig.planned().allocator.follow(0)
in_a_pass = rig.net(rig.batch)
assert rig.allocator.retired_arenas == 1 and rig.allocator.live_blocks > 5
if {uninstalled}:
    rig.allocator.uninstall()
print("ready", flush=True)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=TIMEOUT_S, cwd=HERE.parents[1])
    assert done.returncode == 0 and done.stdout.endswith("ready\n"), done.stderr  # DeepSpeed may have said something before
    assert "ds_memo" not in done.stderr
