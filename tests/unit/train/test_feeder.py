"""Views that are made on a thread of their own, ahead of the steps: whose they are, what a rollback
and an error leave, and whole runs.
"""

from __future__ import annotations

import math
import threading
import time

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from mose_fast import _dali
from mose_fast.augment import ViewMaker
from mose_fast.methods import Mose, create_learner
from mose_fast.runs.checkpoint import latest, load_checkpoint
from mose_fast.settings.run import RunConfig
from mose_fast.train import Interrupted, Listener, TrainingDiverged, resume, run
from mose_fast.train import pipeline as pipeline_module
from mose_fast.train.ring import DEPTH, Feeder, Ring
from tests.unit.train.small import TWO_TASKS, outcome

pytestmark = pytest.mark.skipif(_dali.obstacle() is not None, reason="DALI is not installed")

SETTINGS = {**TWO_TASKS, "feed": "dali"}
NAME = "mose-fast views"


def settings(**changes) -> RunConfig:
    return RunConfig.create(**{**SETTINGS, **changes})


class Watch(Listener):
    """Notes each step's losses, and stops the run at a batch."""

    def __init__(self, at: int | None = None) -> None:
        self.at, self.losses = at, []

    def on_batch(self, batch, losses):
        self.losses.append((batch, losses))
        if batch == self.at:
            raise Interrupted


def noise(count: int, seed: int) -> torch.Tensor:
    return torch.randint(0, 256, (count, 32, 32, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


@pytest.fixture(params=[1, 2], ids="{} a batch".format)
def learner(request) -> Mose:
    options = {"experts": 2, "buffer_batch": 12, "new_extra": 4, "iterations": request.param}
    made = create_learner(method="mose", classes=4, width=1, memory=30, device="cpu", feed="dali", options=options)
    made.begin_task(0)
    return made


def batch(step: int) -> dict:
    return {"x": noise(10, step), "y": torch.arange(10) % 2, "task": 0}


@pytest.fixture
def made_on(monkeypatch) -> list[str]:
    """Names of the threads that made views, call by call."""
    names: list[str] = []
    views = ViewMaker.views

    def noting(maker, *arguments, **named):
        names.append(threading.current_thread().name)
        return views(maker, *arguments, **named)

    monkeypatch.setattr(ViewMaker, "views", noting)
    return names


@pytest.fixture(scope="module")
def plain():
    torch.set_num_threads(1)
    watch = Watch()
    return outcome(run(settings(), listeners=[watch])), watch.losses


# The ring


def test_views_are_made_ahead_on_another_thread_and_are_those_of_their_step(learner, made_on):
    ring = Ring(learner)
    for step in range(DEPTH):
        ring.put(lambda step=step: batch(step))
    deadline = time.monotonic() + 60
    count = (DEPTH - 1) * learner.config.options.iterations
    while len(made_on) < count and time.monotonic() < deadline:
        time.sleep(0.01)
    assert len(made_on) == count  # nobody has asked for them; the first batch is only stored
    taken = [ring.take() for _ in range(DEPTH)]
    assert not taken[0].steps
    steps = [step for prepared in taken for step in prepared.steps]
    assert len(steps) == count
    assert all(torch.equal(step.views, learner.make_views(step.plan)) for step in steps)
    assert set(made_on[:count]) == {f"{NAME}_0"}
    ring.close()


def test_what_was_rolled_back_is_never_handed_out(learner):
    ring = Ring(learner)
    for step in range(DEPTH):
        ring.put(lambda step=step: batch(step))
    ring.roll_back()
    assert learner.memory.seen == 0 and learner.data.sequence == 0
    ring.put(lambda: batch(7))
    ring.put(lambda: batch(8))
    ring.take()
    prepared = ring.take()
    for step in prepared.steps:
        assert torch.equal(step.plan.images[:10], noise(10, 8))
        assert torch.equal(step.views, learner.make_views(step.plan))
    ring.close()


def test_an_error_on_the_thread_is_raised_where_the_views_are_taken(learner, monkeypatch):
    monkeypatch.setattr(ViewMaker, "views", lambda *arguments: 1 / 0)
    ring = Ring(learner)
    ring.put(lambda: batch(0))
    ring.put(lambda: batch(1))
    ring.take()
    with pytest.raises(ZeroDivisionError):
        ring.take()
    ring.close()


def test_functions_are_called_in_order_and_a_closed_feeder_has_no_thread():
    feeder, order = Feeder(torch.device("cpu")), []

    def make(number: int) -> torch.Tensor:
        order.append((number, torch.get_num_threads()))
        return torch.tensor(number)

    waiting = [feeder.put(lambda number=number: make(number), ()) for number in range(20)]
    assert [int(feeder.take(views)) for views in waiting] == list(range(20))
    assert order == [(number, 1) for number in range(20)]
    assert any(thread.name.startswith(NAME) for thread in threading.enumerate())
    feeder.close()
    assert not any(thread.name.startswith(NAME) for thread in threading.enumerate())


def test_a_feeder_that_nobody_holds_ends_by_itself():
    feeder = Feeder(torch.device("cpu"))
    feeder.take(feeder.put(lambda: torch.zeros(1), ()))
    (thread,) = [thread for thread in threading.enumerate() if thread.name.startswith(NAME)]
    del feeder
    thread.join(timeout=10)
    assert not thread.is_alive()


# Whole runs


def test_a_run_makes_its_views_on_that_thread_alone_and_ends_it(made_on, plain):
    assert outcome(run(settings())) == plain[0]
    assert set(made_on) == {f"{NAME}_0"} and len(made_on) == 11
    assert not any(thread.name.startswith(NAME) for thread in threading.enumerate())


def test_steps_taken_one_by_one_have_the_same_losses(plain):
    """Without a ring the step makes its views itself, on the thread that called it."""
    from mose_fast import streams

    config = settings()
    stream = streams.create(config.stream)
    made = create_learner(config, **stream.spec)
    losses = []
    for task in range(2):
        made.begin_task(task, stream.tasks[task])
        for rows in stream.batches(task, seed=config.seed):
            told = made.observe(stream.x_train[rows], stream.y_train[rows], task, index=rows)
            losses.append(None if told is None else {name: float(value) for name, value in told.items()})
    assert losses == [told for _, told in plain[1]]


@pytest.mark.parametrize("depth", [9])
def test_any_depth_gives_the_same_run(monkeypatch, plain, depth):
    monkeypatch.setattr(pipeline_module, "Ring", lambda learner: Ring(learner, depth))
    watch = Watch()
    assert outcome(run(settings(), listeners=[watch])) == plain[0]
    assert watch.losses == plain[1]


@pytest.mark.slow
@pytest.mark.parametrize("at", [3, 6])
def test_a_run_that_is_stopped_while_views_were_made_ahead_goes_on_exactly(tmp_path, plain, at):
    with pytest.raises(Interrupted):
        run(settings(checkpoint_every=4), out=tmp_path / "run", listeners=[Watch(at)])
    watch = Watch()
    assert outcome(resume(tmp_path / "run", listeners=[watch])) == plain[0]
    assert watch.losses == plain[1][at:]


def test_a_loss_that_is_not_finite_takes_later_views_back_with_their_plans(tmp_path, monkeypatch, plain):
    views = ViewMaker.views

    def broken(maker, images, sizes, seed, sequence, rows=None):
        made = views(maker, images, sizes, seed, sequence, rows)
        return made * math.nan if sequence == 6 else made

    with monkeypatch.context() as patched:
        patched.setattr(ViewMaker, "views", broken)
        with pytest.raises(
            TrainingDiverged, match=r"not finite at batch 8 .*The newest is the state before this batch"
        ):
            run(settings(), out=tmp_path / "run")
    tensors, values = load_checkpoint(latest(tmp_path / "run" / "checkpoints"))
    assert values["position"]["done"] == 7 and int(tensors["memory/state"][2]) == 70
    assert outcome(resume(tmp_path / "run")) == plain[0]


class _Counting(TorchDispatchMode):
    """Counts what is dispatched on the thread that entered it."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function, types, arguments=(), named=None):
        self.count += 1
        return function(*arguments, **(named or {}))


def test_the_thread_that_launches_steps_dispatches_no_more_than_with_the_fused_op():
    """On a GPU each of these is a launch or a transfer."""
    counts = {}
    for feed in ("dali", "fused"):
        made = create_learner(
            method="mose", classes=4, width=1, memory=30, device="cpu", feed=feed, options=SETTINGS["options"]
        )
        made.begin_task(0)
        ring = Ring(made)
        for step in range(4):
            ring.put(lambda step=step: batch(step))
            with _Counting() as counting:
                ring.take().take()
        counts[feed] = counting.count
        ring.close()
    assert 0 < counts["dali"] <= counts["fused"]
