"""For any content of a file, `ds-memo` exits with 0, 1 or 2 and one short message."""

from __future__ import annotations

import contextlib
import io
import json
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, given, settings

from ds_memo.cli import main as cli
from ds_memo.config import MemoConfig, MemoConfigError, memo_config
from tests.everyday import everyday
from tests.fuzz.damage import CORPUS, jsons, pickles, sections, texts

pytestmark = pytest.mark.processes

MOST_ERR = 4096
MODEL, HARDWARE = (str(CORPUS / name) for name in ("model.json", "hardware.json"))
ESTIMATE = ("estimate", "--gpus", "1", "--seq-length", "4K")
KINDS = {  # what is damaged: (its strategy, the name it is given, the command)
    "trace": (texts("trace.txt"), "trace.txt", ("plan", "FILE", "--solver", "greedy", "-o", "OUT.json")),
    "pickle": (pickles("snapshot.pickle"), "run.pickle", ("plan", "FILE", "--solver", "greedy")),
    "plan": (jsons("plan.json"), "plan.json", ("show", "FILE", "-o", "OUT.html")),
    "report": (jsons("report.json"), "report.json", ("report", "FILE")),
    "profile": (jsons("profile.json"), "p.json", (*ESTIMATE, "--model", MODEL, "--hardware", HARDWARE, "--profile", "FILE")),
    "model": (jsons("model.json"), "model.json", (*ESTIMATE, "--model", "FILE", "--hardware", HARDWARE)),
    "hardware": (jsons("hardware.json"), "machine.json", (*ESTIMATE, "--model", MODEL, "--hardware", "FILE")),
    "memo": (jsons("memo.json"), None, ("run", "--memo", "FILE", "true")),
}  # fmt: skip
FEW, MANY = 40, 500


def settled(examples: int) -> settings:
    """Return settings: the same cases in every run, without a time limit per case."""
    checks = [HealthCheck.too_slow, HealthCheck.function_scoped_fixture, HealthCheck.data_too_large, HealthCheck.filter_too_much]
    phases = [Phase.explicit, Phase.generate, Phase.shrink]
    return settings(max_examples=examples, derandomize=True, database=None, suppress_health_check=checks, phases=phases)


def words_of(kind: str, data: bytes, folder: Path) -> list[str]:
    """Write the file, and return the command."""
    _, name, words = KINDS[kind]
    if name is None:
        file = data.decode("utf-8", "replace").replace("\0", "")
    else:
        (folder / name).write_bytes(data)
        file = str(folder / name)
    return [file if word == "FILE" else word.replace("OUT", str(folder / "out")) for word in words]


def ends_well(code: int | str | None, err: str) -> None:
    assert code in (0, 1, 2), (code, err[:1000])
    assert "Traceback" not in err and len(err) <= MOST_ERR, err[:MOST_ERR]
    assert err.replace("\n", "").isprintable()


def in_this_process(words: list[str]) -> None:
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = cli.main(words)
        except SystemExit as end:
            code = end.code
    ends_well(code, err.getvalue())
    assert "\x1b" not in out.getvalue()


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_not_damaged_is_taken(kind: str, tmp_path: Path) -> None:
    name = {"pickle": "snapshot.pickle", "trace": "trace.txt"}.get(kind)
    words = words_of(kind, (CORPUS / (name or f"{kind}.json")).read_bytes(), tmp_path)
    with contextlib.redirect_stdout(io.StringIO()):
        assert cli.main(words) == 0


@pytest.mark.parametrize("examples", everyday([FEW, MANY], [FEW], []))
@pytest.mark.parametrize("kind", KINDS)
def test_damaged_files(kind: str, examples: int, tmp_path: Path) -> None:
    pytest.importorskip("plotly")

    @settled(examples)
    @given(KINDS[kind][0])
    def run(data: bytes) -> None:
        in_this_process(words_of(kind, data, tmp_path))

    run()


# ---- the section


@settled(500)
@given(sections("memo.json"))
def test_sections(section: object) -> None:
    try:
        found = memo_config(section)
    except MemoConfigError as error:
        assert 0 < len(str(error)) < MOST_ERR and str(error).replace("\n", "").isprintable()
    else:
        assert isinstance(found, MemoConfig)
        json.dumps(found.model_dump())
