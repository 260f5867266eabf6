"""`ds-memo run COMMAND`: put every Python process that the command starts, at any depth, under memo.

    ds-memo run deepspeed train.py ARGS
    ds-memo run accelerate launch --config_file c.yaml train.py ARGS
    ds-memo run --memo '{"enabled": true}' llamafactory-cli train cfg.yaml     # for DeepSpeed configurations without the section

The folder startup goes first on PYTHONPATH. Its sitecustomize waits until the process imports deepspeed or accelerate, then calls
install(). At the end, a line on stderr says if no process called deepspeed.initialize or prepared a model by Accelerate.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from ds_memo.errors import MemoError, quoted
from ds_memo.runtime.launched_by import GIVEN, LISTENER, VARIABLE, read_section

STARTUP = str(Path(__file__).with_name("startup"))
IDLE = (
    "ds-memo run: no process on this machine called deepspeed.initialize or prepared a model by Accelerate under memo. If none "
    "did elsewhere, memo had no effect: docs/integrations.md says which processes are not reached"
)
_PASSED_ON = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "ds-memo run [--memo JSON] COMMAND ARGS"
    parser.epilog = "Example: ds-memo run deepspeed train.py --deepspeed_config ds.json"
    parser.add_argument(
        "--memo", metavar="JSON", help='the "memo" section, or a file of it: for models without DeepSpeed, or a JSON without one'
    )
    parser.add_argument("command", metavar="COMMAND ARGS", nargs=argparse.REMAINDER, help="as without the prefix")


def run(args: argparse.Namespace) -> int:
    """Run the command and return its exit code. If a signal ends the command, this process ends by the same signal."""
    command = args.command[args.command[:1] == ["--"] :]
    if not command:
        raise MemoError("no command; expected one like ds-memo run deepspeed train.py")
    paths = os.environ.get("PYTHONPATH")
    behind = [folder for folder in paths.split(os.pathsep) if folder != STARTUP] if paths else []
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([STARTUP, *behind])}
    source, given = "--memo", args.memo
    if given is None and GIVEN not in os.environ:
        source, given = VARIABLE, os.environ.get(VARIABLE) or None
    if given is not None:
        environment[GIVEN] = json.dumps(read_section(given, source)).encode().hex()
    try:
        if LISTENER in os.environ:  # inside another `ds-memo run`, which listens
            os.execvpe(command[0], command, environment)
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listener:
            environment[LISTENER] = f"ds_memo_run_{os.getpid()}_{os.urandom(8).hex()}"
            listener.bind("\0" + environment[LISTENER])
            code = _wait_for(command, environment)
            if code == 0 and not _was_told(listener):
                print(IDLE, file=sys.stderr)
    except OSError as error:
        script = f". To start a script: ds-memo run deepspeed {quoted(command[0], 400)}" if command[0].endswith(".py") else ""
        print(f"ds-memo run: {quoted(command[0], 400)}: {error.strerror}{script}", file=sys.stderr)
        return 127 if isinstance(error, FileNotFoundError) else 126
    if code < 0:
        _end_by(signal.Signals(-code))
    return code


def _was_told(listener: socket.socket) -> bool:
    listener.setblocking(False)
    with suppress(BlockingIOError):
        return bool(listener.recv(16))
    return False


def _wait_for(command: Sequence[str], environment: Mapping[str, str]) -> int:
    """Run the command as subprocess.call() does, and pass on signals from other processes (a group's signals arrive twice)."""
    awaited = {*_PASSED_ON, signal.SIGCHLD}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, awaited)

    def unblock() -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)

    try:
        child = subprocess.Popen(command, env=environment, preexec_fn=unblock)
        while child.poll() is None:
            # Another thread, which does not block SIGCHLD, may take it before this one waits for it.
            received = signal.sigtimedwait(awaited, 1.0)
            if received is not None and received.si_code <= 0:  # from a process; the terminal (Ctrl-C) signals the command too
                child.send_signal(received.si_signo)
        return child.returncode
    finally:
        unblock()


def _end_by(number: signal.Signals) -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # only the command should leave a core file
    with suppress(OSError):  # SIGKILL
        signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)
