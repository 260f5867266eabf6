"""The `ds-memo` command: one verb per stage, each a module of its own that is imported only when its verb is used.

A verb's module has `add_arguments(parser)` and `run(args) -> exit code`; a MemoError's message is for the user. Exit codes:
0 done, 1 no plan fits, 2 wrong input or usage, or an error of the system, 70 a defect of ds_memo, 130 interrupted; `run` returns
its command's.
"""

from __future__ import annotations

import argparse
import errno
import os
import sys
import traceback
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from importlib import import_module
from typing import NoReturn, TextIO

from ds_memo import __version__
from ds_memo.cli.arguments import MOST_MESSAGE, one_line_errors
from ds_memo.errors import MemoError, quoted

VERBS = {  # verb: (module, what it does)
    "run": ("ds_memo.cli.run", "run a training command, unchanged, with every process of it under memo"),
    "profile": ("ds_memo.cli.profile", "measure a model's layers and this machine's copies"),
    "plan": ("ds_memo.cli.plan", "from a request trace to an address for every tensor"),
    "estimate": ("ds_memo.cli.estimate", "what a run would take in time and memory, before anything is rented"),
    "report": ("ds_memo.show.report_table", "what a run under ds_memo did, from the JSON of its report"),
    "show": ("ds_memo.cli.show", "draw a plan: time × address, as PNG or interactive HTML"),
}
UNEXPECTED = 70
"""Exit code of a defect: EX_SOFTWARE of sysexits.h. 1 means that nothing fits."""
TRACEBACK = "DS_MEMO_TRACEBACK"
"""Environment variable that, set to anything, shows a defect's traceback."""


def main(argv: Sequence[str] | None = None) -> int:
    words = list(sys.argv[1:] if argv is None else argv)
    for name in ("stdin", "stdout", "stderr"):
        if getattr(sys, name) is None:  # the caller closed it (`2>&-`); the next file to be opened would get its number
            setattr(sys, name, open(os.devnull, "r+"))  # noqa: SIM115
    verb = next((word for word in words if word in VERBS), None)
    name = f"ds-memo {verb}" if verb else "ds-memo"
    try:
        code = _main(words, verb)
        sys.stdout.flush()  # an error at the interpreter's end would not be one line
        return code
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # `ds-memo … | head`
        _drop_output(sys.stdout)
        return 0
    except MemoError as error:
        return _say(name, str(error), 2)
    except OSError as error:  # a full disk, a folder that is gone
        printing = _drop_output(sys.stdout) or (error.filename is None and error.errno in (errno.ENOSPC, errno.EIO, errno.EBADF))
        where = "standard output" if printing else error.filename
        at = "" if where is None else f"{quoted(str(where), 400)}: "
        return _say(name, f"{at}{error.strerror or error}", 2)
    except Exception as error:
        if os.environ.get(TRACEBACK):
            traceback.print_exc()
        kind = f"{type(error).__name__}: {quoted(str(error), 400)}"
        return _say(name, f"unexpected error: {kind}. This is a defect of ds_memo; {TRACEBACK}=1 shows its traceback", UNEXPECTED)


def _main(words: list[str], selected: str | None) -> int:
    parser = argparse.ArgumentParser(prog="ds-memo", description="Long-context training for DeepSpeed.")
    # `deepspeed --module ds_memo.cli` puts it before the verb
    parser.add_argument("--local_rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--version", action="version", version=f"ds-memo {__version__}")
    parser.error = _usage_and_error(parser)  # type: ignore
    verbs = parser.add_subparsers(dest="verb", metavar="VERB", required=True)
    module = None
    for verb, (name, text) in VERBS.items():
        sub = verbs.add_parser(verb, help=text, description=text[0].upper() + text[1:] + ".")
        if verb == selected:  # import this verb's module only
            module = import_module(name)
            one_line_errors(sub)
            module.add_arguments(sub)
            mine = sub
    args, unknown = parser.parse_known_args(words)
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="replace")  # for terminals without "×" and bars
    if unknown:
        mine.error(f"unrecognized arguments: {' '.join(unknown)}")  # names the verb, not `ds-memo`

    def warn(message: Warning | str, *_: object) -> None:
        _say(f"ds-memo {args.verb}", f"warning: {message}", 0)

    warnings.showwarning = warn  # type: ignore[assignment]
    assert module is not None  # argparse demands a verb
    return module.run(args)


def _say(name: str, message: str, code: int) -> int:
    """Print one line on stderr and return the exit code."""
    with suppress(OSError):  # stderr is gone: only the exit code is left
        print(f"{name}: {quoted(message.replace(chr(10), '; '), MOST_MESSAGE)}", file=sys.stderr)
    _drop_output(sys.stderr)
    return code


def _usage_and_error(parser: argparse.ArgumentParser) -> Callable[[str], NoReturn]:
    def error(message: str) -> NoReturn:
        parser.print_usage(sys.stderr)
        parser.exit(2, f"{parser.prog}: error: {quoted(message, MOST_MESSAGE)}\n")

    return error


def _drop_output(stream: TextIO) -> bool:
    """Drop output that cannot be written, so that the interpreter does not try again; return True if there was any."""
    try:
        stream.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
        return True
    return False
