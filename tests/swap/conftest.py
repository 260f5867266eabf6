import gc

import pytest
import torch


@pytest.fixture(autouse=True, scope="module")
def alone():
    """One thread: bit-equality needs one summation order. And no look at old objects when a test collects garbage."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()
    torch.set_num_threads(threads)
