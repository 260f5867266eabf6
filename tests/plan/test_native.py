"""The compiled search: which file is loaded, which compiler builds it, and the remains of stopped builds."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.ops.compiling import NOT_TRUSTED, compiler, lacks, plant, stand_in
from tests.processes import ROOT, assert_gone, python

pytestmark = [pytest.mark.processes, pytest.mark.skipif(bool(lacks()), reason=str(lacks()))]
LOAD = """
import warnings
from ds_memo.compiled import Unavailable
from ds_memo.plan import native
with warnings.catch_warnings(record=True) as said:
    warnings.simplefilter("always")
    try:
        print("loaded", native.load().ds_memo_dsa_search is not None)
    except Unavailable as error:
        print("unavailable", error)
for warning in said:
    print(warning.category.__name__, warning.message)
"""


def load(cache: Path | str, **environment: str | None) -> list[str]:
    """Load the library in a process and return its lines: the result, then the warnings."""
    done = python("-c", LOAD, **{"XDG_CACHE_HOME": str(cache), **environment})
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The library, built by the compiler."""
    folder = tmp_path_factory.mktemp("made")
    assert load(folder) == ["loaded True"]
    return library(folder)


@pytest.fixture
def quick(tmp_path: Path, made: Path) -> tuple[str, Path]:
    """A stand-in compiler that copies the built library and saves some seconds, and the file that counts its calls."""
    return stand_in(tmp_path, f'cat {made} > "$out"')


@pytest.fixture
def cache(tmp_path: Path, quick: tuple[str, Path]) -> Path:
    """A cache with the library."""
    assert load(tmp_path / "cache", CXX=quick[0]) == ["loaded True"]
    return tmp_path / "cache"


def library(cache: Path) -> Path:
    (found,) = cache.rglob("dsa_search*.so")
    return found


def builds(log: Path) -> int:
    return len(log.read_text().splitlines())


def test_it_is_compiled_once(cache: Path, quick: tuple[str, Path]) -> None:
    assert load(cache, CXX=quick[0]) == ["loaded True"]
    assert builds(quick[1]) == 1


READ_BY_ANOTHER = """
import subprocess
from ds_memo.plan import native
print(subprocess.run(["wc", "-c", native.load()._name], capture_output=True, text=True))
"""


def test_other_programs_find_it_by_the_loaders_name(cache: Path, quick: tuple[str, Path]) -> None:
    """Such as addr2line, with which torch's memory snapshots put names to C++ stacks."""
    done = python("-c", READ_BY_ANOTHER, XDG_CACHE_HOME=str(cache), CXX=quick[0])
    assert f"stdout='{library(cache).stat().st_size} " in done.stdout, done.stdout + done.stderr


def test_only_this_user_can_write_what_is_kept(tmp_path: Path, quick: tuple[str, Path]) -> None:
    """Also under umask 0, and then it is still trusted."""
    before = os.umask(0)
    try:
        for _ in range(2):
            assert load(tmp_path / "cache", CXX=quick[0]) == ["loaded True"]
    finally:
        os.umask(before)
    kept = library(tmp_path / "cache")
    assert [p.stat().st_mode & 0o777 for p in (kept, kept.parent, kept.parent.parent)] == [0o600, 0o700, 0o700]
    assert builds(quick[1]) == 1


@pytest.mark.parametrize("damage", ["empty", "half", "a byte", "a few bytes fewer", "another library"])
def test_a_damaged_one_is_built_anew(cache: Path, quick: tuple[str, Path], damage: str) -> None:
    """A full disk or a crash leaves half a library, which ends the process that loads it."""
    kept = library(cache)
    whole = kept.read_bytes()
    middle = len(whole) // 2
    contents = {"empty": b"", "half": whole[:middle], "a few bytes fewer": whole[:-7]}
    contents["a byte"] = whole[:middle] + bytes([whole[middle] ^ 1]) + whole[middle + 1 :]
    contents["another library"] = Path(sys.modules["_ctypes"].__file__).read_bytes()
    kept.write_bytes(contents[damage])
    for _ in range(2):
        assert load(cache, CXX=quick[0]) == ["loaded True"]
    assert builds(quick[1]) == 2 and len(library(cache).read_bytes()) == len(whole)


@pytest.mark.parametrize("how", NOT_TRUSTED)
def test_what_others_may_have_written_is_not_loaded(cache: Path, quick: tuple[str, Path], tmp_path: Path, how: str) -> None:
    kept, proof = library(cache), tmp_path / "it was loaded"
    plant(kept, proof)
    distrust, said = NOT_TRUSTED[how]
    distrust(kept)
    (tmp_path / "temporary").mkdir()
    loaded, warning = load(cache, CXX=quick[0], TMPDIR=str(tmp_path / "temporary"))
    assert loaded == "loaded True" and warning.startswith("MemoWarning ds_memo: ") and said in warning
    assert not proof.exists()
    assert builds(quick[1]) == 2 and not list((tmp_path / "temporary").iterdir())


def test_a_library_of_this_users_is_loaded(cache: Path, quick: tuple[str, Path], tmp_path: Path) -> None:
    """The control of the tests above: the planted library works."""
    plant(library(cache), tmp_path / "it was loaded")
    assert load(cache, CXX=quick[0]) == ["loaded True"]
    assert (tmp_path / "it was loaded").exists() and builds(quick[1]) == 1


def test_a_relative_cache_folder_is_ignored(cache: Path, quick: tuple[str, Path], tmp_path: Path) -> None:
    """It would depend on the working directory."""
    plant(library(cache), tmp_path / "it was loaded")
    done = python("-c", LOAD, cwd=tmp_path, XDG_CACHE_HOME="cache", HOME=str(tmp_path / "home"), CXX=quick[0])
    assert done.stdout.splitlines() == ["loaded True"], done.stderr
    assert not (tmp_path / "it was loaded").exists()
    assert library(tmp_path / "home" / ".cache").is_file()


@pytest.mark.parametrize("cache", ["a file", "/proc"])
def test_a_cache_that_cannot_be_written_is_not_a_missing_compiler(tmp_path: Path, quick: tuple[str, Path], cache: str) -> None:
    (tmp_path / "a file").touch()
    (tmp_path / "temporary").mkdir()
    loaded, warning = load(tmp_path / cache, CXX=quick[0], TMPDIR=str(tmp_path / "temporary"))
    assert loaded == "loaded True" and "cannot be made" in warning and "no C++ compiler" not in warning
    assert not list((tmp_path / "temporary").iterdir())


@pytest.mark.parametrize(
    ("cxx", "why"),
    {
        "no-such-compiler -O1": "no C++ compiler (CXX is no-such-compiler -O1, which is not on the PATH",
        "c++ 'x": "CXX is c++ 'x: no closing quotation; correct it or unset it",
        "false": "false failed: exit status 1",
    }.items(),
)
def test_why_it_is_not_available(tmp_path: Path, cxx: str, why: str) -> None:
    (line,) = load(tmp_path, CXX=cxx)
    assert line.startswith("unavailable dsa_search is not available: ") and why in line


def test_a_compiler_of_several_words(tmp_path: Path) -> None:
    assert load(tmp_path, CXX=f"env  LC_ALL=C {' '.join(compiler())}") == ["loaded True"]


def test_what_the_compiler_says_is_shown_on_one_line(tmp_path: Path) -> None:
    (line,) = load(tmp_path, CXX=f"{' '.join(compiler())} -include /no/such/header.h")
    assert "/no/such/header.h: No such file or directory" in line


def test_a_full_disk_is_named(tmp_path: Path) -> None:
    """A real full disk; the compiler's message needs no room on it."""
    mounted = ["unshare", "-m", "sh", "-c", f'mount -t tmpfs -o size=64k none {tmp_path} && exec "$@"', "sh"]
    if subprocess.run([*mounted, "true"], capture_output=True).returncode:
        pytest.skip("needs the right to mount a file system")
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "XDG_CACHE_HOME": str(tmp_path)}
    done = subprocess.run([*mounted, sys.executable, "-c", LOAD], env=environment, capture_output=True, text=True, timeout=120)
    (line,) = done.stdout.splitlines()
    assert line.startswith("unavailable dsa_search is not available: ") and "No space left on device" in line


# ---- builds that are ended


def started(cxx: str, cache: Path, log: Path, marker: str = "") -> subprocess.Popen[str]:
    """Start a process that is compiling."""
    before = builds(log)
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "XDG_CACHE_HOME": str(cache), "CXX": cxx, "MARKER": marker}
    process = subprocess.Popen([sys.executable, "-c", LOAD], env=environment, stdout=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 60
    while builds(log) == before:
        assert process.poll() is None and time.monotonic() < deadline, "it does not compile"
        time.sleep(0.02)
    return process


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL, signal.SIGINT], ids=lambda how: how.name)
def test_compilers_end_with_the_process(tmp_path: Path, marker: str, how: signal.Signals) -> None:
    """A compiler is several processes. Their folder is removed, too."""
    cxx, log = stand_in(tmp_path, "sleep 600\nexit 1")
    process = started(cxx, tmp_path / "cache", log, marker)
    process.send_signal(how)
    process.communicate(timeout=60)
    assert_gone(marker)
    left = {p.name for p in (tmp_path / "cache").rglob("*") if not p.name.startswith(("ds_memo", "compiled", "lock"))}
    assert left == set()


def test_what_a_lost_machine_left_is_removed(tmp_path: Path, quick: tuple[str, Path]) -> None:
    left = tmp_path / "cache" / "ds_memo" / "compiled" / "build-1234abcd"
    left.mkdir(parents=True)
    (left / "out.so").touch()
    for folder in (left.parent, left.parent.parent):
        folder.chmod(0o700)
    assert load(tmp_path / "cache", CXX=quick[0]) == ["loaded True"]
    assert not left.exists()


def test_two_processes_compile_once(tmp_path: Path, made: Path) -> None:
    cxx, log = stand_in(tmp_path, f'sleep 2\ncat {made} > "$out"')
    first = started(cxx, tmp_path / "cache", log)
    assert load(tmp_path / "cache", CXX=cxx) == ["loaded True"]
    assert first.communicate(timeout=60)[0] == "loaded True\n"
    assert builds(log) == 1


def test_the_time_limit_ends_a_compiler_that_hangs(tmp_path: Path, marker: str) -> None:
    cxx, _ = stand_in(tmp_path, "sleep 600")
    within = LOAD.replace("native.load()", "native.load(time.monotonic() + 0.5)").replace("import", "import time,", 1)
    done = python("-c", within, XDG_CACHE_HOME=str(tmp_path), CXX=cxx, MARKER=marker, timeout=60)
    assert "was not done when the time limit ended" in done.stdout, done.stderr
    assert_gone(marker)


def test_the_time_limit_ends_waiting_for_another_process(tmp_path: Path) -> None:
    cxx, log = stand_in(tmp_path, "sleep 600")
    first = started(cxx, tmp_path / "cache", log)
    try:
        within = LOAD.replace("native.load()", "native.load(time.monotonic() + 0.5)").replace("import", "import time,", 1)
        done = python("-c", within, XDG_CACHE_HOME=str(tmp_path / "cache"), CXX=cxx, timeout=60)
        assert "another process was still compiling when the time limit ended" in done.stdout, done.stderr
    finally:
        first.terminate()
        first.communicate(timeout=60)
