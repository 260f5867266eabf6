"""DeepSpeed's tests of activation checkpointing, with ds_memo.checkpoint in the place of deepspeed.checkpointing.checkpoint.

    DEEPSPEED_TESTS=/path/to/DeepSpeed/tests pytest tests/conformance

Every rank imports this file before it runs a test, so the replacement is made in each of them.
"""

import importlib
import inspect
import os
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import ds_memo
from tests.distributed_harness import common

if "DEEPSPEED_TESTS" not in os.environ:
    pytest.skip("DEEPSPEED_TESTS names no checkout of DeepSpeed's tests", allow_module_level=True)

FOLDER = Path(os.environ["DEEPSPEED_TESTS"]) / "unit" / "runtime" / "activation_checkpointing"
ELSEWHERE = {
    "TestCheckpointableLayersConfig": "about DeepSpeed's pipeline module",
    "TestCPUActivationCheckpoint": "about DeepSpeed's cpu_checkpointing, which memo refuses beside itself",
    "TestCPUActivationCheckpointNonReentrant": "about DeepSpeed's cpu_checkpointing, which memo refuses beside itself",
}
"""Upstream's classes that do not call what is replaced."""


class CallsCheckpointItself(nn.Module):
    """The model that the upstream modules count as layers of."""


def checkpoint(fn, *args, **kwargs):
    if not hasattr(checkpoint, "model"):
        checkpoint.model = CallsCheckpointItself()
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        ds_memo.attach(checkpoint.model, {"alpha": 0.5, "plan": {"enabled": False}}, layers=(), device=device)
    return ds_memo.checkpoint(fn, *args, **kwargs)


class Accelerator:
    """Accelerator for upstream's tests. They skip "cpu", where memo works: the CPU has another name too."""

    def device_name(self):
        return "cpu:0" if common.ON_CPU else "cuda"


def calling_ds_memo(upstream):
    """Yield names and test classes of an upstream file, with ds_memo.checkpoint in them."""
    for module in {upstream, getattr(upstream, "test_act_ckpt", upstream)}:  # the second file runs a copy of the first
        module.ckpt = checkpoint
        module.get_accelerator = Accelerator
    for name, test in inspect.getmembers(upstream, inspect.isclass):
        if name.startswith("Test") and issubclass(test, common.DistributedTest):
            mine = type(name, (test,), {"__module__": __name__, "__qualname__": name})
            yield name, pytest.mark.skip(reason=ELSEWHERE[name])(mine) if name in ELSEWHERE else mine


sys.path.insert(0, str(FOLDER))
for _file in ("test_activation_checkpointing", "test_activation_checkpointing_non_reentrant"):
    globals().update(calling_ds_memo(importlib.import_module(_file)))
