"""Ranks that are not there: bytes that one of 16 sends inside its node and to the other, and the seconds that they take."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from benchmarks import rehearsal
from ds_memo.estimate import hardware
from tests.benchmarks import emulated_exchanges
from tests.benchmarks.emulated import NEEDED, no_emulated_process_hangs  # noqa: F401
from tests.benchmarks.emulated_exchanges import BORDER, HEADS, RANK, RANKS, TOKENS

pytestmark = NEEDED
HEAD = TOKENS * 128 * 2
"""Bytes of a head of a rank's tokens."""


def test_exchanges_of_two_nodes(capfd: pytest.CaptureFixture[str]) -> None:
    assert emulated_exchanges.main() == 0
    found = json.loads(capfd.readouterr().out.splitlines()[-1])
    machine = hardware.load("h200")
    near, far = machine.intra_node, machine.inter_node
    sent = {name: of[1] for name, of in found.items() if isinstance(of, list) and len(of) == 2 and isinstance(of[1], dict)}
    assert sent["heads"] == {"all-to-all inside a node": 28 * HEAD}
    assert sent["uneven heads"] == {"all-to-all inside a node": 10 * HEAD}  # this rank keeps two of twelve
    assert sent["heads of all"] == {"all-to-all inside a node": 14 * HEAD, "all-to-all between nodes": 16 * HEAD}
    assert sent["gather"] == {"collective between nodes": 15 * HEAD}
    assert sent["ring of nodes"] == {"P2P between nodes": 32 * HEAD}
    assert sent["ring"] == {"P2P inside a node": 32 * HEAD}
    assert sent["timeout"] == {"collective inside a node": 2 * 24 * HEAD}
    assert sent["move"] == {"all-to-all inside a node": 32 * HEAD}  # all: the sixteenths of ring number 1 are others than 2 and 3

    def took(name: str) -> float:
        return found[name][0]

    assert took("heads") == pytest.approx(28 * HEAD / near + 2 * 2 * 32 * HEAD / 4.8e12, rel=0.2)  # two copies of it all
    assert 16 * HEAD / far < took("heads of all") < 20 * HEAD / far
    assert took("ring of nodes") == pytest.approx(32 * HEAD / far, rel=0.02)  # both directions at once
    assert took("ring") == pytest.approx(32 * HEAD / near, rel=0.02)
    assert took("product, ring of nodes") == pytest.approx(max(took("product"), took("ring of nodes")), rel=0.02)
    assert found["host"] == [[2 * RANK, 2 * RANK + 1]] * RANKS

    assert found["ordered"] == []
    assert any("write" in race and "exchange" in race for race in found["races"])

    def flops_s(pairs: int, rate: float) -> float:
        return 4.0 * pairs * HEADS * 128 / rate

    length, pair = RANKS * TOKENS, 2 * 2 * 4 * HEAD  # of keys and values: two ranks' tokens, 4 heads
    seconds = flops_s(length * (length + 1) // 2 // RANKS, machine.attention_rates("cudnn").forward)
    assert took("ring attention") == pytest.approx(seconds, rel=0.02)
    assert sent["ring attention"]["P2P inside a node"] == 7 * pair
    assert (
        sent["ring attention, backward"]["P2P inside a node"] == 7 * pair + 7 * 2 * pair + pair
    )  # gradients in fp32, at last in bf16
    assert found["received"] == {"torch.bfloat16": 2 * pair, "torch.float32": 2 * 2 * pair}

    documents = [BORDER, TOKENS - BORDER]
    packed = sum(n * (n + 1) // 2 for n in documents)
    window = sum(128 * n - 128 * 127 // 2 for n in documents)
    whole = sum(n * n for n in documents)
    for name, pairs in (("packed", packed), ("window", window), ("without limits", whole)):
        forward, backward = machine.attention_rates("flash")
        assert took(name) == pytest.approx(flops_s(pairs, forward), rel=0.03)
        assert took(f"{name}, backward") == pytest.approx(2.5 * flops_s(pairs, backward), rel=0.05)
    for dtype in ("torch.bfloat16", "torch.float32"):
        assert found[dtype] == [[1, 4, 4096, 128], [1, 4, 4096], "torch.float32"]


SCRIPT = Path(rehearsal.__file__).parent / "scripts" / "sequence.py"


def layers(capfd: pytest.CaptureFixture[str], *words: str, flash_attn_3: bool = False) -> list[str]:
    """Return what is printed of layers that 16 ranks of two nodes share, trading heads in a node and in a ring of two."""
    memo = json.dumps({"alpha": 0.5, "resident_layers": 0, "ulysses_size": 8})
    of_run = ["--ranks", str(RANKS), "--rank", str(RANK), "--device-gib", "80", *["--flash-attn-3"] * flash_attn_3]
    assert rehearsal.main([*of_run, str(SCRIPT), "llama8b:2", "64K", str(RANKS), memo, *words]) == 0
    found = capfd.readouterr()
    return [*found.out.splitlines(), *found.err.splitlines()]


def kernels(lines: list[str]) -> set[str]:
    """Return the attention kernels that ran, by "attention: … calls of op (kernel)"."""
    (line,) = [line for line in lines if line.startswith("attention: ")]
    return set(re.findall(r"\((\w+)\)", line))


def test_layers_in_parts_never_make_the_host_wait(capfd: pytest.CaptureFixture[str]) -> None:
    lines = layers(capfd)
    waits = [line for line in lines if line.startswith("in layers, the host waits")]
    assert waits and all("deepspeed" in line or "run_ahead_limit" in line for line in waits)
    assert kernels(lines) == {"cudnn"}, "PyTorch prefers it on this card"


def test_ranks_attend_by_flash_attn_3_where_it_is_installed(capfd: pytest.CaptureFixture[str]) -> None:
    """PyTorch's own registration of the package runs, over a stand-in of its ops."""
    lines = layers(capfd, flash_attn_3=True)
    assert kernels(lines) == {"flash_attn_3"} and any(line.endswith("warnings: []") for line in lines)


def test_the_ring_is_ordered(capfd: pytest.CaptureFixture[str]) -> None:
    (line,) = [line for line in layers(capfd, "order") if "nothing orders" in line]
    checked, races = (int(word.replace(",", "")) for word in line.split() if word[0].isdigit())
    assert checked > 10_000 and races == 0


def test_a_plain_loop_under_fsdp2_is_ordered_and_planned(capfd: pytest.CaptureFixture[str]) -> None:
    script = Path(rehearsal.__file__).parent / "scripts" / "fsdp2.py"
    memo = json.dumps({"alpha": 0.5, "resident_layers": 1})
    assert rehearsal.main(["--ranks", "8", "--device-gib", "80", str(script), "16384", memo, "order"]) == 0
    found = capfd.readouterr()
    (line,) = [line for line in found.out.splitlines() if "nothing orders" in line]
    checked, races = (int(word.replace(",", "")) for word in line.split() if word[0].isdigit())
    assert checked > 5_000 and races == 0
    last = [line.split() for line in found.err.splitlines() if line.lstrip().startswith("5 ")][-1]
    assert float(last[4]) > 5 and int(last[7]) > 1500, "an arena, and requests that it served"
