"""How functions that mix tokens, other than attention, run on parts of sequences.

A convolution gets the tokens before each piece (a halo). A scan gets all tokens of some heads: an all-to-all before it, another
behind it. The tables at the end of this file say which argument of which function holds what.
"""

from __future__ import annotations

import bisect
import inspect
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from ds_memo.errors import MemoError
from ds_memo.sequence import exchange
from ds_memo.sequence.cache import cache_tensors
from ds_memo.sequence.parts import Pieces, SequenceParts, concatenated

# ---- a call of a caught function


class Argument(NamedTuple):
    """Dimensions of an argument. Without tokens it is a parameter of each head; without heads all heads share it."""

    tokens: int | None
    heads: int | None


@dataclass(frozen=True)
class Scan:
    """A function that carries a state from token to token, for each head by itself.

    Args:
        lead: the argument whose heads are split, and whose layout the output has. Another argument may have fewer heads, each
            of which serves neighbouring heads of the lead.
        packed: the keyword by which the function's kernel keeps documents apart, if it has one.
        state, final: keywords of the state before the first token, and of whether to return the one behind the last.
        two: True if it returns a state, or None in its place, even if none is asked for.
    """

    lead: str
    arguments: Mapping[str, Argument]
    packed: str | None = None
    state: str | None = None
    final: str | None = None
    two: bool = False


@dataclass
class MixerCall:
    """A call's arguments by the names that the table knows; its caller gives them by position or by keyword."""

    function: Callable[..., Any]
    positional: tuple[str, ...]
    values: dict[str, Any]

    @classmethod
    def of(cls, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> MixerCall:
        names = _names(function)[: len(args)]
        return cls(function, names, dict(zip(names, args, strict=True)) | dict(kwargs))

    def run(self, values: Mapping[str, Any]) -> Any:
        by_name = {name: value for name, value in values.items() if name not in self.positional}
        return self.function(*(values[name] for name in self.positional), **by_name)

    def refuse_unknown(self, name: str, known: Mapping[str, Any], states: Sequence[str | None]) -> None:
        """Refuse what would be wrong without a word: arguments with tokens that no table knows, and states of a cache.

        Keywords that the function does not take are its caller's affair, who hands on all that it was given.
        """
        taken = taken_by(self.function)
        for argument, value in self.values.items():
            if argument in states and value is not None and value is not False:
                raise MemoError(
                    f"{name} got {argument}, as where a cache is used; sequence parallelism expects none. Set use_cache=False"
                )
            if argument in ("cu_seqlens", "seq_idx") and value is not None:
                raise MemoError(
                    f"{name} got {argument}, documents of this rank's tokens; sequence parallelism finds documents by "
                    "position_ids. Leave seq_idx and cu_seq_lens_q out of the batch"
                )
            if isinstance(value, torch.Tensor) and value.dim() and argument not in known and argument in taken:
                raise MemoError(
                    f"{name} got the tensor {argument} of shape {tuple(value.shape)}, of which sequence parallelism knows "
                    f"neither tokens nor heads; it knows {', '.join(known)}. Set sequence_parallel_size to 1, or report the model"
                )


def _names(function: Callable[..., Any]) -> tuple[str, ...]:
    return tuple(inspect.signature(function).parameters)


def taken_by(function: Callable[..., Any]) -> tuple[str, ...]:
    """Return names of the arguments that a function takes: its kernel's where Transformers found one."""
    return _closed_over(function).get("applicable_params", _names(function))


def _takes(function: Callable[..., Any], packed: str | None) -> bool:
    """Return whether documents can be told to a function. Transformers' own fallbacks in PyTorch cannot be told."""
    return bool(_closed_over(function).get("is_new_implementation")) and packed in taken_by(function)


def _closed_over(function: Callable[..., Any]) -> dict[str, Any]:
    """Return the variables of Transformers' wrapper that picks a kernel at import; {} for any other function."""
    code = getattr(function, "__code__", None)
    cells = getattr(function, "__closure__", None) or ()
    return dict(zip(code.co_freevars, (cell.cell_contents for cell in cells), strict=True)) if cells else {}


def fitting(parts: SequenceParts, tokens: int, name: str) -> SequenceParts:
    """Return the parts of a call with so many tokens: a profile calls layers with fewer."""
    if tokens > parts.own:
        raise MemoError(f"{name} got {tokens} tokens, this rank's part has {parts.own}. Set use_cache=False")
    return parts if tokens == parts.own else parts.shortened(tokens)


def rows_of(parts: SequenceParts, batch: int) -> Iterator[tuple[slice, tuple[int, ...]]]:
    """Yield rows of the batch with one list of documents."""
    documents = parts.documents
    if all(row == documents[0] for row in documents):
        yield slice(0, batch), documents[0]
    else:
        yield from ((slice(row, row + 1), starts) for row, starts in enumerate(documents))


# ---- convolutions


def convolution(
    name: str, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], parts: SequenceParts
) -> Any:
    """Run a causal convolution of (b, channels, tokens) on this rank's tokens, in one call."""
    call = MixerCall.of(function, args, kwargs)
    row = CONVOLUTIONS[name]
    call.refuse_unknown(name, dict.fromkeys((row.x, row.weight, "bias")), row.states)
    x = call.values[row.x]
    spread = Spread(x, call.values[row.weight].shape[-1] - 1, fitting(parts, x.shape[-1], name))
    return spread.gathered(call.run(call.values | {row.x: spread.x}))


class Spread:
    """Tokens as a causal convolution needs them: each piece behind its halo, each further document behind as many zeros.

    Args:
        x: (b, channels, tokens) of this rank.
        reach: tokens before its own that an output depends on.
        halos: (b, pieces · reach, channels), if they are here already.
    """

    def __init__(self, x: torch.Tensor, reach: int, parts: SequenceParts, halos: torch.Tensor | None = None) -> None:
        self._places: list[list[tuple[int, int]]] = []
        x = x.transpose(1, 2)  # where tokens lie one after another, the kernel's layout stays
        halos = _halos(x, reach, parts) if halos is None else halos
        rows = []
        for of_batch, starts in rows_of(parts, x.shape[0]):
            segments, places = _segments(x[of_batch], halos[of_batch], reach, parts.pieces, starts)
            rows.append(torch.cat(segments, 1))
            self._places.append(places)
        longest = max(row.shape[1] for row in rows)
        even = [row if row.shape[1] == longest else F.pad(row, (0, 0, 0, longest - row.shape[1])) for row in rows]
        self.x = concatenated(even, 0).transpose(1, 2)

    def gathered(self, y: torch.Tensor) -> torch.Tensor:
        """Return the outputs (b, channels, tokens) of this rank's tokens alone."""
        rows = [y] if len(self._places) == 1 else y.split(1)
        pairs = zip(rows, self._places, strict=True)
        return concatenated([concatenated([row.narrow(2, *place) for place in places], 2) for row, places in pairs], 0)


def _halos(x: torch.Tensor, reach: int, parts: SequenceParts) -> torch.Tensor:
    """Return the tokens before each of this rank's pieces (b, pieces · reach, channels); zeros before the sequence.

    Every rank's graph holds the exchange, that of the first rank, too: otherwise the others' backward would wait for it.
    """
    wanted = [tuple((start - reach, start) for start, _ in pieces) for pieces in parts.all_pieces]
    return exchange.move(x, parts.all_pieces, wanted, parts.ranks.group)


def _segments(
    x: torch.Tensor, halos: torch.Tensor, reach: int, pieces: Pieces, starts: Sequence[int]
) -> tuple[list[torch.Tensor], list[tuple[int, int]]]:
    """Return what to put one after another, and where this rank's tokens then lie."""
    segments, places = [], []
    zeros = x.new_zeros(x.shape[0], reach, x.shape[2])
    passed = at = 0
    for (start, stop), halo in zip(pieces, halos.split(reach, 1), strict=True):
        document = starts[bisect.bisect_right(starts, start) - 1]
        others = torch.arange(start - reach, start, device=x.device) < document
        before = halo.masked_fill(others[:, None], 0)
        for first, last in itertools.pairwise((start, *(border for border in starts if start < border < stop), stop)):
            segments += [before, x.narrow(1, passed, last - first)]
            places.append((at + reach, last - first))
            passed, at, before = passed + last - first, at + reach + last - first, zeros
    return segments, places


# ---- scans


def scan(name: str, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], parts: SequenceParts) -> Any:
    """Run a scan with all tokens of some heads."""
    call, how = MixerCall.of(function, args, kwargs), SCANS[name]
    return on_heads(name, call, how, parts, lambda values, parts: _by_documents(call, values, how, parts))


def on_heads(
    name: str, call: MixerCall, how: Scan, parts: SequenceParts, run: Callable[[dict[str, Any], SequenceParts], torch.Tensor]
) -> Any:
    """Give each rank all tokens of some heads. A rank may have none: its graph still holds every exchange.

    Args:
        run: the scan, given the call's arguments for these heads, and the parts of a call of so many tokens.
    """
    call.refuse_unknown(name, how.arguments, (how.state, how.final))
    lead, where = call.values[how.lead], how.arguments[how.lead]
    parts = fitting(parts, lead.shape[where.tokens], name)
    owned = exchange.blocks(lead.shape[where.heads], parts.ranks.size)
    given = [argument for argument in how.arguments if call.values.get(argument) is not None]  # in one order on all ranks
    values = call.values | {argument: _share(call.values[argument], how.arguments[argument], owned, parts) for argument in given}
    states = run(values, parts) if owned[parts.ranks.number] else _nothing(values, how)
    if not all(owned):  # a rank without heads does not know the dtype: kernels return the lead's, functions in PyTorch may not
        states = states.to(lead.dtype)
    states = parts.by_rank(states.movedim((where.tokens, where.heads), (1, 2)), 1)
    states = exchange.to_tokens(states, [len(heads) for heads in owned], parts.ranks.group)
    states = states.movedim((1, 2), (where.tokens, where.heads))
    return (states, None) if how.two else states


def _share(x: torch.Tensor, where: Argument, owned: exchange.Owned, parts: SequenceParts) -> torch.Tensor:
    """Return what this rank's heads need of an argument."""
    own, heads = owned[parts.ranks.number], sum(map(len, owned))
    if where.tokens is None:
        return x.narrow(where.heads, own[0] if own else 0, len(own))
    if where.heads is None:
        whole = exchange.gather(x.byte() if x.dtype == torch.bool else x, where.tokens, parts)  # gloo gathers no bool
        return whole.to(x.dtype)
    groups = x.shape[where.heads]
    needed = exchange.shared_by(owned, heads, groups)
    x = exchange.to_heads(x.movedim((where.tokens, where.heads), (1, 2)), needed, parts.ranks.group)
    x = parts.sorted(x, 1)
    here = needed[parts.ranks.number]
    group_of = [here.index(head * groups // heads) for head in own]
    if group_of != [head * len(here) // len(own) for head in range(len(own))] or (own and len(own) % len(here)):
        x = x.index_select(2, exchange.index(tuple(group_of), x.device))  # not each group serves as many of this rank's heads
    return x.movedim((1, 2), (where.tokens, where.heads))


def _nothing(values: Mapping[str, Any], how: Scan) -> torch.Tensor:
    """Return the output for no heads, whose gradient reaches all that a scan's would."""
    given = [values[name] for name in how.arguments if values.get(name) is not None]
    return values[how.lead] + sum(value.flatten()[:0].sum() for value in given if value.is_floating_point())


def _by_documents(call: MixerCall, values: dict[str, Any], how: Scan, parts: SequenceParts) -> torch.Tensor:
    """Run a scan of some heads so that no state passes from a document to the next: in one call where a kernel can be told."""

    def states(**others: Any) -> torch.Tensor:
        out = call.run(values | others)
        return out[0] if how.two else out

    if parts.one_document:
        return states()
    batch, device = values[how.lead].shape[0], values[how.lead].device
    if _takes(call.function, how.packed):
        if how.packed == "seq_idx":
            return states(seq_idx=_numbers(parts.documents, parts.length, batch, device))
        one_row = {name: values[name].flatten(0, 1)[None] for name in _with_tokens(values, how)}  # fla wants it
        return states(cu_seqlens=_borders(parts.documents, parts.length, batch, device), **one_row)[0].unflatten(0, (batch, -1))
    return one_by_one(values, how, parts, lambda document, _: (states(**document), None))[0]


def one_by_one(
    values: dict[str, Any],
    how: Scan,
    parts: SequenceParts,
    run: Callable[[dict[str, Any], Any], tuple[torch.Tensor, Any]],
    given: torch.Tensor | None = None,
) -> tuple[torch.Tensor, list[Any]]:
    """Run a scan of some heads, a document at a time. Return its output, and by row the state behind the last document.

    Args:
        run: returns output and state of a document, given its arguments and the state before it.
        given: the state before the first token, of a document that goes on there.
    """
    tokens = _with_tokens(values, how)
    rows, states = [], []
    for of_batch, starts in rows_of(parts, values[how.lead].shape[0]):
        state = None if given is None or starts[0] == 0 else given[of_batch]
        each = []
        for start, stop in itertools.pairwise((0, *starts[1:], parts.length)):
            out, left = run(
                {name: values[name][of_batch].narrow(dim, start, stop - start) for name, dim in tokens.items()}, state
            )
            each.append(out)
            state = None
        rows.append(concatenated(each, tokens[how.lead]))
        states.append(left)
    return concatenated(rows, 0), states


def _with_tokens(values: Mapping[str, Any], how: Scan) -> dict[str, int]:
    """Return the dimension of tokens of each argument that has them."""
    return {name: dim for name, (dim, _) in how.arguments.items() if dim is not None and values.get(name) is not None}


@cache_tensors(16)
def _borders(documents: tuple[tuple[int, ...], ...], length: int, batch: int, device: torch.device) -> torch.Tensor:
    """Return cu_seqlens of all rows one after another."""
    rows = documents if len(documents) == batch else documents * batch
    starts = [row * length + start for row, of_row in enumerate(rows) for start in of_row]
    return torch.tensor([*starts, batch * length], dtype=torch.int32, device=device)


@cache_tensors(16)
def _numbers(documents: tuple[tuple[int, ...], ...], length: int, batch: int, device: torch.device) -> torch.Tensor:
    """Return seq_idx: the number of each token's document in its row."""
    rows = torch.zeros(len(documents), length, dtype=torch.int32)
    for numbers, starts in zip(rows, documents, strict=True):
        numbers[list(starts[1:])] = 1
    return rows.cumsum(1, dtype=torch.int32).expand(batch, -1).to(device)


# ---- which function takes what


class Convolution(NamedTuple):
    x: str
    weight: str
    states: tuple[str, ...]


_HEADS, _PER_HEAD, _SHARED = Argument(1, 2), Argument(None, 0), Argument(1, None)
_DELTA_RULE = Scan(
    lead="value",
    arguments=dict.fromkeys(("query", "key", "value", "g", "beta"), _HEADS),
    packed="cu_seqlens",
    state="initial_state",
    final="output_final_state",
    two=True,
)
_MAMBA_2 = Scan(
    lead="hidden_states",
    arguments=dict.fromkeys(("hidden_states", "dt", "B", "C", "z"), _HEADS) | dict.fromkeys(("A", "D", "dt_bias"), _PER_HEAD),
    packed="seq_idx",
    state="initial_states",
    final="return_final_states",
)
_MAMBA_1 = Scan(
    lead="hidden_states",
    arguments=dict.fromkeys(("hidden_states", "dt", "z"), Argument(2, 1))
    | dict.fromkeys(("B", "C"), Argument(2, None))
    | dict.fromkeys(("A", "D", "delta_bias"), _PER_HEAD),
    final="return_last_state",
)
_RG_LRU = Scan(
    lead="hidden_states",
    arguments={"hidden_states": _HEADS, "recurrent_gate": _HEADS, "reset": _SHARED},
    state="recurrent_states",
    two=True,
)
SCANS = {
    "torch_chunk_gated_delta_rule": _DELTA_RULE,
    "chunk_gated_delta_rule": _DELTA_RULE,
    "chunk_kimi_delta_attention": _DELTA_RULE,
    "chunk_kda": _DELTA_RULE,
    "mamba2_chunk_scan": _MAMBA_2,
    "mamba_chunk_scan_combined": _MAMBA_2,
    "mamba_selective_scan": _MAMBA_1,
    "selective_scan_fn": _MAMBA_1,
    "_rnn_scan": _RG_LRU,
}
"""By the name of Transformers' function in PyTorch, which also one that runs a kernel bears, or by the kernel's own."""
CONVOLUTIONS = {"causal_conv1d_fn": Convolution("hidden_states", "weight", ("initial_states", "return_final_states"))}
FUSED = frozenset({"mamba2_split_conv1d_scan_combined", "mamba_split_conv1d_scan_combined", "mamba_inner_fn"})
"""Convolution and scan in one. Where these return None, models call the two."""
WHOLE = frozenset({"MiniMaxLightningAttention", "RwkvFeedForward", "RwkvSelfAttention", "ZayaCCAProjection"})
"""Classes of modules that mix tokens in code of their own: each rank runs them on all tokens."""
