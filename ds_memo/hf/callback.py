"""MemoCallback: a Trainer's model under memo while it trains."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import Any

from torch import nn
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

import ds_memo
from ds_memo.errors import brief, warn
from ds_memo.units import GIB

_begun: weakref.WeakKeyDictionary[nn.Module, Any] = weakref.WeakKeyDictionary()
"""Handles of models that a callback attached, and has not detached yet."""


class MemoCallback(TrainerCallback):
    """Attach the Trainer's model when training begins and detach it when it ends::

        from ds_memo.hf import MemoCallback

        trainer = Trainer(model, args, train_dataset=data, callbacks=[MemoCallback({"alpha": 0.5, "resident_layers": 2})])

    It serves one GPU, DDP and FSDP2. It does nothing with a model that is under memo already: by DeepSpeed's engine with a
    "memo" section, ``ds_memo.install()`` or ``ds_memo.attach``. Each log has ``memo_alpha`` and ``memo_gib_to_host`` (GiB so far,
    of this rank); callbacks before this one, as those of ``report_to``, do not see them.

    Args:
        config: the "memo" section; absent: all is solved.

    Attributes:
        report: ``ds_memo.report`` of the latest training when it ended; None before that.
    """

    def __init__(self, config: Mapping[str, Any] | None = None) -> None:
        self.config = dict(config or {})
        self.report: dict[str, Any] | None = None
        self._handle: Any = None

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, model: nn.Module, **kwargs: Any
    ) -> None:
        if (left := _begun.pop(model, None)) is not None:  # its training ended by an error, which calls no on_train_end
            left.detach()
        try:
            ds_memo.report(model)
        except ds_memo.MemoError:
            self._handle = _begun[model] = ds_memo.attach(model, self.config, device=args.device)
        else:
            if self.config:
                warn(f"MemoCallback: the model is under memo already, so {brief(self.config)} is not used. Leave one out")

    def on_log(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, logs: dict[str, Any], **kwargs: Any
    ) -> None:
        if self._handle is not None:
            report = self._handle.report()
            numbers = {"memo_alpha": report["alpha"], "memo_gib_to_host": report["bytes_to_host"] / GIB}
            logs.update(numbers)
            state.log_history[-1].update(numbers)

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if self._handle is not None:
            self.report = self._handle.report()
            self._handle.detach()
            self._handle = None
            _begun.pop(kwargs["model"], None)
