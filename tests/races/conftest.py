import gc

import pytest
import torch

from mose_fast import _dali
from mose_fast.augment import dali
from mose_fast.methods import Mose
from mose_fast.train import loop
from tests.races import dali as simulated_dali


@pytest.fixture(autouse=True)
def always_one_thread(one_thread):
    """Of every test here."""


@pytest.fixture(autouse=True, scope="module")
def nothing_old_is_collected():
    """Each run looks for garbage before its first capture, which takes long with all of PyTorch."""
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture(autouse=True)
def simulated(monkeypatch):
    """DALI; and the figure of a run, which is drawn without a GPU."""
    monkeypatch.setattr(_dali, "obstacle", lambda: None)
    monkeypatch.setattr(dali, "_build", simulated_dali.build)
    monkeypatch.setattr(loop, "accuracy_figure", lambda results: b"")


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
