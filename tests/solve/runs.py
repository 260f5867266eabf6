"""Layers and runs for the tests of the solver: GPT and Llama shapes on made-up hardware, small and odd ones at random."""

from __future__ import annotations

import random

from ds_memo.solve.run_costs import LayerCosts, Output, RunCosts

GPT = (("gemm", 3.0), ("attention", 1.0), ("gemm", 1.0), ("gemm", 4.0))
"""Outputs after the input, in units of the hidden size: q k v, attention, projection, fc1."""
LLAMA = (("gemm", 1.0), ("gemm", 0.25), ("gemm", 0.25), ("attention", 1.0), ("gemm", 1.0), ("gemm", 3.5), ("gemm", 3.5))


def layer(tokens: int, shape: tuple = GPT) -> LayerCosts:
    """Return a layer of one rank by formula, in bf16 at 400 TFLOP/s and 3 TB/s: GEMMs, causal attention at half its square, and
    memory-bound work."""
    hidden, flops_per_s, device_bytes_per_s = 4096, 400e12, 3e12
    units = [share for kind, share in shape if kind == "gemm"]
    split_flops = sum(2 * tokens * hidden * share * hidden for share in units)
    last_gemm = 2 * tokens * hidden * hidden * max(units)
    attention = 2 * tokens * tokens * hidden
    elementwise_s = 40 * tokens * hidden / device_bytes_per_s
    gemm_s, attention_s = split_flops / flops_per_s, attention / flops_per_s
    forward_s = gemm_s + last_gemm / flops_per_s + attention_s + elementwise_s
    outputs = [Output("input", tokens, 2 * hidden, 0.0)]
    done = 0.0
    for kind, share in shape:
        done += attention_s if kind == "attention" else 2 * tokens * hidden * share * hidden / flops_per_s
        outputs.append(Output(kind, tokens, 2 * int(hidden * share), done / forward_s))
    return LayerCosts(
        outputs=tuple(outputs),
        forward_s=forward_s,
        backward_s=2.2 * forward_s,
        replay_s=elementwise_s,
        gemm_s=gemm_s,
        attention_s=attention_s,
        no_recompute_bytes=int(2.2 * sum(output.nbytes for output in outputs)),
    )


def run(one: LayerCosts, n: int, link: float = 20e9, host: int = 1 << 50, device: int | None = None, **more: float) -> RunCosts:
    """Return n like layers; without `device`, room for two residents and a reload."""
    device = 3 * one.frame_bytes if device is None else device
    return RunCosts((one,) * n, link, link, host, device, **more)


def random_run(seed: int, most_kinds: int = 3, n: int | None = None) -> RunCosts:
    """Draw n layers (random: 1 to 24) of one or more kinds and odd sizes; budgets from too little to plenty."""
    draw = random.Random(seed)
    kinds = []
    for _ in range(draw.randint(1, most_kinds)):
        tokens = draw.randint(1, 5000)
        outputs = [Output("input", tokens, draw.randint(1, 64) * 4, 0.0)]
        born = 0.0
        for kind in draw.choice([("gemm", "attention", "gemm"), ("gemm", "gemm", "attention", "choice", "gemm"), ("attention",)]):
            born += draw.random() * (1 - born)
            outputs.append(Output(kind, tokens, draw.randint(1, 256) * 4, born))
        forward_s = draw.uniform(1e-3, 1.0)
        gemm_s = draw.uniform(0, 0.8) * forward_s
        kinds.append(
            LayerCosts(
                tuple(outputs),
                forward_s,
                draw.uniform(1, 3) * forward_s,
                draw.uniform(0, 0.2) * forward_s,
                gemm_s,
                draw.uniform(0, 1) * (forward_s - gemm_s),
                int(draw.uniform(1, 3) * sum(output.nbytes for output in outputs)),
            )
        )
    layers = tuple(draw.choice(kinds) for _ in range(n or draw.randint(1, 24)))
    frames = sum(layer.frame_bytes for layer in layers)
    per_second = frames / sum(layer.forward_s for layer in layers)
    return RunCosts(
        layers,
        draw.uniform(0.05, 3) * per_second,
        draw.uniform(0.05, 3) * per_second,
        int(draw.uniform(0.0, 1.2) * frames),
        int(draw.uniform(0.0, 1.2) * frames) + 2 * max(layer.frame_bytes for layer in layers),
        working_bytes=draw.randint(0, 10**4),
        head_s=draw.choice([0.0, draw.random()]),
    )
