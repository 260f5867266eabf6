"""Tests of DistributedTest classes run in processes of their own; see tests/distributed_harness/common.py."""

import gc
import signal
import subprocess
import sys

import hypothesis
import pytest

from tests.fixtures import *  # noqa: F403  pytest finds fixtures by their names here
from tests.haste import make_haste
from tests.processes import new_marker, signal_all

hypothesis.settings.register_profile("ds_memo", deadline=None)  # how long an example takes depends on what else runs
hypothesis.settings.load_profile("ds_memo")
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell starts what runs in the background without it


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """Let an idle worker take half of another's remaining tests: the last files are the slowest."""
    if config.getoption("dist") == "load":
        from xdist.scheduler import WorkStealingScheduling

        return WorkStealingScheduling(config, log)


def pytest_collection_modifyitems(items):
    for item in items:
        if getattr(item.cls, "is_dist_test", False):
            item.add_marker("processes")


def pytest_collection_finish():
    make_haste()
    note_processes()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_call(item):
    if getattr(item.cls, "is_dist_test", False):
        item.cls()(item._request)
        item.runtest = lambda: None


started: list[str] = []
"""Commands that the running test has started."""


def note_processes():
    """Note commands in `started`, but for those of imports (DeepSpeed looks for compilers) and of the one build of a library."""
    start = subprocess.Popen.__init__

    def noted(self, args, *rest, **named):
        if not any(part in file for part in ("importlib", "ds_memo/compiled.py") for file in callers()):
            started.append(str(args))
        start(self, args, *rest, **named)

    subprocess.Popen.__init__ = noted


def callers():
    """Yield the files of the functions that the caller runs in."""
    frame = sys._getframe(2)
    while frame is not None:
        yield frame.f_code.co_filename
        frame = frame.f_back


@pytest.fixture(autouse=True)
def starts_no_process(request):
    """Fail a test that starts a process and is not marked so: the everyday suite has none of them."""
    started.clear()
    yield
    marked = any(map(request.node.get_closest_marker, ("processes", "slow")))
    assert marked or not started, f"mark this test `processes`: it started {started}"


@pytest.fixture(autouse=True, scope="module")
def what_was_imported_since():
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def nothing_stays_attached():
    """Detach the models that a test left attached, so that they do not disturb later tests."""
    before = attached()
    yield
    for memo in attached():
        if memo not in before:
            memo.detach()
    budgets = sys.modules.get("ds_memo.swap.host_budget")
    if budgets and any(pool.clients for pool in budgets._pools.values()):
        gc.collect()  # a model that was dropped without detach() keeps its host memory in reference cycles


@pytest.fixture
def marker():
    """A word for the environment of every process that a test starts. Processes that are left are killed at the end."""
    marker = new_marker()
    yield marker
    signal_all(marker, signal.SIGKILL)


def attached():
    module = sys.modules.get("ds_memo.runtime.attach")
    return module.attached() if module else []
