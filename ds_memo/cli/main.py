"""The `ds-memo` command: one verb per stage, each a module of its own that is imported only when its verb is used.

A verb's module has `add_arguments(parser)`, `run(args) -> exit code`, and INPUT_ERRORS, the exceptions whose message is
for the user. Exit codes: 0 done, 1 no plan fits, 2 wrong input or usage; `run` has its command's.
"""

from __future__ import annotations

import argparse
import os
import sys
import warnings
from collections.abc import Sequence
from importlib import import_module

from ds_memo import __version__
from ds_memo.cli.arguments import one_line_errors

VERBS = {  # verb: (module, what it does)
    "run": ("ds_memo.cli.run", "run a training command, unchanged, with every process of it under memo"),
    "profile": ("ds_memo.cli.profile", "measure a model's layers and this machine's copies"),
    "plan": ("ds_memo.cli.plan", "from a request trace to an address for every tensor"),
    "estimate": ("ds_memo.cli.estimate", "what a run would take in time and memory, before anything is rented"),
    "report": ("ds_memo.show.report", "what a run under ds_memo did, from the JSON of its report"),
    "show": ("ds_memo.cli.show", "draw a plan: time × address, as PNG or interactive HTML"),
}


def main(argv: Sequence[str] | None = None) -> int:
    try:
        return _main(list(sys.argv[1:] if argv is None else argv))
    except KeyboardInterrupt:
        return 130


def _main(words: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="ds-memo", description="Long-context training for DeepSpeed.")
    parser.add_argument("--local_rank", help=argparse.SUPPRESS)  # `deepspeed --module ds_memo.cli` puts it before the verb
    parser.add_argument("--version", action="version", version=f"ds-memo {__version__}")
    verbs = parser.add_subparsers(dest="verb", metavar="VERB", required=True)
    chosen = next((w for w in words if w in VERBS), None)
    module = None
    for verb, (name, text) in VERBS.items():
        sub = verbs.add_parser(verb, help=text, description=text[0].upper() + text[1:] + ".")
        if verb == chosen:  # only this verb's module, and what it needs, is imported
            module = import_module(name)
            one_line_errors(sub)
            module.add_arguments(sub)
            mine = sub
    args, unknown = parser.parse_known_args(words)
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="replace")  # "×" and bars on a terminal that has none
    if unknown:
        mine.error(f"unrecognized arguments: {' '.join(unknown)}")  # by its own usage, not by that of `ds-memo`
    warnings.showwarning = lambda message, *_: print(f"ds-memo {args.verb}: warning: {message}", file=sys.stderr)
    try:
        return module.run(args)
    except module.INPUT_ERRORS as e:
        print(f"ds-memo {args.verb}: {e}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # `ds-memo … | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


if __name__ == "__main__":
    sys.exit(main())
