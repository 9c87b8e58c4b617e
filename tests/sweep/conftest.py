"""One small finished run, and copies of it that pass for runs of other settings."""

import json
import shutil

import pytest
import torch

from mose_fast.config import RunConfig
from mose_fast.train import run

SETTINGS = {"stream": {"name": "digits", "limit_per_task": 20}, "width": 1, "memory": 64, "device": "cpu"}


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def settings():
    return SETTINGS


@pytest.fixture(scope="session")
def finished_run(tmp_path_factory):
    """A run folder; not to be written to."""
    out = tmp_path_factory.mktemp("finished") / "run"
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    run(RunConfig.create(**SETTINGS), out=out)
    torch.set_num_threads(before)
    return out


@pytest.fixture
def pretend(finished_run):
    """A function that makes ``out`` look like the finished run of ``config``."""

    def copy(out, config):
        out.mkdir(parents=True, exist_ok=True)
        for name in ("results.json", "accuracy.csv"):
            shutil.copy(finished_run / name, out)
        results = json.loads((out / "results.json").read_text())
        results |= {"config": config.to_dict(), "seed": config.seed}
        (out / "results.json").write_text(json.dumps(results))
        (out / "config.json").write_text(config.to_json())

    return copy
