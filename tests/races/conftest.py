import pytest
import torch

from mose_fast import _dali
from mose_fast.augment import dali
from mose_fast.methods import Mose
from tests.races import dali as stand_in


@pytest.fixture(autouse=True)
def always_one_thread(one_thread):
    """Of every test here."""


@pytest.fixture(autouse=True)
def stand_in_dali(monkeypatch):
    monkeypatch.setattr(_dali, "obstacle", lambda: None)
    monkeypatch.setattr(dali, "_build", stand_in.build)


@pytest.fixture
def steps_wait(monkeypatch):
    """Steps of MOSE wait for the GPU while they are captured, which breaks the capture."""
    train_on = Mose.train_on

    def waits(learner, inputs):
        losses = train_on(learner, inputs)
        if torch.cuda.is_current_stream_capturing():
            float(losses["loss"])
        return losses

    monkeypatch.setattr(Mose, "train_on", waits)
