"""Install lazy logits: the output heads of a model return them where the whole logits would not be small."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn

from ds_memo.logits import vocabulary  # noqa: F401  its handlers, and those of ops
from ds_memo.logits.head_bytes import BYTES_PER_LOGIT, TILE_BYTES, HeadBytes, head_bytes, tile_rows
from ds_memo.logits.lazy_value import HeadCall, HeadInputs, LazyValue, as_they_are, raise_what_is_known
from ds_memo.logits.tensor import call_head
from ds_memo.remat.autocast import autocast_now
from ds_memo.remat.layer_call import CannotTile
from ds_memo.remat.layer_state import LayerState
from ds_memo.tiles.check.compare import is_by_token
from ds_memo.tiles.graph import refuse_other_gradients
from ds_memo.tiles.weight_gradients import see_products_of_zero3
from ds_memo.units import GIB


def owners_of_heads(model: nn.Module) -> list[nn.Module]:
    """Return the Transformers models in a model."""
    return [module for module in model.modules() if callable(getattr(module, "get_output_embeddings", None))]


def heads_of(owners: Iterable[nn.Module]) -> Iterator[nn.Module]:
    """Yield the output heads of Transformers models, each once."""
    seen = set()
    for module in owners:
        try:
            head = module.get_output_embeddings()
        except (AttributeError, NotImplementedError):  # a model without one
            continue
        if isinstance(head, nn.Module) and not isinstance(head, nn.Embedding) and head not in seen:
            seen.add(head)
            yield head


@functools.cache
def _keep_dynamo_out() -> None:
    """Have dynamo run the ops on lazy logits as they are: what lies between them it compiles."""
    from torch._dynamo import trace_rules

    trace_rules.add("ds_memo.logits")


class LazyHead:
    """An output head that returns lazy logits for more rows than a tile has.

    Args:
        head: a module that computes each row by itself.
        device_bytes: of the device, or what may be used of it.
        warn: warns the user, once.
        keep_before_freeing: has its second argument called before the parameters of a module are freed. It returns False if that
            cannot be done.
    """

    def __init__(
        self,
        head: nn.Module,
        device_bytes: int,
        warn: Callable[[str], None],
        keep_before_freeing: Callable[[nn.Module, Callable[[], None]], bool] = lambda head, keep: True,
    ) -> None:
        _keep_dynamo_out()
        self.module = weakref.ref(head)
        self._device_bytes = device_bytes
        self._warn = warn
        self._keep_before_freeing = keep_before_freeing
        self._alive: weakref.WeakSet[HeadInputs] = weakref.WeakSet()
        self._splits: bool | None = None
        """True if the head computes each row by itself. None: no call yet."""
        self._kinds: list[Any] = []
        """Types, shapes and dtypes of the parameters that this is of."""
        self._state = LayerState("output head", head) if any(head.children()) else None
        self.rows = 0
        """Rows of a tile."""
        self.lazy_calls = 0
        self.bytes: HeadBytes | None = None
        """What a call with gradients takes. None: no call yet, or the head's logits are never lazy."""

    def __call__(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        raise_what_is_known()
        hidden = args[0] if len(args) == 1 and not kwargs else None
        if not isinstance(hidden, torch.Tensor) or hidden.dim() < 2 or _elsewhere(hidden):
            return forward(*args, **kwargs)
        head = self.module()
        if _draws(head):
            return self._whole(forward(hidden))
        flat_NH = hidden.reshape(-1, hidden.shape[-1])
        parameters = list(head.parameters())
        kinds = [(type(parameter), parameter.shape, parameter.dtype) for parameter in parameters]
        if self._splits is None or kinds != self._kinds:  # a resized vocabulary, say
            self._examine(forward, flat_NH, parameters)
            self._kinds = kinds
        if not self._splits:
            return self._whole(forward(hidden))
        if len(flat_NH) <= self.rows:
            return forward(hidden)
        by_row = forward if type(head) is nn.Linear else lambda hidden_TH: forward(hidden_TH[None])[0]  # others may want a batch
        graph = torch.is_grad_enabled() and not torch.is_inference_mode_enabled()
        with torch.set_grad_enabled(graph):
            none = by_row(flat_NH.detach()[:0])
        if _reads_others(none, parameters):
            return self._whole(forward(hidden))
        inputs = HeadInputs(flat_NH.detach(), parameters)
        self._alive.add(inputs)
        self.lazy_calls += 1
        wanted = tuple(tensor.requires_grad for tensor in (flat_NH, *parameters)) if graph else None
        numbers = {id(parameter): number for number, parameter in enumerate(parameters)}
        places = [
            (module._parameters, name, numbers[id(parameter)])
            for module in head.modules()
            for name, parameter in module._parameters.items()
            if parameter is not None
        ]
        before = None if self._state is None else self._state.before()
        head_call = HeadCall(by_row, places, before, wanted, self.rows, inputs.sums, autocast_now(), self._warn)
        index = torch.arange(len(flat_NH), device=hidden.device).view(hidden.shape[:-1])
        content = LazyValue(head_call, as_they_are, (index,), (), none.shape[-1], none.dtype, none.device)
        with torch.set_grad_enabled(wanted is not None):
            return call_head(content, inputs, parameters, flat_NH)

    def keep_values(self) -> None:
        """Have logits that the script still holds be those of the weights as they are, before they are changed or freed."""
        raise_what_is_known()
        for inputs in self._alive:
            inputs.keep_values()

    def _examine(self, forward: Callable[..., Any], flat_NH: torch.Tensor, parameters: list[nn.Parameter]) -> None:
        """Examine the head in its first call, when ZeRO-3 or FSDP2 has gathered it."""
        see_products_of_zero3()
        head = self.module()
        distributed = any(hasattr(parameter, "device_mesh") for parameter in parameters)  # a DTensor
        distributed |= any(getattr(module, "mp_group", None) is not None for module in head.modules())  # DeepSpeed's AutoTP
        plain = not distributed and all(parameter.is_floating_point() for parameter in parameters)
        plain = plain and self._keep_before_freeing(head, self.keep_values)
        splits = plain and (type(head) is nn.Linear or is_by_token(forward, flat_NH[None]))
        if not splits:
            self._splits, self.bytes = False, None
            return
        with torch.no_grad():
            vocabulary = forward(flat_NH[None, :1].detach()).shape[-1]
        self.rows = tile_rows(vocabulary, self._device_bytes)
        numel, size = sum(parameter.numel() for parameter in parameters), flat_NH.element_size()
        self.bytes = head_bytes(self.rows, vocabulary, flat_NH.shape[-1], numel, size)
        self._splits = True  # last: the device may refuse memory above

    def _whole(self, logits: torch.Tensor) -> torch.Tensor:
        """Warn where logits are larger than a tile and cannot be lazy."""
        if logits.numel() * BYTES_PER_LOGIT > TILE_BYTES:
            gib = logits.numel() * logits.element_size() / GIB
            self._warn(
                f"the output head ({type(self.module()).__name__}) makes its logits whole, {gib:.3g} GiB and several copies: its "
                "weights are distributed or quantised, it mixes rows, has dropout, or reads another tensor that needs a "
                "gradient. It needs nothing, if they fit"
            )
        return logits


def _draws(head: nn.Module) -> bool:
    """Return True if the head draws random numbers (PEFT's dropout): tile by tile it would draw others."""
    return any(isinstance(module, nn.modules.dropout._DropoutNd) and module.training and module.p for module in head.modules())


def _reads_others(logits: torch.Tensor, parameters: list[nn.Parameter]) -> bool:
    """Return True if other tensors than parameters would get a gradient by logits: tiles would not give them one."""
    try:
        refuse_other_gradients([logits], parameters)
    except CannotTile:
        return True
    return False


def _elsewhere(hidden: torch.Tensor) -> bool:
    """Return True where a call is traced or transformed, and not computed now."""
    fake = type(hidden) is not torch.Tensor or hidden.is_meta
    return fake or torch._C._functorch.peek_interpreter_stack() is not None or torch.jit.is_tracing()
