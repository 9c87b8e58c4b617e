"""What a method keeps of its own: state, resumption, undoing, and what it forgot to keep."""

from __future__ import annotations

import json
import math
from types import SimpleNamespace

import numpy as np
import pytest
import safetensors.torch
import torch

from mose_fast.learner.kept import unsaved
from mose_fast.methods import METHODS, Er
from mose_fast.runs.checkpoint import latest, load_checkpoint
from mose_fast.settings.run import ConfigError, RunConfig
from mose_fast.streams import from_arrays
from mose_fast.train import Interrupted, resume, run
from tests.listeners import StopAt
from tests.unit.learner.ema import Ema, entered


@pytest.fixture(autouse=True)
def ema():
    with entered():
        yield


@pytest.fixture
def stream():
    """Two tasks of two classes, five batches each."""
    y = np.arange(100) % 4
    x = np.random.default_rng(0).integers(0, 200, (100, 8, 8, 3)).astype(np.uint8)
    return from_arrays(x, y, x[:8], y[:8], tasks=2)


def settings(name: str = "ema", **changes) -> RunConfig:
    given = {"width": 1, "memory": 24, "device": "cpu", "options": {"buffer_batch": 8}, "checkpoint_every": 1}
    return RunConfig.create(method=name, **given | changes)


def kept(learner) -> dict[str, torch.Tensor]:
    return {name: tensor for name, tensor in learner.state()[0].items() if name.startswith("kept/")}


def same(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> bool:
    return found.keys() == wanted.keys() and all(torch.equal(found[name], wanted[name]) for name in wanted)


@pytest.mark.slow
@pytest.mark.parametrize("name", [*METHODS, "ema"])
def test_every_method_keeps_all_that_it_holds(name, make, teach, batch, tmp_path):
    """And anybody can save its state, which shares nothing with the learner."""
    learner = make(name, kernels="fused", options={"passes": 1, "passes_before": 1} if name == "gdumb" else {})
    for task in range(3):
        learner.check_kept()
        if task == 2:
            tensors, values = learner.state()
            torch.save((tensors, values), tmp_path / "state.pt")
            safetensors.torch.save_file(tensors, tmp_path / "state.safetensors")
        teach(learner, tasks=(task,), steps=2)
        learner.predict(batch([0, 1])[0])
    learner.check_kept()
    saved, saved_values = torch.load(tmp_path / "state.pt")
    assert same(saved, tensors) and same(safetensors.torch.load_file(tmp_path / "state.safetensors"), tensors)
    assert json.loads(json.dumps(values)) == values == saved_values


def test_a_resumed_run_has_the_second_network_of_an_uninterrupted_one(stream, tmp_path):
    whole = run(settings(), stream=stream, out=tmp_path / "whole")
    with pytest.raises(Interrupted):
        run(settings(), stream=stream, out=tmp_path / "part", listeners=[StopAt(7)])
    resumed = resume(tmp_path / "part", stream=stream)
    assert resumed["weights_sha256"] == whole["weights_sha256"]
    found, wanted = (load_checkpoint(latest(tmp_path / f / "checkpoints"))[0] for f in ("part", "whole"))
    assert same(found, wanted) and any(name.startswith("kept/slow/") for name in found)
    assert found["kept/drawn"].sum() > 0 and not torch.equal(
        found["kept/slow/classifier1.weight"], found["network/classifier1.weight"]
    )


@pytest.mark.parametrize("kernels", ["torch", "fused"])
@pytest.mark.parametrize("optimiser", ["adam", "sgd"])
def test_a_learning_rate_that_the_method_changes_is_restored(make, teach, monkeypatch, kernels, optimiser):
    def cooler(self):
        for group in self.model.optimiser.param_groups:
            group["lr"] = 0.5 * float(group["lr"])

    monkeypatch.setattr(Er, "on_task_end", cooler)
    given = {"kernels": kernels, "options": {"optimiser": optimiser, "lr": 0.01}}
    learner, other, third = (make("er", **given) for _ in range(3))
    assert learner.state()[1]["optimiser"] == [{}]
    teach(learner, tasks=(0, 1), steps=2).end_task()
    tensors, values = learner.state()
    assert values["optimiser"] == [{"lr": pytest.approx(0.0025)}]
    other.load_state(tensors, values)
    assert teach(other, tasks=(2,), steps=2).weights_hash() == teach(learner, tasks=(2,), steps=2).weights_hash()
    # Another learner's own rate stays where the method has changed none, and comes back.
    warmer = make("er", kernels=kernels, options={"optimiser": optimiser, "lr": 0.1})
    for state in (learner.state(), third.state()):
        warmer.load_state(*state)
    assert float(warmer.model.optimiser.param_groups[0]["lr"]) == pytest.approx(0.1)


def forgetful(monkeypatch, stream, tmp_path, **functions):
    """The refusal of a run of ER with other functions, and the run's folder."""
    for name, function in functions.items():
        monkeypatch.setattr(Er, name, function)
    with pytest.raises(ConfigError) as error:
        run(settings("er"), stream=stream, out=tmp_path / "run")
    return str(error.value), tmp_path / "run"


def test_a_module_that_is_not_kept_is_refused_before_the_first_batch(monkeypatch, stream, tmp_path):
    create = Er.__init__

    def with_teacher(self, config, **stream):
        create(self, config, **stream)
        self.guide = torch.nn.Linear(3, 2)

    said, folder = forgetful(monkeypatch, stream, tmp_path, __init__=with_teacher)
    assert "method 'er' has a tensor of shape [2, 3] in self.guide.weight, which is not part of its state" in said
    assert "self.keep(" in said and "\n" not in said
    assert not any((folder / "checkpoints").iterdir())


@pytest.mark.parametrize(
    ("make_it", "where"),
    [
        (lambda: torch.zeros(3), "a tensor of shape [3] in self.own"),
        (lambda: {"a": [1, torch.ones(2)]}, "a tensor of shape [2] in self.own['a'][1]"),
        (lambda: SimpleNamespace(), None),
        (lambda: np.zeros(4), "a numpy.ndarray in self.own"),
        (lambda: torch.Generator(), "a torch._C.Generator in self.own"),
        (lambda: torch.optim.SGD([torch.zeros(2)], lr=1.0), "in self.own.param_groups[0]['params'][0]"),
        (lambda: [0] * 1000 + [None, "text"], None),
    ],
)
def test_what_a_step_makes_and_nobody_keeps_is_refused_at_the_first_checkpoint(
    monkeypatch, stream, tmp_path, make_it, where
):
    def remembers(self, outputs, rows):
        self.own = make_it()

    if where is None:
        monkeypatch.setattr(Er, "after_update", remembers)
        run(settings("er"), stream=stream, out=tmp_path / "run")
        return
    said, folder = forgetful(monkeypatch, stream, tmp_path, after_update=remembers)
    assert where in said and not any((folder / "checkpoints").iterdir())


def test_a_view_of_what_is_saved_may_be_held(make, teach):
    learner = teach(make("er"), steps=1)
    learner.head, learner.images = learner.network.classifier1, learner.memory.images[2:5]
    learner.check_kept()
    assert unsaved({"a": torch.zeros(0)}, []) is None


def test_own_values_that_json_would_change_are_refused(make, batch):
    learner = make("er")
    for value, fits in (({"0": [1, 2.5, None, "x"]}, True), ({0: 1}, False), ((1, 2), False), (np.int64(3), False)):
        learner.data.own["counts"] = value
        if fits:
            learner.check_kept()
            continue
        with pytest.raises(
            ConfigError, match=r"in self\.data\.own\['counts'\], which a checkpoint would not give back"
        ):
            learner.check_kept()


@pytest.mark.parametrize("observe", [True, False], ids=["observed", "planned ahead"])
def test_a_step_that_is_not_finite_and_all_after_it_leave_it_alone(make, teach, batch, monkeypatch, observe):
    learner = teach(make("ema"), tasks=(0,))
    whole, plain = learner.losses, kept(learner)
    assert not torch.equal(plain["kept/slow/classifier1.weight"], learner.network.classifier1.weight)

    def broken(outputs, rows):
        return {name: term * math.nan for name, term in whole(outputs, rows).items()}

    monkeypatch.setattr(learner, "losses", broken)
    if observe:
        learner.observe(*batch([0, 1] * 5), task=0)
    else:
        prepared = [learner.prepare(*batch([0, 1] * 5, seed), task=0) for seed in (1, 2)]
        assert not torch.equal(learner.drawn, plain["kept/drawn"])
        prepared[0].take()
        assert prepared[1].undo() and prepared[0].undo()
    assert learner.diverged and same(kept(learner), plain)
    monkeypatch.setattr(learner, "losses", whole)
    learner.observe(*batch([0, 1] * 5), task=0)
    learner.end_task()
    assert same(kept(learner), plain)


def test_undoing_plans_undoes_what_they_wrote(make, teach, batch):
    learner = teach(make("ema"), tasks=(0,))
    states, prepared = [], []
    for step in range(4):
        states.append(kept(learner))
        prepared.append(learner.prepare(*batch([0, 1] * 5, seed=step), task=0))
    assert not torch.equal(learner.drawn, states[0]["kept/drawn"])
    for state, one in zip(reversed(states), reversed(prepared), strict=True):
        one.undo()
        assert same(kept(learner), state)


def test_a_plan_that_writes_what_steps_write_is_told(make, teach, batch, monkeypatch):
    learner = teach(make("ema"), tasks=(0,))
    monkeypatch.setattr(learner, "extras", lambda labels, sizes: (next(learner.slow.buffers()).add_(1) and {}) or {})
    with pytest.raises(RuntimeError, match=r"self.slow is written in plan or store.*written='plans'"):
        learner.observe(*batch([0, 1] * 5), task=0)


def test_it_stays_where_it_is(make, teach, batch):
    learner = teach(make("ema"), tasks=(0,))
    with pytest.raises(ConfigError, match=r"self.drawn of Ema is kept, .* wanted self.drawn.copy_\(...\)"):
        learner.drawn = learner.drawn + 1
    learner.drawn += 1  # in place
    other, before = make("ema"), [*learner.slow.state_dict().values(), learner.drawn]
    learner.load_state(*teach(other, tasks=(0, 1)).state())
    after = [*learner.slow.state_dict().values(), learner.drawn]
    assert [tensor.data_ptr() for tensor in after] == [tensor.data_ptr() for tensor in before]
    assert same(kept(learner), kept(other))


def test_a_tensor_that_task_ends_write_may_grow(make, teach):
    class Growing(Er):
        def __init__(self, config, **stream):
            super().__init__(config, **stream)
            self.keep("bank", torch.zeros(0, 2), written="tasks")

        def on_task_end(self):
            super().on_task_end()
            self.keep("bank", torch.cat([self.bank, torch.full((1, 2), float(self.task))]), written="tasks")

    def create():
        return Growing(settings("er"), classes=6, image_size=(8, 8))

    learner = teach(create(), tasks=(0, 1, 2))
    assert learner.bank.tolist() == [[0.0, 0.0], [1.0, 1.0]]
    other = create()
    other.load_state(*learner.state())
    assert torch.equal(other.bank, learner.bank) and other.tensors()["kept/bank"] is other.bank


@pytest.mark.parametrize(
    ("name", "value", "how", "says"),
    [
        ("memory", torch.zeros(2), {}, "self.memory is something else already"),
        ("kernels", torch.zeros(2), {}, "self.kernels is something else already"),
        ("a b", torch.zeros(2), {}, "an attribute cannot have this name"),
        ("own", [1.0], {}, r"Er.keep\('own', ...\) was given a list; wanted a tensor or a torch.nn.Module"),
        ("own", torch.zeros(2), {"written": "always"}, "written='always'; wanted one of steps, plans, tasks"),
    ],
)
def test_what_cannot_be_kept(make, name, value, how, says):
    with pytest.raises(ConfigError, match=says):
        make("er").keep(name, value, **how)


def test_it_is_kept_from_the_beginning(make, teach):
    class Early(Er):
        def __init__(self, config, **stream):
            self.keep("own", torch.zeros(1))

    with pytest.raises(ConfigError, match=r"came too early; wanted it after super\(\).__init__"):
        Early(settings("er"), classes=4)
    with pytest.raises(ConfigError, match="came after the first task had begun; wanted it in __init__"):
        teach(make("er"), tasks=(0,), steps=1).keep("own", torch.zeros(2))


def test_another_methods_state_is_refused(make, teach):
    with pytest.raises(ValueError, match=r"what the method keeps differs: slow/stem.conv.weight is missing"):
        make("ema").load_state(*make("er").state())
    tensors, values = make("ema").state()
    with pytest.raises(
        ValueError, match=r"what the method keeps differs: slow/stem.conv.weight is not in this network"
    ):
        make("er").load_state(tensors, values)
    tensors["kept/slow/classifier1.weight"] = torch.zeros(1, 1)
    with pytest.raises(ValueError, match=r"slow/classifier1.weight has shape \[1, 1\]; wanted \[6, 8\]"):
        make("ema").load_state(tensors, values)
    assert Ema.planning is Er.planning
