"""The loop with batches planned ahead: any depth gives the same run, and a run that stops is as if
nothing had been planned.
"""

from __future__ import annotations

import math
import signal
from contextlib import closing
from functools import partialmethod

import pytest
import torch

from mose_fast.methods import METHODS, Mose, Planning, create_learner
from mose_fast.runs.checkpoint import latest, load_checkpoint
from mose_fast.settings.run import RunConfig
from mose_fast.train import Interrupted, Listener, TrainingDiverged, resume, run
from mose_fast.train import pipeline as pipeline_module
from mose_fast.train.pipeline import Batch, LossReader, Pipeline, incoming
from mose_fast.train.ring import DEPTH, Ring
from tests.unit.train.small import TWO_TASKS, outcome, small_stream

pytestmark = pytest.mark.usefixtures("one_thread")


STREAM = small_stream(120)


def settings(**changes) -> RunConfig:
    return RunConfig.create(**{**TWO_TASKS, **changes})


def start(config: RunConfig, **how) -> dict:
    return run(config, stream=STREAM, **how)


class Watch(Listener):
    """Notes each step's composition and how far the plan was ahead, and does something at a
    batch.
    """

    def __init__(self, at=None, act=lambda: None):
        self.at, self.act = at, act
        self.losses, self.ahead = [], []

    def on_start(self, config, stream, learner, batch, batches):
        self.learner, self.batch, self.batches = learner, batch, batches

    def on_batch(self, batch, losses):
        self.losses.append((batch, losses))
        self.ahead.append(self.learner.data.sequence - self.learner.steps)
        if batch == self.at:
            self.act()


@pytest.fixture(scope="module")
def plain():
    torch.set_num_threads(1)
    watch = Watch()
    return outcome(start(settings(), listeners=[watch])), watch


def with_depth(monkeypatch, depth: int) -> None:
    monkeypatch.setattr(pipeline_module, "Ring", lambda learner: Ring(learner, depth))


@pytest.mark.slow
@pytest.mark.parametrize("depth", [1, 9])
def test_any_depth_gives_the_same_run(monkeypatch, plain, depth):
    with_depth(monkeypatch, depth)
    watch = Watch()
    assert outcome(start(settings(), listeners=[watch])) == plain[0]
    assert watch.losses == plain[1].losses
    assert max(watch.ahead) == min(depth, 6) - 1 and max(plain[1].ahead) == DEPTH - 1


def test_no_plan_passes_a_checkpoint_or_the_end_of_a_task(plain, tmp_path):
    watch = Watch()
    assert outcome(start(settings(checkpoint_every=4), out=tmp_path / "run", listeners=[watch])) == plain[0]
    # After batch b: what is planned ahead stops at the checkpoints after 4, 8 and 12 and at the
    # task's end after 6.
    assert watch.ahead == [3, 2, 1, 0, 1, 0, 1, 0, 3, 2, 1, 0]


@pytest.mark.slow
def test_two_epochs_and_the_final_memory_at_any_depth(monkeypatch):
    with pytest.warns(UserWarning, match="another protocol"):
        expected = [outcome(start(settings(epochs=2))), outcome(start(settings(epochs=2, train_on="final_memory")))]
    with_depth(monkeypatch, 1)
    with pytest.warns(UserWarning, match="another protocol"):
        assert [
            outcome(start(settings(epochs=2))),
            outcome(start(settings(epochs=2, train_on="final_memory"))),
        ] == expected


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(METHODS))
def test_every_method_learns_the_same_whether_or_not_it_plans_ahead(monkeypatch, name):
    """A plan that looks at the network, or at what steps change, would see another one ahead. Two
    tasks, then the final memory.
    """
    own = {"gdumb": {"passes": 1, "passes_before": 1}, "ocm": {"rotations": 1}, "onpro": {"rotations": 1}}
    stream, found = small_stream(batch=8), []
    for depth in (DEPTH, 1):
        with_depth(monkeypatch, depth)
        options = {"buffer_batch": 6} | own.get(name, {})
        learner = create_learner(settings(method=name, options=options), **stream.spec)
        losses = []
        with closing(Pipeline(learner)) as pipeline:
            for task in range(2):
                learner.begin_task(task, stream.tasks[task])
                contents = incoming(stream, task, stream.batches(task, seed=0))
                losses += [told for _, told in pipeline.run(Batch({}, content) for content in contents)]
                pipeline.ring.synchronise()
                learner.end_task()
                learner.prepare_evaluation()
            slots = torch.arange(learner.memory.filled).split(6)
            losses += [told for _, told in pipeline.run(Batch({}, part) for part in slots)]
        found.append((losses, learner.weights_hash(), learner.values(), learner.memory.tensors()))
    (*one, tensors), (*other, others) = found
    assert one == other and all(torch.equal(tensors[part], others[part]) for part in tensors)


def test_learners_that_do_not_plan_ahead_get_one_batch_at_a_time():
    for name, most in (("mir", 0), ("er", DEPTH - 1)):
        assert (METHODS[name].planning >= Planning.AHEAD) == bool(most)
        watch = Watch()
        start(settings(method=name, options={"buffer_batch": 12}), listeners=[watch])
        assert len(watch.losses) == 12 and max(watch.ahead) == most


@pytest.mark.slow
@pytest.mark.parametrize(("batch", "how"), [(1, "Ctrl-C"), (3, "listener"), (6, "Ctrl-C"), (8, "listener")])
def test_a_run_that_is_stopped_while_more_was_planned_goes_on_exactly(tmp_path, plain, batch, how):
    def stop():
        if how == "listener":
            raise Interrupted
        signal.raise_signal(signal.SIGINT)

    out = tmp_path / "run"
    with pytest.raises(Interrupted):
        start(settings(), out=out, listeners=[Watch(batch, stop)])
    tensors, values = load_checkpoint(latest(out / "checkpoints"))
    assert values["position"]["done"] == batch and int(tensors["memory/state"][2]) == 10 * batch
    watch = Watch()
    assert outcome(resume(out, stream=STREAM, listeners=[watch])) == plain[0]
    assert watch.batch == batch and watch.losses == plain[1].losses[batch:]


# Divergence


def nan_views(monkeypatch, sequence: int) -> None:
    """Makes the views of one step NaN, as broken data or an overflow would."""
    step_inputs = Mose.step_inputs

    def inputs(learner, plan, rows=None, *, ready=False):
        made = step_inputs(learner, plan, rows, ready=True)
        return (
            made._replace(views=made.views * math.nan)
            if plan.sequence == sequence
            else step_inputs(learner, plan, rows, ready=ready)
        )

    # Not the function itself: a learner with a function of another file is other code, which cannot
    # resume.
    monkeypatch.setattr(Mose, "step_inputs", partialmethod(inputs))


# The first batch trains nothing, so step s belongs to batch s + 2.
@pytest.mark.slow
@pytest.mark.parametrize("kernels", ["torch", "fused"])
@pytest.mark.parametrize("sequence", [0, 5, 8])
def test_the_checkpoint_of_a_run_that_diverged_is_the_state_before_that_step(tmp_path, monkeypatch, sequence, kernels):
    config = settings(kernels=kernels, width=8 if kernels == "fused" else 1)
    out, reference = tmp_path / "run", tmp_path / "reference"
    batch = sequence + 2
    with monkeypatch.context() as patched:
        nan_views(patched, sequence)
        watch = Watch()
        with pytest.raises(TrainingDiverged) as error:
            start(config, out=out, listeners=[watch])
    message = str(error.value)
    assert f"not finite at batch {batch} (task {(batch - 1) // 6 + 1}): loss nan" in message
    assert "the step had 10 incoming, " in message and " views; losses before it: " in message
    earlier = [f"{losses['loss']:g}" for _, losses in watch.losses if losses is not None]
    assert f"losses before it: {', '.join(earlier[-5:]) or 'none'}; lower options.lr" in message
    assert message.endswith("The newest is the state before this batch.")
    assert len(watch.losses) == batch - 1

    def stop():
        raise Interrupted

    with pytest.raises(Interrupted):
        start(config, out=reference, listeners=[Watch(batch - 1, stop)])
    found, wanted = (load_checkpoint(latest(folder / "checkpoints")) for folder in (out, reference))
    assert found[0].keys() == wanted[0].keys()
    assert all(torch.equal(found[0][name], wanted[0][name]) for name in wanted[0])
    # Before the first batch of a task, the interrupted run stands at the end of the task before,
    # which the other one has left.
    if (batch - 1) % 6:
        assert found[1]["learner"] == wanted[1]["learner"] and found[1]["records"] == wanted[1]["records"]
    assert found[1]["position"]["done"] == batch - 1
    # With data that are whole again, the run ends where it would have ended.
    assert outcome(resume(out, stream=STREAM)) == outcome(resume(reference, stream=STREAM))


def test_weights_that_broke_before_are_no_checkpoint(tmp_path):
    """The loss of the step before was finite, its gradients were not: no state to go back to is at
    hand.
    """
    out = tmp_path / "run"

    class Breaker(Listener):
        def on_start(self, config, stream, learner, batch, batches):
            self.learner = learner

        def on_batch(self, batch, losses):
            if batch == 5:
                with torch.no_grad():
                    next(self.learner.network.parameters()).fill_(math.nan)

    with pytest.raises(TrainingDiverged, match=r"not finite at batch 6 .*The checkpoints before it are kept\.$"):
        start(settings(checkpoint_every=4), out=out, listeners=[Breaker()])
    tensors, values = load_checkpoint(latest(out / "checkpoints"))
    assert values["position"]["done"] == 4 and all(tensor.isfinite().all() for tensor in tensors.values())


def test_losses_are_told_in_order_and_once(plain):
    learner = plain[1].learner
    reader = LossReader(learner)
    for step in range(3):
        reader.add(step, None if step == 1 else {"loss": torch.tensor(float(step)), "part": torch.tensor(-1.0)})
    assert len(reader) == 3
    assert list(reader.drain()) == [(0, {"loss": 0.0, "part": -1.0}), (1, None), (2, {"loss": 2.0, "part": -1.0})]
    assert list(reader.drain(wait=True)) == [] and reader.drop() == []
    reader.add(4, None)
    assert reader.drop() == [4] and len(reader) == 0
