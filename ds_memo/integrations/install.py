"""install: make every later deepspeed.initialize ds_memo's, whichever library calls it.

Accelerate, the Hugging Face Trainer and TRL look ``deepspeed.initialize`` up when they call it, so replacing the name is enough.
Nothing is imported before the script itself imports deepspeed: what it sets up first (environment variables, say) still counts.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import sys
from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import Any

from ds_memo.runtime import launched_by

WATCHED = "deepspeed"


def install(memo: Mapping[str, Any] | None = None) -> None:
    """Let every later ``deepspeed.initialize`` obey the "memo" section of its config, as ``ds_memo.initialize`` does.

    Call it before the trainer is made; a second call does nothing more. If DeepSpeed is not imported yet, it happens when it is.

    Args:
        memo: the section for configurations that have none, because a script makes them by itself, say.

    Raises:
        MemoConfigError: a value in `memo` is refused.
    """
    if memo is not None:
        from ds_memo.config import memo_config  # not before: whole processes only ask whether there is a deepspeed

        memo_config(memo)
        launched_by.section = memo
    if WATCHED in sys.modules and not _is_loading(sys.modules[WATCHED]):
        _install_now()
    elif not any(isinstance(finder, _Watch) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Watch())


def install_as_told() -> None:
    """Call install() with the section that `ds-memo run` was given, unless the script has given one."""
    install(launched_by.given_section() if launched_by.section is None else None)


def uninstall() -> None:
    """Undo install(). Engines that were made meanwhile stay as they are."""
    launched_by.section = None
    sys.meta_path[:] = [finder for finder in sys.meta_path if not isinstance(finder, _Watch)]
    if "ds_memo.deepspeed.initialize" in sys.modules:
        sys.modules["ds_memo.deepspeed.initialize"].give_initialize_back()


def _install_now() -> None:
    from ds_memo.deepspeed.initialize import take_initialize_over

    take_initialize_over()


def _is_loading(module: ModuleType) -> bool:
    return getattr(module.__spec__, "_initializing", False)


class _Watch:
    """Stands before the other finders until deepspeed has been imported. Many only ask whether it could be."""

    def __init__(self) -> None:
        self._asking = False

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name != WATCHED or self._asking:
            return None
        try:
            self._asking = True
            spec = importlib.util.find_spec(name)
        finally:
            self._asking = False
        if spec is not None and spec.loader is not None:
            _then_install(spec.loader)
        return spec


def _then_install(loader: Any) -> None:
    """Have a loader install once it has made its module."""

    def exec_module(module: ModuleType) -> None:
        del loader.exec_module
        loader.exec_module(module)
        sys.meta_path[:] = [finder for finder in sys.meta_path if not isinstance(finder, _Watch)]
        _install_now()

    loader.exec_module = exec_module
