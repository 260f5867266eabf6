"""Models that Accelerate prepares for training without DeepSpeed: one GPU, DDP and FSDP2.

The Trainer, TRL, Axolotl, LLaMA-Factory and ms-swift call ``Accelerator.prepare``. It calls ``prepare_model`` for each model, or
``_prepare_fsdp2`` for all that it was given; both are replaced in the class. DeepSpeed's way leads to ``deepspeed.initialize``,
which has the model already.
"""

from __future__ import annotations

import functools
import inspect
import warnings
from collections.abc import Callable
from typing import Any

from accelerate import Accelerator
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ds_memo.errors import MemoError, MemoWarning
from ds_memo.runtime import launched_by

ALONE = "this {} runs without memo: {}"
_stock: dict[str, Callable[..., Any]] = {}
"""Accelerate's own methods, by name, once install() has replaced them."""
_taken = False
"""False after uninstall(), also where another library has wrapped what install() put there."""


def take_prepare_over() -> None:
    """Attach what Accelerate prepares from now on."""
    global _taken
    _taken = True
    for name, around in (("prepare_model", _around_prepare_model), ("_prepare_fsdp2", _around_prepare_fsdp2)):
        if name not in _stock and name in vars(Accelerator):  # FSDP2 came with Accelerate 1.6
            _stock[name] = vars(Accelerator)[name]
            setattr(Accelerator, name, around(_stock[name]))


def give_prepare_back() -> None:
    """Undo take_prepare_over(). A method that other code has wrapped since stays, and attaches nothing."""
    global _taken
    _taken = False
    for name, stock in list(_stock.items()):
        if getattr(vars(Accelerator)[name], "__wrapped__", None) is stock:
            setattr(Accelerator, name, _stock.pop(name))


def _around_prepare_model(stock: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(stock)

    @functools.wraps(stock)
    def prepare_model(self: Accelerator, *args: Any, **kwargs: Any) -> Any:
        asked = signature.bind(self, *args, **kwargs).arguments
        prepared = stock(self, *args, **kwargs)
        _attach(self, prepared, asked.get("evaluation_mode", False))
        return prepared

    return prepare_model


def _around_prepare_fsdp2(stock: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(stock)
    def prepare_fsdp2(self: Accelerator, *args: Any) -> Any:
        prepared = stock(self, *args)
        for what in prepared:
            if isinstance(what, nn.Module):
                _attach(self, what, False)
        return prepared

    return prepare_fsdp2


def _attach(accelerator: Accelerator, prepared: nn.Module, for_evaluation: bool) -> None:
    """Attach a model that was prepared, if memo may have it."""
    from ds_memo.config import memo_config
    from ds_memo.distributed.agree import from_all_ranks
    from ds_memo.distributed.topology import units
    from ds_memo.hf.find_layers import find_layers
    from ds_memo.remat.diagnostics import within_compiled
    from ds_memo.runtime.attach import attach_without_engine, handle_of
    from ds_memo.runtime.conflicts import refuse_model
    from ds_memo.runtime.ranks_alike import compare, heard_by_others, leaves_alone, shared_by_ranks
    from ds_memo.runtime.say import say, tell_what_moved
    from ds_memo.runtime.session import EngineTies

    if not _taken or accelerator.distributed_type in ("DEEPSPEED", "MEGATRON_LM"):
        return
    config = memo_config(launched_by.section or {})
    if not config.enabled and "enabled" in config.model_fields_set:
        leaves_alone("its section has enabled: false")
        return
    inner = within_compiled(prepared)
    model = inner.module if isinstance(inner, DistributedDataParallel) else prepared  # parts of a script call what DDP wraps
    name = type(within_compiled(model)).__name__
    # Transformers shards some models as it loads them. The Trainer prepares these for evaluation, and trains them.
    if for_evaluation and not getattr(model, "is_distributed_loading_by_transformers", False):
        say(f"leaves this {name} alone: Accelerate prepared it for evaluation")
        leaves_alone("Accelerate prepared it for evaluation")
        return
    if not any(parameter.requires_grad for parameter in model.parameters()):
        say(f"leaves this {name} alone: none of its parameters requires a gradient")
        leaves_alone("none of its parameters requires a gradient")
        return
    if handle_of(model) is not None:
        return
    launched_by.tell()
    ranks = accelerator.num_processes
    with heard_by_others():
        if why := _not_for_memo(accelerator, model):
            warnings.warn(ALONE.format(name, why), MemoWarning, stacklevel=4)
            leaves_alone(why)
            return
        try:
            layers = find_layers(model, config.layers)
        except MemoError as error:
            warnings.warn(ALONE.format(name, error), MemoWarning, stacklevel=4)
            leaves_alone(str(error))
            return
        refuse_model(layers)
        shared = shared_by_ranks(config, model, len(layers))
    if ranks > 1:
        compare(shared, (), "Accelerator.prepare")
    ties = EngineTies(
        agree_on_host=(lambda nbytes: min(from_all_ranks(nbytes))) if ranks > 1 else int, tell_what_moved=tell_what_moved
    )
    attach_without_engine(model, config, config.layers, accelerator.device if units(model) else None, ties)


def _not_for_memo(accelerator: Accelerator, model: nn.Module) -> str:
    """Return why memo leaves a model alone that trains; an empty string if it does not."""
    of_transformers = getattr(getattr(model, "config", None), "distributed_config", None)
    for sizes in (getattr(accelerator, "parallelism_config", None), of_transformers):
        for key in ("tp_size", "cp_size", "ep_size", "pp_size"):
            if (getattr(sizes, key, None) or 1) > 1:
                how = f"{type(sizes).__name__}({key}={getattr(sizes, key)})"
                return f"{how} has torch divide layers among ranks in a way that memo does not know. Leave one of the two out"
    devices = {str(device) for device in (getattr(model, "hf_device_map", None) or {}).values()}
    if len(devices) > 1:
        return f"its layers are on several devices ({', '.join(sorted(devices))}), and memo takes one. Leave device_map out"
    return ""
