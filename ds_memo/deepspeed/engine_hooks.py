"""Hooks on a DeepSpeed engine: methods of the engine, and its optimizer's step, are replaced by ones that tell the session.

They tell of steps, of gradients that are reduced, of memory that the device refuses in a backward, and of the engine's end. An
error of the process group in them names the rank that is lost.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import MethodType
from typing import Any

import deepspeed
import torch

from ds_memo.distributed.lost_ranks import naming_lost_ranks
from ds_memo.remat.undo import changed
from ds_memo.runtime.passes import ran_out
from ds_memo.runtime.report import events, report
from ds_memo.runtime.session import Session
from ds_memo.runtime.steps import step_begins, step_ended


def hook_engine(engine: deepspeed.DeepSpeedEngine, session: Session) -> None:
    """Hook an engine until its model is detached. The session has weak references to the engine alone and keeps none alive."""
    hooks = _EngineHooks(engine, session)
    replaced = {
        "forward": (_plain, "a forward"),
        "_take_model_step": (hooks.take_step, "a step"),
        "backward": (hooks.backward, "a backward"),
        "_backward_epilogue": (hooks.reduce, "the reduction of gradients"),
        "destroy": (hooks.destroy, "the engine's end"),
    }
    for name, (tell, where) in replaced.items():
        vars(engine)[name] = _around(getattr(engine, name), tell, where)
    session.patches.undo_with(functools.partial(_give_methods_back, weakref.ref(engine), tuple(replaced)))
    session.patches.undo_with(_hook_optimizer(engine.optimizer, hooks))


class _EngineHooks:
    """What is done around an engine's methods; `stock` is the engine's own."""

    def __init__(self, engine: deepspeed.DeepSpeedEngine, session: Session) -> None:
        self._engine = weakref.ref(engine)
        self._session = session
        self._in_step = False

    def take_step(self, stock: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        engine = self._engine()
        with self.step(engine.was_step_applied):
            result = stock(*args, **kwargs)
        if engine.monitor.enabled and engine.global_rank == 0:
            engine.monitor.write_events(events(report(self._session), engine.global_samples))
        return result

    def backward(self, stock: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        try:
            return stock(*args, **kwargs)
        except torch.OutOfMemoryError:
            ran_out(self._session)
            raise

    def reduce(self, stock: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self._session.addresses.reduction_begins()
        try:
            return stock(*args, **kwargs)
        finally:
            self._session.addresses.leave_phase()

    def destroy(self, stock: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self._engine() is not None:  # who calls has the engine; when it is collected, on whatever thread, stock's part is done
            self._session.detach()
        return stock(*args, **kwargs)

    @contextmanager
    def step(self, is_applied: Callable[[], bool]) -> Iterator[None]:
        """Tell of a step, and nothing of one inside it."""
        if self._in_step:
            yield
            return
        step_begins(self._session)
        with changed(self, "_in_step", True):
            yield
        step_ended(self._session, is_applied())


def _plain(stock: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return stock(*args, **kwargs)


def _around(stock: Callable[..., Any], tell: Callable[..., Any], where: str) -> Callable[..., Any]:
    @functools.wraps(stock)
    def told(*args: Any, **kwargs: Any) -> Any:
        with naming_lost_ranks(where):
            return tell(stock, *args, **kwargs)

    return told


def _give_methods_back(engine: weakref.ref, names: tuple[str, ...]) -> None:
    if (target := engine()) is not None:
        for name in names:
            vars(target).pop(name, None)


def weakly(boundary: Callable[[], bool]) -> Callable[[], bool]:
    method = weakref.WeakMethod(boundary)

    def ask() -> bool:
        live = method()
        return live is not None and bool(live())

    return ask


def _hook_optimizer(optimizer: Any, hooks: _EngineHooks) -> Callable[[], None]:
    """Tell of its steps, too: Lightning's Fabric steps an engine's optimizer and leaves the engine out.

    Returns:
        What gives it back as it was.
    """
    stock, own = optimizer.step, {name: value for name, value in vars(optimizer).items() if name == "step"}

    @functools.wraps(stock)
    def take_step(self: Any, *args: Any, **kwargs: Any) -> Any:
        with hooks.step(lambda: not getattr(self, "overflow", False)):
            return stock(*args, **kwargs)

    vars(optimizer)["step"] = MethodType(take_step, optimizer)  # torch's schedulers ask for its __func__
    itself = weakref.ref(optimizer)

    def give_back() -> None:
        if (target := itself()) is not None:
            vars(target).pop("step", None)
            vars(target).update(own)

    return give_back
