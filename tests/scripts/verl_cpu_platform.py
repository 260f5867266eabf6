"""A platform for CPUs, a plug-in of verl: VERL_USE_EXTERNAL_MODULES=tests.scripts.verl_cpu_platform VERL_PLATFORM=cpu."""

import contextlib
import types
from typing import Any

import torch
from verl.plugin.platform.platform_base import PlatformBase
from verl.plugin.platform.platform_manager import PlatformRegistry

COUNTS = {"memory_allocated": 0, "memory_reserved": 0, "mem_get_info": (0, 0), "empty_cache": None}
DEVICE = types.SimpleNamespace(**vars(torch.cpu), **{name: lambda answer=answer: answer for name, answer in COUNTS.items()})
ANSWERS = {
    "current_device": "cpu", "device_count": 1, "is_available": True, "is_ipc_supported": False, "cudart": None,
    "nvtx_range": contextlib.nullcontext(), "communication_backend_name": "gloo", "get_device_capability": (None, None),
    "visible_devices_envvar": "NONE", "ray_resource_name": "CPU", "ray_noset_envvars": [],
}  # fmt: skip
NOTHING = ("set_device", "synchronize", "manual_seed", "manual_seed_all", "empty_cache", "set_allocator_settings")
answers: dict[str, Any] = {**ANSWERS, **dict.fromkeys((*NOTHING, "profiler_start", "profiler_stop"))}
members: dict[str, Any] = {name: lambda self, *_, answer=answer: answer for name, answer in answers.items()}
members |= {"device_name": "cpu", "vendor_name": "cpu", "device_module": DEVICE}
PlatformRegistry.register(platform="cpu")(type("PlatformForCPUs", (PlatformBase,), members))
