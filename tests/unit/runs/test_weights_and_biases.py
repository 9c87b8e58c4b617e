"""Weights & Biases, with a stand-in module: what is logged, and that no run ever depends on it."""

import sys
import types

import pytest

from mose_fast.runs.weights_and_biases import WeightsAndBiases
from mose_fast.settings.run import RunConfig
from mose_fast.streams import create
from mose_fast.train import Interrupted, RunError, resume, run
from tests.listeners import StopAt

CONFIG = RunConfig.create(stream={"name": "digits", "tasks": 2, "limit_per_task": 30}, width=1, memory=64, device="cpu")


class StandIn(types.ModuleType):
    """What the listener uses of wandb."""

    def __init__(self, fails=()):
        super().__init__("wandb")
        self.fails, self.started, self.points, self.summary, self.finished = fails, [], [], {}, 0

    def _maybe_fail(self, what):
        if what in self.fails:
            raise OSError(28, "No space left on device")

    def init(self, **settings):
        self._maybe_fail("init")
        self.started.append(settings)
        return self

    def log(self, values, step):
        self._maybe_fail("log")
        self.points.append((step, values))

    def finish(self):
        self._maybe_fail("finish")
        self.finished += 1


@pytest.fixture
def wandb(monkeypatch):
    def install(**options):
        module = StandIn(**options)
        monkeypatch.setitem(sys.modules, "wandb", module)
        monkeypatch.delenv("WANDB_MODE", raising=False)
        monkeypatch.delenv("WANDB_API_KEY", raising=False)
        return module

    return install


def test_losses_accuracies_and_results_are_logged(tmp_path, wandb, monkeypatch):
    module = wandb()
    results = run(CONFIG, out=tmp_path / "first", listeners=[WeightsAndBiases("project", tmp_path / "first", every=2)])
    (started,) = module.started
    assert (started["project"], started["name"], started["mode"], started["resume"]) == (
        "project",
        "first",
        "offline",
        "allow",
    )
    assert RunConfig.from_dict(started["config"]) == CONFIG
    assert started["config"]["stream"]["fingerprint"] == results["config"]["stream"]["fingerprint"] is not None
    assert [step for step, values in module.points if any(name.startswith("loss/") for name in values)] == [2, 4, 6]
    evaluated = [(step, values["accuracy_ncm/4"]) for step, values in module.points if "accuracy_ncm/4" in values]
    matrix = results["accuracy"]["ncm"]["4"]
    assert evaluated == [(3, matrix[0][0]), (6, pytest.approx(sum(matrix[1]) / 2))]
    assert module.summary == {name: results[name] for name in ("acc", "af_paper", "af_released")}
    assert module.finished == 1


@pytest.mark.slow
def test_a_resumed_run_continues_the_same_one_also_in_a_moved_folder_and_an_overwritten_one_does_not(tmp_path, wandb):
    module, first, moved = wandb(), tmp_path / "first", tmp_path / "moved"

    with pytest.raises(Interrupted):
        run(CONFIG, out=first, listeners=[WeightsAndBiases("project", first), StopAt(4)])
    first.rename(moved)
    resume(moved, listeners=[WeightsAndBiases("project", moved)])
    run(CONFIG, out=moved, overwrite=True, listeners=[WeightsAndBiases("project", moved)])
    run(CONFIG, out=first, listeners=[WeightsAndBiases("project", first)])
    before, after, overwritten, other = (started["id"] for started in module.started)
    assert before == after and len({after, overwritten, other}) == 3
    assert [started["resume"] for started in module.started] == ["allow"] * 4


def test_a_key_or_wandb_mode_decides_where_it_goes(tmp_path, wandb, monkeypatch):
    for name, value, mode in (("WANDB_API_KEY", "abc", "online"), ("WANDB_MODE", "disabled", "disabled")):
        module = wandb()
        monkeypatch.setenv(name, value)
        WeightsAndBiases("project", tmp_path).on_start(CONFIG, create(CONFIG.stream), None, 0, 6)
        assert module.started[0]["mode"] == mode


@pytest.mark.slow
@pytest.mark.parametrize("what", ["init", "log", "finish"])
def test_a_run_goes_on_when_it_fails(tmp_path, wandb, what):
    wandb(fails=(what,))
    plain = run(CONFIG)
    with pytest.warns(
        UserWarning, match=r"Weights & Biases does not work .*No space left.* the run continues without it"
    ) as seen:
        results = run(CONFIG, listeners=[WeightsAndBiases("project", tmp_path)])
    assert len([w for w in seen if "Weights & Biases" in str(w.message)]) == 1
    assert results["weights_sha256"] == plain["weights_sha256"]


def test_without_wandb(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(RunError, match=r"pip install 'mose-fast\[wandb\]'"):
        WeightsAndBiases("project", tmp_path)
