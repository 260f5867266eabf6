"""Answer a question: try the layouts and return the best one's time, memory and binding constraint."""

from __future__ import annotations

from dataclasses import replace

from ds_memo.estimate import layout as layouts
from ds_memo.estimate.costs import Costs
from ds_memo.estimate.layout import Layout
from ds_memo.estimate.methods import memo, stock
from ds_memo.estimate.offload import host_state_bytes
from ds_memo.estimate.question import OK, OOHM, OOM, Estimate, Question, check
from ds_memo.units import GIB, round_up


def estimate(question: Question) -> Estimate:
    """Return the best layout's answer: the fastest that fits; else one that lacks host memory, else one that lacks device memory.

    Raises:
        EstimateError: a value is out of range, or this model has no layout on these GPUs.
    """
    check(question)
    answers = [_on(question, layout) for layout in candidates(question)]
    return max(answers, key=lambda a: ((OOM, OOHM, OK).index(a.status), a.tgs or -a.device_total))


def candidates(question: Question) -> list[Layout]:
    q = question
    split = q.tp is not None or q.cp is not None
    zero = q.zero if q.zero is not None else 1 if split and q.offload != "all" else 3
    if (q.tp, q.cp, q.sp) == (None, None, None):
        found = layouts.ulysses(q.model, q.gpus, zero, q.batch)
    else:
        one = layouts.check(Layout(q.gpus, q.tp or 1, q.cp or 1, q.sp or 1, zero), q.model)
        found = [one] if q.tp is None or q.cp is not None else layouts.every_cp(one, q.batch)
    return [replace(layout, offload=q.offload) for layout in found]


def _on(question: Question, layout: Layout) -> Estimate:
    """Return the answer for one layout."""
    model = question.model
    costs = Costs(model, question.hardware, layout, question.seq_length, question.profile)
    notes = list(question.model.notes)
    if layout.dp > question.batch:
        more = f"{layout.dp} replicas work on {layout.dp} sequences a step"
        largest = layouts.largest_sp(question.model, question.gpus)
        if layout.sp == largest < question.gpus:
            more = f"Ulysses ends at sp {largest} with {question.model.heads} heads on {question.gpus} GPUs: {more}"
        notes.append(f"{more}, not on {question.batch}")
    if question.seq_length % layout.ranks:
        padded = round_up(question.seq_length, layout.ranks)
        notes.append(f"{question.seq_length} tokens do not split into {layout.ranks} equal parts: pad them to {padded}")
    states = host_state_bytes(model, layout) * question.ranks_on_node
    left = question.host_bytes - states
    if left < 0:
        why = f"host memory: the model's states alone take {states / GIB:.4g} of {question.host_bytes / GIB:.4g} GiB of the node"
        answer = Estimate(question, layout, OOHM, f"{why}. What helps: more GPUs on as many more nodes.", {}, 0.0)
    else:
        asked = replace(question, host_memory=left)
        answer = (memo if question.method == "memo" else stock)(asked, costs)
    host_bytes = answer.host_bytes + states
    return replace(answer, question=question, notes=tuple(notes), host_bytes=host_bytes, host_state_bytes=states)
