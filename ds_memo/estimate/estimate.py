"""Answer questions: one length on the best of the layouts; the longest sequence; the fewest GPUs; many lengths and methods."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace

from ds_memo.attention_kernel import AttentionKernel
from ds_memo.estimate import layout as layouts
from ds_memo.estimate.costs import Costs
from ds_memo.estimate.errors import EstimateError
from ds_memo.estimate.hardware import Hardware
from ds_memo.estimate.layout import GpuLayout
from ds_memo.estimate.methods import memo
from ds_memo.estimate.question import METHODS, OK, OOHM, OOM, Estimate, Question, check
from ds_memo.estimate.stock import stock
from ds_memo.units import GIB, round_up

GRAIN = 32
"""The longest length is found to one part in GRAIN of itself, or to 1 Ki tokens."""
KI = 1024
FIRST = 64
"""Ki tokens of the first length that is tried."""
_MOST_GPUS = 1 << 16


def estimate(question: Question) -> Estimate:
    """Return the best layout's answer: the fastest that fits; else one that lacks host memory, else one that lacks device memory.

    Raises:
        EstimateError: a value is out of range, or this model has no layout on these GPUs.
    """
    check(question)
    answers = [_on(question, layout) for layout in candidates(question)]
    return max(answers, key=lambda a: ((OOM, OOHM, OK).index(a.status), a.tgs or -a.device_total))


def candidates(question: Question) -> list[GpuLayout]:
    q = question
    node = int(q.hardware.gpus_per_node)
    split = q.tp is not None or q.cp is not None
    zero = q.zero if q.zero is not None else 0 if q.model.adapters else 1 if split and q.offload != "all" else 3
    if (q.tp, q.cp, q.sp) == (None, None, None):
        found = layouts.every_sp(q.model, q.gpus, zero, q.batch, node if q.method == "memo" else None)
    else:
        asked = GpuLayout(q.gpus, q.tp or 1, q.cp or 1, q.sp or 1, zero=zero)
        one = layouts.split(asked, q.model, node, q.ulysses) if q.method == "memo" else layouts.check(asked, q.model)
        found = [one] if q.tp is None or q.cp is not None else layouts.every_cp(one, q.batch)
    return [replace(layout, offload=q.offload) for layout in found]


def _on(question: Question, layout: GpuLayout) -> Estimate:
    """Return the answer for one layout."""
    model = question.model
    costs = Costs(model, question.hardware, layout, question.seq_length, question.profile)
    notes = [*question.model.notes, *_attention_notes(question.hardware, costs.attention)]
    if assumed := question.hardware.assumed:
        notes.append(f"assumed of {question.hardware.name}, neither measured nor published: {', '.join(assumed)}")
    if layout.dp > question.batch:
        more = f"{layout.dp} replicas work on {layout.dp} sequences a step"
        largest = layouts.largest_sp(question.model, question.gpus)
        if question.method != "memo" and layout.sp == largest < question.gpus:
            more = f"Ulysses ends at sp {largest} with {question.model.heads} heads on {question.gpus} GPUs: {more}"
        notes.append(f"{more}, not on {question.batch}")
    if question.seq_length % layout.ranks:
        padded = round_up(question.seq_length, layout.ranks)
        notes.append(f"{question.seq_length} tokens do not split into {layout.ranks} equal parts: pad them to {padded}")
    states = costs.host_state_bytes * question.ranks_on_node
    left = question.host_bytes - states
    if left < 0:
        why = f"host memory: the model's states alone take {states / GIB:.4g} of {question.host_bytes / GIB:.4g} GiB of the node"
        helps = "What helps: more GPUs on as many more nodes."
        answer = Estimate(question, layout, OOHM, f"{why}. {helps}", {}, 0.0)
    else:
        asked = replace(question, host_memory=left)
        answer = (memo if question.method == "memo" else stock)(asked, costs)
    host_bytes = answer.host_bytes + states
    return replace(
        answer,
        question=question,
        notes=tuple(notes),
        host_bytes=host_bytes,
        host_state_bytes=states,
        attention=costs.attention,
    )


def _attention_notes(machine: Hardware, kernels: Iterable[AttentionKernel]) -> list[str]:
    if not machine.attention_kernels:
        return [f"{machine.name} has one rate for all attention kernels"] if machine.attention else []
    rates = {rate: name for name, rate in machine.attention_kernels}
    return [
        f"the rate of attention's kernel {kernel.name} on {machine.name} is not known: it has that of {rates[rate]}"
        for kernel in kernels
        if rates[rate := machine.attention_rates(kernel.name)] != kernel.name
    ]


# ---- open questions


def longest(question: Question, tell: Callable[[Estimate], None] = lambda answer: None) -> tuple[Estimate | None, Estimate]:
    """Return the longest sequence that fits, in whole Ki tokens (None: 1 Ki does not fit), and the shortest found that does not.

    `question.seq_length` is ignored.

    Args:
        tell: called with the answer for each length.
    """

    def at(units: int) -> Estimate:
        answer = estimate(replace(question, seq_length=units * KI))
        tell(answer)
        return answer

    low, fits, high = 0, None, FIRST
    beyond = at(high)
    while beyond.status == OK:
        low, fits, high = high, beyond, 2 * high
        if high > 1 << 24:
            raise EstimateError("no sequence length is too long for this")
        beyond = at(high)
    while high - low > max(1, low // GRAIN):
        middle = (low + high) // 2
        answer = at(middle)
        if answer.status == OK:
            low, fits = middle, answer
        else:
            high, beyond = middle, answer
    return fits, beyond


def fewest_gpus(
    question: Question, tell: Callable[[Estimate], None] = lambda answer: None
) -> tuple[Estimate | None, Estimate | None]:
    """Return the fewest GPUs on which the length fits, and the last number tried that was too small.

    The search tries 1, 2, 4, … GPUs of a node, then 1, 2, 4, … nodes. It ends where more GPUs only add replicas and save no
    memory; the first answer is None then.

    Args:
        tell: called with the answer for each number.

    Raises:
        EstimateError: a value is out of range for any number of GPUs.
    """
    check(question)
    before: Estimate | None = None
    for gpus in _counts(int(question.hardware.gpus_per_node), _MOST_GPUS):
        try:
            tried = estimate(replace(question, gpus=gpus))
        except EstimateError:  # this model cannot be split over so many
            continue
        tell(tried)
        if tried.status == OK:
            return tried, before
        if before is not None and tried.status == before.status and _misses(tried) > 0.99 * _misses(before):
            return None, tried
        before = tried
    return None, before


def _misses(answer: Estimate) -> float:
    """Return the bytes needed of the memory that runs out."""
    return answer.host_bytes / answer.question.ranks_on_node if answer.status == OOHM else answer.device_total


def sweep(question: Question, lengths: Sequence[int]) -> list[Estimate]:
    """Return one answer per length."""
    return [estimate(replace(question, seq_length=length)) for length in lengths]


def compare(question: Question, lengths: Sequence[int]) -> list[Estimate]:
    """Return one answer per method and length. No method loses memory between blocks: memo has its plan, the others are given one
    as well, as PyTorch's expandable segments nearly are."""
    asked = [replace(question, method=method, plan=True) for method in METHODS]
    return [answer for method in asked for answer in sweep(method, lengths)]


def _counts(node: int, most: int) -> Iterator[int]:
    gpus = 1
    while gpus < node:
        yield gpus
        gpus *= 2
    gpus = node
    while gpus <= most:
        yield gpus
        gpus *= 2
