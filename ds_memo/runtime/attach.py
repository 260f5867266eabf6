"""attach: put a model's layers under ds_memo, and take them out again."""

from __future__ import annotations

import functools
import warnings
import weakref
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from ds_memo.config import MemoConfig, memo_config
from ds_memo.distributed.topology import meet_in_layers
from ds_memo.errors import MemoConfigError, MemoError, MemoWarning, quoted
from ds_memo.hf.find_layers import find_layers
from ds_memo.hf.kernels import use_kernels
from ds_memo.memory.device import join_split_blocks
from ds_memo.remat.diagnostics import within_compiled
from ds_memo.remat.modes import inside_a_layer
from ds_memo.runtime.active_forward import in_forward
from ds_memo.runtime.conflicts import refuse_fsdp1
from ds_memo.runtime.handle import MemoHandle
from ds_memo.runtime.optimizer_hooks import watch_optimizers
from ds_memo.runtime.passes import Passes
from ds_memo.runtime.ranks_alike import compare, heard_by_others, shared_by_ranks
from ds_memo.runtime.session import NO_ENGINE, EngineTies, Session, module_of
from ds_memo.runtime.steps import step_begins, step_ended

_attached: weakref.WeakKeyDictionary[nn.Module, weakref.ref[Session]] = weakref.WeakKeyDictionary()
"""By model, whose hooks keep the session alive. A session may keep its model alive: FSDP2 keeps units in modules' tables."""

OUTSIDE = (
    "ds_memo.checkpoint was called outside any attached model, so torch.utils.checkpoint does it. Use "
    'ds_memo.attach(model, config, layers=()), or "memo": {"enabled": true, "layers": []} in the DeepSpeed JSON, for memo'
)

NO_THREAD = "can't start new thread"
SYSTEM_REFUSED = (
    "the system refused memory or a thread while the model was attached ({}): look at `ulimit -v` and `ulimit -u`, and at the "
    "limits of the container"
)


def attach(
    model: nn.Module,
    config: Mapping[str, Any] | MemoConfig,
    layers: Iterable[str | nn.Module] | None = None,
    device: torch.device | None = None,
) -> MemoHandle:
    """Put the layers of a plain module under ds_memo; no engine needed.

    Args:
        model: its layers are found by themselves: Hugging Face layers, else the longest ``nn.ModuleList`` of one class.
        config: the "memo" section.
        layers: names or modules, where they cannot be found; empty for a model that calls ``ds_memo.checkpoint`` itself.
        device: where the layers compute, "cuda" being the current one; absent: where the first parameter is.

    Ranks that meet in layers (FSDP2) all attach, with the same section: a rank that solves waits for the others here.

    Returns:
        A handle with ``.detach()``, ``.report()``, ``.plan``, ``.release_arena()`` and ``.config``.

    Raises:
        MemoConfigError: a value is refused.
        MemoError: already attached, the layers are not known, a kernel is missing, or there is no such device; or ranks that
            meet in layers differ. The model is as it was.
    """
    if not isinstance(model, nn.Module) or not meet_in_layers(model):
        return MemoHandle(attach_without_engine(model, config, layers, device))
    with heard_by_others():
        session = attach_without_engine(model, config, layers, device)
    try:
        compare(shared_by_ranks(session.config, model, len(session.layers)), (), "ds_memo.attach", session.tuner is not None)
    except BaseException:
        session.detach()
        raise
    return MemoHandle(session)


def attach_without_engine(
    model: nn.Module,
    config: Mapping[str, Any] | MemoConfig,
    layers: Iterable[str | nn.Module] | None = None,
    device: torch.device | None = None,
    ties: EngineTies = NO_ENGINE,
) -> Session:
    """Do the same as attach. Steps of torch's optimizers are followed."""
    config = memo_config(config)
    if config.kernels.adam:
        raise MemoConfigError(
            "memo.kernels.adam: the optimizer is DeepSpeed's to make; use ds_memo.initialize, or make it yourself"
        )
    session = attach_model(model, config, config.layers if layers is None else layers, device, ties)
    for end in watch_optimizers(session.model, session, step_begins, step_ended):
        session.patches.undo_with(end)
    return session


def attach_model(
    model: nn.Module,
    config: Mapping[str, Any] | MemoConfig,
    layers: Iterable[str | nn.Module] | None = None,
    device: torch.device | None = None,
    ties: EngineTies = NO_ENGINE,
) -> Session:
    """Do the same as attach; the caller tells when optimizer steps begin and end.

    Args:
        ties: what an engine brings, which has given its model the kernels already.
    """
    config = memo_config(config)
    if not isinstance(model, nn.Module):
        raise MemoError(f"model: got {quoted(model)}, expected a torch.nn.Module")
    if not config.enabled and "enabled" in config.model_fields_set:
        raise MemoConfigError("memo.enabled: got false; attach() was asked to put the model under ds_memo, so true or nothing")
    refuse_attached(model)
    refuse_fsdp1(model)
    found = [(name, within_compiled(module)) for name, module in find_layers(model, layers)]
    for name, module in found:
        if any(session.owns(module) for session in attached()):
            raise MemoError(
                f"layer {name} is already attached with another model that holds it; call .detach() on that handle first"
            )
    check_residents(config, len(found))
    if device is None:
        device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
        if device.type == "meta":
            raise MemoError(
                f"{type(model).__name__} is on the meta device: its weights have no memory yet, and where they will be is not "
                "known. Attach it once they have (to_empty, or a loaded checkpoint)"
            )
    device = _usable(device)
    if not ties.of_engine and config.plan.enabled:  # an engine's model was joined before DeepSpeed made copies
        gradients = (parameter.grad for parameter in model.parameters() if parameter.grad is not None)
        join_split_blocks(device, (*model.parameters(), *model.buffers(), *gradients))
    with ExitStack() as undo:
        if not ties.of_engine:
            undo.enter_context(use_kernels(model, config, device))  # last: a refusal leaves the model as it was
        try:
            session = Session(model, config, found, device, ties)
            with ExitStack() as failed:
                failed.callback(session.patches.undo)
                Passes(session, model)
                failed.pop_all()
            _attached[model] = weakref.ref(session)
        except (MemoryError, RuntimeError) as error:
            if isinstance(error, MemoryError) or NO_THREAD in str(error):
                raise MemoError(SYSTEM_REFUSED.format(str(error) or "no memory")) from error
            raise
        session.patches.undo_with(undo.pop_all().close, last=True)
    session.patches.undo_with(functools.partial(_forget, weakref.ref(model)))
    return session


def _usable(device: torch.device | str) -> torch.device:
    """Return the device with its index; "cuda" is the current one.

    Raises:
        MemoError: there is none.
    """
    try:
        return torch.empty(0, device=device).device
    except (RuntimeError, AssertionError, TypeError) as error:  # a CPU build asserts
        why = str(error).partition("\n")[0]
        raise MemoError(f"device: got {quoted(device)}, expected a device that PyTorch has here ({why})") from None


def refuse_attached(model: nn.Module, but_by_engines: bool = False) -> None:
    """Refuse a model that is attached.

    Raises:
        MemoError: it is attached.
    """
    session = _session_of(model)
    if session is not None and not (but_by_engines and session.ties.of_engine):
        raise MemoError(f"{type(model).__name__} is already attached; call .detach() on its handle first")


def take_from_engine(model: nn.Module) -> None:
    """Detach a model of which another engine is made. The one before, which its hooks keep alive, goes on without memo."""
    session = _session_of(model)
    if session is not None and session.ties.of_engine:
        session.detach()
        warnings.warn(
            f"another engine had this {type(model).__name__}: it runs without memo from now on. Make one engine of a model",
            MemoWarning,
            stacklevel=4,
        )


def check_residents(config: MemoConfig, layers: int) -> None:
    if layers and (config.resident_layers or 0) > layers:
        raise MemoConfigError(
            f"memo.resident_layers: got {config.resident_layers}; allowed: a whole number from 0 to {layers}, "
            "the number of layers of this model"
        )


def checkpoint(
    fn: Callable[..., Any], /, *args: Any, use_reentrant: bool | None = None, preserve_rng_state: bool = True, **kwargs: Any
) -> Any:
    """Call ``fn(*args, **kwargs)`` as a layer of the attached model, in place of ``torch.utils.checkpoint.checkpoint``.

    Outside any attached model ``torch.utils.checkpoint`` does it, with a warning: such a model trains without memo, too.

    Args:
        fn: a module, a bound method of one, or a partial of either keeps its identity between steps and is fast; any other
            function works but is analysed anew each time. Two methods of one module count as two calls of one layer: give
            them modules of their own.
        use_reentrant: accepted for compatibility; the work is never done reentrantly.
        preserve_rng_state: True if what is computed again draws the random numbers of the forward.

    Raises:
        MemoError: several models are attached, none of them is in its forward, and `fn` is no module of one of them.
    """
    session = _current(fn)
    if session is not None:
        return session.run(fn, *args, preserve_rng_state=preserve_rng_state, **kwargs)
    if inside_a_layer():  # of an attached model, which replays it
        return fn(*args, **kwargs)
    warnings.warn(OUTSIDE, MemoWarning, stacklevel=2)
    return torch_checkpoint(fn, *args, use_reentrant=False, preserve_rng_state=preserve_rng_state, **kwargs)


def report(of: Any) -> dict[str, Any]:
    """Return what ds_memo is set to and what it did, as a dict; printed, it is a table.

    Args:
        of: an engine from ``ds_memo.initialize``, a handle from ``ds_memo.attach``, or a model that is attached, wrapped or not.

    Raises:
        MemoError: it was never put under ds_memo, or is detached.
    """
    if (handle := handle_of(of)) is None:
        raise MemoError(
            f"{type(of).__name__} is not under ds_memo: report() takes an engine from ds_memo.initialize whose config has "
            '"memo": {"enabled": true}, a handle from ds_memo.attach, or a model that is attached'
        )
    return handle.report()


def handle_of(what: Any) -> MemoHandle | None:
    """Return the handle of an engine, of an attached model, or of one that holds or is a part of it (DDP's, torch.compile's)."""
    handle = what if isinstance(what, MemoHandle) else getattr(what, "memo", None)
    if isinstance(handle, MemoHandle):
        return handle
    if not isinstance(what, nn.Module):
        return None
    for session in attached():
        model = session.model()
        if model is None:
            continue
        if any(model is part for part in what.modules()) or any(what is part for part in model.modules()):
            return MemoHandle(session)
    return None


def attached() -> list[Session]:
    return [session for ref in list(_attached.values()) if (session := ref()) is not None]


def _session_of(model: nn.Module) -> Session | None:
    ref = _attached.get(model)
    return None if ref is None else ref()


def _current(fn: Callable[..., Any]) -> Session | None:
    running: Session | None = in_forward()
    if running is not None:
        return running
    module = module_of(fn)  # of a part of a model that is called by itself
    holders = [
        session
        for session in attached()
        if (model := session.model()) is not None and (module is None or any(module is part for part in model.modules()))
    ]
    if len(holders) > 1:
        raise MemoError(
            f"ds_memo.checkpoint was called with {len(attached())} models attached and none of them in forward; which of "
            "them it is for cannot be told. Call it with a module of that model, or inside its forward"
        )
    return holders[0] if holders else None


def _forget(model: weakref.ref[nn.Module]) -> None:
    if (gone := model()) is not None:
        _attached.pop(gone, None)
