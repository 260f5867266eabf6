"""The backend that the user asked for, with the recipe's partition in place of its own."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from torch import fx

from ds_memo.compiled_layers.partition import CannotCompile, partition
from ds_memo.compiled_layers.torch_private import (
    AotAutograd,
    CustomPartitionerFn,
    InductorBackend,
    NamedBackend,
    boxed,
    get_hash_for_files,
)
from ds_memo.placement import PlacementKind

_SOURCES = tuple(str(path) for path in sorted(Path(__file__).parent.glob("*.py")))


def partitioned(backend: Any, kind: PlacementKind) -> tuple[Any, dict[str, Any]]:
    """Return a backend, for torch.compile, that splits graphs by the recipe of a kind of placement; and its options.

    Args:
        backend: innermost, as torch.compile wraps it.

    Raises:
        CannotCompile: its partition cannot be replaced.
    """
    if isinstance(backend, InductorBackend):
        options = dict(backend.config)
        if options.get("custom_partitioner_fn") is not None:
            raise CannotCompile("is compiled with a custom_partitioner_fn, and memo needs that place")
        options["custom_partitioner_fn"] = _RecipePartitioner(kind)
        options.pop("triton.cudagraphs", None)  # frames come and go: no graph of kernels repeats their addresses
        return "inductor", options
    compiler = backend.compiler_fn if isinstance(backend, NamedBackend) else backend
    parts = functools.partial(partition, kind=kind)
    if isinstance(compiler, AotAutograd):
        return AotAutograd(**{**compiler.kwargs, "partition_fn": parts}), {}
    if getattr(backend, "compiler_name", None) == "aot_eager":
        return AotAutograd(fw_compiler=_run_as_traced, partition_fn=parts, keep_inference_input_mutations=True), {}
    name = name_of(backend)
    raise CannotCompile(f'is compiled with backend="{name}", whose graphs memo cannot split: "inductor" and "aot_eager" it can')


def name_of(backend: Any) -> str:
    return getattr(backend, "compiler_name", None) or getattr(backend, "__name__", type(backend).__name__)


def _run_as_traced(module: fx.GraphModule, inputs: Sequence[Any]) -> Callable[[list[Any]], Any]:
    return boxed(module.forward)


class _RecipePartitioner(CustomPartitionerFn):
    def __init__(self, kind: PlacementKind) -> None:
        self._kind = kind

    def __call__(
        self, gm: fx.GraphModule, joint_inputs: Sequence[object], **kwargs: Any
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        return partition(gm, joint_inputs, kind=self._kind, **kwargs)

    def uuid(self) -> Any:  # None would not keep graphs out of inductor's caches: another partition's could come back
        return get_hash_for_files(_SOURCES), self._kind.name
