"""Cases of test_emulated_calls.py: `python -m tests.benchmarks.emulated_controls CASE` runs one in an emulated process; JSON."""

from __future__ import annotations

import ctypes
import json
import sys
import tempfile
import threading
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import nn

import ds_memo
from benchmarks import emulator
from benchmarks.emulated_order import Unordered
from benchmarks.emulated_process import run_emulated, without_values
from benchmarks.emulated_time import Clock, keeping_time
from ds_memo.autotune.kernel_seconds import KernelSeconds
from ds_memo.estimate import hardware
from ds_memo.nvme.direct_files import DirectFiles
from ds_memo.profile import attention_alone, stopwatch
from ds_memo.profile import layer as layer_profile
from ds_memo.swap.host_pool import HostPool
from ds_memo.swap.host_slab import HostSlab
from ds_memo.swap.stream_protocol import D2H
from ds_memo.swap.streams import CudaStreams
from ds_memo.units import MIB
from tests.models import Block
from tests.nvme.files import directory
from tests.swap.rig import attached

DEVICE = torch.device("cuda", 0)
SLOW = 1e-6
"""Share of the link. A copy of some KiB then takes longer than all of a step's kernels, and none is over by chance."""


def item_in_a_hook(clock: Clock) -> dict[str, Any]:
    """A hook of the user's reads a value on the host, in each forward and replay of one layer."""

    def read_a_value(layer: nn.Module, args: Any, out: Any) -> None:
        (out if torch.is_tensor(out) else out[0]).flatten()[0].item()

    build = emulator.build

    def build_with_a_hook(*args: Any) -> nn.Module:
        model = build(*args)
        model.gpt_neox.layers[2].attention.dense.register_forward_hook(read_a_value)
        return model

    with mock.patch.object(emulator, "build", build_with_a_hook):
        memo = {"alpha": 0.5, "resident_layers": 2}
        return emulator.syncs(lambda around: emulator.step(clock, "gpt7b", 16384, memo, around=around))


# ---- several compute streams


class SharedExpertAside(Block):
    """A layer that computes its MLP on a side stream, beside its attention."""

    side = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        main, side = torch.cuda.current_stream(), self.side
        side.wait_stream(main)
        x.record_stream(side)
        with torch.cuda.stream(side):
            shared = self.down(F.gelu(self.up(F.gelu(self.up(x))[..., : x.shape[-1]])))
        out = x + self.attend(x)
        main.wait_stream(side)
        shared.record_stream(main)
        return out + shared


class OnStreams(nn.Module):
    """Layers that run on streams in turn."""

    def __init__(self, layers: list[nn.Module], streams: list[torch.cuda.Stream]) -> None:
        super().__init__()
        self.layers, self.streams = nn.ModuleList(layers), streams

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for index, layer in enumerate(self.layers):
            stream, before = self.streams[index % len(self.streams)], torch.cuda.current_stream()
            stream.wait_stream(before)
            x.record_stream(stream)
            with torch.cuda.stream(stream):
                x = layer(x)
            before.wait_stream(stream)
            x.record_stream(before)
        return x.sum()


def compute_streams(clock: Clock, *models: str, guarded: bool = True) -> dict[str, Any]:
    """Return races of models that compute on other streams than the default one, or on several.

    Args:
        models: those to train; none: all.
        guarded: False: the engine takes all for one stream.
    """
    clock.link_share(SLOW)
    side, other = torch.cuda.Stream(), torch.cuda.Stream()
    SharedExpertAside.side = side
    found = {}
    for name, block, streams, around in [
        ("stock, inside a layer", SharedExpertAside, [torch.cuda.default_stream()], None),
        ("inside a layer", SharedExpertAside, [torch.cuda.default_stream()], None),
        ("layers in turn", Block, [side, other], None),
        ("all on another", Block, [other], other),
    ]:
        if models and name not in models:
            continue
        model = OnStreams([block(64) for _ in range(5)], streams).to(DEVICE)
        x = torch.randn(2, 256, 64, device=DEVICE)
        unordered, used = Unordered(), CudaStreams(DEVICE)
        if not guarded:
            used.current = lambda: 0
        with torch.cuda.stream(around) if around else nullcontext(), unordered:
            if name.startswith("stock"):
                for _ in range(3):
                    model(x).backward()
            else:
                with attached(model, used, {"alpha": 0.5, "resident_layers": 0}):
                    for _ in range(3):
                        model(x).backward()
        found[name] = {"checked": unordered.checked, "races": list(unordered.races)}
    return found


# ---- a card that cannot keep up its clock


def slowing_down(clock: Clock, sustained: bool = False, learns: bool = True, **memo: Any) -> list[Any]:
    """Train on a card that takes 18 % longer after 0.2 s of work without a pause, as an H200 does.

    Args:
        sustained: True: the profile works as long before each sample, and attention runs alone. False: the host pauses there.
        learns: False: training corrects no prediction.

    Returns:
        A row for each step: the milliseconds of its layers, predicted and measured, and what was changed.
    """
    clock.boost(0.2, 1.18)
    clock.link_share(4.0)  # layers are what binds
    warm_up = layer_profile.sustain

    def after_a_pause(*args: Any) -> None:
        torch.cuda.synchronize()
        clock.host_waits_until(clock.now() + 0.1)
        warm_up(*args)

    layer_profile.sustain = attention_alone.sustain = after_a_pause
    if sustained:
        stopwatch.SUSTAINED_S = 0.4
    else:
        attention_alone.MOST_S = 0.0
    if not learns:
        KernelSeconds.measured = lambda *_: None  # type: ignore[method-assign]
    model = OnStreams([Block(2048) for _ in range(6)], [torch.cuda.default_stream()]).to(DEVICE, torch.bfloat16)
    x = torch.randn(1, 32768, 2048, device=DEVICE, dtype=torch.bfloat16)
    optimizer, rows = torch.optim.SGD(model.parameters(), lr=0.0), []
    handle = ds_memo.attach(model, {"device_memory_gib": 3} | memo)
    for _ in range(8):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        model(x).backward()
        end.record()
        end.synchronize()
        report = handle.report()
        row = {"predicted": 1e3 * report["predicted"]["layers_s"], "measured": begin.elapsed_time(end), "tiles": report["tiles"]}
        rows.append(row | report["profile"])
        optimizer.step()
        optimizer.zero_grad()
    handle.detach()
    return rows


# ---- several devices


def threads_of_the_second_device(clock: Clock) -> dict[str, Any]:
    """A rank of GPU 1 locks memory, writes it to a file behind a copy, and a thread of its user's drops what was locked.

    Returns:
        The devices that have a context, and why the transfer failed.
    """
    device = torch.device("cuda", 1)
    torch.cuda.set_device(device)
    cuda = ctypes.CDLL("libcuda.so.1")
    streams, pool = CudaStreams(device), HostPool(device)
    held = [slab := HostSlab(2 * MIB, pool)]
    block, there = slab.allocate(MIB, "a test"), torch.empty(MIB, dtype=torch.uint8, device=device)
    with tempfile.TemporaryDirectory() as folder:
        files = DirectFiles([directory(Path(folder))], 64 * MIB, streams, preallocate=False)
        streams.copy(D2H, block.views(0, MIB)[0], there, MIB)
        transfer = files.write(block, files.extent(MIB, "a test"), (streams.mark(D2H),))
        torch.cuda.synchronize(device)  # the clock goes on
        assert transfer.over.wait(60)
        files.close()
    before = cuda.emulated_contexts()
    failure = transfer.failure
    held += [block, pool]
    del slab, block, transfer, pool, files
    dropper = threading.Thread(target=held.clear)
    dropper.start()
    dropper.join()
    return {"running": before, "dropped": cuda.emulated_contexts(), "failure": failure and str(failure)}


CASES: dict[str, Callable[[Clock], Any]] = {
    "item": item_in_a_hook,
    "streams": compute_streams,
    "inside a layer, unguarded": lambda clock: compute_streams(clock, "inside a layer", guarded=False),
    "slows down": lambda clock: slowing_down(clock, tile_tokens=0),
    "slows down, uncorrected": lambda clock: slowing_down(clock, learns=False, tile_tokens=0),
    "slows down, after work": lambda clock: slowing_down(clock, sustained=True, learns=False, tile_tokens=0),
    "slows down, in tiles": lambda clock: slowing_down(clock, tile_tokens=4096),
    "second device": threads_of_the_second_device,
    "layers in turn, unguarded": lambda clock: compute_streams(clock, "layers in turn", guarded=False),
}


def main(case: str, *emulated: str) -> int:
    if not emulated:
        return run_emulated("tests.benchmarks.emulated_controls", [case, "--emulated"], 139.8)
    without_values()
    with keeping_time(hardware.load("h200")) as clock:
        print(json.dumps(CASES[case](clock)))
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
