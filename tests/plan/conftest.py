from contextlib import suppress

import pytest

from ds_memo.compiled import Unavailable
from ds_memo.plan import native


@pytest.fixture(scope="session", autouse=True)
def _compiled_once(tmp_path_factory):
    """Compile the exact search into this session's own cache, before any test that keeps a time limit."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        with suppress(Unavailable):  # tests of the search are skipped then
            native.load()
        yield
