"""verl: attach each model that verl's FSDP engine trains, in every worker that imports this module.

    actor_rollout_ref.model.external_lib=ds_memo.integrations.verl actor_rollout_ref.actor.strategy=fsdp2

The section is that of ds_memo.ray_setup() or `ds-memo run --memo`; without one everything is solved.
"""

import functools
from typing import Any

import torch
from torch import nn
from verl.utils.device import get_device_name
from verl.workers.engine.fsdp.transformer_impl import FSDPEngine

from ds_memo.runtime import launched_by
from ds_memo.runtime.attach import attach

_stock = FSDPEngine._build_fsdp_module


@functools.wraps(_stock)
def _build_fsdp_module(engine: Any, module: nn.Module) -> nn.Module:
    module = _stock(engine, module)
    if not engine.engine_config.forward_only:  # a reference's
        launched_by.tell()
        section = launched_by.section or launched_by.given_section() or {}
        engine.memo = attach(module, section, device=torch.device(get_device_name()))  # not where offloaded parameters are
    return module


FSDPEngine._build_fsdp_module = _build_fsdp_module
