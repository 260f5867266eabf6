"""Write docs/support.md, what works with what, from the tables that tests go through:

python -m tests.support
"""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path

from benchmarks.cpu.tile_models import groups_of
from tests import architectures
from tests.compiled_layers.test_gradients import MODELS as COMPILED
from tests.deepspeed.matrix import every_case
from tests.nvme.test_training import CASES, HYBRIDS

DOCS = Path(__file__).parents[1] / "docs"
PAGE = DOCS / "support.md"
FAMILIES = Path(__file__).parent / "data" / "sequence_families.json"
_HEAD = """# What works with what

Which models and settings give the losses and gradients of training without memo, which are refused, and which does no test try?

"Exact" means equal up to rounding, within the bar of the test that is named. These tests ran on CPUs; what ran on a GPU is in
[evidence](evidence.md). `python -m tests.support` writes this page from the tests' own tables.

## DeepSpeed's settings

Exact for Llama on two ranks, with one sequence to a rank and with two ranks to a sequence, with gradient accumulation
and without (`tests/deepspeed/matrix.py`):

"""


def page() -> str:
    """Return the page's text."""
    return _HEAD + "\n".join([*_settings(), "", *_others(), "", *_models(), ""])


def _settings() -> list[str]:
    cases = [case for ranks in (1, 2) for case in every_case(ranks)]
    stages, offloads = sorted({case.stage for case in cases}), sorted({case.offload for case in cases})
    lines = [f"| offload | {' | '.join(f'ZeRO-{stage}' for stage in stages)} |", "|---" * (len(stages) + 1) + "|"]
    for offload in offloads:
        found = [sorted({case.dtype for case in cases if (case.stage, case.offload) == (stage, offload)}) for stage in stages]
        lines.append(f"| {offload or 'none'} | {' | '.join(', '.join(dtypes) or 'DeepSpeed has none' for dtypes in found)} |")
    return lines


def _others() -> list[str]:
    files = sorted({case[0] for case in (*CASES, *HYBRIDS)})
    return [
        "## Other settings",
        "",
        "| setting | exact with | refused | untested |",
        "|---|---|---|---|",
        "| fp16 | ZeRO-2 under Trainer: `tests/deepspeed/test_scripts.py` | | other stages |",
        "| GEMMs in fp8 | `torch._scaled_mm`, torchao's float8 linears: `tests/remat/test_fp8.py` | | MXFP8, NVFP4 |",
        f"| `torch.compile` | {', '.join(COMPILED)}: `tests/compiled_layers` | DeepCompile, `tile_tokens` | other models |",
        f"| `nvme` | {', '.join(files)}: `tests/nvme` | network file systems without O_DIRECT | other models |",
        "| AutoTP | Llama, two ranks: `tests/deepspeed/test_tensor_parallel.py` | | with Ulysses |",
        "| FSDP2, by `ds_memo.attach` | Llama, two ranks: `tests/distributed/test_fsdp2.py` | | on a GPU |",
        "| DDP and FSDP2, by Accelerate | Llama, two ranks: `tests/integrations/test_scripts.py` | | on a GPU |",
        "| FSDP's version 1 | | `FullyShardedDataParallel` | |",
        "| pipeline parallelism | | `PipelineModule` | |",
        "| devices | CPUs, NVIDIA's GPUs | AMD's (ROCm), and all others | a MIG slice: its memory counts, and `mfu` is None |",
    ]


def _models() -> list[str]:
    """Return the models' table: one row for each pair of answers, tiles and sequence parallelism."""
    tiles = groups_of((DOCS / "tiles_models.md").read_text())
    by_ranks = json.loads(FAMILIES.read_text())
    rows: dict[tuple[str, str], list[str]] = defaultdict(list)
    for name, reason in tiles.items():
        rows[_in_tiles(reason), _in_parts(by_ranks, name)].append(name)
    order = sorted(rows, key=lambda row: (-len(rows[row]), row))
    untested: dict[str, list[str]] = defaultdict(list)
    for name, reason in architectures.NOT_COMPARED.items():
        untested[reason].append(name)
    return [
        "## Models",
        "",
        f"All {len(tiles)} causal language models below are exact in whole layers, at alpha 0 and 0.5",
        "(`tests/remat/test_architectures.py`). In tiles, what cannot be cut runs whole ([reasons](tiles_models.md)). With",
        "`sequence_parallel_size` 2 (Ulysses), and 4 as 2 × 2 (Ulysses × ring), a model is exact, also with packed documents, or",
        "refused by name (`tests/sequence/test_sweep.py`).",
        "",
        "| tiles | ranks that share a sequence | models |",
        "|---|---|---|",
        f"| {order[0][0]} | {order[0][1]} | the other {len(rows[order[0]])}, named in [Models in tiles](tiles_models.md) |",
        *(f"| {in_tiles} | {in_parts} | {', '.join(sorted(rows[in_tiles, in_parts]))} |" for in_tiles, in_parts in order[1:]),
        "",
        "Untested:",
        "",
        *(f"- {', '.join(sorted(names))}: {reason}" for reason, names in untested.items()),
    ]


def _in_tiles(reason: str) -> str:
    return {"all": "all layers", "some": "some layers", "whole:": "none"}[reason.split()[0]]


def _in_parts(by_ranks: dict[str, dict[str, str]], name: str) -> str:
    two, four = (_said(by_ranks[ranks].get(name)) for ranks in ("2", "4"))
    return two if two == four else f"{two}; 2 × 2 ranks: {four}"


def _said(verdict: str | None) -> str:
    if verdict is None:
        return "untested"
    return verdict if verdict.startswith("exact") else f"refused: it {verdict}"


if __name__ == "__main__":
    PAGE.write_text(page())
