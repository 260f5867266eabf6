"""Memory requests of a list of ops: the mallocs and frees of its forward, replay and backward.

The rules are autograd's. An op saves some of its inputs and outputs; a tensor that no op saves is freed after its last reader. An
op's backward reads the gradient of the output, makes those of the inputs, adds them to existing ones, and frees the saved ones.
ds_memo also keeps some outputs; a replay makes the others again before the backward of the last op that saved something.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

INPUT, GRADIENT = "input", "gradient"


@dataclass(frozen=True)
class Op:
    """One op with one output. Sizes are bytes of one token."""

    name: str
    """Name of the op and of its output."""
    nbytes: float
    reads: tuple[str, ...]
    saves: tuple[str, ...] = ()
    """Names among `reads`, and its own name, that its backward needs."""
    inner: float = 0.0
    """Also saved, made by the op itself: float32 values of a norm, indices."""
    holds: tuple[str, ...] = ()
    """Tensors that it does not read but that live until its end: a Python frame holds them."""
    temporary: float = 0.0
    """Bytes alive while it runs, including `inner` bytes that are not saved."""
    back: float = 0.0
    """Bytes alive while its backward runs, without gradients."""
    views: tuple[tuple[str, float], ...] = ()
    """(name, bytes) of inputs of which it reads a part: their gradient has the size of that part."""
    kind: str = "plain"
    """A kind of ds_memo.solve.costs: gemm, attention, choice; all others are plain."""
    adds: bool = False
    """True for a sum: its output's gradient is its inputs' gradient too, in the same memory."""
    no_gradient: bool = False
    """True if its output has no gradient, as indices have none."""
    moved: float | None = None
    """Bytes that it moves through device memory. None: its inputs and output, once; 0 for GEMMs and attention."""
    moved_back: float | None = None
    """The same in its backward. None: gradients and saved tensors, once."""


@dataclass
class _Memory:
    """A list of requests in order: (name, bytes) allocates, (name, None) frees."""

    requests: list[tuple[str, float | None]] = field(default_factory=list)
    alive: set[str] = field(default_factory=set)

    def malloc(self, name: str, nbytes: float) -> None:
        if nbytes > 0:
            self.requests.append((name, nbytes))
            self.alive.add(name)

    def free(self, name: str) -> None:
        if name in self.alive:
            self.requests.append((name, None))
            self.alive.remove(name)


@dataclass(frozen=True)
class Tape:
    """A layer's ops in forward order; the last op's output is the layer's."""

    ops: tuple[Op, ...]

    @property
    def saved_bytes(self) -> float:
        """Bytes that autograd saves of a token."""
        sizes = self._sizes
        return sum(sizes[name] for name in self.saved) + sum(op.inner for op in self.ops)

    @property
    def saved(self) -> set[str]:
        """Names of the tensors that some op saves."""
        return {name for op in self.ops for name in op.saves}

    @property
    def _sizes(self) -> dict[str, float]:
        return {op.name: op.nbytes for op in self.ops} | {INPUT: self.ops[-1].nbytes}

    def forward(self, kept: Collection[str]) -> list[tuple[str, float | None]]:
        """Return the forward's requests under ds_memo, which keeps these; autograd saves nothing."""
        memory = _Memory()
        self._run(memory, self.ops, {*kept, self.ops[-1].name}, (), keeps_inner=False)
        return memory.requests

    def backward(
        self, given: Collection[str], replays: bool = True, frees_gradient: bool = False
    ) -> list[tuple[str, float | None]]:
        """Return the backward's requests.

        Args:
            given: tensors that exist until the layer is over: its input, and what a replay is supplied with.
            replays: True if a replay makes what autograd would have saved; else it exists already and does not count.
            frees_gradient: True if the gradient of the output dies with its last reader, as under torch's checkpointing, and
                counts; else it belongs to the caller.
        """
        memory = _Memory()
        savers = Counter(name for op in self.ops for name in op.saves)
        sizes = self._sizes
        holders: Counter[str] = Counter()  # users of a gradient's memory
        gradients = {self.ops[-1].name: GRADIENT}
        if frees_gradient:
            memory.malloc(GRADIENT, self.ops[-1].nbytes)
        holders[GRADIENT] = 1
        pending = replays
        for op in reversed(self.ops):
            gradient = gradients.pop(op.name, None)
            if gradient is None:
                continue
            if pending and (op.saves or op.inner):
                self._replay(memory, given, savers)
                pending = False
            memory.malloc(f"{op.name}.back", op.back)
            for name in () if op.no_gradient else op.reads:
                mine = gradient if op.adds else f"d.{name}.{op.name}"
                holders[mine] += 1
                if not op.adds:
                    memory.malloc(mine, dict(op.views).get(name, sizes[name]))
                if name in gradients:
                    before, total = gradients[name], f"d.{name}.sum.{op.name}"
                    memory.malloc(total, sizes[name])
                    for part in (before, mine):
                        _release(memory, holders, part)
                    mine, holders[total] = total, 1
                gradients[name] = mine
            memory.free(f"{op.name}.back")
            _release(memory, holders, gradient)
            memory.free(f"{op.name}.inner")
            for name in op.saves:
                savers[name] -= 1
                if not savers[name]:
                    memory.free(name)
        for name in list(memory.alive):
            memory.free(name)
        return memory.requests

    def _replay(self, memory: _Memory, given: Collection[str], saved: Collection[str]) -> None:
        """Run the ops up to the last that saves something, without outputs that no op reads."""
        last = max(i for i, op in enumerate(self.ops) if op.inner or op.saves)
        self._run(memory, self.ops[: last + 1], saved, given, keeps_inner=True)

    def _run(self, memory: _Memory, ops: Sequence[Op], kept: Collection[str], given: Collection[str], keeps_inner: bool) -> None:
        last_read = {name: i for i, op in enumerate(ops) for name in (*op.reads, *op.holds)}
        for i, op in enumerate(ops):
            memory.malloc(f"{op.name}.inner", op.inner)
            if op.name not in given:
                memory.malloc(f"{op.name}.temporary", op.temporary if keeps_inner else op.temporary - op.inner)
                if op.name in kept or op.name in last_read:
                    memory.malloc(op.name, op.nbytes)
                memory.free(f"{op.name}.temporary")
                if not keeps_inner:
                    memory.free(f"{op.name}.inner")
            for name in (*op.reads, *op.holds):
                if name not in kept and last_read[name] == i:
                    memory.free(name)


def _release(memory: _Memory, holders: Counter[str], gradient: str) -> None:
    """Remove one user of a gradient, and free it after the last."""
    holders[gradient] -= 1
    if not holders[gradient]:
        memory.free(gradient)


def most_alive(requests: Sequence[tuple[str, float | None]]) -> float:
    """Return the most bytes alive at once."""
    sizes: dict[str, float] = {}
    total = most = 0.0
    for name, nbytes in requests:
        if nbytes is None:
            total -= sizes.pop(name)
        else:
            sizes[name] = nbytes
            total += nbytes
        most = max(most, total)
    return most
