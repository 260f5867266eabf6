"""Every rival of the GPU benchmarks computes what stock computes; one that did not would make the comparison void."""

import copy
import dataclasses

import pytest
import torch
import torch.distributed as dist
from deepspeed.runtime.sequence_parallel import ulysses_sp
from torch.distributed.tensor import distribute_tensor
from torch.distributed.tensor.experimental._context_parallel import _attention as torchs_ring

from benchmarks import head_groups, input_offload, ring, trl_million, workloads
from benchmarks.noise import distance
from benchmarks.rivals import RIVALS, Budget, Installed, unpinned
from benchmarks.timing import Trainer
from ds_memo.remat.undo import changed
from tests.attention_kernels import cuda_kernels
from tests.distributed_harness.common import ON_CPU, DistributedTest
from tests.everyday import everyday

CPU = torch.device("cpu")
FP32 = 1e-5
"""Share of the norm: a GEMM that is split by rows may sum in another order."""


@pytest.fixture(scope="module")
def stock():
    """Trainer, loss and gradients of stock, per workload."""
    made = {}

    def of(name):
        if name not in made:
            shape = dataclasses.replace(workloads.shapes(CPU)[name], layers=4)
            trainer = Trainer(workloads.build(shape, CPU), workloads.batch(shape, shape.lengths[0], CPU))
            made[name] = trainer, *trainer.gradients(Installed())
        return made[name]

    return of


BUDGET = Budget(CPU, 1 << 27)


@pytest.mark.parametrize("workload", everyday(["gpt7b", "llama8b"], ["llama8b"]))
@pytest.mark.parametrize("name", RIVALS)
def test_gradients_are_those_of_stock(name, workload, stock, tmp_path):
    trainer, loss, want = stock(workload)
    with RIVALS[name].on(trainer.model, dataclasses.replace(BUDGET, cache_dir=str(tmp_path))) as installed:
        for _ in range(2):
            got_loss, got = trainer.gradients(installed)
            assert torch.equal(got_loss, loss)
            assert max(distance(got, want).values()) <= FP32
    again_loss, again = trainer.gradients(Installed())  # it is taken off without a trace
    assert torch.equal(again_loss, loss) and max(distance(again, want).values()) == 0


@pytest.mark.parametrize("kernel", ["cudnn", "efficient"])
@pytest.mark.parametrize("name", ["alst", "upipe", "ds_memo, planned"])
def test_a_log_sum_exp_that_is_there_only_for_gradients(name, kernel, stock, tmp_path):
    """A kernel that runs without gradients gives none. Of an empty one cuDNN's backward computes nothing, and says nothing."""
    trainer, _, want = stock("llama8b")
    with (
        cuda_kernels(kernel) as ran,
        RIVALS[name].on(trainer.model, dataclasses.replace(BUDGET, cache_dir=str(tmp_path))) as installed,
    ):
        for _ in range(2):
            _, got = trainer.gradients(installed)
            assert max(distance(got, want).values()) <= FP32
        assert f"_scaled_dot_product_{kernel}_attention_backward" in ran


def tile_calls(installed, trainer):
    """Return the rows of every call of the first layer's MLP in a step."""
    rows, (first, *_) = [], (module for module in trainer.model.modules() if type(module).__name__.endswith("MLP"))
    inner = next(child for child in first.children() if isinstance(child, torch.nn.Linear))
    hook = inner.register_forward_pre_hook(lambda _, given: rows.append(given[0].shape[-2]))
    trainer.gradients(installed)
    hook.remove()
    return rows


@pytest.mark.parametrize("length, tiles", [(32, [32]), (48, [24, 24]), (65, [22, 22, 21])])
@pytest.mark.parametrize("workload", ["gpt7b", "llama8b"])
def test_alst_has_the_recipes_tiles(workload, length, tiles, stock):
    """ceil(tokens / hidden) of them, in the forward, in the recomputation and once more in TiledMLP's own backward."""
    trainer, *_ = stock(workload)
    shape = workloads.shapes(CPU)[workload]
    trainer = Trainer(trainer.model, workloads.batch(shape, length, CPU))
    assert shape.size.hidden == 32
    with RIVALS["alst"].on(trainer.model, BUDGET) as installed:
        assert tile_calls(installed, trainer) == 3 * tiles
    assert tile_calls(Installed(), trainer) == [length]


def test_alst_has_every_norm_as_one_kernel(stock, monkeypatch):
    """Two norms of each of four layers, in the forward and in the recomputation, and the last one."""
    trainer, *_ = stock("llama8b")
    calls, kernel = [], torch.nn.functional.rms_norm
    monkeypatch.setattr(torch.nn.functional, "rms_norm", lambda x, *more: calls.append(x.shape) or kernel(x, *more))
    with RIVALS["alst"].on(trainer.model, BUDGET) as installed:
        trainer.gradients(installed)
    assert len(calls) == 4 * 2 * 2 + 1
    trainer.gradients(Installed())
    assert len(calls) == 4 * 2 * 2 + 1


def attention_calls(installed, trainer):
    with workloads.AttentionOps() as seen:
        trainer.gradients(installed)
    return len(seen.names)


@pytest.mark.parametrize("workload, groups", [("gpt7b", 8), ("llama8b", 2)])
def test_upipe_attends_to_each_group_twice(workload, groups, stock):
    """In the forward and in the checkpoint's recomputation, and not in the groups' own backward."""
    trainer, *_ = stock(workload)
    assert attention_calls(Installed(), trainer) == 4
    with RIVALS["upipe"].on(trainer.model, BUDGET) as installed:
        assert attention_calls(installed, trainer) == 2 * 4 * groups


@pytest.mark.parametrize("name, calls", [("async_offload", 8), ("axolotl", 4), ("alst, axolotl", 4)])
def test_axolotl_attends_once(name, calls, stock):
    """Its outputs are on the host meanwhile: all that layers save, but the last one's."""
    trainer, *_ = stock("llama8b")
    with RIVALS[name].on(trainer.model, BUDGET) as installed:
        assert attention_calls(installed, trainer) == calls


@pytest.mark.parametrize("name, outputs", [("async_offload", 0), ("axolotl", 2)])
def test_all_that_a_layer_saves_is_on_the_host(name, outputs, stock, monkeypatch):
    """A layer's input, attention's output and its log-sum-exp, of all layers but the last."""
    trainer, *_ = stock("llama8b")
    made, tensors_of = [], input_offload.LayerTensors
    monkeypatch.setattr(input_offload, "LayerTensors", lambda *given: made.append(tensors_of(*given)) or made[0])
    with RIVALS[name].on(trainer.model, BUDGET) as installed:
        trainer.gradients(installed)
        shape, tokens = trainer.model.config, trainer.ids.numel()
        hidden, scalars = tokens * shape.hidden_size, tokens * shape.num_attention_heads
        (tensors,) = made
        assert [x.numel() for x in tensors._on_host.values()] == 3 * [hidden, hidden, scalars][: 1 + outputs]
        assert not tensors._on_device and not tensors._leaving


def rows_beside_its_own(monkeypatch):
    """TiledMLP's backward takes the gradients of other rows."""
    back = ulysses_sp.TiledMLP.backward
    monkeypatch.setattr(ulysses_sp.TiledMLP, "backward", staticmethod(lambda ctx, grad: back(ctx, grad.roll(1, 1))))


def the_first_groups_result(monkeypatch):
    """Each group's backward starts from the log-sum-exp of the first."""
    made, kernel = [], head_groups._Kernel

    def recorded(outputs=None):
        if outputs is not None:
            made.append(outputs)
            outputs = (outputs[0], *made[0][1:])
        return kernel(outputs)

    monkeypatch.setattr(head_groups, "_Kernel", recorded)


def keys_for_values(monkeypatch):
    """Gradients of keys and values go around the ring in each other's place."""
    sent = ring._Own.exchange_buffers
    monkeypatch.setattr(ring._Own, "exchange_buffers", lambda own, x: sent(own, x.roll(x.numel() // 2)))


def another_sign(monkeypatch, number=0):
    """A layer's input comes back with another sign, or what it saved after that."""
    load = input_offload.LayerTensors._load

    def loaded(tensors, layer):
        load(tensors, layer)
        for place, copied in tensors._on_device.items():
            if (place.layer, place.number) == (layer, number):
                copied.tensor.neg_()

    monkeypatch.setattr(input_offload.LayerTensors, "_load", loaded)


def another_attention(monkeypatch):
    another_sign(monkeypatch, 1)


def another_log_sum_exp(monkeypatch):
    another_sign(monkeypatch, 2)


OFFLOAD = ("async_offload", "alst, async", "upipe", "trl", "axolotl")
FAULTS = [("alst", rows_beside_its_own), ("upipe", the_first_groups_result), ("trl", keys_for_values)]
FAULTS += [("axolotl", another_attention), ("alst, axolotl", another_log_sum_exp)]


@pytest.mark.parametrize("name, fault", [*FAULTS, *((name, another_sign) for name in OFFLOAD)])
def test_a_fault_shows(name, fault, stock, monkeypatch):
    """The negative controls."""
    trainer, _, want = stock("llama8b")
    fault(monkeypatch)
    with RIVALS[name].on(trainer.model, BUDGET) as installed:
        _, got = trainer.gradients(installed)
    assert max(distance(got, want).values()) > 100 * FP32


def over_ranks(x):
    """The all-to-all whose place head_groups.traded takes, with a backward."""
    return dist.nn.all_to_all_single(torch.empty_like(x, memory_format=torch.contiguous_format), x.contiguous())


@pytest.mark.skipif(not ON_CPU, reason="two CPU ranks")
class TestTwoRanks(DistributedTest):
    """Two ranks share a sequence. Gradients of every parameter beside the stock model's on one rank, both in fp32."""

    world_size = 2

    def test_trl(self):
        """Shards, the ring, offloaded checkpoints and the loss in chunks: all that benchmarks.trl_million trains with."""
        stock = workloads.build(dataclasses.replace(workloads.shapes(CPU)["llama8b"], layers=2), CPU)
        stock.set_attn_implementation("sdpa")
        length, trl_million.CHUNK = 48, 8  # three chunks of a rank's tokens
        with unpinned(CPU):
            scored, batch = trl_million.as_trl(copy.deepcopy(stock.config), length, "cpu", torch.float32)
        ids = torch.randint(512, (1, length), generator=torch.Generator().manual_seed(0))
        labels = ids.roll(-1, 1)
        torch.nn.functional.cross_entropy(stock(input_ids=ids, use_cache=False).logits[0], labels[0]).backward()
        want = {name: p.grad for name, p in stock.named_parameters()}
        for name, p in scored.named_parameters():
            whole = stock.get_parameter(name.removeprefix("inner."))
            p.data.to_local().copy_(distribute_tensor(whole.data, p.device_mesh, p.placements).to_local())

        def far():
            scored.zero_grad()
            with unpinned(CPU):
                scored(*batch).backward()
            got = {name.removeprefix("inner."): p.grad.full_tensor() for name, p in scored.named_parameters()}
            assert got.keys() == want.keys()
            return max(distance(got, want).values())

        assert far() <= FP32
        with changed(torchs_ring, "_create_rotater", ring._Own):  # the negative control: each rank keeps its keys and values
            assert far() > 100 * FP32

    @pytest.mark.parametrize("family, groups", [("gpt7b", 4), ("llama8b", 1)])
    def test_upipe(self, family, groups):
        """Groups of heads with their projections, traded group by group."""
        shape = dataclasses.replace(workloads.shapes(CPU)[family], layers=2)
        stock = workloads.build(shape, CPU)
        model, rank = copy.deepcopy(stock), dist.get_rank()
        ids, positions = workloads.batch(shape, 48, CPU), torch.arange(48)[None]
        stock(input_ids=ids, use_cache=False).logits.square().mean().backward()
        want = {name: p.grad for name, p in stock.named_parameters()}

        def far():
            model.zero_grad()
            with RIVALS["upipe"].on(model, dataclasses.replace(BUDGET, ranks=2)) as installed, installed.around():
                part, places = (x.chunk(2, 1)[rank] for x in (ids, positions))
                with workloads.AttentionOps() as seen:
                    model(input_ids=part, position_ids=places, use_cache=False).logits.square().mean().backward()
            for p in model.parameters():
                dist.all_reduce(p.grad)
            assert len(seen.names) == 2 * shape.layers * groups
            return max(distance({name: p.grad / 2 for name, p in model.named_parameters()}, want).values())

        with changed(head_groups, "traded", over_ranks):
            assert far() <= FP32
        assert far() > 100 * FP32  # the negative control: heads stay where they are
