"""The allocator's core on its own, compiled with g++: unit tests, and a stress against a model under the sanitizers."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from tests.ops.compiling import compiler, lacks

pytestmark = pytest.mark.processes

HERE = Path(__file__).parent
CSRC = HERE.parents[1] / "ops" / "csrc"
SANITIZERS = {
    "plain": [],
    "address": ["-fsanitize=address,undefined", "-fno-sanitize-recover=all"],
    "thread": ["-fsanitize=thread"],
}
THREADS = 4
slow = pytest.mark.slow

WITHOUT = {
    "the overlap guard": ("if (last->state == kLive) return false;", ""),
    "the bounds check": (
        "return size && offset <= bytes_ && size <= bytes_ - offset;",
        "return size && offset + size <= bytes_ + 4096;",
    ),
    "a part of the overlap guard": ("last->begin < offset + size; ++last", "last->begin < offset + 1; ++last"),
    "the fences": ("range->state = fence;", "range->state = fence & kFree;"),
    "retired arenas": ("if (fresh && fresh->live()) {", "if (fresh && fresh->live() > 8) {"),
    "abandoning a visit": ("abandoned_ = true;", ""),
}
"""Changes to the core in the negative controls: a text and its replacement."""
EVERYDAY = ("the overlap guard", "the fences", "retired arenas")


@cache
def sanitizer_is_missing(name: str, folder: Path) -> str | None:
    """Return why the sanitizer cannot be used here, or None."""
    program = folder / f"empty_{name}"
    source = program.with_suffix(".cpp")
    source.write_text("int main() {}\n")
    built = subprocess.run([*compiler(), *SANITIZERS[name], source, "-o", program], capture_output=True, text=True)
    if built.returncode:
        return f"{compiler()[0]} has no {name} sanitizer: {built.stderr.strip().splitlines()[-1]}"
    ran = subprocess.run([program], capture_output=True, text=True)
    return f"a program with the {name} sanitizer does not start: {ran.stderr[:200]}" if ran.returncode else None


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Return a function that compiles a program of this folder, once per set of arguments, with any csrc/."""
    if reason := lacks():
        pytest.skip(reason)
    folder = tmp_path_factory.mktemp("core")

    @cache
    def build(program: str, sanitizer: str = "plain", csrc: Path = CSRC) -> Path:
        if reason := sanitizer_is_missing(sanitizer, folder):
            pytest.skip(reason)
        out = folder / f"{program}_{sanitizer}_{csrc.name}"
        quick = csrc != CSRC or program == "core_test"  # most of what compiling takes is optimizing
        strict = ["-std=c++20", "-Wall", "-Wextra", "-Werror", "-g1", "-pthread", "-O0" if quick else "-O1"]
        command = [*compiler(), *strict, *SANITIZERS[sanitizer], f"-I{csrc}", HERE / f"{program}.cpp", "-o", out]
        done = subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr
        return out

    return build


def run(*command: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=300)


def test_unit_tests_of_the_core(built):
    done = run(built("core_test", "address"))
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("sanitizer", ["address", "thread"])
def test_random_requests_from_four_threads(built, sanitizer):
    requests = 250_000
    done = run(built("core_stress", sanitizer), requests, THREADS, 1)
    assert done.returncode == 0, done.stdout + done.stderr
    counts = {name: int(count) for name, count in map(str.split, done.stdout.splitlines())}
    assert counts.pop("waits") > requests / 1000  # fences were made and found
    assert sum(counts.values()) <= requests and counts["hit"] > requests / 10 and min(counts.values()) > requests / 1000


@pytest.mark.parametrize("part", [part if part in EVERYDAY else pytest.param(part, marks=slow) for part in WITHOUT])
def test_the_stress_notices_what_is_missing(built, tmp_path, part):
    """Negative controls: a core that lacks one of its guards."""
    text, instead = WITHOUT[part]
    source = (CSRC / "allocator_core.h").read_text()
    assert source.count(text) == 1, f"{part} reads otherwise now: correct WITHOUT"
    mutant = tmp_path / part.replace(" ", "_")
    mutant.mkdir()
    (mutant / "allocator_core.h").write_text(source.replace(text, instead))
    done = run(built("core_stress", csrc=mutant), 1_000_000, THREADS, 1)
    assert done.returncode != 0, f"without {part} the stress passed"
    assert "WRONG" in done.stdout or done.returncode < 0, done.stdout + done.stderr


@slow
def test_the_thread_sanitizer_notices_a_missing_lock(tmp_path):
    """Negative control: the mutex locks nothing."""
    if reason := lacks() or sanitizer_is_missing("thread", tmp_path):
        pytest.skip(reason)
    source = (CSRC / "allocator_core.h").read_text()
    assert source.count("std::mutex mutex;") == 1
    unlocked = source.replace("std::mutex mutex;", "struct { void lock() {} void unlock() {} } mutex;")
    (tmp_path / "allocator_core.h").write_text(unlocked)
    stress = (HERE / "core_stress.cpp").read_text().replace("lock_guard<std::mutex> lock(model.", "lock_guard lock(model.")
    (tmp_path / "stress.cpp").write_text(stress)
    flags = ["-std=c++20", "-g", "-O1", "-pthread", *SANITIZERS["thread"], f"-I{tmp_path}"]
    done = run(*compiler(), *flags, tmp_path / "stress.cpp", "-o", tmp_path / "stress")
    assert done.returncode == 0, done.stderr
    assert run(tmp_path / "stress", 100_000, THREADS, 1).returncode != 0
