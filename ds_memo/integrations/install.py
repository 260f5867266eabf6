"""install: put every later deepspeed.initialize, and every model that Accelerate prepares, under ds_memo.

Accelerate, the Hugging Face Trainer and TRL look ``deepspeed.initialize`` up when they call it, so replacing the name is enough.
Nothing is imported before the script itself imports deepspeed or accelerate: what it sets up first (environment variables, say)
still counts. A script that imports ray is warned where its workers are not reached.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import sys
from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import Any

from ds_memo.runtime import launched_by

WATCHED = ("deepspeed", "accelerate", "ray")


def install(memo: Mapping[str, Any] | None = None) -> None:
    """Attach what frameworks train, without a change of their code.

    Every later ``deepspeed.initialize`` obeys the "memo" section of its config, as ``ds_memo.initialize`` does. Every model that
    Accelerate prepares for training without DeepSpeed (one GPU, DDP, FSDP2) is attached, as ``ds_memo.attach`` does.

    Call it before the trainer is made; a second call does nothing more. Where deepspeed or accelerate are not imported yet, it
    happens when they are.

    Args:
        memo: the section for models without DeepSpeed, and for configurations that have none, because a script makes them by
            itself, say. None: that of ``ds-memo run --memo`` or of the variable DS_MEMO; without these, all is solved.

    Raises:
        MemoConfigError: a value in `memo` or DS_MEMO is refused.
    """
    if memo is not None:
        from ds_memo.config import memo_config  # not before: whole processes only ask whether there is a deepspeed

        memo_config(memo)
        launched_by.section = memo
    elif launched_by.section is None:
        launched_by.section = launched_by.given_section()
    watch = next((finder for finder in sys.meta_path if isinstance(finder, _Watch)), None)
    for name in WATCHED:
        if name in sys.modules and not _is_loading(sys.modules[name]):
            _install_in(name)
        elif watch is None:
            watch = _Watch()
            sys.meta_path.insert(0, watch)


def uninstall() -> None:
    """Undo install(). Engines that were made meanwhile, and models that were attached, stay as they are."""
    launched_by.section = None
    _end_watch()
    if "ds_memo.deepspeed.initialize" in sys.modules:
        sys.modules["ds_memo.deepspeed.initialize"].give_initialize_back()
    if "ds_memo.integrations.accelerate" in sys.modules:
        sys.modules["ds_memo.integrations.accelerate"].give_prepare_back()
    if "ds_memo.integrations.ray" in sys.modules:
        sys.modules["ds_memo.integrations.ray"].warn_no_more()


def _install_in(name: str) -> None:
    if name == "deepspeed":
        from ds_memo.deepspeed.initialize import take_initialize_over

        take_initialize_over()
    elif name == "accelerate":
        from ds_memo.integrations.accelerate import take_prepare_over

        take_prepare_over()
    else:
        from ds_memo.integrations.ray import warn_in_drivers

        warn_in_drivers()


def _end_watch() -> None:
    sys.meta_path[:] = [finder for finder in sys.meta_path if not isinstance(finder, _Watch)]


def _is_loading(module: ModuleType) -> bool:
    return getattr(module.__spec__, "_initializing", False)


class _Watch:
    """Stands before the other finders until all of WATCHED have been imported. Many only ask whether they could be."""

    def __init__(self) -> None:
        self._asking = False

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name not in WATCHED or self._asking:
            return None
        try:
            self._asking = True
            spec = importlib.util.find_spec(name)
        finally:
            self._asking = False
        if spec is not None and spec.loader is not None:
            _then_install(spec.loader, name)
        return spec


def _then_install(loader: Any, name: str) -> None:
    """Have a loader install once it has made its module."""

    def exec_module(module: ModuleType) -> None:
        del loader.exec_module
        loader.exec_module(module)
        if all(watched in sys.modules for watched in WATCHED):
            _end_watch()
        _install_in(name)

    loader.exec_module = exec_module
