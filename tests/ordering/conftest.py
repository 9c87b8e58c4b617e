import pytest
import torch

from mose_fast import _dali
from mose_fast.augment import dali
from tests.ordering import dali as stand_in


@pytest.fixture(autouse=True)
def always_one_thread(one_thread):
    """Of every test here."""


@pytest.fixture(autouse=True)
def stand_in_dali(monkeypatch):
    monkeypatch.setattr(_dali, "obstacle", lambda: None)
    monkeypatch.setattr(dali, "_build", stand_in.build)
    monkeypatch.setattr(torch, "from_dlpack", stand_in.from_dlpack)
