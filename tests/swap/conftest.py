import pytest
import torch


@pytest.fixture(autouse=True, scope="module")
def alone():
    """One thread: bit-equality needs one summation order."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
