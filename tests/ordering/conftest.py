import pytest
import torch

from mose_fast import _dali
from mose_fast.augment import dali
from tests.ordering import dali as stand_in


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def stand_in_dali(monkeypatch):
    monkeypatch.setattr(_dali, "obstacle", lambda: None)
    monkeypatch.setattr(dali, "_build", stand_in.build)
    # Which would take the memory and leave what is known of it.
    monkeypatch.setattr(torch, "from_dlpack", lambda tensor: tensor)
