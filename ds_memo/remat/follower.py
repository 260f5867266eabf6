"""How far a mode has followed its recipe, and the C++ that follows it.

C++ (ops/csrc/follower.h) runs nearly every op of a layer without Python, and leaves the unusual ones to the modes. Both read and
write the same state: a Follower of the library, or where that cannot be compiled a PythonFollower. So the modes' Python does the
whole work there, and is what C++ is compared with.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch
from torch._ops import OpOverload
from torch.multiprocessing.reductions import StorageWeakRef

from ds_memo.compiled import Unavailable
from ds_memo.errors import warn
from ds_memo.ops import library as ops
from ds_memo.remat import op_policy
from ds_memo.remat.modes import Mode
from ds_memo.remat.op_policy import OpKind, kind_of
from ds_memo.remat.tensors import storage_of, tensor_leaves
from ds_memo.remat.undo import changed

TORCHS = ((2, 11), (2, 15))
"""The first and the last torch whose interpreter's table is known. In others Python follows."""
COST = (
    "record and replay run in Python, which takes the host about twice as long per layer as torch.utils.checkpoint. "
    "Training goes on; install what is missing for the C++ ({})"
)


class PythonFollower:
    """The state of a Follower, for ops that all run in Python."""

    def __init__(self) -> None:
        self.next = 0
        """Index of the recipe's next op."""
        self.packs = 0
        """Number of tensors that autograd has saved."""
        self.following = True
        """False: the call has left its recipe."""
        self.noted: list[torch.Tensor] | None = None
        """Takes what autograd saves; None: it is counted."""
        self.flops = 0
        """FLOPs of products that C++ has computed."""
        self.awaiting: tuple[int, torch.Tensor] | None = None
        """Index and product of the op whose bias comes next."""
        self._left_out: dict[int, StorageWeakRef] = {}
        """Storages that depend on products which the replay leaves out. They are few: such products come last in a layer."""

    @property
    def leaves_any_out(self) -> bool:
        return bool(self._left_out)

    def leaves_out(self, storage: int) -> bool:
        return storage in self._left_out

    def leave_out(self, tensor: torch.Tensor) -> None:
        if (storage := storage_of(tensor)) and storage not in self._left_out:
            self._left_out[storage] = StorageWeakRef(tensor.untyped_storage())

    def overwritten(self, storage: int) -> None:
        del self._left_out[storage]


class _Followed:
    """What follows recipes in this process."""

    library: ModuleType | None = None
    why: str | None = None
    """Why there is no library; None: it was not looked for yet."""
    in_python = False
    """True: Python follows, whatever there is."""


def library(warn: Callable[[str], None] = warn) -> ModuleType | None:
    """Return the library that follows, loaded or compiled now; None: Python does.

    Args:
        warn: called, by the first model alone, with the reason why there is none.
    """
    if _Followed.library is None and _Followed.why is None:
        _Followed.library, _Followed.why = _load(warn)
        if _Followed.library is None:
            warn(COST.format(_Followed.why))
    return None if _Followed.in_python else _Followed.library


def way() -> dict[str, Any]:
    """Return how record and replay go, for the report: "C++" with the ops of this process so far, or "Python" and why."""
    found = library()
    if found is None:
        return {"way": "Python", "why": "asked for" if _Followed.in_python else _Followed.why}
    in_cpp, in_python = found.counts()
    return {"way": "C++", "ops_in_cpp": in_cpp, "ops_in_python": in_python}


@contextmanager
def in_python() -> Iterator[None]:
    """Have Python follow in calls that begin inside the block: the reference that C++ is compared with."""
    with changed(_Followed, "in_python", True):
        yield


def _load(warn: Callable[[str], None]) -> tuple[ModuleType | None, str]:
    version = tuple(map(int, torch.__version__.split(".")[:2]))
    if not TORCHS[0] <= version <= TORCHS[1]:
        first, last = (".".join(map(str, torch)) for torch in TORCHS)
        return None, f"torch is {torch.__version__}, and its interpreter is known from {first} to {last}"
    why = ""
    for backend in dict.fromkeys(("cuda" if torch.cuda.is_available() and torch.version.cuda else "cpu", "cpu")):
        try:
            found = ops.load(backend, warn)
        except Unavailable as error:
            why = why or str(error)
        else:
            _install(found)
            return found, ""
    return None, why


def _install(found: ModuleType) -> None:
    from torch.utils.checkpoint import CheckpointError, _StopRecomputationError

    found.install(_describe, Mode)
    found.raises(_StopRecomputationError, CheckpointError, getattr(torch._C, "_get_graph_exec_group", None))


_NUMBERS = {OpKind.PLAIN: 0, OpKind.GEMM: 1, OpKind.BATCHED: 2, OpKind.MUTATES: 3, OpKind.ATTENTION: 4, OpKind.CHOICE: 4}
_OTHER = 5


def _describe(name: str, overload: str) -> tuple[int, bool, bool, bool, bool, bool]:
    """Tell C++ what an op is: the fields of its Op."""
    namespace, _, packet = name.partition("::")
    try:
        func = getattr(getattr(getattr(torch.ops, namespace), packet), overload or "default")
    except (AttributeError, RuntimeError):
        func = None
    if not isinstance(func, OpOverload):
        return _OTHER, False, False, False, False, False
    return (
        _NUMBERS.get(kind_of(func), _OTHER),
        func in (op_policy.aten.mm.default, op_policy.aten.addmm.default),
        func in op_policy.ADDS,
        func in op_policy.VIEWS,
        func is op_policy.aten.add_.Tensor,
        op_policy.may_read_values(func),
    )


def program(ops: Sequence[Any]) -> Any:
    """Return a recipe's ops as C++ reads them."""
    found = library()
    assert found is not None
    return found.Program([(op.func.name() if isinstance(op.func, OpOverload) else "", op) for op in ops])


def follow(mode: Any, call: Any, recipe: Any, replays: bool) -> Any:
    """Return the state of a mode that begins to follow a recipe: the library's, or Python's."""
    found = library()
    return PythonFollower() if found is None else found.Follower(recipe.program, mode, call, replays)


def leave_out_all(at: Any, made: Any) -> None:
    for tensor in tensor_leaves(made):
        at.leave_out(tensor)
