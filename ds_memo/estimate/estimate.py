"""From a question to an answer: what a step takes in time and memory, and what runs out first.

method           kept of a layer                                                layers
none             everything autograd saves                                      as they are
full_recompute   the input                                                      torch's or Megatron's checkpointing
full_swap        everything, on the host                                        the paper's ablation
paper            input and attention output, and alpha of everything else       MEMO as published
memo             input and attention output, and alpha of the GEMM outputs      this project, solved by ds_memo.solve
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from ds_memo.estimate import flops, requests
from ds_memo.estimate import layout as layouts
from ds_memo.estimate.costs import Costs
from ds_memo.estimate.errors import EstimateError
from ds_memo.estimate.hardware import Hardware
from ds_memo.estimate.layout import Layout
from ds_memo.estimate.model import Model
from ds_memo.estimate.simulate import Simulated, simulate
from ds_memo.solve.costs import LayerCosts, RunCosts, Working
from ds_memo.solve.homes import solve
from ds_memo.solve.memory import device_bytes
from ds_memo.solve.paper import paper_alpha
from ds_memo.solve.places import Places
from ds_memo.solve.refusals import NothingFits
from ds_memo.units import GIB, round_up

if TYPE_CHECKING:
    from ds_memo.profile.sample import Profile

METHODS = ("memo", "paper", "full_recompute", "full_swap", "none")
PLANNED = ("memo", "paper", "full_swap")
"""Methods that bring the memory planner along."""
OK, OOM, OOHM = "ok", "oom", "oohm"
_MOST_BYTES = 1 << 60
"""The solver counts in 64 bits."""
TILE_TOKENS = 1024
"""Tokens of a tile of ds_memo's tiled loss (launch/loss.py)."""
LOGIT_BYTES, FUSED_LOGIT_BYTES = 12, 4
"""Per logit: bf16 and fp32 logits and their gradients; Megatron's vocabulary-parallel loss works in place in fp32."""
CACHE_GROWTH = 12
"""Without a plan, the cache of what comes and goes in a step grows to this many times its bytes before it settles: in the paper's
ablation flushes begin between 64 Ki and 128 Ki tokens, which is between 9 and 19 times."""


@dataclass(frozen=True)
class Question:
    """What to estimate. Sizes are of the whole job; those that are None are chosen."""

    model: Model
    hardware: Hardware
    gpus: int
    seq_length: int
    batch: int = 1
    """Sequences per optimizer step, accumulated one at a time on each replica."""
    method: str = "memo"
    tp: int | None = None
    cp: int | None = None
    sp: int | None = None
    zero: int | None = None
    alpha: float | None = None
    plan: bool | None = None
    host_memory: float | None = None
    """Bytes of a node."""
    profile: Profile | None = None
    """Of a real run on the same number of ranks per sequence: its layers stand in for formulas, under memo."""

    @property
    def planned(self) -> bool:
        return self.method in PLANNED if self.plan is None else self.plan

    @property
    def host_bytes(self) -> float:
        """Bytes of a node that activations may take."""
        return self.hardware.host_memory * self.hardware.host_usable if self.host_memory is None else self.host_memory

    @property
    def megatron(self) -> bool:
        """Whether it is laid out as the paper's runs were (tensor and context parallel, with Megatron's kernels)."""
        return self.tp is not None or self.cp is not None or (self.method == "paper" and self.sp is None)

    @property
    def ranks_on_node(self) -> int:
        return min(self.gpus, int(self.hardware.gpus_per_node))


@dataclass(frozen=True)
class Estimate:
    """The answer. Times of a whole optimizer step; bytes of one GPU, host bytes of one node."""

    question: Question
    layout: Layout
    status: str
    binding: str
    device_bytes: dict[str, float]
    host_bytes: float
    step_s: float | None = None
    alpha: float | None = None
    resident_layers: int | None = None
    seconds: dict[str, float] = field(default_factory=dict)
    run: RunCosts | None = field(default=None, repr=False)
    places: Places = field(default_factory=Places)
    notes: tuple[str, ...] = ()

    @property
    def sequences(self) -> int:
        """In a step: every replica has at least one."""
        return self.layout.dp * math.ceil(self.question.batch / self.layout.dp)

    @property
    def mfu(self) -> float | None:
        """0 to 1."""
        if self.step_s is None:
            return None
        q = self.question
        work = flops.sequence_flops(q.seq_length, q.model.active_parameters, q.model.layers, q.model.attention_width)
        return flops.mfu(self.sequences * work, self.step_s, q.gpus, q.hardware.peak)

    @property
    def tgs(self) -> float | None:
        """Tokens per GPU and second."""
        return None if self.step_s is None else self.sequences * self.question.seq_length / (self.step_s * self.question.gpus)

    @property
    def device_total(self) -> float:
        return sum(self.device_bytes.values())

    def simulated(self) -> Simulated:
        """The schedule of one forward and backward, in virtual time."""
        return simulate(self.run, self.alpha or 0.0, self.places)

    def as_json(self) -> dict[str, Any]:
        layout = self.layout
        return {
            "status": self.status,
            "mfu": self.mfu,
            "tgs": self.tgs,
            "step_s": self.step_s,
            "alpha": self.alpha,
            "resident_layers": self.resident_layers,
            "homes": {name: len(layers) for name, layers in self.places._asdict().items()},
            "binding": self.binding,
            "device_gib": self.device_total / GIB,
            "host_gib": self.host_bytes / GIB,
            "parts": {
                "device_gib": {name: nbytes / GIB for name, nbytes in self.device_bytes.items()},
                "step_s": self.seconds,
            },
            "method": self.question.method,
            "plan": self.question.planned,
            "seq_length": self.question.seq_length,
            "gpus": self.question.gpus,
            "sequences": self.sequences,
            "layout": {"tp": layout.tp, "cp": layout.cp, "sp": layout.sp, "dp": layout.dp, "zero": layout.zero},
            "notes": list(self.notes),
        }


def estimate(question: Question) -> Estimate:
    """The best layout's answer: the fastest of those that fit; else the one that lacks host memory, else device memory.

    Raises:
        EstimateError: a value that is out of range, or no layout for this model on these GPUs.
    """
    check(question)
    answers = [_on(question, layout) for layout in candidates(question)]
    return max(answers, key=lambda a: ((OOM, OOHM, OK).index(a.status), a.tgs or -a.device_total))


def check(question: Question) -> None:
    for name in ("gpus", "seq_length", "batch"):
        if getattr(question, name) < 1:
            raise EstimateError(f"{name} is {getattr(question, name)}, expected at least 1")
    model = question.model
    if model.layers * requests.saved_bytes(model, question.seq_length) > _MOST_BYTES:
        raise EstimateError(f"{model.name} at {question.seq_length} tokens is beyond any machine: no whole numbers for its bytes")
    if question.method not in METHODS:
        raise EstimateError(f"method is {question.method!r}, expected one of {', '.join(METHODS)}")
    if question.alpha is not None:
        if question.method not in ("memo", "paper"):
            raise EstimateError(f"alpha {question.alpha} with method {question.method}: only memo and paper have an alpha")
        if not 0 <= question.alpha <= 1:
            raise EstimateError(f"alpha is {question.alpha}, expected 0 to 1")


def candidates(question: Question) -> Iterable[Layout]:
    q = question
    zero = q.zero if q.zero is not None else 1 if q.megatron else 3
    if (q.tp, q.cp, q.sp) == (None, None, None):
        if q.megatron:
            return layouts.megatron(q.model, q.hardware, q.gpus, zero, q.batch)
        return layouts.ulysses(q.model, q.gpus, zero, q.batch)
    return [layouts.check(Layout(q.gpus, q.tp or 1, q.cp or 1, q.sp or 1, zero), q.model)]


def _on(question: Question, layout: Layout) -> Estimate:
    """The answer on one layout."""
    costs = Costs(question.model, question.hardware, layout, question.seq_length, question.megatron and question.method != "memo")
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
    answer = _memo(question, costs) if question.method == "memo" else _published(question, costs)
    return replace(answer, notes=tuple(notes))


# ---- methods


def _memo(question: Question, costs: Costs) -> Estimate:
    layout, model = costs.layout, question.model
    states = _states(costs)
    working = {
        "gathered parameters": _gathered(costs),
        "logits of a tile": min(costs.tokens, TILE_TOKENS) * model.vocab * LOGIT_BYTES,
    }
    loose = 1.0 if question.planned else question.hardware.fragmentation
    budget = question.hardware.usable_device_bytes - sum(states.values())
    layers = costs.layers(Costs.memo_layer) if question.profile is None else _measured(question.profile, costs).layers
    run = RunCosts(
        layers=layers,
        d2h_bytes_per_s=question.hardware.d2h,
        h2d_bytes_per_s=question.hardware.h2d,
        host_budget=int(question.host_bytes / question.ranks_on_node),
        device_budget=int(budget / loose),
        working_bytes=int(sum(working.values())),
        head_s=costs.head_s,
    )
    try:
        homes = solve(run, alpha=question.alpha, planned=question.planned)
    except NothingFits as nothing:
        status = OOHM if nothing.where == "host" else OOM
        why = str(nothing) if budget > 0 else _too_large(question, layout, states)
        least = {
            "transients": max(layer.working_without_attention.backward for layer in layers),
            "reload buffers": 2 * max(layer.smallest_frame_bytes for layer in layers),
        }
        parts = _parts(question, states, {**working, **least})
        host = nothing.needed * question.ranks_on_node if status == OOHM else 0.0
        return Estimate(question, layout, status, why, parts, host)
    kept = _frames(run, homes.places, homes.alpha)
    name = "resident layers and reload buffers" if homes.places.swapped(model.layers) else "layers that stay"
    working |= {"transients": homes.device_bytes - run.working_bytes - kept, name: kept}
    parts = _parts(question, states, working)
    if sum(parts.values()) > question.hardware.device_memory:  # as an alpha that was asked for may
        return Estimate(question, layout, OOM, _device_use(question, parts), parts, 0.0)
    answer = Estimate(
        question,
        layout,
        OK,
        homes.binding,
        parts,
        homes.host_bytes * question.ranks_on_node,
        alpha=homes.alpha,
        resident_layers=len(homes.places.residents),
        run=run,
        places=homes.places,
    )
    return _timed(answer, costs)


def _too_large(question: Question, layout: Layout, states: dict[str, float]) -> str:
    """Where nothing that is done with activations helps."""
    whole, usable = sum(states.values()) / GIB, question.hardware.usable_device_bytes / GIB
    helps = "more GPUs" if layout.zero == 3 else "a higher ZeRO stage, more GPUs"
    return f"device memory: the model's states alone take {whole:.4g} of {usable:.4g} GiB. What helps: {helps}, a smaller model."


def _frames(run: RunCosts, places: Places, alpha: float) -> int:
    """Bytes of the device that layers keep and reload: the peak, not counting what comes and goes inside a layer."""
    nothing = dict.fromkeys(("working", "working_at_0", "working_without_attention"), Working())
    return device_bytes(replace(_each(run, lambda layer: replace(layer, **nothing)), working_bytes=0), places, alpha)


def _each(run: RunCosts, change: Callable[[LayerCosts], LayerCosts]) -> RunCosts:
    """The run with every layer changed. Layers that were the same object are the same object again: the solver counts on it."""
    changed = {layer: change(layer) for layer in set(run.layers)}
    return replace(run, layers=tuple(changed[layer] for layer in run.layers))


def _measured(profile: Profile, costs: Costs) -> RunCosts:
    """The layers as measured, at this length and layout. What ranks exchange inside them is measured, or added by formula."""
    at = [(1, max(1, round(costs.tokens)))] * len(profile.kinds)
    run = profile.costs(at, 0, 0, ranks_per_sequence=costs.layout.ranks)
    if profile.ranks_per_sequence > 1:
        return run
    there, again = costs.layer.exchange, costs.layer.exchange_replay

    def longer(layer: LayerCosts) -> LayerCosts:
        forward_s, backward_s, replay_s = layer.forward_s + there, layer.backward_s + there, layer.replay_s + again
        return replace(layer, forward_s=forward_s, backward_s=backward_s, replay_s=replay_s)

    return _each(run, longer)


def _published(question: Question, costs: Costs) -> Estimate:
    """The paper's methods. Its MEMO falls back to plain, unplanned training where that fits, unless an alpha is asked for."""
    model, method = question.model, question.method
    if method == "paper" and question.alpha is None:
        plain = _published(replace(question, method="none", plan=False), costs)
        if plain.status == OK:
            return replace(plain, question=question, alpha=1.0, binding=f"everything fits without swapping: {plain.binding}")
    states, layer, layers = _states(costs), costs.paper_layer(), costs.layers(Costs.paper_layer)
    skeletal = costs.skeletal_bytes
    working = {
        "none": {"activations of all layers": sum(layer.plain_bytes for layer in layers)},
        "full_recompute": {"inputs of all layers": model.layers * costs.hidden_bytes, "one layer's activations": skeletal},
    }.get(method, {"rounding buffers": 2 * skeletal})
    megatron = costs.layout.tp * costs.layout.cp > 1
    working |= {
        "gathered parameters": _gathered(costs),
        "transients": costs.transient_bytes,
        "logits": costs.tokens * model.vocab * (FUSED_LOGIT_BYTES if megatron else LOGIT_BYTES),
    }
    parts = _parts(question, states, working)
    binding = _device_use(question, parts)
    answer = Estimate(question, costs.layout, OOM, binding, parts, 0.0)
    if sum(parts.values()) > question.hardware.device_memory:
        return answer
    rate = question.hardware.d2h
    run = RunCosts(layers, rate, question.hardware.h2d, 0, 0, head_s=costs.head_s)
    if method in ("none", "full_recompute"):
        run = _plain(run, costs, recomputes=method == "full_recompute")
        swapless = replace(answer, status=OK, run=run, places=Places(residents=frozenset(range(model.layers))))
        return _timed(replace(swapless, resident_layers=model.layers if method == "none" else 0), costs)
    swapped = max(0, model.layers - 2)
    alpha = 1.0 if method == "full_swap" else question.alpha
    host_bound = hides = False
    if alpha is None:
        alpha, host_bound, hides = _papers_alpha(question, layer, swapped)
    host = _pinned(layer, alpha) * swapped * question.ranks_on_node
    use = f"host memory: {host / GIB:.0f} of {question.host_bytes / GIB:.0f} GiB of the node at alpha {alpha:g}"
    if host > question.host_bytes:
        return replace(answer, status=OOHM, binding=f"{use}, pinned blocks rounded up to powers of two", host_bytes=host)
    if host_bound:
        binding = use
    elif hides:
        binding = f"link: at alpha {alpha:g} a layer's copy takes as long as its forward"
    residents = frozenset(range(swapped, model.layers))
    swapping = replace(answer, status=OK, binding=binding, host_bytes=host, alpha=alpha, resident_layers=len(residents))
    return _timed(replace(swapping, run=run, places=Places(residents=residents)), costs)


def _papers_alpha(question: Question, layer: LayerCosts, swapped: int) -> tuple[float, bool, bool]:
    """The paper's program, with its pinned blocks; whether the host, or the link, bounds it."""
    link = paper_alpha(
        input_bytes=layer.nbytes("input"),
        attention_bytes=layer.attention_bytes,
        other_bytes=layer.split_bytes,
        bandwidth=min(question.hardware.d2h, question.hardware.h2d) * question.hardware.quiet_link,
        layer_forward_s=layer.forward_s,
        layers=swapped + 2,
        host_bytes=math.inf,
    )
    link = link or 0.0
    block = int(question.host_bytes / max(1, swapped * question.ranks_on_node))
    largest = 1 << max(0, block.bit_length() - 1)  # that a power of two may have
    host = max(0.0, (largest - layer.whole_bytes) / layer.split_bytes)
    return min(link, host), host < link, link <= host and link < 1


def _pinned(layer: LayerCosts, alpha: float) -> int:
    """Host bytes of a layer's block: PyTorch's pinned allocator rounds up to a power of two."""
    return 1 << max(0, math.ceil(layer.whole_bytes + alpha * layer.split_bytes) - 1).bit_length()


def _plain(run: RunCosts, costs: Costs, recomputes: bool) -> RunCosts:
    """No copies; each layer's backward begins with nothing, or with its forward, which torch's checkpointing leaves as soon as
    all that is needed is there."""

    def again(layer: LayerCosts) -> float:
        return layer.forward_s if costs.megatron else max(layer.gemm_s + layer.attention_s, costs.gather_s)

    return _each(run, lambda layer: replace(layer, outputs=(), replay_s=again(layer) if recomputes else 0.0, gemm_s=0.0))


# ---- parts


def _states(costs: Costs) -> dict[str, float]:
    """bf16 parameters, gradients (fp32 under Megatron, bf16 under DeepSpeed), fp32 weights and two moments."""
    layout, mine = costs.layout, costs.model.parameters / costs.layout.tp
    shards, zero = layout.sharded, layout.zero
    gradient = 4 if layout.tp * layout.cp > 1 else 2
    return {
        "parameters": 2 * mine / (shards if zero >= 3 else 1),
        "gradients": gradient * mine / (shards if zero >= 2 else 1),
        "optimizer states": 12 * mine / (shards if zero >= 1 else 1),
    }


def _gathered(costs: Costs) -> float:
    """Under ZeRO-3: a layer's parameters, the next one's, and its gradients before they are reduced."""
    return 3 * 2 * costs.model.layer_parameters / costs.layout.tp if costs.layout.zero == 3 else 0.0


def _parts(question: Question, states: dict[str, float], working: dict[str, float]) -> dict[str, float]:
    loose = 0.0 if question.planned else (question.hardware.fragmentation - 1) * sum(working.values())
    reserve = {"context and communication": question.hardware.device_reserve}
    parts = states | working | ({"fragmentation": loose} if loose else {}) | reserve
    return {name: nbytes for name, nbytes in parts.items() if nbytes > 0}


def _device_use(question: Question, parts: dict[str, float]) -> str:
    return f"device memory: {sum(parts.values()) / GIB:.1f} of {question.hardware.device_memory / GIB:.1f} GiB"


def _timed(answer: Estimate, costs: Costs) -> Estimate:
    """Simulate one sequence; a step has as many as fall on a replica, and one optimizer step."""
    question, simulated = answer.question, answer.simulated()
    rounds = answer.sequences // answer.layout.dp
    kinds: dict[str, float] = {}
    for span in simulated.spans:
        if span.stream == "compute":
            kinds[span.kind] = kinds.get(span.kind, 0.0) + rounds * (span.end - span.begin)
    seconds = rounds * simulated.seconds
    if not question.planned and _flushes(answer):
        kinds["allocator"] = question.hardware.stall * seconds
        seconds += kinds["allocator"]
    kinds["optimizer"] = costs.optimizer_s
    return replace(answer, step_s=seconds + costs.optimizer_s, seconds=kinds)


def _flushes(answer: Estimate) -> bool:
    """Whether the caching allocator keeps on giving back its cache."""
    parts = answer.device_bytes
    comes_and_goes = sum(parts.get(name, 0.0) for name in ("one layer's activations", "transients", "logits", "logits of a tile"))
    stays = answer.device_total - comes_and_goes - parts.get("fragmentation", 0.0)
    return stays + CACHE_GROWTH * comes_and_goes > answer.question.hardware.device_memory
