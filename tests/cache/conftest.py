import pytest
import torch


@pytest.fixture(autouse=True)
def one_thread():
    """These tensors are too small for threads, which would only wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
