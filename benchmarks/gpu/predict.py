"""Prediction of a point before it is measured: the solver's layers, and `ds-memo estimate` from the measured profile,
within the same budgets."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.rivals import PLANNED, RIVALS, Budget
from benchmarks.timing import Trainer, does_not_fit, placements
from benchmarks.workloads import LOGITS, Shape
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
    """Return a prediction as one line.

    Args:
        measured_s: the step that was predicted; None: not measured.
    """
    if why := said.get("skipped") or said.get("why"):
        return why
    step_s, estimated = said.get("step_s"), said["estimate"]
    if step_s is not None:
        step = f"step {step_s * 1e3:.1f} ms"
        step += f", measured {measured_s * 1e3:.1f} ms ({step_s / measured_s - 1:+.1%})" if measured_s else ""
    else:
        step = f"no step: {estimated['binding']}" if estimated else "no step: the estimator does not know this device"
    return f"{step}; alpha {said['alpha']:.4g}, {said['resident_layers']} resident; {said['binding']}"


def predict(trainer: Trainer, shape: Shape, length: int, budget: Budget, folder: Path, hardware: str | None) -> dict[str, Any]:
    """Take ds_memo's first steps, in which it profiles the layers and solves; then ask the estimator.

    The first step leaves half of the device alone, until head and optimizer are known. So the solver's answer counts once it is
    that of the step before.

    Args:
        folder: for the profile and the model's config.
        hardware: the estimator's name of this device; None: only the solver answers.
    """
    try:
        with RIVALS[PLANNED].on(trainer.model, replace(budget, ranks=shape.ranks)) as installed:
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
    stem = f"{shape.name}-{length}"
    profile_file, config_file = folder / f"profile-{stem}.json", folder / f"model-{stem}.json"
    # The stand-in for one rank of several was measured at that rank's rows, with the attention of the whole sequence.
    profile_file.write_text(to_json(replace(profile, ranks_per_sequence=shape.ranks)))
    if hardware is None:
        return found | {"estimate": None}
    config = trainer.model.config.to_dict() | {"vocab_size": LOGITS}  # the workload's loss keeps so few logits: no head to count
    config_file.write_text(json.dumps(config, default=str))
    ranks = str(shape.ranks)  # the layers' times are those of one rank of so many, measured
    words = ["--model", str(config_file), "--hardware", hardware, "--gpus", ranks, "--sp", ranks, "--zero", "0"]
    words += ["--seq-length", str(length), "--host-memory-gib", f"{shape.ranks * budget.host_bytes / GIB:.9f}"]
    # The solver's budget for layers, plus what the estimator subtracts for states and headroom.
    counted, activations = model.load(str(config_file)), report["profile"]["device_budget"]
    words += ["--device-memory-gib", f"{(STATE_BYTES * counted.parameters + activations / (1 - HEADROOM)) / GIB:.9f}"]
    words += ["--profile", str(profile_file), "--json"]
    command = [sys.executable, "-m", "ds_memo.cli", "estimate", *words]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    except subprocess.TimeoutExpired:
        return found | {"estimate": None, "why": "ds-memo estimate took more than 60 s"}
    if done.returncode:
        return found | {"estimate": None, "why": done.stderr.strip()[-300:]}
    answer = json.loads(done.stdout)
    step_s = answer["step_s"]
    if step_s is not None:  # its optimizer is Adam on ranks that reduce, another than the one here
        step_s += trainer.update_s() - answer["parts"]["step_s"]["optimizer"]
    keys = ("status", "layout", "step_s", "alpha", "resident_layers", "binding", "mfu", "device_gib", "host_gib", "parts")
    return found | {"step_s": step_s, "estimate": {key: answer.get(key) for key in keys}}
