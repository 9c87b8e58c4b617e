"""One thread for every run of these tests: another number of threads changes float sums, and they
share the machine.
"""

import pytest
import torch


def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


# For fixtures that a module makes once, before those of its first test; and for each test, since
# one may choose another number.
one_thread_a_module = pytest.fixture(_one_thread, scope="module", autouse=True)
one_thread = pytest.fixture(_one_thread, autouse=True)
