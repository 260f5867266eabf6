"""Hardware files: all load, every number has a source, and a device's own name finds its file."""

from __future__ import annotations

import json
from importlib.resources import files

import pytest

from ds_memo.estimate import hardware
from ds_memo.estimate.errors import EstimateError

FOLDER = files("ds_memo.estimate") / "hardware_data"
GENERIC = {"peak": 1e14, "device_memory": 16e9, "device_bandwidth": 7e11, "d2h": 2e10, "h2d": 2e10}


@pytest.mark.parametrize("name", [*hardware.names(), hardware.GENERIC])
def test_every_number_has_a_source(name: str) -> None:
    card = hardware.load(name, GENERIC if name == hardware.GENERIC else {})
    assert card.name == name
    data = json.loads((FOLDER / f"{name}.json").read_text())
    numbers = {key: entry for key, entry in data.items() if key not in ("name", "attention_kernels")}
    for kernel, rates in data.get("attention_kernels", {}).items():
        numbers |= {f"attention_kernels.{kernel}.{way}": entry for way, entry in rates.items()}
    assert all(len(entry.get("source", "")) >= 6 for entry in numbers.values())
    assert set(card.assumed) == {key for key, entry in numbers.items() if entry["source"].startswith("assumed: ")}


@pytest.mark.parametrize("name", ["rtx4090", "rtx5090", "rtxpro6000", "l40s", "a6000", "gh200", "gb200"])
def test_what_a_data_sheet_says_is_not_assumed(name: str) -> None:
    assert not {"peak", "device_bandwidth", "multiprocessors", "compute_capability"} & set(hardware.load(name).assumed)


@pytest.mark.parametrize(
    ("device", "name"),
    [
        ("NVIDIA GeForce RTX 4090", "rtx4090"),
        ("NVIDIA GeForce RTX 5090", "rtx5090"),
        ("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", "rtxpro6000"),
        ("NVIDIA L40S", "l40s"),
        ("NVIDIA RTX A6000", "a6000"),
        ("NVIDIA GH200 480GB", "gh200"),
        ("NVIDIA GB200", "gb200"),
        ("NVIDIA H200", "h200"),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
        ("NVIDIA GeForce RTX 4090 D", None),
        ("NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition", None),
        ("NVIDIA A100-SXM4-80GB MIG 3g.40gb", None),
        ("NVIDIA RTX 6000 Ada Generation", None),
    ],
)
def test_a_devices_own_name(device: str, name: str | None) -> None:
    assert hardware.named(device) == name
    assert hardware.peak_flops(device) == (name and hardware.load(name).peak)


def test_given_numbers_are_in_place_of_a_files() -> None:
    given = hardware.load("rtx4090", {"d2h": 1e10, "h2d": 1e10})
    assert (given.d2h, given.h2d, given.peak) == (1e10, 1e10, 165.2e12)
    card = hardware.load("generic", GENERIC)
    assert (card.peak, card.device_memory, card.h2d) == (1e14, 16e9, 2e10) and "gemm_efficiency" in card.assumed


def test_a_generic_card_without_numbers_is_refused() -> None:
    with pytest.raises(EstimateError, match="--hardware generic: --device-gb-per-s, --link-gb-per-s missing"):
        hardware.load("generic", {"peak": 1e14, "device_memory": 16e9})
