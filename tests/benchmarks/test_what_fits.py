"""The README's table of what fits is what the command prints."""

import pytest

from benchmarks import what_fits
from tests.processes import ROOT


@pytest.mark.slow
@pytest.mark.sweep
def test_the_readme_has_what_the_command_prints(capsys: pytest.CaptureFixture[str]) -> None:
    what_fits.main()
    assert capsys.readouterr().out in (ROOT / "README.md").read_text()
