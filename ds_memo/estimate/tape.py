"""Forward, replay and backward of a list of ops: which bytes are asked for, and when they are given back.

The rules are autograd's. An op saves some of what it reads and makes; what no op saves is freed after its last reader; a backward
takes the gradient of an op's output, makes those of what it reads and adds up where there is one already, and then frees what it
saved. ds_memo keeps some outputs beside this, and a replay makes the others again before the first op that saved something.
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
    """Of the op and of its output."""
    nbytes: float
    reads: tuple[str, ...]
    saves: tuple[str, ...] = ()
    """Of what it reads, and its own name: what its backward needs."""
    inner: float = 0.0
    """Saved too, made by the op itself: float32 inside a norm, indices."""
    holds: tuple[str, ...] = ()
    """Alive until it is over, though it does not read them: a Python frame has names for them."""
    temporary: float = 0.0
    """Alive while it runs; what is inner and not saved is among it."""
    back: float = 0.0
    """Alive while its backward runs, beside gradients."""
    views: tuple[tuple[str, float], ...] = ()
    """(name, bytes) of what it reads only a part of: the gradient that it makes is no larger than that part."""
    kind: str = "plain"
    """As ds_memo.solve.costs has it: gemm, attention, choice; all others are plain."""
    adds: bool = False
    """A sum: the gradient of its output is that of its inputs too, in the same memory."""
    no_gradient: bool = False
    """Nothing flows back through it: what it makes are indices."""
    moved: float | None = None
    """Bytes that it moves through device memory. None: what it reads and makes, once; 0 for GEMMs and attention."""
    moved_back: float | None = None
    """The same in its backward. None: gradients and what it saved, once."""


@dataclass
class _Memory:
    """A list of requests in order: (name, bytes) asks for memory, (name, None) gives it back."""

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
    """A layer's ops in the order of the forward; the last one's output is the layer's."""

    ops: tuple[Op, ...]

    @property
    def saved_bytes(self) -> float:
        """What autograd saves of a token."""
        sizes = self._sizes
        return sum(sizes[name] for name in self.saved) + sum(op.inner for op in self.ops)

    @property
    def saved(self) -> set[str]:
        """What some op saves of what it reads and makes."""
        return {name for op in self.ops for name in op.saves}

    @property
    def _sizes(self) -> dict[str, float]:
        return {op.name: op.nbytes for op in self.ops} | {INPUT: self.ops[-1].nbytes}

    def forward(self, kept: Collection[str]) -> list[tuple[str, float | None]]:
        """The forward's requests under ds_memo, which keeps these; autograd saves nothing."""
        memory = _Memory()
        self._run(memory, self.ops, {*kept, self.ops[-1].name}, (), keeps_inner=False)
        return memory.requests

    def backward(self, given: Collection[str], replays: bool = True) -> list[tuple[str, float | None]]:
        """The backward's requests.

        Args:
            given: what is there, and stays until the layer is over: its input, and what a replay is supplied with.
            replays: what autograd would have saved is made again; otherwise it is there already, and counts for nothing.
        """
        memory = _Memory()
        savers = Counter(name for op in self.ops for name in op.saves)
        sizes = self._sizes
        holders: Counter[str] = Counter()  # of the memory of a gradient
        gradients = {self.ops[-1].name: GRADIENT}
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
        """Ops up to the last that something is saved of or in; GEMMs that nobody reads then are left out."""
        last = max(i for i, op in enumerate(self.ops) if op.inner or op.saves)
        self._run(memory, self.ops[: last + 1], saved, given, keeps_inner=True)

    def _run(self, memory: _Memory, ops: Sequence[Op], stay: Collection[str], given: Collection[str], keeps_inner: bool) -> None:
        last_read = {name: i for i, op in enumerate(ops) for name in (*op.reads, *op.holds)}
        for i, op in enumerate(ops):
            memory.malloc(f"{op.name}.inner", op.inner)
            if op.name not in given:
                memory.malloc(f"{op.name}.temporary", op.temporary if keeps_inner else op.temporary - op.inner)
                if op.name in stay or op.name in last_read:
                    memory.malloc(op.name, op.nbytes)
                memory.free(f"{op.name}.temporary")
                if not keeps_inner:
                    memory.free(f"{op.name}.inner")
            for name in (*op.reads, *op.holds):
                if name not in stay and last_read[name] == i:
                    memory.free(name)


def _release(memory: _Memory, holders: Counter[str], gradient: str) -> None:
    """A gradient has one reader less, and goes with the last. The one that the layer's backward began with is not the layer's."""
    if gradient == GRADIENT:
        return
    holders[gradient] -= 1
    if not holders[gradient]:
        memory.free(gradient)


def most_alive(requests: Sequence[tuple[str, float | None]]) -> float:
    """The most bytes at once."""
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
