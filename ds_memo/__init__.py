"""ds_memo: long-context training for DeepSpeed with little recomputation.

    engine, optimizer, loader, schedule = ds_memo.initialize(model=model, config=config)   # as deepspeed.initialize
    ds_memo.install()                                                                     # every engine and prepared model
    handle = ds_memo.attach(model, {"alpha": 0.5, "resident_layers": 2})                  # a plain nn.Module, no engine
    out = ds_memo.checkpoint(layer, hidden)                                               # as torch.utils.checkpoint
    attend = ds_memo.keep_whole(torch.compile(flex_attention))                            # attention by custom kernels
    shared = ds_memo.share_sequences(model, mesh["sp"])                                   # several ranks to a sequence, no engine
    ds_memo.report(engine)                                                                # what it did

Names are loaded when first used, so that the command line tools start without torch.
"""

from importlib import import_module
from typing import Any

from ds_memo.errors import MemoConfigError, MemoError, MemoWarning

__version__ = "0.1.0"

__all__ = [
    "MemoConfig",
    "MemoConfigError",
    "MemoError",
    "MemoWarning",
    "attach",
    "checkpoint",
    "initialize",
    "install",
    "keep_whole",
    "ray_setup",
    "report",
    "share_sequences",
]

_MODULES = {
    "MemoConfig": "ds_memo.config",
    "attach": "ds_memo.runtime.attach",
    "checkpoint": "ds_memo.runtime.attach",
    "initialize": "ds_memo.deepspeed.initialize",
    "install": "ds_memo.integrations.install",
    "keep_whole": "ds_memo.remat.functions",
    "ray_setup": "ds_memo.integrations.ray",
    "report": "ds_memo.runtime.attach",
    "share_sequences": "ds_memo.runtime.sequence",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'ds_memo' has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(_MODULES[name]), name)
    return value
