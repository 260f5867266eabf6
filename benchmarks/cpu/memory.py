"""Bytes that a layer stores and that a step holds on the device, with their bars.

    python -m benchmarks.memory [--device cpu|cuda] [--dtype float32|bfloat16] [--length 512] [--layers 8] [--json PATH]

Two layers of the papers' shapes at small scale, head dimension 128: a GPT (rotary GPT-NeoX, GELU tanh, layer norm, biases) and a
Llama-3 shape (1 KV head for 4 heads, ffn 3.5 h). All sizes are in units of b·s·h elements, and exact: they count tensors, not
what an allocator rounds them to. Printed per alpha and number of resident layers:

    stored          sent to the host per swapped layer; bar: 2 + 8 alpha (GPT), 2.06 + 9.5 alpha (Llama), within 3 %
    live            most on the device when a layer begins or the forward ends; bar: the resident frames and two more
    buffers         most reload buffers alive; bar: 2
    backward peak   most on the device during backward; bar at alpha 0 without resident layers: torch.utils.checkpoint's peak
                    and the attention outputs

`live` and its bar leave out what torch.utils.checkpoint holds beyond the layer inputs (embedding, final norm, loss).
"""

from __future__ import annotations

import argparse
import itertools
import json
import weakref
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

import ds_memo
from benchmarks import results
from benchmarks.workloads import small_models
from ds_memo.profile.live import LiveBytes
from ds_memo.swap.engine import SwapEngine
from ds_memo.swap.frame import Frame

HIDDEN, HEAD = 512, 128
TOLERANCE = 0.03
ALPHAS = (0.0, 0.125, 0.5, 1.0)


@dataclass(frozen=True)
class Shape:
    model: str
    """Name among the small models."""
    whole: float
    """Units per layer that are stored whatever alpha is."""
    rows: float
    """Units per layer that alpha splits."""

    def stored(self, alpha: float) -> float:
        return self.whole + self.rows * alpha


SHAPES = {"gpt": Shape("gpt-neox", 2.0, 8.0), "llama": Shape("llama", 2.06, 9.5)}


@dataclass
class Baseline:
    """A step without ds_memo, in units."""

    after_forward: float
    backward_peak: float


@dataclass
class Measured:
    """A step with ds_memo, in units, and its bars."""

    shape: str
    alpha: float
    resident_layers: int
    step: int
    stored: float
    stored_bar: float
    live: float
    live_bar: float
    buffers: int
    backward_peak: float
    backward_bar: float | None

    def misses(self) -> list[str]:
        """Values over their bar."""
        found = []
        if self.stored and abs(self.stored / self.stored_bar - 1) > TOLERANCE:
            found.append(f"stored {self.stored:.3f} instead of {self.stored_bar:.3f}")
        if self.live > self.live_bar + 0.01:
            found.append(f"live {self.live:.2f} over {self.live_bar:.2f}")
        if self.buffers > 2:
            found.append(f"{self.buffers} reload buffers")
        if self.backward_bar is not None and self.backward_peak > self.backward_bar:
            found.append(f"backward peak {self.backward_peak:.2f} over {self.backward_bar:.2f}")
        return found


class Bench:
    """One shape on one device.

    Args:
        shape: a key of SHAPES.
        layers: how many.
        length: tokens; the batch is one sequence.
    """

    def __init__(self, shape: str, layers: int, length: int, device: str = "cpu", dtype: torch.dtype = torch.float32) -> None:
        self.shape, self.layers = shape, layers
        self.device = torch.device(device)
        models = small_models(64, layers, HIDDEN, heads=HIDDEN // HEAD, kv_heads=1, llama_ffn=HIDDEN * 7 // 2)
        self.model = models[SHAPES[shape].model].base_model.to(self.device, dtype).train()
        self.tokens = torch.randint(0, 64, (1, length), device=self.device)
        self.unit = length * HIDDEN * dtype.itemsize
        self.attention = self.unit + length * (HIDDEN // HEAD) * 4  # its output and the log-sum-exp in float32
        for parameter in self.model.parameters():
            parameter.grad = torch.zeros_like(parameter)  # born before the count, so gradients do not enter it
        self.plain = self._baseline()
        self.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        self.checkpointed = self._baseline()
        self.model.gradient_checkpointing_disable()

    def measure(self, alpha: float, resident_layers: int, step: int = 2) -> Measured:
        """One configuration; the first step analyses the layers, later ones follow what it found."""
        config = {"enabled": True, "alpha": alpha, "resident_layers": resident_layers, "host_memory_gib": 4.0}
        handle = ds_memo.attach(self.model, config)
        try:
            for _ in range(step - 1):
                self._loss().backward()
            count = LiveBytes(self.device)
            live: list[int] = []
            buffers = _count_reload_buffers(handle._session.engine)
            frames = _watch_frames(handle._session.engine, count, live)
            sent = handle._session.engine.traffic.bytes_to_host
            with count:
                loss = self._loss()
                live.append(count.live)
                sent = handle._session.engine.traffic.bytes_to_host - sent
                count.reset_peak()
                loss.backward()
        finally:
            handle.detach()
        swapped = [size for resident, size in frames if not resident]
        bound = sum(size for resident, size in frames if resident) + sum(sorted(swapped)[-2:])
        rest = self.checkpointed.after_forward - self.layers  # neither layer inputs nor frames
        whole = self.checkpointed.backward_peak + self.layers * self.attention / self.unit
        return Measured(
            shape=self.shape,
            alpha=alpha,
            resident_layers=resident_layers,
            step=step,
            stored=sent / len(swapped) / self.unit if swapped else 0.0,
            stored_bar=SHAPES[self.shape].stored(alpha),
            live=max(live) / self.unit - rest,
            live_bar=bound / self.unit,
            buffers=max(buffers, default=0),
            backward_peak=count.peak / self.unit,
            backward_bar=None if alpha or resident_layers else whole,
        )

    def _loss(self) -> torch.Tensor:
        return self.model(input_ids=self.tokens, use_cache=False).last_hidden_state.square().mean()

    def _baseline(self) -> Baseline:
        with LiveBytes(self.device) as count:
            loss = self._loss()
            after_forward = count.live
            count.reset_peak()
            loss.backward()
        return Baseline(after_forward / self.unit, count.peak / self.unit)


def _count_reload_buffers(engine: SwapEngine) -> list[int]:
    """Fills with how many reload buffers are alive after each reload."""
    alive: list[weakref.ref] = []
    counts: list[int] = []
    reload = engine._reload

    def counting(frame: Frame) -> None:
        reload(frame)
        alive.append(weakref.ref(next(iter(frame.slots.values())).untyped_storage()))
        counts.append(sum(ref() is not None for ref in alive))

    engine._reload = counting
    return counts


def _watch_frames(engine: SwapEngine, count: LiveBytes, live: list[int]) -> list[tuple[bool, int]]:
    """Fills with each frame's residence and bytes on the device, and `live` with what is alive before each layer."""
    frames: list[tuple[bool, int]] = []
    begin, end = engine.begin, engine.end

    def watched_begin(*args: Any, **options: Any) -> Frame:
        live.append(count.live)
        return begin(*args, **options)

    def watched_end(frame: Frame) -> None:
        end(frame)
        storages = {storage._cdata: storage.nbytes() for storage in (x.untyped_storage() for x in frame.device.values())}
        frames.append((frame.resident, sum(storages.values())))

    engine.begin, engine.end = watched_begin, watched_end
    return frames


def measure(device: torch.device, dtype: torch.dtype, layers: int = 8, length: int = 512) -> list[Measured]:
    """Print the tables and return their rows."""
    found: list[Measured] = []
    print(f"{layers} layers, s {length}, h {HIDDEN}, {dtype} on {device}; units of b·s·h elements")
    for shape in SHAPES:
        bench = Bench(shape, layers, length, str(device), dtype)
        for name, base in (("everything saved", bench.plain), ("torch.utils.checkpoint", bench.checkpointed)):
            print(f"{shape}, {name}: after forward {base.after_forward:.2f}, backward peak {base.backward_peak:.2f}")
        rows = [bench.measure(*how) for how in itertools.product(ALPHAS, (0, 2), (1, 2))]
        head = ("alpha", "resident", "step", "stored", "bar", "live", "bar", "buffers (2)", "backward peak", "bar", "")
        print(*results.markdown(head, map(_cells, rows)), sep="\n")
        found += rows
    missed = [miss for row in found for miss in row.misses()]
    print(f"{len(found)} configurations, {len(missed)} over a bar")
    return found


def _cells(row: Measured) -> tuple[Any, ...]:
    peaks = (row.stored, row.stored_bar, row.live, row.live_bar, row.buffers, row.backward_peak, row.backward_bar or 0.0)
    return row.alpha, row.resident_layers, row.step, *(f"{value:.2f}" for value in peaks), ", ".join(row.misses()) or "ok"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rows = measure(torch.device(options.device), getattr(torch, options.dtype), options.layers, options.length)
    if options.json:
        options.json.write_text(json.dumps([asdict(row) for row in rows], indent=1))
    raise SystemExit(any(row.misses() for row in rows))


if __name__ == "__main__":
    main()
