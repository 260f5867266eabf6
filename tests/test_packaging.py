"""An install, ordinary or editable, has every package and every extra."""

import configparser
import shutil
import subprocess
import sys
import sysconfig
import tarfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement

REPO = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def setup_cfg():
    config = configparser.ConfigParser()
    config.read(REPO / "setup.cfg")
    return config


def names(requirements: str) -> set[str]:
    return {Requirement(line).name for line in requirements.split("\n") if line.strip()}


def test_every_package_is_listed(setup_cfg):
    on_disk = {p.parent.relative_to(REPO).as_posix().replace("/", ".") for p in REPO.glob("ds_memo/**/__init__.py")}
    ops = {p.parent.relative_to(REPO).as_posix().replace("/", ".") for p in REPO.glob("ops/**/__init__.py")}
    listed = setup_cfg["options"]["packages"].split()
    assert set(listed) == on_disk | {f"ds_memo.{name}" for name in ops}
    assert listed == sorted(listed)


def test_requirements_and_extras(setup_cfg):
    assert names(setup_cfg["options"]["install_requires"]) == {"deepspeed", "torch", "numpy", "mip"}
    extras = {name: names(text) for name, text in setup_cfg["options.extras_require"].items()}
    assert set(extras) == {"hf", "plot", "highs", "flash", "liger", "docs", "dev"}
    assert extras["dev"] >= extras["hf"] | extras["plot"] | extras["docs"] | {"pytest", "ruff"}


def test_every_requirement_has_a_tested_version(setup_cfg):
    lines = (REPO / "constraints.txt").read_text().splitlines()
    constrained = {Requirement(line).name for line in lines if line and not line.startswith("#")}
    extras = setup_cfg["options.extras_require"]
    wanted = names(setup_cfg["options"]["install_requires"]) | names(extras["hf"]) | names(extras["docs"])
    assert wanted <= constrained


@pytest.fixture
def source(tmp_path):
    """A copy to install from, because a build leaves folders behind."""
    copy = tmp_path / "source"
    for name in ("ds_memo", "ops"):
        shutil.copytree(REPO / name, copy / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__", "*.so"))
    for name in ("setup.cfg", "setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(REPO / name, copy)
    return copy


def install(target: Path, *words: object) -> None:
    options = ["--quiet", "--no-deps", "--no-build-isolation", "--no-index", "--target", target]
    done = subprocess.run([sys.executable, "-m", "pip", "install", *map(str, (*options, *words))], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def where(module: str, target: Path) -> Path:
    """Return the file of `module` in an interpreter that has `target` and, without .pth files, our packages."""
    code = f"""
import site, sys
site.addsitedir({str(target)!r})
sys.path.append({sysconfig.get_path("purelib")!r})
import {module}
print({module}.__file__)
"""
    done = subprocess.run([sys.executable, "-I", "-S", "-c", code], capture_output=True, text=True, cwd=target)
    assert done.returncode == 0, done.stderr
    return Path(done.stdout.strip())


def sources(folder: Path) -> set[str]:
    return {p.relative_to(folder).as_posix() for p in folder.rglob("*.py")}


@pytest.mark.processes
def test_an_ordinary_install(tmp_path, source):
    target = tmp_path / "target"
    install(target, source)
    assert where("ds_memo", target) == target / "ds_memo" / "__init__.py"
    assert where("ds_memo.ops", target) == target / "ds_memo" / "ops" / "__init__.py"
    assert sources(target / "ds_memo") == sources(REPO / "ds_memo") | {f"ops/{name}" for name in sources(REPO / "ops")}
    assert {p.name.split("-")[0] for p in target.iterdir()} == {"ds_memo", "bin"}  # neither tests nor launch
    assert [p.name for p in (target / "bin").iterdir()] == ["ds-memo"]
    assert (target / "ds_memo" / "ops" / "csrc" / "allocator_core.h").is_file()  # compiled at first use


@pytest.mark.processes
def test_an_editable_install(tmp_path, source):
    target = tmp_path / "target"
    install(target, "--editable", source)
    assert where("ds_memo", target) == source / "ds_memo" / "__init__.py"
    assert where("ds_memo.ops", target).resolve() == source / "ops" / "__init__.py"


@pytest.mark.processes
def test_the_source_distribution_has_the_tests_and_what_they_read(tmp_path):
    """An sdist must be testable by those who package it."""
    listed = subprocess.run(["git", "ls-files"], cwd=REPO, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("not a git checkout")
    copy = tmp_path / "source"
    for name in filter(lambda name: (REPO / name).is_file(), [*listed.stdout.splitlines(), "MANIFEST.in"]):
        (copy / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(REPO / name, copy / name)
    code = f"from setuptools.build_meta import build_sdist; build_sdist({str(tmp_path)!r})"
    done = subprocess.run([sys.executable, "-c", code], cwd=copy, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    with tarfile.open(next(tmp_path.glob("*.tar.gz"))) as archive:
        packed = {name.partition("/")[2] for name in archive.getnames()}
    left_out = {name for name in listed.stdout.splitlines() if not name.startswith(".") and name not in packed}
    assert left_out <= {"ds_memo/ops"}  # a link to ops, which an install maps
