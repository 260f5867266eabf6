import os
from contextlib import suppress

import pytest


@pytest.fixture(scope="session", autouse=True)
def _compiled_once(tmp_path_factory):
    """The exact search is built into a cache of this session's own, once, before any test that keeps a time limit."""
    from ds_memo.plan import native

    before = os.environ.get("XDG_CACHE_HOME")
    os.environ["XDG_CACHE_HOME"] = str(tmp_path_factory.mktemp("cache"))
    with suppress(native.Unavailable):  # the Python twin is tested then; test_search.py skips what needs C++
        native.load()
    yield
    if before is None:
        del os.environ["XDG_CACHE_HOME"]
    else:
        os.environ["XDG_CACHE_HOME"] = before
