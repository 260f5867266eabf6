"""All knowledge of Transformers. Users import MemoCallback from here; it is loaded, with Transformers, when first asked for."""

from importlib import import_module
from typing import Any

__all__ = ["MemoCallback"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'ds_memo.hf' has no attribute {name!r}")
    value = globals()[name] = import_module("ds_memo.hf.callback").MemoCallback
    return value
