"""Probe of sequence parallelism: a short sequence must come out alike, whole on each rank and in parts on the ranks of its group.

Ranks exchange tokens in the functions that ds_memo.sequence catches. A module that mixes tokens elsewhere (a token shift, its own
attention), or numbers them by itself, starts anew on each rank. Gradients are then off by tens of per cent, the loss by 1e-4.

The sequence runs whole first, and what goes into and comes out of each module is kept. It then runs in parts. There each value
is compared with the kept one and replaced by it, so every module computes from the same values as in the whole run. Differences
do not add up or hide behind a residual, and the first one lies in the module that mixes.

Cost: two forwards of about 75 tokens without gradients (under ZeRO-3 two gathers of every parameter), and this rank's part of all
inputs and outputs. Where a value differs, up to two more rounds with other tokens tell a mixing module from a router that chose
otherwise.
"""

from __future__ import annotations

import inspect
import math
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from torch import nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from ds_memo.distributed import agree
from ds_memo.distributed.topology import units
from ds_memo.errors import MemoError
from ds_memo.hf.sequence_tables import FIELD
from ds_memo.profile.caught_call import hidden_from_training
from ds_memo.remat.random_states import forked
from ds_memo.sequence.parts import SequenceParts

if TYPE_CHECKING:
    from ds_memo.hf.sequence import Decoder

TOKENS, LEAST = 75, 5
"""Tokens of the whole sequence (no usual size of a dimension), and the fewest of a part: causal convolutions span four."""
ROUNDS = 3
"""A router's choice flips at random tokens. A module that mixes differs at the border of the same part in every round."""
STEPS = 2
"""Distance that rounding may cause, in steps of the coarsest dtype, at least TF32's. From the same inputs few values are rounded
otherwise (on a CPU none). A lost state or position shifts the tokens behind a border by 3 % or more in every family tried."""
TF32 = 2**-10

Key = tuple[int, str, int]
"""Number of the comparison, name of the module that computed the value, token of the whole sequence."""


def refuse_inexact(
    model: nn.Module,
    forward: Callable[..., Any],
    group: dist.ProcessGroup,
    whole: Callable[[], AbstractContextManager[Any]],
    rows: int = 1,
    decoder: Decoder | None = None,
) -> None:
    """Run the probe; all ranks of the process call this together.

    Args:
        model: its modules are compared. Parameters, buffers, modes and random states stay as they are.
        forward: calls the model as training does. Where that asks for more than tokens and positions, such as labels for a
            loss, the model's body without its head is called instead.
        group: ranks that share a sequence.
        whole: makes attention local, within the context.
        rows: sequences in a batch.
        decoder: of ds_memo's own sequence parallelism; inside of it a rank may hold other tokens than a caller gives it.

    Raises:
        MemoError: on all ranks, if an output differs on any, or the model cannot run.
    """
    ranks, config = dist.get_world_size(group), model.config.get_text_config()
    pieces = ranks if decoder is None or decoder.ranks.ring == 1 else math.lcm(2 * decoder.ranks.ring, ranks)
    longest = min(TOKENS, getattr(config, "max_position_embeddings", None) or TOKENS)
    part = max(LEAST, longest // pieces) * pieces // ranks
    forward = _on_tokens_alone(model, forward)
    suspects: dict[Key, float] | None = None
    for seed in range(ROUNDS):
        tokens = torch.randint(3, config.vocab_size, (1, part * ranks), generator=torch.Generator().manual_seed(seed))
        comparison = _Comparison(model, part, rows, dist.get_rank(group), decoder)
        try:
            with _undisturbed(model):
                found = comparison.run(forward, tokens, whole)
        except MemoError:
            raise
        except Exception as error:
            why = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
            own = "its attention computes with a mask, by code of its own; " if "'Mask'" in why else ""
            raise MemoError(
                f"{FIELD} {ranks}: {type(model).__name__} cannot be tried on {part * ranks} tokens with input_ids and "
                f"position_ids ({own}{why}), so memo does not know if "
                f'parts give what whole sequences give. Use "{FIELD}": 1, or a model whose forward needs nothing else'
            ) from error
        suspects = {key: off for key, off in found.items() if suspects is None or key in suspects}
        firsts = [first for first in agree.from_all_ranks(min(suspects.items(), default=None)) if first]
        if not firsts:
            return
    (_, name, token), off = min(firsts)
    raise MemoError(
        f"{FIELD} {ranks}: {_described(model, name)} computes token {token} of {part * ranks} {off:.0%} away from what it is in "
        "a whole sequence. It mixes tokens outside the functions that ds_memo knows (Transformers' attention, scans, "
        f'convolutions), or numbers them by itself: each of the {ranks} parts would start anew. Use "{FIELD}": 1; layers in '
        "tiles (memo.tile_tokens) or ZeRO-3 make room for longer sequences on a rank"
    )


def _on_tokens_alone(model: nn.Module, forward: Callable[..., Any]) -> Callable[..., Any]:
    head = next((module for module in model.modules() if hasattr(type(module), "base_model_prefix")), model)
    asked = (value for value in inspect.signature(head.forward).parameters.values() if value.default is value.empty)
    names = {value.name for value in asked if value.kind not in (value.VAR_POSITIONAL, value.VAR_KEYWORD)}
    return forward if names <= {"input_ids", "position_ids"} else head.base_model


def _described(model: nn.Module, name: str) -> str:
    """Return the name and class of a module, or of the one that holds it where it is a mere list."""
    while isinstance(model.get_submodule(name), (nn.ModuleList, nn.ModuleDict, nn.Sequential)):
        name = name.rpartition(".")[0]
    return f"{name} ({type(model.get_submodule(name)).__name__})" if name else type(model).__name__


class _Comparison:
    """One sequence, whole and in parts.

    Args:
        part: tokens of a part.
        rows: sequences in the batch, all alike.
        rank: number of this one among those that share a sequence.
    """

    def __init__(self, model: nn.Module, part: int, rows: int, rank: int, decoder: Decoder | None) -> None:
        self._model = model
        self._part, self._rows = part, rows
        self._outside = list(range(rank * part, (rank + 1) * part))
        self._inside, self._decoder, self._takes_whole = self._outside, "", False
        if decoder is not None:
            pieces = SequenceParts(decoder.ranks, part * decoder.ranks.size).pieces
            self._inside = [token for start, stop in pieces for token in range(start, stop)]
            self._decoder = next(name for name, module in model.named_modules() if module is decoder.module)
            self._takes_whole = decoder.takes_whole
        self._kept: dict[tuple[str, bool], list[list[tuple[torch.Tensor, int] | None]]] = defaultdict(list)
        """This rank's part of what went into (True) or came out of (False) each call of a module, and its dimension of tokens."""
        self._distances: list[tuple[str, list[int], torch.Tensor]] = []
        self._dtypes: set[torch.dtype] = set()

    def run(
        self, forward: Callable[..., Any], tokens: torch.Tensor, whole: Callable[[], AbstractContextManager[Any]]
    ) -> dict[Key, float]:
        """Return the distance of each token that differs by more than rounding."""
        device = torch.device(get_accelerator().current_device_name())
        tokens = tokens.expand(self._rows, -1).to(device)
        positions = torch.arange(tokens.shape[1], device=device).expand(self._rows, -1)
        self._length = tokens.shape[1]
        with self._watched(self._keep), whole():
            forward(input_ids=tokens, position_ids=positions, use_cache=False)
        local = slice(None) if self._takes_whole else slice(self._outside[0], self._outside[-1] + 1)
        with self._watched(self._compare):
            forward(input_ids=tokens[:, local].contiguous(), position_ids=positions[:, local].contiguous(), use_cache=False)
        if not self._distances:
            raise TypeError("no module of it takes or returns a floating-point tensor (rows, tokens, …)")
        most = STEPS * max(TF32, *(torch.finfo(dtype).eps for dtype in self._dtypes))
        return {
            (number, name, token): off
            for number, (name, tokens, distances) in enumerate(self._distances)
            for token, off in zip(tokens, distances.tolist(), strict=False)
            if not off <= most
        }

    @contextmanager
    def _watched(self, hook: Callable[[str, bool, Any], Any]) -> Iterator[None]:
        """Call ``hook(name, True, (args, kwargs))`` before each module and ``hook(name, False, output)`` behind it."""
        with ExitStack() as undo:
            for name, module in self._model.named_modules():
                before = module.register_forward_pre_hook(partial(_with_inputs, hook, name), with_kwargs=True)
                undo.callback(before.remove)
                undo.callback(module.register_forward_hook(partial(_with_output, hook, name)).remove)
            yield

    def _keep(self, name: str, goes_in: bool, values: Any) -> None:
        by_rows = not name and not goes_in
        tokens = self._tokens(name, goes_in)
        self._kept[name, goes_in].append([self._of_part(value, tokens, by_rows) for value in tree_flatten(values)[0]])

    def _tokens(self, name: str, goes_in: bool) -> list[int]:
        """Return this rank's tokens of the whole sequence, where a value passes."""
        within = self._decoder + "." if self._decoder else ""
        inside = goes_in if name == self._decoder else name.startswith(within)
        return self._inside if inside else self._outside

    def _of_part(self, value: Any, tokens: list[int], by_rows: bool) -> tuple[torch.Tensor, int] | None:
        """Return this rank's part of a tensor (rows, …), and its dimension of tokens; None: it has not one such dimension.

        What goes in and out of routers and experts has none: rows sorted by expert are no tokens in order.

        Args:
            by_rows: return one without tokens, such as a class for each row, whole.
        """
        if not isinstance(value, torch.Tensor) or not value.is_floating_point() or value.dim() < 2 or len(value) != self._rows:
            return None
        dims = [dim for dim, size in enumerate(value.shape) if dim and size == self._length]
        if len(dims) == 1:
            return value.index_select(dims[0], torch.tensor(tokens, device=value.device)), dims[0]
        return (value.clone(), 0) if by_rows and not dims else None

    def _compare(self, name: str, goes_in: bool, values: Any) -> Any:
        """Note how far each token is away, under the module that computed it. Return the values of the whole run."""
        if not (calls := self._kept[name, goes_in]):
            return values
        culprit = name.rpartition(".")[0] if goes_in else name
        leaves, spec = tree_flatten(values)
        for index, (leaf, kept) in enumerate(zip(leaves, calls.pop(0), strict=False)):
            if kept is not None and isinstance(leaf, torch.Tensor) and leaf.shape == kept[0].shape:
                self._dtypes.add(leaf.dtype)
                self._distances.append((culprit, self._tokens(name, goes_in), _distances(leaf, *kept)))
                leaves[index] = kept[0]
        return tree_unflatten(leaves, spec)


def _with_inputs(hook: Callable[..., Any], name: str, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
    hook(name, True, (args, kwargs))


def _with_output(hook: Callable[..., Any], name: str, module: nn.Module, args: tuple, output: Any) -> Any:
    return hook(name, False, output)


def _distances(got: torch.Tensor, want: torch.Tensor, dim: int) -> torch.Tensor:
    """Return each token's distance, relative to its size, or a tenth of the median size where that is more."""
    got, want = (x.movedim(dim, 0).flatten(1).float() for x in (got, want))
    alike = (got == want) | (got.isnan() & want.isnan())
    size = want.nan_to_num(0, 0, 0).norm(dim=1)
    return (got - want).masked_fill(alike, 0).norm(dim=1) / size.maximum(size.median() / 10).clamp(min=1e-30)


@contextmanager
def _undisturbed(model: nn.Module) -> Iterator[None]:
    """Evaluate without gradients, uncompiled, and put back what a forward changes."""
    training = [module for module in model.modules() if module.training]
    groups = [module for module in model.modules() if "num_key_value_groups" in vars(module)]  # Ulysses writes it
    before = [module.num_key_value_groups for module in groups]
    device = torch.device(get_accelerator().current_device_name())
    with torch.no_grad(), forked(device), hidden_from_training(model), torch.compiler.set_stance("force_eager"):
        for module in training:
            module.training = False
        try:
            yield
        finally:
            for unit in units(model):  # FSDP2's root would stay gathered
                unit.reshard()
            for module in training:
                module.training = True
            for module, value in zip(groups, before, strict=True):
                module.num_key_value_groups = value
