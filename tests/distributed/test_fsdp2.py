"""Models whose parameters FSDP2 (``fully_shard``) gathers and frees: losses, gradients and weights are those without memo."""

from __future__ import annotations

import gc
import itertools
import shutil
import tempfile
import warnings
import weakref
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.distributed import checkpoint
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor import DTensor, distribute_tensor

import ds_memo
from ds_memo.remat import gathered_params
from ds_memo.runtime.attach import attached
from tests.distributed_harness.common import DistributedTest
from tests.models import build

LAYERS, LENGTH = 4, 160
GIVEN = {"alpha": 0.5, "resident_layers": 1, "plan": {"enabled": False}}
SOLVED = {"host_memory_gib": 1.0, "device_memory_gib": 1.0}
TIGHT = {"host_memory_gib": 1.0, "device_memory_gib": 0.0015}
IN_TILES = {**GIVEN, "tile_tokens": 64}
GROUPS = {"alpha": 0.0, "resident_layers": 0, "tile_tokens": 64, "input_every": 4, "plan": {"enabled": False}}
LAZY = {**GIVEN, "device_memory_gib": 0.25}
LARGE = {"vocab_size": 4096, "length": 600}


def own_loss(outputs: Any, ids: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(outputs.logits[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten())


def divided_loss(outputs: Any, ids: torch.Tensor) -> torch.Tensor:
    outputs.logits.div_(0.7)
    return own_loss(outputs, ids)


Case = tuple[dict[str, Any], dict[str, Any]]
CASES: dict[str, Case] = {
    "given": (GIVEN, {}),
    "solved": (SOLVED, {}),
    "little memory": (TIGHT, {}),
    "tiles": (IN_TILES, {}),
    "groups of layers": (GROUPS, {}),
    "compiled": (GIVEN, {"compile": True}),
    "lazy": (LAZY, LARGE),
    "lazy, a head of its own": (LAZY, {**LARGE, "head": True}),
    "lazy, the loop's loss": (LAZY, {**LARGE, "head": True, "loss": own_loss}),
}
LAZY_CASES: dict[str, Case] = {
    "the root kept": (LAZY, {**LARGE, "root": {"reshard_after_forward": False}}),
    "bf16": (LAZY, {**LARGE, "head": True, "bf16": True}),
    "divided in place": (LAZY, {**LARGE, "head": True, "loss": divided_loss}),
    "offloaded": (LAZY, {**LARGE, "offload": True, "loss": own_loss}),
    "two micro-batches": (LAZY, {**LARGE, "head": True, "micro_batches": 2}),
    "a tied head": (LAZY, {**LARGE, "tie_word_embeddings": True}),
    "in Accelerate's units": (LAZY, {**LARGE, "tail": True, "loss": own_loss}),
    "DDP": (LAZY, {**LARGE, "ddp": True}),
    "in tiles": ({**IN_TILES, "device_memory_gib": 0.25}, LARGE),
    "solved": ({**SOLVED, "device_memory_gib": 0.25}, LARGE),
}
SETTINGS = {"given": GIVEN, "the default": {}, "solved": SOLVED, "tiles": IN_TILES}
WAYS: dict[str, dict[str, Any]] = {
    "plain": {},
    "bf16": {"bf16": True},
    "not freed behind a forward": {"reshard": False},
    "offloaded": {"offload": True},
    "the root alone": {"root_only": True},
    "attached before": {"before": True},
    "three micro-batches": {"micro_batches": 3},
    "clipped": {"clip": 0.1},
    "LoRA": {"lora": True},
    "begun on meta": {"meta": True},
    "evaluated between steps": {"evaluate": True},
    "saved and loaded": {"checkpoint": True},
    "HSDP": {"hsdp": True},
    "Qwen3-MoE": {"model": "qwen3_moe"},
    "prefetched": {"prefetch": True},
    "frozen between steps": {"freeze": True, "before": True},
    "Transformers' checkpointing": {"checkpointing": True},
    "DDP": {"ddp": True},
    "DDP, three micro-batches": {"ddp": True, "micro_batches": 3},
}
TILED = 2e-5
"""Tiles and split rows sum in another order."""
ROUNDED = 2e-3
"""Half a unit of bf16's last place: whole logits round sums that tiles of logits keep in float32."""


def made(how: dict[str, Any]) -> nn.Module:
    torch.manual_seed(0)
    more = {name: how[name] for name in ("vocab_size", "tie_word_embeddings") if name in how}
    model = build(how.get("model", "llama"), num_hidden_layers=LAYERS, **more)
    if how.get("lora"):
        model = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "v_proj", "up_proj"], init_lora_weights=False))
    return model.train()


def sharded(model: nn.Module, how: dict[str, Any]) -> nn.Module:
    if how.get("ddp"):
        return nn.parallel.DistributedDataParallel(model)
    size, inner = dist.get_world_size(), model.base_model.model if how.get("lora") else model
    mesh = init_device_mesh("cpu", (size, 1), mesh_dim_names=("a", "b")) if how.get("hsdp") else init_device_mesh("cpu", (size,))
    dtype = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if how.get("bf16") else MixedPrecisionPolicy()
    more: dict[str, Any] = {"mesh": mesh, "mp_policy": dtype, "reshard_after_forward": how.get("reshard", True)}
    if how.get("offload"):
        more["offload_policy"] = CPUOffloadPolicy(pin_memory=False)
    layers = [] if how.get("root_only") else list(inner.model.layers)
    for layer in layers:
        fully_shard(layer, **more)
        if how.get("compile"):
            layer.compile(backend="aot_eager")
    if how.get("head"):
        fully_shard(inner.lm_head, **more)
    if how.get("tail"):
        fully_shard(inner.model.embed_tokens, **more)
        fully_shard([inner.model.norm, inner.lm_head], **more | {"reshard_after_forward": False})
    if how.get("prefetch"):
        for layer, following in itertools.pairwise(layers):
            layer.set_modules_to_forward_prefetch([following])
            following.set_modules_to_backward_prefetch([layer])
    return fully_shard(model, **more | how.get("root", {}))


def begun_on_meta(how: dict[str, Any], like: nn.Module) -> nn.Module:
    with torch.device("meta"):
        model = made(how)
    model = sharded(model, how).to_empty(device="cpu")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(distribute_tensor(like.get_parameter(name), parameter.device_mesh, parameter.placements))
        for name, buffer in model.named_buffers():
            buffer.copy_(like.get_buffer(name))
    return model


def save_and_load(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(folder)
    with torch.no_grad():
        checkpoint.save(dict(zip("mo", get_state_dict(model, optimizer), strict=True)), checkpoint_id=folder[0])
        for parameter in model.parameters():
            parameter.to_local().zero_()
        state = dict(zip("mo", get_state_dict(model, optimizer), strict=True))
        checkpoint.load(state, checkpoint_id=folder[0])
        set_state_dict(model, optimizer, model_state_dict=state["m"], optim_state_dict=state["o"])
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(folder[0])


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor.detach().clone()


def train(memo: dict[str, Any] | None, how: dict[str, Any]) -> tuple[list[float], dict[str, torch.Tensor], Any]:
    """Return losses, first gradients and last weights of three steps, and the report."""
    model, handle = made(how), None
    if how.get("checkpointing"):
        model.gradient_checkpointing_enable({"use_reentrant": False})
    if memo is not None and how.get("before"):
        handle = ds_memo.attach(model, memo)
    run = begun_on_meta(how, model) if how.get("meta") else sharded(model, how)
    model = run.module if how.get("ddp") else run
    if memo is not None and handle is None:
        handle = ds_memo.attach(model, memo)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3, foreach=False)
    generator = torch.Generator().manual_seed(dist.get_rank())
    losses, tensors = [], {}
    for number in range(3 * (batches := how.get("micro_batches", 1))):
        last = number % batches == batches - 1
        if not how.get("ddp"):
            model.set_requires_gradient_sync(last)
        ids = torch.randint(how.get("vocab_size", 96), (1, how.get("length", LENGTH)), generator=generator)
        with nullcontext() if last or not how.get("ddp") else run.no_sync():
            outputs = run(input_ids=ids, labels=None if "loss" in how else ids, use_cache=False)
            loss = how["loss"](outputs, ids) if "loss" in how else outputs.loss
            loss.backward()
        losses.append(float(loss.detach()))
        if last:
            if how.get("clip"):
                losses.append(float(whole(nn.utils.clip_grad_norm_(model.parameters(), how["clip"]))))
            if not tensors:
                tensors = {f"grad {n}": whole(p.grad) for n, p in model.named_parameters() if p.grad is not None}
            optimizer.step()  # while `outputs` is alive
            optimizer.zero_grad()
        if dist.get_rank() == 0 and not how.get("bf16"):  # alone; in bf16 the largest of 4096 are often equal
            losses.append(float(outputs.logits.detach().argmax(-1).double().mean()))
        if how.get("evaluate"):
            model.eval()
            with torch.no_grad():
                losses.append(float(run(input_ids=ids, labels=ids).loss))
            model.train()
        if how.get("checkpoint"):
            save_and_load(model, optimizer)
        if how.get("freeze"):
            for name, parameter in model.named_parameters():
                parameter.requires_grad_("q_proj" not in name)
    report = None if handle is None else handle.report()
    if handle is not None:
        handle.detach()
    return losses, tensors | {name: whole(weight) for name, weight in model.named_parameters()}, report


def compare(case: Case, exact: bool) -> Any:
    memo, how = case
    want, got = train(None, how), train(memo, how)
    tolerance = 0.0 if exact else ROUNDED if how.get("bf16") else TILED
    assert got[0] == pytest.approx(want[0], rel=tolerance or 1e-12), how
    assert got[1].keys() == want[1].keys()
    for name, of_stock in want[1].items():
        apart = float((got[1][name] - of_stock).norm() / of_stock.norm())
        assert apart <= 10 * tolerance, (how, name, apart)  # Adam divides by gradients that are next to nothing
    return got[2]


@pytest.mark.processes
class TestTwoRanks(DistributedTest):
    world_size = 2

    def test_every_case(self) -> None:
        warnings.simplefilter("ignore")
        reports = {name: compare(case, exact=name in ("given", "solved", "compiled")) for name, case in CASES.items()}
        assert reports["little memory"]["bytes_to_host"] or reports["little memory"]["gemm_flops_recomputed_fraction"]
        assert reports["tiles"]["tiles"]["layers"] and reports["groups of layers"]["layers_without_input"]
        assert reports["compiled"]["warnings"] == []
        for name in [name for name in CASES if name.startswith("lazy")]:
            assert reports[name]["logits"]["lazy_calls"], name

    @pytest.mark.slow
    @pytest.mark.parametrize("name", LAZY_CASES)
    def test_lazy_logits(self, name: str) -> None:
        warnings.simplefilter("ignore")
        assert compare(LAZY_CASES[name], exact=False)["logits"]["lazy_calls"]

    @pytest.mark.slow
    @pytest.mark.parametrize("setting", SETTINGS)
    def test_every_way_to_shard(self, setting: str) -> None:
        warnings.simplefilter("ignore")
        for how in WAYS.values():
            compare((SETTINGS[setting], how), exact=setting != "tiles")

    def test_where_fsdp2_cannot_be_told_of_logits_they_are_whole(self, monkeypatch: pytest.MonkeyPatch) -> None:
        warnings.simplefilter("ignore")
        monkeypatch.setattr("ds_memo.remat.gathered_params.gathered_together", lambda state: [object()])
        assert compare(CASES["lazy, a head of its own"], exact=False)["logits"]["lazy_calls"] == 0

    def test_without_a_copy_before_weights_are_freed(self, monkeypatch: pytest.MonkeyPatch) -> None:
        warnings.simplefilter("ignore")
        monkeypatch.setattr(gathered_params, "_told_first", lambda act, free: free())
        with pytest.raises(ds_memo.MemoError, match="freed"):
            compare(CASES["lazy, a head of its own"], exact=False)

    def test_a_model_that_is_dropped_is_freed(self) -> None:
        model = sharded(made(LARGE), {"head": True})
        ds_memo.attach(model, LAZY)
        ids = torch.randint(4096, (1, 600))
        for _ in range(2):
            model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        dropped = weakref.ref(model)
        del model
        gc.collect()
        assert dropped() is None and attached() == []

    def test_a_rank_that_solves_hears_of_one_that_does_not(self) -> None:
        model = sharded(made({}), {})
        if dist.get_rank() == 0:
            with pytest.raises(ds_memo.MemoError, match=r"memo.alpha.*0.5"):
                ds_memo.attach(model, SOLVED)
            assert attached() == []
        else:
            ds_memo.attach(model, {**SOLVED, **GIVEN})

    def test_fsdp1_is_refused(self) -> None:
        for original, before, by_layer in itertools.product([False, True], repeat=3):
            model = made(LARGE)
            if before:
                ds_memo.attach(model, GIVEN)
            policy = ModuleWrapPolicy({type(model.model.layers[0])}) if by_layer else None
            how = {"auto_wrap_policy": policy, "device_id": torch.device("cpu"), "use_orig_params": original}
            flat = FullyShardedDataParallel(model, **how)
            with pytest.raises(ds_memo.MemoError, match=r"FSDP1.* fsdp_version: 2"):
                flat(input_ids=torch.zeros(1, 8, dtype=torch.long)) if before else ds_memo.attach(flat, GIVEN)

    def test_detach_gives_fsdp2_its_methods_back(self) -> None:
        model = sharded(made(LARGE), {"head": True})
        group = model.lm_head._get_fsdp_state()._fsdp_param_group
        names, handle = {"_to_sharded", "_to_sharded_post_forward"}, ds_memo.attach(model, LAZY)
        ids = torch.randint(4096, (1, 600))
        for _ in range(2):
            model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        assert names <= set(vars(group)) and group._to_sharded.args[1].__self__ is group  # told once
        handle.detach()
        assert names.isdisjoint(vars(group))

    def test_a_probe_that_leaves_units_gathered_is_seen(self, monkeypatch: pytest.MonkeyPatch) -> None:
        warnings.simplefilter("ignore")
        monkeypatch.setattr("ds_memo.profile.caught_call.reshard", lambda model: None)
        monkeypatch.setattr(gathered_params, "units", lambda module: [])
        with pytest.raises(Exception, match=r"mixed torch\.Tensor and DTensor|size|shape|freed|storage"):
            compare(CASES["solved"], exact=True)


def test_a_model_without_memory_is_refused() -> None:
    with torch.device("meta"):
        model = nn.TransformerEncoderLayer(16, 2)
    with pytest.raises(ds_memo.MemoError, match=r"on the meta device.* Attach it once"):
        ds_memo.attach(nn.Sequential(model), GIVEN, layers=["0"])
