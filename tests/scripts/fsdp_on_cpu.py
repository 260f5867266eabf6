"""Runs a script whose ranks Accelerate shards with FSDP on a CPU; by itself it does so on accelerators alone.

[ds-memo run] accelerate launch --use_fsdp --fsdp_version 2 … fsdp_on_cpu.py SCRIPT ARGS
"""

import runpy
import sys

import torch
from accelerate.state import PartialState
from accelerate.utils import DistributedType


def prepare_backend(self: PartialState, *args: object, **kwargs: object) -> tuple[str, DistributedType]:
    return "gloo", DistributedType.MULTI_GPU


def set_device(self: PartialState) -> None:
    self.device = torch.device("cpu")


if not torch.distributed.is_initialized():
    torch.distributed.init_process_group("gloo")  # Accelerate would start one for its own kinds of ranks
PartialState._prepare_backend = prepare_backend
PartialState.set_device = set_device
sys.argv[:] = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
