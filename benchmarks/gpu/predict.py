"""Prediction of a point before it is measured: the solver's layers, and `ds-memo estimate` from the measured profile,
within the same budgets."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from benchmarks.rivals import PLANNED, RIVALS, Budget
from benchmarks.timing import Trainer, does_not_fit, placements
from benchmarks.workloads import LOGITS
from ds_memo.estimate import model
from ds_memo.estimate.hardware import named
from ds_memo.profile.json_file import to_json
from ds_memo.solve.headroom import HEADROOM
from ds_memo.units import GIB

SETTLED_AFTER = 4
"""Steps until the solution stays, at most."""
STATE_BYTES = 16
"""Bytes of a parameter's states in the estimator, without ZeRO: weight, gradient, and Adam's fp32 weight and two moments."""


def hardware_of(device: torch.device) -> str | None:
    """Return the estimator's name of the device; None: it has none."""
    return named(torch.cuda.get_device_name(device)) if device.type == "cuda" else None


def in_words(said: dict[str, Any], measured_s: float | None = None) -> str:
    """Return a prediction as one line, beside the measured step if there is one."""
    if why := said.get("skipped") or said.get("why"):
        return why
    step_s, estimated = said.get("step_s"), said["estimate"]
    if step_s is not None:
        step = f"step {step_s * 1e3:.1f} ms"
        step += f", measured {measured_s * 1e3:.1f} ms ({step_s / measured_s - 1:+.1%})" if measured_s else ""
    else:
        step = f"no step: {estimated['binding']}" if estimated else "no step: the estimator does not know this device"
    return f"{step}; alpha {said['alpha']:.4g}, {said['resident_layers']} resident; {said['binding']}"


def predict(trainer: Trainer, length: int, budget: Budget, hardware: str | None) -> dict[str, Any]:
    """Take ds_memo's first steps, in which it profiles the layers and solves; then ask the estimator.

    The first step leaves half of the device alone, until head and optimizer are known. So the solver's answer counts once it is
    that of the step before.

    Args:
        hardware: the estimator's name of this device; None: only the solver answers.
    """
    try:
        with RIVALS[PLANNED].on(trainer.model, budget) as installed:
            reports: list[dict[str, Any]] = []
            while len(reports) < SETTLED_AFTER and (len(reports) < 2 or placements(reports[-2]) != placements(reports[-1])):
                trainer.step(installed)
                reports.append(installed.report())
            report, profile = reports[-1], installed.profile()
    except (RuntimeError, MemoryError) as error:
        if not does_not_fit(error):
            raise
        return {"why": f"{type(error).__name__}: {str(error).splitlines()[0][:300]}"}
    if profile is None:
        return {"why": "ds_memo made no profile", "warnings": report["warnings"]}
    found: dict[str, Any] = {"alpha": report["alpha"], "resident_layers": report["resident_layers"], "binding": report["binding"]}
    found |= {"solver": report["predicted"], "steps_until_settled": len(reports)}
    if hardware is None:
        return found | {"estimate": None}
    status, answer = _estimate(trainer, length, budget, hardware, to_json(profile), report["profile"]["device_budget"])
    if status:
        return found | {"estimate": None, "why": answer[-300:]}
    answer = json.loads(answer)
    step_s = answer["step_s"]
    if step_s is not None:  # its optimizer is Adam on ranks that reduce, another than the one here
        step_s += trainer.update_s() - answer["parts"]["step_s"]["optimizer"]
    keys = ("status", "layout", "step_s", "alpha", "resident_layers", "binding", "mfu", "device_gib", "host_gib", "parts")
    return found | {"step_s": step_s, "estimate": {key: answer.get(key) for key in keys}}


def _estimate(trainer: Trainer, length: int, budget: Budget, hardware: str, profile: str, activations: int) -> tuple[int, Any]:
    """Run `ds-memo estimate`, in a process where no kernel is patched; return its exit status, and what it printed.

    Args:
        profile: of the layers, as JSON.
        activations: the solver's bytes of the device for them.
    """
    config = trainer.model.config.to_dict() | {"vocab_size": LOGITS}  # the workload's loss keeps so few logits: no head to count
    with tempfile.TemporaryDirectory() as folder:
        config_file, profile_file = Path(folder, "model.json"), Path(folder, "profile.json")
        config_file.write_text(json.dumps(config, default=str))
        profile_file.write_text(profile)
        # The solver's budget for layers, plus what the estimator subtracts for states and headroom.
        device_bytes = STATE_BYTES * model.load(str(config_file)).parameters + activations / (1 - HEADROOM)
        words = ["estimate", "--model", str(config_file), "--hardware", hardware, "--gpus", "1", "--sp", "1", "--zero", "0"]
        words += ["--seq-length", str(length), "--host-memory-gib", f"{budget.host_bytes / GIB:.9f}"]
        words += ["--device-memory-gib", f"{device_bytes / GIB:.9f}", "--profile", str(profile_file), "--json"]
        done = subprocess.run([sys.executable, "-m", "ds_memo.cli", *words], capture_output=True, text=True, check=False)
    return done.returncode, done.stdout if done.returncode == 0 else done.stderr.strip()
