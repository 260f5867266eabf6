"""The house: imports point downwards, words are the glossary's, docstrings begin as they should."""

import ast
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

REPO = Path(__file__).parents[1]
CODE = sorted(path for folder in ("ds_memo", "ops", "launch", "benchmarks", "examples") for path in (REPO / folder).rglob("*.py"))
PAGES = sorted([*REPO.glob("*.md"), *REPO.glob("docs/*.md")])
OLD_WORDS = re.compile(
    r"\b(autopilot|takeover|skeleton|cautions?|sharers?|graves?|plain layers?|lean layers?|at_length|"
    r"Homes|Places|plain_bytes|Chosen|Decisions|SeenGemm|Stays|has_part|[Ww]hoever|[Ss]omebody|[Nn]obody)\b"
)
"""Words of earlier versions, for which there are terms of the field."""

SHARED_NAMES = {
    "_Running": "private: what one file notes of a thread",
    "_Thread": "private: what one file notes of a thread",
    "_Watch": "private: the start-up hook stands outside of the package and imports nothing of it",
}
"""Names of several classes of the package, and why."""


def lint_imports(folder: Path) -> subprocess.CompletedProcess:
    command = [sys.executable, "-c", "from importlinter.cli import lint_imports_command; lint_imports_command()", "--no-cache"]
    return subprocess.run(command, cwd=folder, env={"PYTHONPATH": str(folder), "PATH": ""}, capture_output=True, text=True)


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    shutil.copytree(REPO / "ds_memo", tmp_path / "ds_memo", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(REPO / "pyproject.toml", tmp_path)
    return tmp_path


@pytest.mark.processes
def test_imports_point_downwards(copy: Path) -> None:
    done = lint_imports(copy)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.processes
def test_forbidden_imports_are_found(copy: Path) -> None:
    """Upwards and lazily, torch in the solver, Transformers outside hf, a frame that knows addresses or a host a runner."""
    for file, line in (
        ("plan/trace.py", "def late():\n    from ds_memo.runtime import attach\n"),
        ("solve/run_costs.py", "import torch\n"),
        ("autotune/tuner.py", "import transformers\n"),
        ("swap/engine.py", "from ds_memo.planned_alloc import runtime\n"),
        ("remat/layer_host.py", "def late():\n    from ds_memo.remat.recorded import Recorded\n"),
    ):
        with open(copy / "ds_memo" / file, "a") as module:
            module.write(f"\n\n{line}")
    done = lint_imports(copy)
    assert done.returncode == 1 and "BROKEN" in done.stdout, done.stdout + done.stderr
    assert "ds_memo.plan.trace -> ds_memo.runtime.attach" in done.stdout
    assert "ds_memo.solve.run_costs -> torch" in done.stdout
    assert "ds_memo.autotune.tuner -> transformers" in done.stdout
    assert "ds_memo.swap.engine -> ds_memo.planned_alloc.runtime" in done.stdout
    assert "ds_memo.remat.layer_host -> ds_memo.remat.recorded" in done.stdout


def test_no_old_word_is_left() -> None:
    found = [
        f"{path.relative_to(REPO)}:{number}: {line.strip()[:100]}"
        for path in (*CODE, *PAGES)
        if path.name != "CHANGELOG.md"
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if OLD_WORDS.search(line)
    ]
    assert not found, "\n".join(found)


def test_no_two_classes_share_a_name() -> None:
    places: dict[str, list[str]] = {}
    for path in (*(REPO / "ds_memo").rglob("*.py"), *(REPO / "ops").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                places.setdefault(node.name, []).append(f"{path.relative_to(REPO)}:{node.lineno}")
    shared = {name: found for name, found in places.items() if len(found) > 1}
    assert shared.keys() == SHARED_NAMES.keys(), shared


def test_no_docstring_begins_with_of() -> None:
    found = []
    for path in (*CODE, *sorted((REPO / "tests").rglob("*.py"))):
        for node in ast.walk(ast.parse(path.read_text())):
            text = node.value.value if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) else None
            if isinstance(text, str) and text.startswith("Of "):
                found.append(f"{path.relative_to(REPO)}:{node.lineno}")
    assert not found, "\n".join(found)
