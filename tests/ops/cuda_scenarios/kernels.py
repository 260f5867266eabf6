"""Scenarios with real kernels: computed values, a slow reader, graphs, another process, DeepSpeed."""

from __future__ import annotations

import os

import torch

from tests.ops.cuda_scenarios.rig import DEVICE, MIB, Slots, expandable, gpu, holds
from tests.ops.rig import Rig, same


@gpu
def a_planned_pass() -> None:
    rig = Rig(DEVICE, rows=1024)
    rig.forward_and_backward()
    reference = rig.forward_and_backward()
    rig.planned()
    for _ in range(3):
        with rig.counting() as counts:
            assert same(rig.follow(), reference)
        assert counts == {"hit": rig.requests}
    rig.allocator.release()


def _read_by_a_side_stream(recorded: bool) -> bool:
    """Return True if a slow reader on another stream read the right values although the block was freed and rewritten."""
    seen = torch.empty(8 * MIB, dtype=torch.uint8, device="cuda")  # before the pass: it is not planned
    slots, side = Slots((0, 8), (0, 8)), torch.cuda.Stream()
    block = slots.take(8).fill_(1)
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        torch.cuda._sleep(200_000_000)
        seen.copy_(block)
    if recorded:
        block.record_stream(side)
    address = block.data_ptr()
    del block
    block = slots.take(8)
    assert block.data_ptr() == address
    block.fill_(2)
    torch.cuda.synchronize()
    return bool((seen == 1).all())


@gpu
def a_side_stream_still_reads() -> None:
    assert _read_by_a_side_stream(recorded=True)
    assert not _read_by_a_side_stream(recorded=False), "the reader was too fast: nothing was tested"


@gpu
def a_graph_is_captured() -> None:
    slots, side = Slots((0, 8), (8, 8)), torch.cuda.Stream()
    x = slots.take(8).fill_(1)
    block = slots.take(8)
    block.record_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = x + 1
        z = y * 2
        del block
    assert slots.owns(x) and not slots.owns(y) and not slots.owns(z) and slots.count("pool") >= 2
    for value in (3, 5):
        x.fill_(value)
        graph.replay()
        torch.cuda.synchronize()
        assert holds(z, 2 * (value + 1))
    slots.again()
    assert not slots.owns(slots.take(8)) and slots.owns(slots.take(8))  # x is still there; block is not
    del graph, x, y, z


def _child_reads(queue: torch.multiprocessing.Queue, answer: torch.multiprocessing.Queue) -> None:
    tensor = queue.get()
    answer.put(bool((tensor == 7).all().item()))
    tensor.fill_(8)
    torch.cuda.synchronize()
    del tensor
    answer.put("written")


@gpu
def another_process_reads_a_planned_block() -> None:
    if expandable():
        return
    slots = Slots((0, 8), (8, 8))
    block = [slots.take(8), slots.take(8).fill_(7)][1]
    torch.cuda.synchronize()
    context = torch.multiprocessing.get_context("spawn")
    queue, answer = context.Queue(), context.Queue()
    child = context.Process(target=_child_reads, args=(queue, answer))
    child.start()
    queue.put(block)
    assert answer.get(timeout=60) is True and answer.get(timeout=60) == "written"
    child.join(60)
    assert child.exitcode == 0 and holds(block, 8)


@gpu
def a_zero_3_engine() -> None:
    """The loss with planned addresses equals the loss without, and requests hit.

    Sequences have 128 tokens: with more, the backward of attention adds up in no fixed order.
    """
    losses = {planned: _zero_3_losses(planned) for planned in (False, True)}
    assert losses[True] == losses[False], losses


def _zero_3_losses(planned: bool) -> list[float]:
    import deepspeed
    from transformers import LlamaConfig, LlamaForCausalLM

    import ds_memo

    for name, value in {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "0",
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "1",
    }.items():
        os.environ.setdefault(name, value)
    deepspeed.init_distributed()
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(hidden_size=512, intermediate_size=1024, num_hidden_layers=4, num_attention_heads=8, vocab_size=512)
    )
    config = {
        "train_micro_batch_size_per_gpu": 16,
        "zero_optimization": {"stage": 3},
        "zero_allow_untested_optimizer": True,
        "bf16": {"enabled": True},
        "memo": {"enabled": True, "alpha": 0.5, "plan": {"enabled": planned}},
    }
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    engine, *_ = ds_memo.initialize(model=model, optimizer=optimizer, config=config)
    tokens = torch.randint(0, 512, (16, 128), device=engine.device, generator=torch.Generator(engine.device).manual_seed(0))
    losses = []
    for _ in range(8):
        loss = engine(input_ids=tokens, labels=tokens, use_cache=False).loss
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    if planned:
        assert ds_memo.report(engine)["plan"]["hits"] > 0, ds_memo.report(engine)
    engine.destroy()
    return losses
