"""setup_env.sh in an environment that already has a torch."""

import subprocess
import venv
from pathlib import Path

import pytest

from tests.launch.launcher import REPO

pytestmark = pytest.mark.processes

PIP = """\
import sys
from pathlib import Path
if "-c" in sys.argv:
    Path({seen!r}).write_text(Path(sys.argv[sys.argv.index("-c") + 1]).read_text())
"""


@pytest.fixture
def set_up(tmp_path):
    """Sources setup_env.sh in an environment of `files` (path: text), whose pip installs nothing: (output, constraints)."""

    def set_up(files):
        environment, seen = tmp_path / "venv", tmp_path / "constraints"
        venv.create(environment, symlinks=True)
        (packages,) = environment.glob("lib/python*/site-packages")
        for path, text in {"pip/__main__.py": PIP.format(seen=str(seen)), "pip/__init__.py": "", **files}.items():
            (packages / path).parent.mkdir(exist_ok=True)
            (packages / path).write_text(text)
        env = {"PATH": "/usr/bin:/bin", "VIRTUAL_ENV": str(environment), "EXTRA": "dev"}
        done = subprocess.run(["bash", "-ec", ". launch/setup_env.sh"], cwd=REPO, env=env, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        assert not done.stderr
        return done.stdout, seen.read_text().splitlines()

    return set_up


def test_a_torch_that_is_there_is_kept_by_pips_version(set_up):
    """PyPI's CUDA build says 2.13.0+cu130 itself and is 2.13.0 to pip, which refuses to keep "2.13.0+cu130"."""
    metadata = "Metadata-Version: 2.1\nName: torch\nVersion: 9.9.9\n"
    output, constraints = set_up({"torch/__init__.py": "__version__ = '9.9.9+cu130'", "torch-9.9.9.dist-info/METADATA": metadata})
    assert "keeping torch 9.9.9" in output
    assert [line for line in constraints if line.startswith("torch==")] == ["torch==9.9.9"]


def test_without_a_torch_the_tested_one_is_installed(set_up):
    output, constraints = set_up({})
    assert "installing torch" in output
    assert constraints == Path(REPO, "constraints.txt").read_text().splitlines()
