"""Libraries that are compiled at first use: which file is loaded, which compiler builds it, and the remains of stopped builds."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.ops.compiling import NOT_TRUSTED, lacks, plant, stand_in
from tests.processes import ROOT, assert_gone, python

pytestmark = [pytest.mark.processes, pytest.mark.skipif(bool(lacks()), reason=str(lacks()))]
LOAD = """
import ctypes, subprocess, sys, warnings
from pathlib import Path
from ds_memo import compiled
source, longest = sys.argv[1:3]
compiled.LONGEST_S = float(longest)
with warnings.catch_warnings(record=True) as said:
    warnings.simplefilter("always")
    try:
        library = compiled.Library("small", Path(source), ("-shared", "-fPIC"))
        loaded = compiled.load(library, ctypes.CDLL)
        print("loaded", loaded.answer())
    except compiled.Unavailable as error:
        print("unavailable", error)
for warning in said:
    print(warning.category.__name__, warning.message)
"""


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("source") / "small.cpp"
    file.write_text('extern "C" int answer() { return 42; }\n')
    return file


@pytest.fixture
def counted(tmp_path: Path) -> tuple[str, Path]:
    """A compiler whose calls are counted, and the file that has a line for each."""
    return stand_in(tmp_path, 'exec c++ "$@"')


@pytest.fixture
def cache(tmp_path: Path, source: Path, counted: tuple[str, Path]) -> Path:
    """A cache with the library."""
    assert load(source, tmp_path / "cache", CXX=counted[0]) == ["loaded 42"]
    return tmp_path / "cache"


def load(
    source: Path, cache: Path | str, *, script: str = LOAD, longest: float = 100, cwd: Path = ROOT, **environment: str | None
) -> list[str]:
    """Load the library in a process and return its lines: the result, then the warnings."""
    done = python("-c", script, source, longest, cwd=cwd, XDG_CACHE_HOME=str(cache), **environment)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def library(cache: Path) -> Path:
    (found,) = cache.rglob("small*.so")
    return found


def builds(log: Path) -> int:
    return len(log.read_text().splitlines())


def test_other_programs_find_it_by_the_loaders_name(source: Path, cache: Path, counted: tuple[str, Path]) -> None:
    """Such as addr2line, with which torch's memory snapshots put names to C++ stacks. It is not compiled again."""
    read = LOAD + '\nprint(subprocess.run(["wc", "-c", loaded._name], capture_output=True, text=True).stdout)'
    lines = load(source, cache, script=read, CXX=counted[0])
    assert lines[0] == "loaded 42" and lines[1].startswith(f"{library(cache).stat().st_size} ")
    assert builds(counted[1]) == 1


def test_only_this_user_can_write_what_is_kept(source: Path, tmp_path: Path, counted: tuple[str, Path]) -> None:
    """Also under umask 0, and then it is still trusted."""
    before = os.umask(0)
    try:
        for _ in range(2):
            assert load(source, tmp_path / "cache", CXX=counted[0]) == ["loaded 42"]
    finally:
        os.umask(before)
    kept = library(tmp_path / "cache")
    assert [p.stat().st_mode & 0o777 for p in (kept, kept.parent, kept.parent.parent)] == [0o600, 0o700, 0o700]
    assert builds(counted[1]) == 1


def test_a_damaged_one_is_built_anew(source: Path, cache: Path, counted: tuple[str, Path]) -> None:
    """A full disk or a crash leaves half a library, which ends the process that loads it."""
    kept = library(cache)
    whole = kept.read_bytes()
    middle = len(whole) // 2
    a_byte = whole[:middle] + bytes([whole[middle] ^ 1]) + whole[middle + 1 :]
    another = Path(sys.modules["_ctypes"].__file__).read_bytes()
    for number, content in enumerate((whole[:middle], a_byte, another), 2):
        kept.write_bytes(content)
        for _ in range(2):
            assert load(source, cache, CXX=counted[0]) == ["loaded 42"]
        assert builds(counted[1]) == number and len(library(cache).read_bytes()) == len(whole)


@pytest.mark.parametrize("how", NOT_TRUSTED)
def test_what_others_may_have_written_is_not_loaded(
    source: Path, cache: Path, counted: tuple[str, Path], tmp_path: Path, how: str
) -> None:
    kept, proof = library(cache), tmp_path / "it was loaded"
    plant(kept, proof)
    distrust, said = NOT_TRUSTED[how]
    distrust(kept)
    (tmp_path / "temporary").mkdir()
    loaded, warning = load(source, cache, CXX=counted[0], TMPDIR=str(tmp_path / "temporary"))
    assert loaded == "loaded 42" and warning.startswith("MemoWarning ds_memo: ") and said in warning
    assert not proof.exists()
    assert builds(counted[1]) == 2 and not list((tmp_path / "temporary").iterdir())


def test_a_library_of_this_users_is_loaded(source: Path, cache: Path, counted: tuple[str, Path], tmp_path: Path) -> None:
    """The control of the test above: the planted library works."""
    plant(library(cache), tmp_path / "it was loaded")
    assert load(source, cache, CXX=counted[0]) == ["loaded -1"]
    assert (tmp_path / "it was loaded").exists() and builds(counted[1]) == 1


@pytest.mark.parametrize(
    ("cxx", "why"),
    {
        "no-such-compiler -O1": "no C++ compiler (CXX is no-such-compiler -O1, which is not on the PATH",
        "c++ 'x": "CXX is c++ 'x: no closing quotation; correct it or unset it",
        "c++ -include /no/such/header.h": "/no/such/header.h: No such file or directory",
    }.items(),
)
def test_why_it_is_not_available(source: Path, tmp_path: Path, cxx: str, why: str) -> None:
    (line,) = load(source, tmp_path, CXX=cxx)
    assert line.startswith("unavailable small is not available: ") and why in line


# ---- builds that are ended


def started(source: Path, cxx: str, cache: Path, log: Path, marker: str = "") -> subprocess.Popen[str]:
    """Start a process that is compiling."""
    before = builds(log)
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "XDG_CACHE_HOME": str(cache), "CXX": cxx, "MARKER": marker}
    command = [sys.executable, "-c", LOAD, str(source), "100"]
    process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 60
    while builds(log) == before:
        assert process.poll() is None and time.monotonic() < deadline, "it does not compile"
        time.sleep(0.02)
    return process


def test_an_interrupt_ends_compilers(source: Path, tmp_path: Path, marker: str) -> None:
    """A compiler is several processes. Their folder is removed, too."""
    cxx, log = stand_in(tmp_path, "sleep 600\nexit 1")
    process = started(source, cxx, tmp_path / "cache", log, marker)
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=60)
    assert_gone(marker)
    left = {p.name for p in (tmp_path / "cache").rglob("*") if not p.name.startswith(("ds_memo", "compiled", "lock"))}
    assert left == set()


def test_what_a_lost_machine_left_is_removed(source: Path, cache: Path) -> None:
    left = library(cache).with_name("build-1234abcd")
    left.mkdir()
    (left / "out.so").touch()
    library(cache).unlink()
    assert load(source, cache) == ["loaded 42"]
    assert not left.exists()


def test_two_processes_compile_once(source: Path, tmp_path: Path) -> None:
    cxx, log = stand_in(tmp_path, 'sleep 2\nexec c++ "$@"')
    first = started(source, cxx, tmp_path / "cache", log)
    assert load(source, tmp_path / "cache", CXX=cxx) == ["loaded 42"]
    assert first.communicate(timeout=60)[0] == "loaded 42\n"
    assert builds(log) == 1


def test_the_time_limit_ends_a_compiler_that_hangs_and_the_wait_for_one(source: Path, tmp_path: Path, marker: str) -> None:
    cxx, log = stand_in(tmp_path, "sleep 600")
    (line,) = load(source, tmp_path / "cache", longest=0.5, CXX=cxx, MARKER=marker)
    assert "was not done when the time limit ended" in line
    assert_gone(marker)
    other = started(source, cxx, tmp_path / "cache", log)
    try:
        (line,) = load(source, tmp_path / "cache", longest=0.5, CXX=cxx)
        assert "another process was still compiling when the time limit ended" in line
    finally:
        other.send_signal(signal.SIGINT)
        other.communicate(timeout=60)
