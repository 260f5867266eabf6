"""Machines as data, and MFU: hardware_data/*.json, or the user's own file with the same keys.

Each number is {"value", "unit", "source"}. Bandwidths of links are those of one GPU in one direction while all GPUs of its node
copy. "attention_kernels" has two numbers for each kernel, {"forward", "backward"}: kernels differ by up to a factor of two.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, dataclass, fields, replace
from importlib.resources import files
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from ds_memo import attention_kernel
from ds_memo.attention_kernel import Attention, AttentionKernel
from ds_memo.errors import MOST_NAME, MemoError, brief, quoted
from ds_memo.estimate.errors import EstimateError
from ds_memo.files import MOST_CONFIG_BYTES, read_text

_BYTES = {"B": 1.0, "MB": 1e6, "GB": 1e9, "TB": 1e12, "MiB": 2.0**20, "GiB": 2.0**30, "TiB": 2.0**40}
_BYTES_PER_S = {f"{unit}/s": factor for unit, factor in _BYTES.items()}
_FLOPS = {"FLOP/s": 1.0, "GFLOP/s": 1e9, "TFLOP/s": 1e12, "PFLOP/s": 1e15}
_ONE = {"": 1.0}
_SHARE, _COUNT, _MOST = (_ONE, 1e-6, 1.0), (_ONE, 1.0, 1e6), 1e21
_FIELDS: dict[str, tuple[dict[str, float], float, float]] = {
    "peak": (_FLOPS, 1.0, _MOST),
    **dict.fromkeys(("device_memory", "host_memory", "nvme_memory", "nvme_daily"), (_BYTES, 1.0, _MOST)),
    "device_reserve": (_BYTES, 0.0, _MOST),
    **dict.fromkeys(("device_bandwidth", "host_bandwidth", "d2h", "h2d"), (_BYTES_PER_S, 1.0, _MOST)),
    **dict.fromkeys(("intra_node", "inter_node", "nvme_write", "nvme_read"), (_BYTES_PER_S, 1.0, _MOST)),
    **dict.fromkeys(("device_bandwidth_efficiency", "gemm_efficiency", "attention_forward_efficiency"), _SHARE),
    **dict.fromkeys(("attention_backward_efficiency", "host_bandwidth_efficiency"), _SHARE),
    **dict.fromkeys(("fragmentation", "gpus_per_node", "quiet_link"), _COUNT),
    **dict.fromkeys(("stall", "multiprocessors", "compute_capability"), (_ONE, 0.0, 1e6)),
    **dict.fromkeys(("forward", "backward"), (_FLOPS, 1.0, _MOST)),
}
"""Units of each number, and the least and most that it may be in the first of them."""
_WHOLE = ("gpus_per_node", "multiprocessors")
# Chips with the same peak as one in hardware_data/.
_SAME_PEAK = {"h800": "h100"}
# PCIe cards have a smaller power budget (NVIDIA's data sheets: dense bf16).
_PCIE_PEAK = {"h100": 756e12}
_SMALLER = {"mig", "laptop", "d", "q"}
"""In the name of a part of a card (Multi-Instance GPU), which has a part of its peak, and of cards with fewer multiprocessors or
watts: "RTX 4090 Laptop GPU", "RTX 5090 D", "RTX PRO 6000 Blackwell Max-Q"."""
GENERIC = "generic"
OPTIONS = {
    "peak": "--peak-tflops",
    "device_memory": "--device-memory-gib",
    "device_bandwidth": "--device-gb-per-s",
    "d2h": "--link-gb-per-s",
}
"""Numbers that GENERIC must be given, by option."""
_ASSUMED = "assumed: "
"""Before the source of a number that is neither measured nor published."""
ATTENTION = ("cudnn", "flash", "flash_attn_2", "flash_attn_3", "flash_attn_4")
"""Kernels that can be asked for, as memo.attention names them."""


class AttentionRates(NamedTuple):
    """FLOP/s of an attention kernel. The backward has 2.5 times the forward's FLOPs."""

    forward: float
    backward: float


@dataclass(frozen=True)
class Hardware:
    """One GPU of a cluster. FLOP/s, bytes, bytes per second."""

    name: str
    peak: float
    """Dense bf16."""
    device_memory: float
    device_reserve: float
    """Device memory that no tensor can have: CUDA context, communication buffers."""
    device_bandwidth: float
    device_bandwidth_efficiency: float
    """Share that elementwise kernels reach."""
    gemm_efficiency: float
    attention_forward_efficiency: float
    attention_backward_efficiency: float
    """Shares of the peak that scans reach, and attention where `attention_kernels` is empty."""
    d2h: float
    h2d: float
    quiet_link: float
    """Speed-up of a copy while the other GPUs do not copy. The paper solved alpha for such a link."""
    intra_node: float
    """Bus bandwidth of collectives inside a node."""
    inter_node: float
    """Bandwidth of one GPU's network adapter."""
    gpus_per_node: float
    host_memory: float
    """Bytes of a node."""
    host_bandwidth: float
    """Bytes per second of all memory channels of a node."""
    host_bandwidth_efficiency: float
    """Share that CPU Adam reaches."""
    fragmentation: float
    """Bytes that the caching allocator takes per byte of activations without a plan."""
    stall: float
    """Share that the caching allocator's flushes add to a step without a plan, once its cache has outgrown the device."""
    multiprocessors: float = 0
    """Streaming multiprocessors. 0: no multiprocessor idles at the end of a GEMM."""
    nvme_memory: float = 0.0
    """Bytes on the drives of a node, behind its host memory; 0: it has none. A file may leave out this and what follows."""
    nvme_write: float = 0.0
    nvme_read: float = 0.0
    """Bytes per second of all drives of a node, while they are written and read."""
    nvme_daily: float = math.inf
    """Bytes that may be written to the drives of a node in a day: what they are rated for."""
    compute_capability: float = 0.0
    """CUDA's, as 9.0; 0: not known, so attention is FlashAttention-2."""
    attention_kernels: tuple[tuple[str, AttentionRates], ...] = ()
    """Rates by kernel. Empty: one rate for all of them."""
    attention: str | None = None
    """The kernel that is asked for, one of ATTENTION. None: as PyTorch chooses without FlashAttention-3 and 4. No file has it."""
    assumed: tuple[str, ...] = ()
    """Names of the numbers whose source begins with _ASSUMED. No file has it."""

    @property
    def usable_device_bytes(self) -> float:
        return self.device_memory - self.device_reserve

    def with_device_memory(self, nbytes: float) -> Hardware:
        """Return the hardware with this much usable memory on each GPU, as memo.device_memory_gib limits a run."""
        return replace(self, device_memory=nbytes, device_reserve=0.0)

    def attending_with(self, kernel: str | None) -> Hardware:
        """Return the hardware on which attention runs by a kernel of ATTENTION, with its package installed.

        Raises:
            EstimateError: no call can have it on this card, or its rate is not known.
        """
        asked = replace(self, attention=kernel)
        if kernel is None:
            return asked
        found = asked.attention_kernel(Attention("bfloat16", 128, 128))
        if found.instead_of is not None:
            raise EstimateError(f"attention {kernel} on {self.name}: {found.reason}")
        if self.attention_kernels and found.name not in dict(self.attention_kernels):
            known = ", ".join(name for name, _ in self.attention_kernels)
            raise EstimateError(f"attention {kernel} on {self.name}: its rate is not known, those of {known} are")
        return asked

    def attention_kernel(self, call: Attention) -> AttentionKernel:
        """Return the kernel that runs a call of attention in a run on this machine."""
        major, minor = divmod(round(10 * (self.compute_capability or 8.0)), 10)
        installed = frozenset({self.attention} & {attention_kernel.FA3, attention_kernel.FA4})
        return attention_kernel.attention_kernel(call, (major, minor), installed, self.attention)

    def attention_rates(self, kernel: str) -> AttentionRates:
        """Return the rates of a kernel; where its own are not known, those of the slowest one with known rates."""
        if not self.attention_kernels:
            return AttentionRates(self.peak * self.attention_forward_efficiency, self.peak * self.attention_backward_efficiency)
        rates = dict(self.attention_kernels)
        return rates.get(kernel) or min(rates.values())

    def bandwidth(self, ranks: int, apart: int = 1) -> float:
        """Return the bus bandwidth of collectives among ranks that are this many GPUs apart.

        Beyond a node, NCCL aggregates the network adapters of the group's GPUs: each of its rings leaves a node at another GPU
        (NVIDIA/nccl, issues 412 and 652).
        """
        if ranks * apart <= self.gpus_per_node:
            return self.intra_node
        return min(self.intra_node, self.inter_node * max(1, self.gpus_per_node // apart))

    def link(self, ranks: int) -> float:
        """Return the bandwidth from each of this many neighbouring GPUs to the next."""
        return self.intra_node if ranks <= self.gpus_per_node else self.inter_node


def names() -> list[str]:
    """Return the names of the cards that have a file."""
    found = (path.name.removesuffix(".json") for path in _folder().iterdir() if path.name.endswith(".json"))
    return sorted(name for name in found if name != GENERIC)


def named(device: str) -> str | None:
    """Return the entry of `names` that a device's own name contains ("NVIDIA A100-SXM4-80GB", "NVIDIA RTX PRO 6000"), or None.

    A slice of a card ("NVIDIA A100-SXM4-80GB MIG 3g.40gb") has no entry, nor a smaller one of that name.
    """
    said = words(device)
    if _SMALLER & set(said):
        return None
    joined = {"".join(said[first:last]) for last in range(len(said) + 1) for first in range(max(0, last - 3), last)}
    return next((name for name in names() if name in joined), None)


def words(device: str) -> list[str]:
    """Return the words of a device's own name, in lower case."""
    return re.split(r"[^a-z0-9]+", device.lower())


def load(name_or_path: str, given: Mapping[str, float] = MappingProxyType({})) -> Hardware:
    """Load hardware by name, or from a JSON file.

    Args:
        given: numbers, in FLOP/s, bytes and bytes per second, in place of the file's. GENERIC has none of its own for OPTIONS.

    Raises:
        EstimateError: there is no such hardware or file, its content is wrong, or a number is missing.
    """
    missing = [option for name, option in OPTIONS.items() if name not in given]
    if name_or_path.lower() == GENERIC and missing:
        raise EstimateError(
            f"--hardware {GENERIC}: {', '.join(missing)} missing. A data sheet has them. All other numbers are assumed, as "
            f"{_folder() / GENERIC}.json says; a JSON file of your own can have them all"
        )
    if name_or_path.lower() in (GENERIC, *names()):
        return _parse(json.loads((_folder() / f"{name_or_path.lower()}.json").read_text()), name_or_path, given)
    path = Path(name_or_path)
    if not path.is_file():
        example, options = _folder() / "h200.json", ", ".join(OPTIONS.values())
        raise EstimateError(
            f"hardware {brief(name_or_path)} is neither a file nor one of {', '.join(names())}; for another card name {GENERIC} "
            f"and give its numbers ({options}), or copy {example}, put its numbers in and name that file"
        )
    return _parse(read_json(path, "hardware"), quoted(name_or_path), given)


def peak_flops(device_name: str) -> float | None:
    """Return the dense bf16 peak of a device, or None if it is not known.

    Args:
        device_name: The result of torch.cuda.get_device_name(), e.g. "NVIDIA H200" or "NVIDIA A100-SXM4-80GB".

    Returns:
        FLOP/s of one device.
    """
    said = words(device_name)
    name = named(" ".join(_SAME_PEAK.get(word, word) for word in said))
    if "pcie" in said and name in _PCIE_PEAK:
        return _PCIE_PEAK[name]
    return load(name).peak if name else None


def mfu(flops: float, seconds: float, ranks: int, peak: float) -> float:
    """Return the model FLOPs utilisation of one step, 0 to 1.

    Args:
        flops: Model FLOPs of the step over all ranks.
        seconds: Wall-clock time of the step.
        ranks: Devices that worked on it.
        peak: FLOP/s of one device.
    """
    return flops / (seconds * ranks * peak)


def model_file(path: str) -> Path:
    """Return the config JSON of a model, that of its folder, or that of a model's name in the Hugging Face cache.

    Raises:
        EstimateError: there is none.
    """
    file = Path(path) / "config.json" if Path(path).is_dir() else Path(path)
    if not file.is_file():
        if _NAME.fullmatch(path) and (cached := _cached(path)) is not None:
            return cached
        if _NAME.fullmatch(path) and not path.endswith(".json"):
            raise EstimateError(
                f"model {brief(path)}: no such folder, and no such config in the Hugging Face cache, and nothing is downloaded. "
                f"Run `hf download {path} config.json`, or give a config JSON"
            )
        raise EstimateError(
            f"model {brief(path)}: no such file or folder; expected a Hugging Face config JSON, e.g. "
            "ds_configs/models/gpt-7b.json, or a folder with one (nothing is downloaded)"
        )
    return file


_NAME = re.compile(r"[\w.-]+/[\w.-]+")
"""The name of a model in the Hugging Face Hub."""


def _cached(name: str) -> Path | None:
    """Return the config of a model in the Hugging Face cache; None: it is not there."""
    try:
        from huggingface_hub import try_to_load_from_cache
    except ImportError:
        return None
    try:
        found = try_to_load_from_cache(name, "config.json")
    except ValueError:  # no name that a model can have
        return None
    return Path(found) if isinstance(found, str) else None


def read_json(path: Path, what: str) -> dict[str, Any]:
    """Return the JSON object in a file of at most MOST_CONFIG_BYTES.

    Raises:
        EstimateError: the file cannot be read, or holds something else.
    """
    name = quoted(str(path), 400)
    try:
        data = json.loads(read_text(path, MOST_CONFIG_BYTES))
    except (MemoError, ValueError) as error:
        raise EstimateError(f"{what} file {name} cannot be read as JSON: {error}") from None
    except RecursionError:
        raise EstimateError(f"{what} file {name} cannot be read as JSON: it is nested too deeply") from None
    if not isinstance(data, dict):
        raise EstimateError(f"{what} file {name} holds a {type(data).__name__}, expected a JSON object")
    return data


def _folder() -> Any:
    return files("ds_memo.estimate") / "hardware_data"


def _parse(data: dict[str, Any], path: str, given: Mapping[str, float]) -> Hardware:
    wanted = [f.name for f in fields(Hardware) if f.name not in ("attention", "assumed")]
    for key in data:
        if key not in wanted:
            raise EstimateError(f"hardware {path}: unknown key {brief(key)}; allowed: {', '.join(wanted)}")
    drives = {"nvme_memory", "nvme_write", "nvme_read"}
    optional = {f.name for f in fields(Hardware) if f.default is not MISSING} - (drives if drives & set(data) else set())
    missing = [name for name in wanted if name not in data and name not in {"name", *optional, *given}]
    if missing:
        raise EstimateError(f"hardware {path}: missing {', '.join(missing)}")
    others = ("name", "attention_kernels")
    numbers: dict[str, Any] = {name: _number(path, name, data[name]) for name in wanted if name in data and name not in others}
    numbers |= given
    if numbers["device_reserve"] >= numbers["device_memory"]:
        raise EstimateError(f"hardware {path}: device_reserve is not below device_memory")
    name = data.get("name", Path(path).stem)
    if not isinstance(name, str) or len(name) > MOST_NAME:
        raise EstimateError(f"hardware {path}: name is {brief(name)}, expected a text of at most {MOST_NAME} characters")
    numbers["attention_kernels"] = _kernels(path, data.get("attention_kernels", {}))
    if numbers["attention_kernels"] and "compute_capability" not in numbers:
        raise EstimateError(f"hardware {path}: missing compute_capability, by which one of attention_kernels is chosen")
    return Hardware(name=quoted(name, MOST_NAME), assumed=tuple(_assumed(data, given)), **numbers)


def _assumed(data: dict[str, Any], given: Mapping[str, float]) -> Iterator[str]:
    for name, entry in data.items():
        if isinstance(entry, dict) and name not in given:
            if str(entry.get("source", "")).startswith(_ASSUMED):
                yield name
            elif "value" not in entry:
                yield from (f"{name}.{inner}" for inner in _assumed(entry, {}))


def _kernels(path: str, given: Any) -> tuple[tuple[str, AttentionRates], ...]:
    if not isinstance(given, dict) or not set(given) <= set(attention_kernel.NAMES):
        names = ", ".join(attention_kernel.NAMES)
        raise EstimateError(f"hardware {path}: attention_kernels is {brief(given)}, expected an object with keys of {names}")
    found = []
    for kernel, rates in given.items():
        where = f"attention_kernels.{kernel}"
        if not isinstance(rates, dict) or set(rates) != set(AttentionRates._fields):
            raise EstimateError(f"hardware {path}: {where} is {brief(rates)}, expected forward and backward")
        found.append((kernel, AttentionRates(*(_number(path, name, rates[name], where) for name in AttentionRates._fields))))
    return tuple(found)


def _number(path: str, name: str, entry: Any, within: str = "") -> float:
    units, least, most = _FIELDS[name]
    name = f"{within}.{name}" if within else name
    if not isinstance(entry, dict) or not {"value", "unit"} <= set(entry) <= {"value", "unit", "source"}:
        shape = '{"value": …, "unit": …, "source": …}'
        raise EstimateError(f"hardware {path}: {name} is {brief(entry)}, expected {shape}")
    value, unit = entry["value"], entry["unit"]
    if not isinstance(unit, str) or unit not in units:
        allowed = ", ".join(repr(u) for u in units)
        raise EstimateError(f"hardware {path}: {name} has the unit {brief(unit)}, expected one of {allowed}")
    least, most = least / units[unit], most / units[unit]
    if type(value) not in (int, float) or not least <= value <= most or (name in _WHOLE and value != int(value)):
        what = "a whole number" if name in _WHOLE else "a number"
        raise EstimateError(f"hardware {path}: {name} is {brief(value)} {unit}, expected {what} from {least:g} to {most:g}")
    return float(value) * units[unit]
