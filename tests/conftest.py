"""Tests of DistributedTest classes run in processes of their own; see tests/unit/common.py."""

import sys

import pytest


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_call(item):
    if getattr(item.cls, "is_dist_test", False):
        item.cls()(item._request)
        item.runtest = lambda: None


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    """A test that fails leaves its model attached, alive in the traceback: it must not be in the way of the tests after it."""
    report = yield
    attach = sys.modules.get("ds_memo.integrate.attach")
    if report.failed and attach is not None:
        for memo in attach.attached():
            memo.detach()
    return report
