"""Every rival of the GPU benchmarks computes what stock computes; one that did not would make the comparison void."""

import copy
import dataclasses

import pytest
import torch
import torch.distributed as dist
from deepspeed.runtime.sequence_parallel import ulysses_sp
from torch.distributed.tensor import distribute_tensor
from torch.distributed.tensor.experimental._context_parallel import _attention as torchs_ring
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks import head_groups, input_offload, paper_memo, ring, trl_million, workloads
from benchmarks.noise import distance
from benchmarks.rivals import RIVALS, Budget, Installed, unpinned
from benchmarks.timing import Trainer
from ds_memo.remat import op_policy
from ds_memo.remat.undo import changed
from tests.attention_kernels import cuda_kernels
from tests.distributed_harness.common import ON_CPU, DistributedTest
from tests.everyday import everyday

CPU = torch.device("cpu")
FP32 = 1e-5
"""Share of the norm: a GEMM that is split by rows may sum in another order."""


@pytest.fixture(scope="module")
def stock():
    """Model, trainer and stock's gradients per workload."""
    made = {}

    def of(name):
        if name not in made:
            shape = dataclasses.replace(workloads.shapes(CPU)[name], layers=4)
            trainer = Trainer(workloads.build(shape, CPU), workloads.batch(shape, shape.lengths[0], CPU))
            made[name] = shape, trainer, *trainer.gradients(Installed())
        return made[name]

    return of


def budget(shape, **more):
    return Budget(CPU, 1 << 27, ranks=shape.ranks, bandwidth=1e9, layer_forward_s=1e-3, **more)


@pytest.mark.parametrize("workload", everyday(["gpt7b", "llama8b", "ulysses8"], ["llama8b"], ["gpt7b"]))
@pytest.mark.parametrize("name", RIVALS)
def test_gradients_are_those_of_stock(name, workload, stock, tmp_path):
    shape, trainer, loss, want = stock(workload)
    with RIVALS[name].on(trainer.model, budget(shape, cache_dir=str(tmp_path))) as installed:
        for _ in range(2):
            got_loss, got = trainer.gradients(installed)
            assert torch.equal(got_loss, loss)
            assert max(distance(got, want).values()) <= FP32
    again_loss, again = trainer.gradients(Installed())  # it is taken off without a trace
    assert torch.equal(again_loss, loss) and max(distance(again, want).values()) == 0


@pytest.mark.parametrize("kernel", ["cudnn", "efficient"])
@pytest.mark.parametrize("name", ["alst", "upipe", "paper", "ds_memo, planned"])
def test_a_log_sum_exp_that_is_there_only_for_gradients(name, kernel, stock, tmp_path):
    """A kernel that runs without gradients gives none. Of an empty one cuDNN's backward computes nothing, and says nothing."""
    shape, trainer, _, want = stock("llama8b")
    with cuda_kernels(kernel) as ran, RIVALS[name].on(trainer.model, budget(shape, cache_dir=str(tmp_path))) as installed:
        for _ in range(2):
            _, got = trainer.gradients(installed)
            assert max(distance(got, want).values()) <= FP32
        assert f"_scaled_dot_product_{kernel}_attention_backward" in ran


@pytest.mark.parametrize("workload", ["gpt7b", "llama8b", "ulysses8"])
@pytest.mark.parametrize("alpha", [0.0, 0.3, 1.0])
def test_the_papers_memo_at_every_alpha(alpha, workload, stock):
    shape, trainer, loss, want = stock(workload)
    rival = dataclasses.replace(RIVALS["paper"], settings={"alpha": alpha})
    with rival.on(trainer.model, budget(shape)) as installed:
        got_loss, got = trainer.gradients(installed)
    assert torch.equal(got_loss, loss)
    assert max(distance(got, want).values()) <= FP32


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
    shape, trainer, _, _ = stock(workload)
    trainer = Trainer(trainer.model, workloads.batch(shape, length, CPU))
    assert shape.size.hidden == 32
    with RIVALS["alst"].on(trainer.model, budget(shape)) as installed:
        assert tile_calls(installed, trainer) == 3 * tiles
    assert tile_calls(Installed(), trainer) == [length]


def test_alst_has_every_norm_as_one_kernel(stock, monkeypatch):
    """Two norms of each of four layers, in the forward and in the recomputation, and the last one."""
    shape, trainer, _, _ = stock("llama8b")
    calls, kernel = [], torch.nn.functional.rms_norm
    monkeypatch.setattr(torch.nn.functional, "rms_norm", lambda x, *more: calls.append(x.shape) or kernel(x, *more))
    with RIVALS["alst"].on(trainer.model, budget(shape)) as installed:
        trainer.gradients(installed)
    assert len(calls) == 4 * 2 * 2 + 1
    trainer.gradients(Installed())
    assert len(calls) == 4 * 2 * 2 + 1


@pytest.mark.parametrize("tiles", [4, 64])
def test_alst_sums_the_gradients_of_its_tiles_in_the_parameters_dtype(tiles):
    """Why Rival.own_rounding: in bf16 every tile rounds the sum once more. It is what 64 tiles lose; one GEMM loses far less."""
    model = workloads.build(dataclasses.replace(workloads.shapes(CPU)["llama8b"], layers=1), CPU).bfloat16()
    mlp, generator = model.model.layers[0].mlp, torch.Generator().manual_seed(0)
    x, dy = (torch.randn(1, tiles * 32, 32, generator=generator).bfloat16() for _ in range(2))

    def weights_gradient(module, dtype):
        module.to(dtype).zero_grad()
        module(x.to(dtype).requires_grad_()).backward(dy.to(dtype))
        return {name: p.grad.clone() for name, p in module.named_parameters()}

    exact, whole = (weights_gradient(mlp, dtype) for dtype in (torch.float64, torch.bfloat16))
    with RIVALS["alst"].on(model, Budget(CPU, 1 << 27)):
        tiled = weights_gradient(mlp, torch.bfloat16)
    one_gemm, sums = (max(distance(got, exact).values()) for got in (whole, tiled))
    assert one_gemm < sums <= one_gemm + RIVALS["alst"].own_rounding


def test_a_tile_in_the_wrong_place_shows(stock, monkeypatch):
    """The negative control: TiledMLP's backward takes the gradients of rows beside its own."""
    shape, trainer, _, want = stock("llama8b")
    back = ulysses_sp.TiledMLP.backward
    monkeypatch.setattr(ulysses_sp.TiledMLP, "backward", staticmethod(lambda ctx, grad: back(ctx, grad.roll(1, 1))))
    with RIVALS["alst"].on(trainer.model, budget(shape)) as installed:
        _, got = trainer.gradients(installed)
    assert max(distance(got, want).values()) > 100 * FP32


def attention_calls(installed, trainer):
    with Counted(op_policy.ATTENTION) as counted:
        trainer.gradients(installed)
    return counted.calls


class Counted(TorchDispatchMode):
    """Counts the calls of some ops."""

    def __init__(self, ops):
        super().__init__()
        self.ops, self.calls = ops, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.calls += func in self.ops
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("workload, groups", [("gpt7b", 8), ("llama8b", 2), ("ulysses8", 1)])
def test_upipe_attends_to_each_group_twice(workload, groups, stock):
    """In the forward and in the checkpoint's recomputation, and not in the groups' own backward."""
    shape, trainer, _, _ = stock(workload)
    assert attention_calls(Installed(), trainer) == shape.layers
    with RIVALS["upipe"].on(trainer.model, budget(shape)) as installed:
        assert attention_calls(installed, trainer) == 2 * shape.layers * groups


def test_a_group_with_anothers_result_shows(stock, monkeypatch):
    """The negative control: each group's backward starts from the log-sum-exp of the first."""
    shape, trainer, _, want = stock("llama8b")
    made, kernel = [], head_groups._Kernel

    def recorded(outputs=None):
        if outputs is not None:
            made.append(outputs)
            outputs = (outputs[0], *made[0][1:])
        return kernel(outputs)

    monkeypatch.setattr(head_groups, "_Kernel", recorded)
    with RIVALS["upipe"].on(trainer.model, budget(shape)) as installed:
        _, got = trainer.gradients(installed)
    assert max(distance(got, want).values()) > 100 * FP32


def test_a_ring_that_swaps_gradients_shows(stock, monkeypatch):
    """The negative control: what goes around has those of keys and values in each other's place."""
    shape, trainer, _, want = stock("llama8b")
    sent = ring._Own.exchange_buffers
    monkeypatch.setattr(ring._Own, "exchange_buffers", lambda own, x: sent(own, x.roll(x.numel() // 2)))
    with RIVALS["trl"].on(trainer.model, budget(shape)) as installed:
        _, got = trainer.gradients(installed)
    assert max(distance(got, want).values()) > 100 * FP32


def over_ranks(x):
    """The all-to-all whose place workloads.traded takes, with a backward."""
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
            with RIVALS["upipe"].on(model, dataclasses.replace(budget(shape), ranks=2)) as installed, installed.around():
                part, places = (x.chunk(2, 1)[rank] for x in (ids, positions))
                with Counted(op_policy.ATTENTION) as counted:
                    model(input_ids=part, position_ids=places, use_cache=False).logits.square().mean().backward()
            for p in model.parameters():
                dist.all_reduce(p.grad)
            assert counted.calls == 2 * shape.layers * groups
            return max(distance({name: p.grad / 2 for name, p in model.named_parameters()}, want).values())

        with changed(workloads, "traded", over_ranks):
            assert far() <= FP32
        assert far() > 100 * FP32  # the negative control: heads stay where they are


@pytest.mark.parametrize("name", ["async_offload", "alst, async", "upipe", "trl"])
def test_an_input_that_comes_back_wrong_shows(name, stock, monkeypatch):
    """The negative control: what comes back has another sign."""
    shape, trainer, _, want = stock("llama8b")
    load = input_offload.Inputs._load
    monkeypatch.setattr(
        input_offload.Inputs, "_load", lambda inputs, number: load(inputs, number) or inputs._on_device[number].tensor.neg_()
    )
    with RIVALS[name].on(trainer.model, budget(shape)) as installed:
        _, got = trainer.gradients(installed)
    assert max(distance(got, want).values()) > 100 * FP32


def test_the_papers_memo_stores_sixteen_units_of_a_gpt_layer(stock, monkeypatch):
    """MEMO, section 2: input 1, ln1 1, q k v 3, attention 1, second norm's input 1, ln2 1, fc1 4, gelu 4; and the log-sum-exp."""
    monkeypatch.setattr(paper_memo, "SMALL", 1024)  # the tiny model's log-sum-exp is smaller than what stays by default
    shape, trainer, _, _ = stock("gpt7b")
    rows, size = shape.lengths[0], shape.size
    unit = rows * size.hidden * 4
    stored = {}
    for alpha in (0.0, 1.0):
        with dataclasses.replace(RIVALS["paper"], settings={"alpha": alpha}).on(trainer.model, budget(shape)) as installed:
            trainer.gradients(installed)
            stored[alpha] = installed.report()["bytes_to_host"] / (shape.layers - 2)
    logsumexp = rows * size.heads * 4
    assert stored[1.0] == 16 * unit + logsumexp
    assert stored[0.0] == 2 * unit + logsumexp


def test_a_replay_that_is_wrong_shows(stock, monkeypatch):
    """The negative control: rows of the layer input that the replay starts from are shifted by one."""
    shape, trainer, _, want = stock("gpt7b")
    back = paper_memo.Rows.back
    monkeypatch.setattr(paper_memo.Rows, "back", lambda rows, tensor: back(rows, tensor.roll(1, 0)))
    with dataclasses.replace(RIVALS["paper"], settings={"alpha": 0.3}).on(trainer.model, budget(shape)) as installed:
        _, got = trainer.gradients(installed)
    assert max(distance(got, want).values()) > 100 * FP32


def test_the_paper_solves_its_own_alpha(stock):
    shape, trainer, _, _ = stock("gpt7b")

    def alpha(**measured):
        with RIVALS["paper"].on(trainer.model, dataclasses.replace(budget(shape), **measured)) as installed:
            trainer.gradients(installed)
            return installed.report()["alpha"]

    assert alpha(bandwidth=1e12) == 1.0
    assert alpha(bandwidth=1.0) == 0.0
    assert 0 < alpha(bandwidth=5e7) < 1  # 16 units of 6 KiB in a millisecond would take twice that


def test_attention_is_where_the_ranks_heads_meet():
    x = torch.randn(1, 16, 6, 4)
    there = workloads.heads_to_ranks(x, 8)
    assert there.shape == (1, 2, 48, 4)
    assert torch.equal(workloads.ranks_to_heads(there, 8), x.transpose(1, 2))


def test_the_papers_memo_with_planned_addresses():
    """Planned after two steps alike, then followed; the gradients stay stock's. At 512 tokens: small requests are not planned."""
    shape = dataclasses.replace(workloads.shapes(CPU)["gpt7b"], layers=4)
    trainer = Trainer(workloads.build(shape, CPU), workloads.batch(shape, 512, CPU))
    loss, want = trainer.gradients(Installed())
    rival = RIVALS["paper, planned"]
    with rival.on(trainer.model, budget(shape)) as installed:
        for _ in range(rival.warm_up):
            trainer.step(installed)
        before = installed.report()["plan"]
        got_loss, got = trainer.gradients(installed)
        plan = installed.report()["plan"]
    assert before["plans"] == 1 and 0 < before["lower_bound"] <= before["peak"] <= plan["arena"]
    assert plan["hits"] - before["hits"] > 10 * len(trainer.model.gpt_neox.layers)
    assert torch.equal(got_loss, loss) and max(distance(got, want).values()) <= FP32
