"""Commands that tests start are ended with all that they started."""

import os
import sys

import pytest

from tests.processes import assert_gone, finished

pytestmark = pytest.mark.processes

CHILD = [sys.executable, "-c", "import time; time.sleep(1000)"]


@pytest.mark.parametrize("waits", [True, False], ids=["hangs", "leaves a child that holds the output"])
def test_what_hangs_is_shown_and_ended(waits, marker):
    code = f"import subprocess; print('begun', flush=True); child = subprocess.Popen({CHILD})" + "; child.wait()" * waits
    with pytest.raises(TimeoutError, match=r"still ran after 10 s\nbegun\n") as error:
        finished([sys.executable, "-c", code], os.environ | {marker: "1"}, timeout=10)
    assert str(error.value).count("Fatal Python error: Aborted") == 1 + waits, error.value
    assert_gone(marker)


def test_what_ends_is_returned():
    done = finished([sys.executable, "-c", "import sys; print('out'); sys.exit('err')"], os.environ, timeout=60)
    assert (done.stdout, done.stderr, done.returncode) == ("out\n", "err\n", 1)
