"""The "memo" section of the DeepSpeed JSON.

    "memo": {"enabled": true, "alpha": 0.5, "resident_layers": 2}

Every field is optional; ds_memo works out absent ones. Values are not coerced and unknown keys are refused.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from ds_memo import files
from ds_memo.errors import MemoConfigError, brief, quoted

SECTION = "memo"
MOST_GIB = 1 << 20
"""1 PiB: its bytes fit 64 bits by far."""
MOST_SECONDS = 1e6
"""The system counts the milliseconds of a wait in 31 bits."""
MOST_TB_PER_DAY = 1e6
MOST_LAYERS = 1 << 16
MOST_TOKENS = 1 << 32
MOST_PROBLEMS = 10
"""Most refused fields that one error names."""


class _Section(BaseModel):  # not DeepSpeedConfigModel, which would silently drop every field whose value is "auto"
    model_config = ConfigDict(extra="forbid", validate_assignment=True)


def _check_path(path: str) -> None:
    """Raise ValueError if a path cannot be one."""
    try:
        os.fsencode(files.expanded(path))
    except UnicodeEncodeError:
        raise ValueError("file names cannot hold it") from None
    except files.NotPrivate as error:
        raise ValueError(str(error)) from None


class PlanConfig(_Section):
    """Address planning of transient tensors."""

    enabled: bool = Field(True, strict=True)
    """Plan addresses and replay them through the allocator op."""

    solver: Literal["cbc", "highs", "greedy"] = "cbc"
    """Solver that runs if the greedy portfolio does not reach the lower bound."""

    time_limit_s: float = Field(60.0, gt=0, le=MOST_SECONDS, allow_inf_nan=False, strict=True)
    """Seconds that the solver may take per plan."""


class ProfileConfig(_Section):
    """Measuring of sizes and times."""

    method: Literal["fit", "direct"] = "fit"
    """fit: two short lengths and a check; direct: one layer at full length."""


class KernelsConfig(_Section):
    """Kernels in place of the model's and DeepSpeed's own."""

    fast: bool = Field(False, strict=True)
    """RMSNorm, rotary embedding and SwiGLU as one kernel each, where that is installed and right. "kernels": "fast" sets it."""

    norm: Literal["apex", "torch"] | None = None
    """Norms as one kernel. torch: RMSNorm by PyTorch's; apex: LayerNorm and RMSNorm by NVIDIA apex's."""

    adam: Literal["apex"] | None = None
    """The optimizer of the DeepSpeed JSON: NVIDIA apex's FusedAdam."""

    cross_entropy: Literal["liger", "whole"] | None = None
    """The output head and the loss. liger: Liger's fused linear cross entropy; whole: the model's own, with whole logits. Absent:
    lazy logits."""


class NvmeConfig(_Section):
    """Files behind host memory."""

    path: str | list[str]
    """A directory on a drive of this node, or one on each of several, over which blocks are striped."""

    gib: float | None = Field(None, gt=0, le=MOST_GIB, allow_inf_nan=False, strict=True)
    """GiB of files that all ranks of the node together may use; preallocated. Absent: what is free, less a tenth; allocated as
    passes want it."""

    max_tb_per_day: float | None = Field(None, gt=0, le=MOST_TB_PER_DAY, allow_inf_nan=False, strict=True)
    """TB (10^12 bytes) a day that all ranks of the node together may write. Absent: no bound."""

    @property
    def paths(self) -> list[str]:
        return [str(files.expanded(path)) for path in ([self.path] if isinstance(self.path, str) else self.path)]

    @field_validator("path")
    @classmethod
    def _are_paths(cls, value: str | list[str]) -> str | list[str]:
        named = [value] if isinstance(value, str) else value
        if not named or not all(named):
            raise ValueError("names no directory")
        for path in named:
            _check_path(path)
        return value


class MemoConfig(_Section):
    """The whole section. Build it with :func:`memo_config`, which words the errors."""

    enabled: bool = Field(False, strict=True)
    """Off: the engine is exactly DeepSpeed's."""

    alpha: float | None = Field(None, ge=0.0, le=1.0, allow_inf_nan=False, strict=True)
    """Fraction of GEMM output rows that a swapped layer keeps on the host. Absent: solved."""

    resident_layers: int | None = Field(None, ge=0, le=MOST_LAYERS, strict=True)
    """Layers whose kept outputs all stay on the device, 0 to all layers. Absent: solved."""

    layers: list[str] | None = Field(None, strict=True)
    """Names of the layers, if they cannot be found; empty: the model calls ``deepspeed.checkpointing.checkpoint`` itself."""

    host_memory_gib: float | None = Field(None, gt=0, le=MOST_GIB, allow_inf_nan=False, strict=True)
    """GiB of this node's memory that all its ranks together may use. Absent: what the cgroup leaves, less headroom."""

    device_memory_gib: float | None = Field(None, gt=0, le=MOST_GIB, allow_inf_nan=False, strict=True)
    """GiB of each device that may be used. Absent: what is free."""

    tile_tokens: int | None = Field(None, ge=0, le=MOST_TOKENS, strict=True)
    """Tokens of the flattened batch that a layer runs at once, which bounds its working set. 0: layers run whole. Absent: solved;
    whole if alpha and resident_layers are given."""

    head_groups: int | None = Field(None, ge=1, le=MOST_LAYERS, strict=True)
    """Groups of heads that attention's backward runs for, one after another, in a tiled layer; a divisor of the (local) key-value
    heads. Where ranks trade heads (Ulysses) forward and backward run so, and it divides a rank's heads. Absent: solved; 1 if
    alpha and resident_layers are given."""

    input_every: int | None = Field(None, ge=1, le=MOST_LAYERS, strict=True)
    """Layers in a row, at most, of which the first alone stores its input on the host; the backward computes the others' from it.
    Such layers run in tiles, or in one tile. 1: every layer stores its input. Absent: solved; 1 if alpha and resident_layers are
    given."""

    ulysses_size: int | None = Field(None, ge=1, le=MOST_LAYERS, strict=True)
    """Number of ranks that trade heads, of those that share a sequence ("sequence_parallel_size"); what is left is a ring.
    Absent: chosen."""

    nvme: NvmeConfig | None = None
    """Absent: host memory bounds what is swapped."""

    cache_dir: str | None = Field(None, min_length=1, strict=True)
    """Folder that keeps profiles between runs. Absent: ``$XDG_CACHE_HOME/ds_memo``, else ``~/.cache/ds_memo``."""

    plan: PlanConfig = Field(default_factory=PlanConfig)
    profile: ProfileConfig = Field(default_factory=ProfileConfig)
    kernels: KernelsConfig = Field(default_factory=KernelsConfig)

    ablation: Literal["full_recompute", "full_swap"] | None = None
    """A baseline: torch.utils.checkpoint's full recomputation, or every row swapped. Absent: memo."""

    attention: Literal["cudnn", "flash", "flash_attn_2", "flash_attn_3", "flash_attn_4", "eager"] | None = None
    """cudnn, flash: the kernel F.scaled_dot_product_attention must use inside the layers; flash_attn_2, 3, 4: the flash-attn
    package that a Hugging Face model is switched to, and of 3 and 4 the one that PyTorch's flash ops run; eager: eager attention
    stays. Ranks that share a sequence have that kernel where it can serve. Absent: the best kernel that is there
    (ds_memo/attention_kernel.py), the model's own package, and one op in the place of eager attention where Transformers has no
    other."""

    @field_validator("kernels", mode="before")
    @classmethod
    def _is_one_word(cls, value: Any) -> Any:
        return {"fast": True} if value == "fast" else value

    @field_validator("cache_dir")
    @classmethod
    def _is_a_path(cls, value: str | None) -> str | None:
        if value is not None:
            _check_path(value)
        return value

    @property
    def groups_inputs(self) -> bool:
        """True if the section has layers compute their inputs."""
        return (self.input_every or 1) > 1 and self.ablation is None and self.tile_tokens != 0

    @property
    def may_tile(self) -> bool:
        """True if layers may run in tiles: as configured, or because that is left open."""
        given = self.ablation is not None or (self.alpha is not None and self.resident_layers is not None)
        return bool(self.tile_tokens) or (self.tile_tokens is None and (self.groups_inputs or not given))


def memo_config(section: Mapping[str, Any] | MemoConfig) -> MemoConfig:
    """Check a "memo" section.

    Raises:
        MemoConfigError: fields are refused; one line per field has its name, its value, and what is allowed.
    """
    if isinstance(section, MemoConfig):
        return section
    if not isinstance(section, Mapping):
        raise MemoConfigError(f'"{SECTION}" must be a JSON object, got {brief(section)}; expected one like {{"enabled": true}}')
    try:
        config = MemoConfig(**{str(key): value for key, value in section.items()})
    except ValidationError as error:
        lines = sorted({_explain(problem) for problem in error.errors()})
        if len(lines) > MOST_PROBLEMS:
            lines[MOST_PROBLEMS:] = [f"and {len(lines) - MOST_PROBLEMS:,} more"]
        raise MemoConfigError("\n".join(lines)) from None
    if config.ablation is not None and config.alpha is not None:
        raise MemoConfigError(
            f'memo.ablation: got "{config.ablation}" beside memo.alpha, which it decides; remove one of the two'
        )
    if (config.input_every or 1) > 1 and (config.tile_tokens == 0 or config.ablation is not None):
        other = "memo.tile_tokens 0" if config.tile_tokens == 0 else f'memo.ablation "{config.ablation}"'
        raise MemoConfigError(
            f"memo.input_every: got {config.input_every} beside {other}; layers whose inputs are computed again run in tiles: "
            "remove one of the two"
        )
    return config


def _explain(problem: Mapping[str, Any]) -> str:
    path = [str(part) for part in problem["loc"]]
    field = quoted(".".join([SECTION, *path]))
    if problem["type"] == "extra_forbidden":
        return f"{field}: unknown key; allowed here: {', '.join(_model_at(path[:-1]).model_fields)}"
    if problem["type"] == "missing":
        return f"{field}: missing; expected: {_allowed(path)}"
    why = f" ({quoted(str(problem['ctx']['error']))})" if problem["type"] == "value_error" else ""
    return f"{field}: got {brief(problem['input'])}{why}; allowed: {_allowed(path)}"


def _model_at(path: list[str]) -> type[_Section]:
    sections: dict[str, type[_Section]] = {
        "nvme": NvmeConfig,
        "plan": PlanConfig,
        "profile": ProfileConfig,
        "kernels": KernelsConfig,
    }
    return sections[path[0]] if path else MemoConfig


_ALLOWED = {
    "": "a JSON object whose keys are Unicode text",
    "enabled": "true or false",
    "alpha": "a number from 0 to 1 (leave the key out to have it solved)",
    "resident_layers": f"a whole number from 0 to the number of layers, at most {MOST_LAYERS:,} (leave out to have it solved)",
    "layers": 'a list of module names, like ["decoder.blocks.0"] (leave the key out to have them found)',
    "host_memory_gib": f"a number of GiB above 0, at most {MOST_GIB:,} (leave the key out to use what the cgroup leaves)",
    "device_memory_gib": f"a number of GiB above 0, at most {MOST_GIB:,} (leave the key out to use what is free)",
    "tile_tokens": f"a whole number from 0 to {MOST_TOKENS:,} (0: layers run whole; leave the key out to have it solved)",
    "head_groups": f"a divisor of the (local) key-value heads, from 1 to {MOST_LAYERS:,} (leave the key out to have it solved)",
    "input_every": f"a whole number from 1 to {MOST_LAYERS:,} (leave the key out to have it solved)",
    "ulysses_size": f"a divisor of sequence_parallel_size, at most {MOST_LAYERS:,} (leave the key out to have it chosen)",
    "ablation": '"full_recompute" or "full_swap" (leave the key out for memo itself)',
    "attention": '"cudnn", "flash", "flash_attn_2", "flash_attn_3", "flash_attn_4" or "eager" (leave out for the best available)',
    "nvme": 'a JSON object with "path" (leave the key out to use no files)',
    "nvme.path": "a directory that exists, or a list of them",
    "nvme.gib": f"a number of GiB above 0, at most {MOST_GIB:,} (leave the key out to use what is free, less a tenth)",
    "nvme.max_tb_per_day": f"a number of TB above 0, at most {MOST_TB_PER_DAY:,.0f} (leave the key out for no bound)",
    "cache_dir": "a path (leave the key out for ~/.cache/ds_memo)",
    "plan": "a JSON object",
    "profile": "a JSON object",
    "kernels": '"fast" or a JSON object',
    "kernels.fast": "true or false",
    "kernels.norm": '"torch" or "apex" (leave the key out for the model\'s own)',
    "kernels.adam": '"apex" (leave the key out for DeepSpeed\'s)',
    "kernels.cross_entropy": '"liger" or "whole" (leave the key out for lazy logits)',
    "plan.enabled": "true or false",
    "plan.solver": '"cbc", "highs" or "greedy"',
    "plan.time_limit_s": f"a number of seconds above 0, at most {MOST_SECONDS:,.0f}",
    "profile.method": '"fit" or "direct"',
}


def _allowed(path: list[str]) -> str:
    while ".".join(path) not in _ALLOWED:  # an item of a list, a key that is no text
        path = path[:-1]
    return _ALLOWED[".".join(path)]
