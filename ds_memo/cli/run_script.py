"""Run a training script under ds_memo, unchanged; `ds-memo run` (cli/run.py) does it for whole commands.

    deepspeed --module ds_memo.run train.py ARGS
    accelerate launch --use_deepspeed --deepspeed_config_file ds.json -m ds_memo.run train.py ARGS
    torchrun -m ds_memo.run train.py ARGS
    python -m ds_memo.run -m package.train ARGS        # a module, as `python -m` would
    torchrun -m ds_memo.run --memo '{"enabled": true}' train.py ARGS    # the section, for DeepSpeed configurations without one

The script runs as ``__main__`` with its own arguments. Every ``deepspeed.initialize`` in it, or in the libraries that it uses,
obeys the "memo" section of its DeepSpeed JSON.
"""

from __future__ import annotations

import importlib.machinery
import io
import os
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from types import CodeType, ModuleType, TracebackType
from typing import Any

from ds_memo.cli.arguments import MOST_MESSAGE
from ds_memo.cli.run import section
from ds_memo.deepspeed.install import WATCHED, install
from ds_memo.deepspeed.launched_by import LISTENER
from ds_memo.errors import MemoConfigError, quoted

USAGE = "usage: python -m ds_memo.run [--memo JSON] [-m MODULE | SCRIPT] ARGS"
OTHERS = ". Processes that it started itself are under memo with `ds-memo run COMMAND`: see docs/integrations.md"
_OWN_FILES = (__file__, str(Path(__file__).parents[1] / "run.py"), runpy.__file__, "<frozen runpy>")
"""Files whose frames the traceback of a script leaves out."""
_LAUNCHERS_FLAGS = ("--local_rank", "--local-rank")


def main() -> None:
    """Run ``python -m ds_memo.run``."""
    # DeepSpeed's launcher puts its flag before the arguments of its module, ds_memo.run; the script must get it.
    words, flags = sys.argv[1:], list[str]()
    while words and words[0].partition("=")[0] in _LAUNCHERS_FLAGS:
        taken = 1 if "=" in words[0] else 2
        flags, words = flags + words[:taken], words[taken:]
    memo = None
    if words and words[0].partition("=")[0] == "--memo":
        memo, words = (words[0].partition("=")[2], words[1:]) if "=" in words[0] else ("".join(words[1:2]), words[2:])
    as_module = words[:1] == ["-m"]
    words = words[as_module:]
    if not words or (words[0].startswith("-") and not as_module):
        asked = words[:1] in (["-h"], ["--help"])
        print(f"{USAGE}\n\n{__doc__}" if asked else USAGE, file=sys.stdout if asked else sys.stderr)
        sys.exit(0 if asked else 2)
    target, arguments = words[0], [*flags, *words[1:]]
    sys.excepthook = _without_own_frames(sys.excepthook)
    try:
        install(None if memo is None else section(memo))
    except MemoConfigError as error:
        print(f"ds_memo.run: {quoted(str(error), MOST_MESSAGE)}", file=sys.stderr)
        sys.exit(2)
    try:
        if as_module:
            run_module(target, arguments)
        else:
            run_script(target, arguments)
    except SystemExit as end:
        if not end.code:
            tell_if_idle()
        raise
    tell_if_idle()


def run_script(path: str, arguments: list[str]) -> None:
    """Run a script in this process as ``python path arguments`` would."""
    try:
        with io.open_code(path) as file:
            source = file.read()
    except OSError as error:
        print(f"ds_memo.run: can't open file {os.path.abspath(path)!r}: {error.strerror}", file=sys.stderr)
        sys.exit(2)
    sys.argv[:] = [path, *arguments]
    if not getattr(sys.flags, "safe_path", False):
        sys.path[0] = os.path.dirname(os.path.realpath(path))
    main: Any = ModuleType("__main__")
    main.__file__ = os.path.abspath(path)
    main.__loader__ = importlib.machinery.SourceFileLoader("__main__", path)
    _run_as_main(main, compile(source, main.__file__, "exec", dont_inherit=True))


def run_module(name: str, arguments: list[str]) -> None:
    """Run a module in this process as ``python -m name arguments`` would."""
    sys.argv[:] = ["-m", *arguments]  # until the module is found: its parent packages may read it
    try:
        # As pdb does; runpy.run_module() takes __main__ away again.
        _, spec, code = runpy._get_module_details(name)  # type: ignore[attr-defined]
    except ImportError as error:
        print(f"ds_memo.run: {error}", file=sys.stderr)
        sys.exit(1)
    sys.argv[0] = spec.origin
    main: Any = ModuleType("__main__")
    main.__file__, main.__cached__ = spec.origin, spec.cached
    main.__loader__, main.__package__, main.__spec__ = spec.loader, spec.parent, spec
    _run_as_main(main, code)


def _run_as_main(main: Any, code: CodeType) -> None:
    main.__builtins__ = sys.modules["builtins"]
    main.__annotations__ = {}
    sys.modules["__main__"] = main  # not restored: pickles, spawned workers and exit handlers look up names here
    exec(code, main.__dict__)


def tell_if_idle() -> None:
    """Print a line if the script made no engine, so that memo had no effect."""
    initialize = sys.modules.get("ds_memo.deepspeed.initialize")
    if (initialize is None or not initialize.initialized) and LISTENER not in os.environ:  # else `ds-memo run` prints it, once
        why = "never imported DeepSpeed" if WATCHED not in sys.modules else "never called deepspeed.initialize"
        print(f"ds_memo.run: the script {why}, so memo had no effect{OTHERS}", file=sys.stderr)


def _without_own_frames(stock: Callable[..., None]) -> Callable[..., None]:
    def show(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        while trace is not None and trace.tb_frame.f_code.co_filename in _OWN_FILES:
            trace = trace.tb_next
        stock(kind, error.with_traceback(trace), trace)

    return show
