import gc
import weakref
from contextlib import suppress

import pytest
import torch

from ds_memo.errors import MemoError
from ds_memo.swap import host_budget
from tests.swap.by_hand import Rig


@pytest.fixture(autouse=True, scope="module")
def alone():
    """One thread: bit-equality needs one summation order."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def rig():
    made = Rig()
    yield made
    with suppress(MemoError):
        made.engine.close()


@pytest.fixture
def no_other_client(monkeypatch: pytest.MonkeyPatch) -> None:
    """No slab of another test shares."""
    gc.collect()
    monkeypatch.setattr(host_budget, "_pools", weakref.WeakValueDictionary())
