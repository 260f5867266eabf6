"""ds_memo.initialize: deepspeed.initialize with the "memo" section obeyed."""

from __future__ import annotations

import base64
import functools
import inspect
import os
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from difflib import get_close_matches
from typing import Any

import deepspeed
import hjson
import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.pipe.engine import PipelineEngine
from deepspeed.runtime.pipe.module import PipelineModule
from torch import nn

from ds_memo.config import SECTION, MemoConfig, memo_config
from ds_memo.deepspeed import checkpoint_api, sequence
from ds_memo.deepspeed.engine_hooks import hook_engine, weakly
from ds_memo.deepspeed.first_compile import announce_first_compile
from ds_memo.deepspeed.gather_again import gathers_again
from ds_memo.deepspeed.rebind import Taken, other_holders, replace_in_modules, restore
from ds_memo.deepspeed.run_ahead_limit import limit_run_ahead
from ds_memo.deepspeed.whole_layers import WholeLayers, forget_order, mark_around_leaf_modules
from ds_memo.distributed.lost_ranks import naming_lost_ranks
from ds_memo.distributed.store import groups_wait_no_longer
from ds_memo.errors import MemoError, MemoWarning
from ds_memo.hf import kernels
from ds_memo.hf.find_layers import find_layers
from ds_memo.memory.device import join_split_blocks, keep_blocks_whole
from ds_memo.nvme.open_files import shares_drives_with
from ds_memo.runtime import launched_by
from ds_memo.runtime.attach import attach_model, check_residents, refuse_attached, take_from_engine
from ds_memo.runtime.conflicts import refuse_config, refuse_model
from ds_memo.runtime.handle import MemoHandle
from ds_memo.runtime.ranks_alike import compare, heard_by_others, shared_by_ranks
from ds_memo.runtime.say import say, tell_what_moved
from ds_memo.runtime.session import EngineTies, Session

NO_SECTION = (
    f'this engine runs without memo: its DeepSpeed configuration has no "{SECTION}" section. Add "{SECTION}": '
    '{"enabled": true} to the JSON (that of Accelerate names one by deepspeed_config_file) or the dict, or start with '
    "ds-memo run --memo JSON COMMAND"
)
MISSPELLED = (
    f'this engine runs without memo: its DeepSpeed configuration has a section "{{}}". Did you mean "{SECTION}"? Correct the name'
)
NOT_ENABLED = (
    f'this engine runs without memo: the "{SECTION}" section does not say "enabled": true. Add that, or false to have no warning'
)
TOO_LATE = (
    "ds_memo.install() came after deepspeed.initialize was kept by {}: engines made through that run without memo. Call "
    "install() before, or make engines with deepspeed.initialize"
)
NO_LAUNCHER = (
    ". No launcher has set {} for this process, so DeepSpeed asks MPI, which is not here. Start the script with one, on a single "
    "GPU too: deepspeed train.py, torchrun train.py, or ds-memo run deepspeed train.py"
)
_LAUNCHERS_SET = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
initialized = False
"""True once initialize() was called."""
_replaced: Callable[..., tuple] | None = None
"""DeepSpeed's own initialize, once install() has replaced it."""
_taken: list[Taken] = []
"""Names that held it when install() came."""


@functools.wraps(deepspeed.initialize)
def initialize(*args: Any, **kwargs: Any) -> tuple:
    """Return what ``deepspeed.initialize`` does; attach the engine's model if the config has ``"memo": {"enabled": true, …}``.

    ``"sequence_parallel_size"`` above 1 makes a Hugging Face model sequence-parallel, with memo or without
    (:mod:`ds_memo.deepspeed.sequence`); not where the caller passes an ``mpu`` and so has done that already.
    Everything that can be refused is refused before DeepSpeed starts. ``engine.memo`` is the handle.

    Raises:
        MemoConfigError: a value of the section is refused.
        MemoError: the model's layers are not known, or DeepSpeed is asked to do the same work in another way.
    """
    global initialized
    initialized = True
    launched_by.tell()
    stock: Callable[..., Any] = _replaced or deepspeed.initialize
    call = inspect.signature(stock).bind(*args, **kwargs)
    asked = call.arguments
    section = _read_config(asked)
    if _replaced and launched_by.section is not None:
        section = {SECTION: launched_by.section, **section}
    if asked.get("model") is None:  # DeepSpeed itself has something to say
        return stock(*args, **kwargs)
    if SECTION not in section:
        if key := _misspelled(section):
            warnings.warn(MISSPELLED.format(key), MemoWarning, stacklevel=2)
        elif _replaced:
            warnings.warn(NO_SECTION, MemoWarning, stacklevel=2)
    announce_first_compile()
    with ExitStack() as undo, naming_lost_ranks("ds_memo.initialize"):
        with heard_by_others():
            config = memo_config(section.get(SECTION, {}))
            if SECTION in section and "enabled" not in config.model_fields_set:
                warnings.warn(NOT_ENABLED, MemoWarning, stacklevel=2)
            ranks = sequence.size_in(section)
            shared: dict[str, Any] = {"memo.enabled": False, sequence.FIELD: ranks}
            if config.enabled:
                _refuse_pipelines(asked["model"])
                if why := _takes_no_steps(asked, section):
                    say(f"leaves this {type(asked['model']).__name__} alone: {why}, so its engine takes no steps")
                    config = config.model_copy(update={"enabled": False})
            if config.enabled:
                shared |= _prepared(asked, config, section, undo)
            makes_groups = ranks > 1 and asked.get("mpu") is None
            if makes_groups:  # DeepSpeed would take such a configuration and train on parts of sequences
                sequence.refuse_conflicts(section)
        with _words_for_mpi():
            _start_process_group(asked)
            wait = config.enabled or SECTION in section
            compare(shared, ("memo.enabled", sequence.FIELD), "ds_memo.initialize", wait)  # a rank without memo tells no more
            with groups_wait_no_longer():
                if makes_groups:
                    asked["mpu"] = sequence.set_up(asked["model"], ranks, config.ulysses_size)
                make = functools.partial(_made, stock, ranks > 1 or config.enabled, *call.args, **call.kwargs)
                if not config.enabled:
                    return make()
                returned, session = _made_and_attached(make, asked["model"], config)
        session.patches.undo_with(undo.pop_all().close, last=True)
        _say_who_shares_drives(session, section)
        return returned


def take_initialize_over() -> None:
    """Put initialize() in the place of ``deepspeed.initialize``."""
    global _replaced
    if _replaced is not None:
        return
    announce_first_compile()  # a Trainer's arguments start the process group
    stock = deepspeed.initialize
    unreachable = other_holders(stock)
    _taken[:] = replace_in_modules(stock, initialize)  # also modules that wrote `from deepspeed import initialize` before
    _replaced = stock
    checkpoint_api.redirect()  # now, so that a name imported from there is ours as well
    if unreachable:
        warnings.warn(TOO_LATE.format(", ".join(unreachable)), MemoWarning, stacklevel=3)


def give_initialize_back() -> None:
    """Undo take_initialize_over(), unless someone else has wrapped ``deepspeed.initialize`` since."""
    global _replaced
    if deepspeed.initialize is initialize:
        restore(_taken, _replaced, initialize)
        _replaced = None
        checkpoint_api.give_back()


def _made(stock: Callable[..., tuple], check_parts: bool, *args: Any, **kwargs: Any) -> tuple:
    """Return what DeepSpeed makes; `check_parts`: refuse a sequence-parallel model that mixes tokens outside attention."""
    returned = stock(*args, **kwargs)
    if check_parts:
        sequence.refuse_inexact(returned[0].module, returned[0])
        forget_order(returned[0])  # a forward's alone
    return returned


@contextmanager
def _words_for_mpi() -> Iterator[None]:
    """Add advice on launchers to the error that DeepSpeed raises without MPI."""
    try:
        yield
    except ModuleNotFoundError as error:
        missing = [name for name in _LAUNCHERS_SET if name not in os.environ]
        if error.name == "mpi4py" and missing:  # else something else wants it, as a 1-bit optimizer
            error.msg += NO_LAUNCHER.format(", ".join(missing))
        raise


def _made_and_attached(make: Callable[[], tuple], model: nn.Module, config: MemoConfig) -> tuple[tuple, Session]:
    """Return what `make` returns, and the session of its engine's model.

    DeepSpeed flattens and copies. What that leaves behind would be split for good, and torch's allocator could no longer be told
    to keep blocks whole while passes are profiled. The same holds for a model made in pieces (deepspeed.zero.Init), until these
    lie elsewhere.
    """
    device = torch.device(get_accelerator().current_device_name())
    planned = False
    if config.plan.enabled:
        pieces = (parameter.ds_tensor for parameter in model.parameters() if hasattr(parameter, "ds_tensor"))
        join_split_blocks(device, (*model.parameters(), *model.buffers(), *pieces))
    try:
        keep_blocks_whole(device, config.plan.enabled)
        returned = make()
        get_accelerator().empty_cache()  # whole blocks are of little use to other sizes
        session = attach_engine(returned[0], config)
        planned = session.addresses.planned
    finally:
        if not planned:
            keep_blocks_whole(device, False)
    return returned, session


def attach_engine(engine: deepspeed.DeepSpeedEngine, config: MemoConfig) -> Session:
    """Attach the model of a ready engine and hook the engine's steps."""
    _refuse_pipelines(engine)
    checkpoint_api.redirect()
    take_from_engine(engine.module)
    limit = limit_run_ahead(engine.module, engine.device)
    whole, live = WholeLayers(engine), weakref.ref(engine)
    ties = EngineTies(
        of_engine=True,
        agree_on_host=functools.partial(_smallest, device=engine.device),
        observers=() if limit is None else (limit,),  # first: the phase of planned addresses begins after its wait
        # ZeRO-3 would gather ahead in a probe: a layer measured on its own cannot use, nor gather, what is under way to it
        before_probe=lambda: forget_order(live()),
        gather_whole=whole.gather,
        gather_again=gathers_again(engine),
        on_last_micro_batch=weakly(engine.is_gradient_accumulation_boundary),
        tell_what_moved=tell_what_moved if _replaced else None,
    )
    session = attach_model(engine.module, config, config.layers, engine.device, ties)
    hook_engine(engine, session)
    session.patches.undo_with(whole.undo)
    if config.tile_tokens or config.groups_inputs:
        whole.gather(session.modules())
    heads = (head.module() for head in session.heads)
    whole.gather([head for head in heads if head is not None and any(head.children())])  # LoRA's: tiles call what is inside
    engine.memo = MemoHandle(session)
    return session


def _prepared(asked: dict[str, Any], config: MemoConfig, section: dict[str, Any], undo: ExitStack) -> dict[str, Any]:
    """Refuse what memo cannot do, and put kernels in place; return what all ranks must share, by name."""
    # DeepSpeed calls functions of torch by names that torch 2.13 deprecates; a warning at each step hides others.
    warnings.filterwarnings("ignore", r"`torch\.distributed\.\w+` is deprecated", FutureWarning)
    model: nn.Module = asked["model"]
    refuse_attached(model, but_by_engines=True)
    refuse_config(section)
    layers = find_layers(model, config.layers)
    refuse_model(layers)
    check_residents(config, len(layers))
    zero = section.get("zero_optimization")
    shared = {
        **shared_by_ranks(config, model, len(layers)),
        "zero_optimization.stage": zero.get("stage", 0) if isinstance(zero, dict) else 0,
        "gradient_accumulation_steps": section.get("gradient_accumulation_steps"),
    }
    if config.tile_tokens or config.groups_inputs:
        mark_around_leaf_modules([layer for _, layer in layers])
    undo.enter_context(kernels.use_kernels(model, config, torch.device(get_accelerator().current_device_name())))
    if config.kernels.adam:
        asked["optimizer"] = kernels.fused_adam(section, model, asked.get("model_parameters"), asked.get("optimizer"))
    return shared


def _start_process_group(asked: dict[str, Any]) -> None:
    """Start it as ``deepspeed.initialize`` would: ranks compare what they were given before DeepSpeed exchanges tensors."""
    names = ("distributed_port", "dist_init_required")
    deepspeed.init_distributed(
        dist_backend=get_accelerator().communication_backend_name(), **{name: asked[name] for name in names if name in asked}
    )


def _say_who_shares_drives(session: Session, section: dict[str, Any]) -> None:
    """Warn if ZeRO-Infinity keeps states on the drives of memo.nvme: each takes bandwidth from the other."""
    zero, nvme = section.get("zero_optimization"), session.config.nvme
    if nvme is None or not isinstance(zero, dict):
        return
    for key in ("offload_optimizer", "offload_param"):
        offload = zero.get(key)
        if (
            isinstance(offload, dict)
            and offload.get("device") == "nvme"
            and shares_drives_with(nvme, str(offload.get("nvme_path")))
        ):
            session.warn(
                f"zero_optimization.{key} keeps its states on a file system of memo.nvme.path: each takes bandwidth from the "
                "other. What memo measures at the first step does not have ZeRO's transfers in it. Give each drives of its own"
            )


def _misspelled(config: Mapping[str, Any]) -> str | None:
    """Return the name of a section that reads like memo's: "Memo", "memmo"."""
    sections = (key for key, value in config.items() if isinstance(key, str) and isinstance(value, Mapping))
    return next((key for key in sections if get_close_matches(key.lower(), [SECTION], cutoff=0.75)), None)


def _takes_no_steps(asked: dict[str, Any], section: dict[str, Any]) -> str:
    """Return why an engine will never train, as that of a frozen reference model (TRL); an empty string if it may."""
    if not any(parameter.requires_grad for parameter in asked["model"].parameters()):
        return "none of its parameters requires a gradient"
    if asked.get("optimizer") is None and not section.get("optimizer"):
        return "neither the call nor the JSON has an optimizer"
    return ""


def _smallest(number: int, device: torch.device) -> int:
    """Return the smallest number of all ranks, so that all solve with the same host budget."""
    # The one collective of attach_engine.
    smallest = torch.tensor(number, device=device)
    torch.distributed.all_reduce(smallest, op=torch.distributed.ReduceOp.MIN)
    return int(smallest)


def _read_config(asked: dict[str, Any]) -> dict[str, Any]:
    """Return the DeepSpeed configuration as deepspeed.initialize would find it."""
    config = asked.get("config") or asked.get("config_params")
    if config is None and asked.get("args") is not None:
        config = getattr(asked["args"], "deepspeed_config", None)
    if isinstance(config, (str, os.PathLike)) and os.path.exists(config):
        with open(config) as file:
            config = hjson.load(file)
    elif isinstance(config, str):
        with suppress(ValueError):  # as DeepSpeed's own configuration reads it
            config = hjson.loads(base64.urlsafe_b64decode(config).decode("utf-8"))
    # Anything else (nothing, a bad path) is DeepSpeed's to judge.
    return config if isinstance(config, dict) else {}


def _refuse_pipelines(model: Any) -> None:
    if isinstance(model, (PipelineModule, PipelineEngine)):
        raise MemoError(
            "memo works with DeepSpeedEngine; pipeline parallelism runs its own checkpointing. "
            "Use data, tensor or sequence parallelism"
        )
