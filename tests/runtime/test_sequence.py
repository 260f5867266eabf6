"""Ranks of a DeviceMesh share sequences, without an engine: gradients that FSDP2 and DDP make are those of whole sequences."""

from __future__ import annotations

import functools
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator, FullyShardedDataParallelPlugin, ParallelismConfig
from accelerate.state import PartialState
from accelerate.utils import DistributedType
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.parallel import DistributedDataParallel
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

import ds_memo
from ds_memo.hf import sequence_probe
from ds_memo.runtime.sequence import SharedSequences, decoders
from tests import architectures
from tests.deepspeed.matrix import mean_loss
from tests.distributed_harness.common import DistributedTest
from tests.models import VOCAB, Different, assert_same_grads, build

LENGTH, TOLERANCE = 24, 1e-5
ALPHA = {"alpha": 0.5, "resident_layers": 1, "plan": {"enabled": False}}
TILES = {**ALPHA, "tile_tokens": 4}
GROUPS = {"alpha": 0.0, "resident_layers": 0, "tile_tokens": 4, "input_every": 4, "plan": {"enabled": False}}
SOLVED = {"host_memory_gib": 1.0, "device_memory_gib": 1.0}
MODELS = {
    "hybrid": lambda: architectures.build("falcon_h1").train(),  # attention beside a scan and a convolution
    **{name: functools.partial(build, name) for name in ("llama", "gemma2", "mistral", "qwen3_moe")},
}
PACKED = (7, 12, 5)
"""Tokens of the documents of each sequence."""


def batch(seed: int, packed: bool = False) -> dict[str, torch.Tensor]:
    """Return a sequence. Labels that count: 5 in its first half and 12 in the second, or one less."""
    tokens = torch.randint(3, VOCAB, (1, LENGTH + 1), generator=torch.Generator().manual_seed(seed))
    labels = tokens[:, 1:].clone()
    labels[:, 2 : 9 + seed % 2] = -100
    positions = torch.cat([torch.arange(n) for n in PACKED]) if packed else torch.arange(LENGTH)
    return {"input_ids": tokens[:, :-1], "position_ids": positions[None], "labels": labels}


def logits_of(model: nn.Module, given: dict[str, torch.Tensor]) -> torch.Tensor:
    return model(input_ids=given["input_ids"], position_ids=given["position_ids"], use_cache=False).logits


def whole_gradients(name: str, sequences: list[dict[str, torch.Tensor]]) -> tuple[float, dict[str, Any]]:
    """Return the mean loss of whole sequences and its gradients, by one process."""
    model = make(name)
    loss = torch.stack([mean_loss(logits_of(model, one), one["labels"]) for one in sequences]).mean()
    loss.backward()
    return loss.item(), gradients(model)


def make(name: str) -> nn.Module:
    torch.manual_seed(0)
    return MODELS[name]()


def gradients(model: nn.Module) -> dict[str, Any]:
    """Return the gradients, whole, and clear them. A rank may have none of an expert that FSDP2 does not have."""
    found = {}
    for name, parameter in model.named_parameters():
        gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        found[name] = (gradient.full_tensor() if isinstance(gradient, DTensor) else gradient).clone()
    model.zero_grad()
    return found


def mesh_of(*sizes: int, names: tuple[str, ...] = ("dp", "sp")) -> DeviceMesh:
    return init_device_mesh("cpu", sizes, mesh_dim_names=names)


def sharded(model: nn.Module, mesh: DeviceMesh | None = None) -> nn.Module:
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def compare(
    name: str, mesh: DeviceMesh, of_sequence: DeviceMesh, memo: dict[str, Any] | None, packed: bool = False, shards: Any = None
) -> dict[str, Any] | None:
    """Train a model, and compare its gradients in each of three steps.

    Args:
        shards: the mesh that fully_shard gets; None: all ranks.
    """
    groups = dist.get_world_size() // of_sequence.size()
    of_data = [name for name in mesh.mesh_dim_names if name.startswith("dp")]
    group = mesh[of_data[0]].get_local_rank() if of_data else 0
    model = make(name)
    shared = ds_memo.share_sequences(model, of_sequence)
    sharded(model, shards)
    handle = None if memo is None else ds_memo.attach(model, memo)
    for step in range(3):
        sequences = [batch(10 * step + number, packed) for number in range(groups)]
        want = whole_gradients(name, sequences)
        part = shared.part(sequences[group])
        loss = shared.mean_loss(mean_loss(logits_of(model, part), part["labels"]), part["labels"])
        loss.backward()
        assert_same_grads(gradients(model), want[1], TOLERANCE)
    report = None if handle is None else handle.report()
    if handle is not None:
        handle.detach()
    return report


@pytest.mark.processes
class TestFourRanks(DistributedTest):
    world_size = 4

    def test_gradients_are_those_of_whole_sequences(self) -> None:
        warnings.simplefilter("ignore")
        mesh = mesh_of(2, 2)
        compare("llama", mesh, mesh["sp"], None)
        for name in ("llama", "gemma2", "qwen3_moe"):  # attention alike; windows, soft caps; experts, a head size of its own
            report = compare(name, mesh, mesh["sp"], ALPHA)
            assert report["bytes_to_host"] > 0 and report["attention_recomputed"] == 0, name
        for name in ("qwen3_moe", "hybrid"):
            assert compare(name, mesh, mesh["sp"], TILES)["tiles"]["layers"], name
        assert compare("llama", mesh, mesh["sp"], GROUPS)["layers_without_input"]
        assert compare("llama", mesh, mesh["sp"], SOLVED)["resident_layers"]
        compare("llama", mesh, mesh["sp"], ALPHA, packed=True)
        compare("llama", mesh, mesh["sp"], None, shards=mesh)  # copies over dp, pieces over sp

    def test_rings_and_meshes_of_other_orders(self) -> None:
        warnings.simplefilter("ignore")
        rings = mesh_of(2, 2, names=("ring", "ulysses"))
        assert compare("gemma2", rings, rings, TILES)["tiles"]["layers"]
        outside = mesh_of(2, 2, names=("sp", "dp"))  # ranks 0 and 2 share a sequence, 1 and 3
        compare("mistral", outside, outside["sp"], ALPHA)

    @pytest.mark.parametrize("with_mesh", [True, False])
    def test_accelerate_shards_and_loads(self, with_mesh: bool, monkeypatch: pytest.MonkeyPatch) -> None:
        """Its own mesh, whose ranks of a sequence read one batch; or none, and each rank reads its own."""
        warnings.simplefilter("ignore")
        on_cpus = lambda *given, **more: ("gloo", DistributedType.MULTI_GPU)  # noqa: E731  # it shards on accelerators alone
        monkeypatch.setattr(PartialState, "_prepare_backend", on_cpus)
        monkeypatch.setattr(PartialState, "set_device", lambda self: setattr(self, "device", torch.device("cpu")))
        wrap = {"auto_wrap_policy": "transformer_based_wrap", "transformer_cls_names_to_wrap": ["LlamaDecoderLayer"]}
        sizes = ParallelismConfig(dp_shard_size=2, cp_size=2) if with_mesh else None
        plugin = FullyShardedDataParallelPlugin(fsdp_version=2, **wrap)
        accelerator = Accelerator(fsdp_plugin=plugin, parallelism_config=sizes)
        model = build("llama")
        shared = ds_memo.share_sequences(model, accelerator.torch_device_mesh["cp"] if with_mesh else mesh_of(2, 2)["sp"])
        data = [{name: value[0] for name, value in batch(number).items()} for number in range(8)]
        given = model, torch.optim.SGD(model.parameters(), lr=0.0), torch.utils.data.DataLoader(data)
        model, _, loader = accelerator.prepare(*given)
        handle = ds_memo.attach(model, ALPHA)
        parts = map(shared.part, loader) if with_mesh else shared.split(loader, torch.device("cpu"))
        order = [(0, 1), (2, 3), (4, 5), (6, 7)] if with_mesh else [(0, 2), (1, 3), (4, 6), (5, 7)]
        for numbers, part in zip(order, parts, strict=True):
            accelerator.backward(shared.mean_loss(mean_loss(logits_of(model, part), part["labels"]), part["labels"]))
            assert_same_grads(gradients(model), whole_gradients("llama", [batch(n) for n in numbers])[1], TOLERANCE)
        handle.detach()

    def test_where_weights_are_made_last(self) -> None:
        """As torchtitan's loops do: on meta, then in parts, sharded, and given memory and values."""
        mesh = mesh_of(2, 2)
        with torch.device("meta"):
            model = build("llama")
        shared = ds_memo.share_sequences(model, mesh["sp"])
        sharded(model)
        model.to_empty(device="cpu")
        values = build("llama")
        for name, buffer in values.named_buffers():
            model.get_buffer(name).copy_(buffer)
        for parameter, value in zip(model.parameters(), values.parameters(), strict=True):
            parameter.data.copy_(distribute_tensor(value.data, parameter.device_mesh, parameter.placements))
        train_by_split(model, shared, mesh)

    def test_loops_of_other_kinds(self) -> None:
        """Ranks that read batches of their own; Accelerate's DDP; gradients that the loop averages; sums in place of means."""
        mesh = mesh_of(2, 2)
        model = build("llama")
        shared = ds_memo.share_sequences(model, mesh["sp"])
        prepared = Accelerator(cpu=True).prepare(model)
        assert isinstance(prepared, DistributedDataParallel)
        train_by_split(prepared, shared, mesh)

        model = build("llama")
        shared = ds_memo.share_sequences(model, mesh["sp"].get_group(), averaged_over=dist.group.WORLD)
        train_by_split(model, shared, mesh, average=True)

        model = sharded(build("llama"))
        shared = ds_memo.share_sequences(model, mesh["sp"])
        for unit in model.modules():
            if hasattr(unit, "set_gradient_divide_factor"):
                unit.set_gradient_divide_factor(1.0)
                unit.set_force_sum_reduction_for_comms(True)  # gloo knows no other
        train_by_split(model, shared, mesh)

    def test_what_is_wrong_is_noticed(self, monkeypatch: pytest.MonkeyPatch) -> None:
        mesh = mesh_of(2, 2)
        with monkeypatch.context() as patch:
            patch.setattr(SharedSequences, "_scale", lambda self: 1.0)
            with pytest.raises(Different):
                compare("llama", mesh, mesh["sp"], None)
        monkeypatch.setattr(SharedSequences, "mean_loss", lambda self, loss, labels: loss)  # each part counts as much
        with pytest.raises(Different):
            compare("llama", mesh, mesh["sp"], None)

    def test_gradients_that_are_not_added_up_are_refused(self) -> None:
        mesh = mesh_of(2, 2)
        with pytest.raises(
            ds_memo.MemoError, match=r"averaged over the ranks \[0, 2\] alone|averaged over the ranks \[1, 3\] alone"
        ):
            compare("llama", mesh, mesh["sp"], None, shards=mesh["dp"])
        model = build("llama")
        shared = ds_memo.share_sequences(model, mesh["sp"])
        part = shared.part(batch(mesh["dp"].get_local_rank()))
        loss = mean_loss(logits_of(model, part), part["labels"])
        with pytest.raises(ds_memo.MemoError, match="neither fully_shard nor DistributedDataParallel has the model"):
            shared.mean_loss(loss, part["labels"])
        for layer in model.model.layers:
            fully_shard(layer)
        with pytest.raises(ds_memo.MemoError, match=r"FSDP2 does not have model.embed_tokens.weight"):
            shared.mean_loss(loss, part["labels"])
        fully_shard(model).model.layers[0].set_gradient_divide_factor(2.0)
        with pytest.raises(ds_memo.MemoError, match="a loss has one factor"):
            shared.mean_loss(loss, part["labels"])


def train_by_split(model: nn.Module, shared: SharedSequences, mesh: DeviceMesh, average: bool = False) -> None:
    """Compare gradients of batches that each rank reads for itself, and which the ranks of a group take in turn."""
    sp, dp = (mesh[name].get_local_rank() for name in ("sp", "dp"))
    own = [batch(4 * number + 2 * dp + sp) for number in range(2)]
    parts = list(shared.split(own, torch.device("cpu")))
    assert len(parts) == 4 and parts[0]["labels"].shape == (1, LENGTH // 2)
    for turn, part in enumerate(parts):
        number, rank = divmod(turn, 2)
        want, grads = whole_gradients("llama", [batch(4 * number + 2 * group + rank) for group in range(2)])
        loss = shared.mean_loss(mean_loss(logits_of(model, part), part["labels"]), part["labels"])
        loss.backward()
        seen = loss.detach().clone()
        dist.all_reduce(seen)
        assert seen.item() / 4 == pytest.approx(want, rel=1e-6)
        found = gradients(model)
        for gradient in found.values() if average else ():
            dist.all_reduce(gradient)
            gradient /= dist.get_world_size()
        assert_same_grads({name.removeprefix("module."): one for name, one in found.items()}, grads, TOLERANCE)


class Conv(nn.Module):
    """A causal convolution over tokens that nothing catches."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(64, 1, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.conv1d(nn.functional.pad(x.transpose(1, 2), (3, 0)), self.weight, groups=64).transpose(1, 2)


class Wrapper(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.inner = model

    def forward(self, **given: Any) -> Any:
        return self.inner(**given)


@pytest.mark.processes
class TestTwoRanks(DistributedTest):
    world_size = 2

    def test_all_ranks_share_a_sequence(self) -> None:
        warnings.simplefilter("ignore")
        mesh = mesh_of(2, names=("sp",))
        for memo in (None, ALPHA, TILES):
            compare("llama", mesh, mesh["sp"], memo)

    def test_a_model_that_mixes_tokens_elsewhere_is_refused_at_its_first_forward(self) -> None:
        mesh = mesh_of(2, names=("sp",))
        model = build("llama")
        model.model.layers[1].mlp = Conv()
        shared = ds_memo.share_sequences(model, mesh["sp"])
        handle = ds_memo.attach(sharded(model), TILES)
        part = shared.part(batch(0))
        for _ in range(2):  # again, too
            with pytest.raises(ds_memo.MemoError, match=r"model\.layers\.1\.mlp \(Conv\) computes token"):
                logits_of(model, part)
        handle.detach()

    def test_the_first_forward_alone_is_tried(self, monkeypatch: pytest.MonkeyPatch) -> None:
        mesh, tried = mesh_of(2, names=("sp",)), []
        stock = sequence_probe.refuse_inexact
        monkeypatch.setattr(
            sequence_probe, "refuse_inexact", lambda *given, **more: (tried.append(given[0]), stock(*given, **more))
        )
        model, other = build("llama"), build("llama")
        shared = ds_memo.share_sequences(model, mesh["sp"])
        sharded(model)
        part = shared.part(batch(0))
        logits_of(other, batch(0))
        assert not tried
        for _ in range(2):
            logits_of(model, part)
            assert tried == [model]

    def test_models_that_are_wrapped_or_have_adapters_or_compiled_layers(self) -> None:
        warnings.simplefilter("ignore")
        mesh, one = mesh_of(2, names=("sp",)), batch(0)

        def adapted(name: str) -> nn.Module:
            model = build("llama")
            torch.manual_seed(1)
            how = LoraConfig(target_modules=["q_proj", "down_proj"], init_lora_weights=False)
            return get_peft_model(model, how) if name == "adapters" else model

        for name in ("adapters", "wrapped", "compiled"):
            whole, model = adapted(name), adapted(name)
            mean_loss(logits_of(whole, one), one["labels"]).backward()
            want = gradients(whole)
            shared = ds_memo.share_sequences(model, mesh["sp"])
            layers = [module for module in model.modules() if isinstance(module, LlamaDecoderLayer)]
            for layer in layers:
                fully_shard(layer)
            root = fully_shard(Wrapper(model) if name == "wrapped" else model)
            handle = ds_memo.attach(model, ALPHA)
            for layer in layers if name == "compiled" else ():
                layer.compile(backend="eager")
            part = shared.part(one)
            for _ in range(3):
                shared.mean_loss(mean_loss(logits_of(root, part), part["labels"]), part["labels"]).backward()
                assert_same_grads(gradients(model), want, TOLERANCE)
            handle.detach()

    def test_calls_that_do_not_fit_are_refused(self) -> None:
        mesh = mesh_of(1, 2)
        model = build("llama")
        with pytest.raises(ds_memo.MemoConfigError, match="ulysses_size: got 3; allowed: a number that divides the 2 ranks"):
            ds_memo.share_sequences(model, mesh["sp"], ulysses_size=3)
        with pytest.raises(ds_memo.MemoConfigError, match="ulysses_size: got 1; allowed: 2, as the mesh has it"):
            ds_memo.share_sequences(model, mesh, ulysses_size=1)
        with pytest.raises(ds_memo.MemoConfigError, match="mesh: got 2; allowed: a DeviceMesh"):
            ds_memo.share_sequences(model, 2)
        handle = ds_memo.attach(model, ALPHA)
        with pytest.raises(ds_memo.MemoError, match="already attached"):
            ds_memo.share_sequences(model, mesh["sp"])
        handle.detach()
        shared = ds_memo.share_sequences(model, mesh["sp"])
        with pytest.raises(ds_memo.MemoError, match="call share_sequences once"):
            ds_memo.share_sequences(model, mesh["sp"])
        with pytest.raises(ds_memo.MemoError, match="read batches of their own"):
            shared.part(batch(dist.get_rank()))
        for wrong, seen in ((None, "got None"), ({"input_ids": torch.zeros(1, 8)}, "got labels of NoneType")):
            with pytest.raises(ds_memo.MemoError, match=f"{seen}; expected a dict with the tensors"):
                shared.part(wrong)

    def test_the_model_inside_ddp_is_taken(self) -> None:
        model = DistributedDataParallel(build("llama"))
        shared = ds_memo.share_sequences(model, mesh_of(1, 2)["sp"])
        part = shared.part(batch(0))
        logits = logits_of(model, part)
        with pytest.raises(ds_memo.MemoError, match="expected a scalar"):
            shared.mean_loss(logits[0, :, 0], part["labels"])
        shared.mean_loss(mean_loss(logits, part["labels"]), part["labels"]).backward()
        assert_same_grads(gradients(model.module), whole_gradients("llama", [batch(0)])[1], TOLERANCE)

    def test_one_rank_to_a_sequence_is_a_plain_loop(self) -> None:
        mesh = mesh_of(2, 1)
        model = build("llama")
        shared = ds_memo.share_sequences(model, mesh["sp"])
        assert model not in decoders
        sharded(model)
        part = shared.part(batch(dist.get_rank()))
        shared.mean_loss(mean_loss(logits_of(model, part), part["labels"]), part["labels"]).backward()
        assert_same_grads(gradients(model), whole_gradients("llama", [batch(0), batch(1)])[1], TOLERANCE)
