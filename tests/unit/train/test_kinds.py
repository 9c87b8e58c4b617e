"""Runs on streams of every kind: what the learner is told, what is measured, and that they can be
resumed.
"""

import dataclasses
import json
import warnings
from itertools import cycle

import jsonschema
import pytest
import torch

from mose_fast.methods import METHODS
from mose_fast.runs.results import schema, summary
from mose_fast.settings.run import WITHOUT_BOUNDARIES, ConfigError, RunConfig
from mose_fast.streams import StreamError, create, from_arrays
from mose_fast.train import Interrupted, Listener, resume, run
from tests.listeners import StopAt
from tests.unit.train.small import small_stream

# 80 images in 12 batches of 7, three a part.
STREAM = {"name": "digits", "limit_per_task": 16, "batch": 7, "tasks": 5, "imbalance": 4, "blur": 0.3, "disjoint": 0.5}
SETTINGS = {"buffer_batch": 12, "width": 1, "memory": 30, "device": "cpu"}
OPTIONS = {
    "mose": {"experts": 2, "new_extra": 4},
    "gdumb": {"passes": 1, "passes_before": 1},
    # A digit that is rotated is another.
    "ocm": {"rotations": 1},
    "onpro": {"rotations": 1},
}
NEED_BOUNDARIES = {name for name, method in METHODS.items() if method.needs_boundaries}


def config(kind, method="er", **changes):
    return RunConfig.create(
        **{"method": method, "stream": {**STREAM, "kind": kind}, **SETTINGS, **OPTIONS.get(method, {}), **changes}
    )


def made(kind):
    """As many images, of 8x8 pixels."""
    return small_stream(classes=10, kind=kind, tasks=5, batch=7, imbalance=4, blur=0.3)


def quiet(function, *arguments, **keywords):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return function(*arguments, **keywords)


class Told(Listener):
    """Keeps the learner, and what its methods are called with."""

    def __init__(self):
        self.calls, self.rows = [], []

    def on_start(self, config, stream, learner, batch, batches):
        self.learner, self.stream, self.batches = learner, stream, batches
        begin, end, receive = learner.begin_task, learner.end_task, learner.data.receive

        def begin_task(task, classes=None):
            self.calls.append(("begin", task))
            begin(task, classes)

        def end_task():
            self.calls.append(("end", learner.data.task))
            end()

        def received(x, y, index):
            self.rows.append(index.tolist())
            return receive(x, y, index)

        learner.begin_task, learner.end_task, learner.data.receive = begin_task, end_task, received


# To a method that runs on them, streams without task boundaries are one task each: it gets one.
TAKEN = [
    *((method, "imbalanced") for method in ("er", "mose", "gdumb", "joint")),
    *zip(METHODS, cycle(WITHOUT_BOUNDARIES), strict=False),
]


@pytest.mark.slow
@pytest.mark.parametrize(("method", "kind"), TAKEN)
def test_methods(method, kind, tmp_path):
    """Those that need task boundaries refuse a stream without before a folder exists."""
    if kind in WITHOUT_BOUNDARIES and method in NEED_BOUNDARIES:
        with pytest.raises(ConfigError, match=f"but a stream of kind '{kind}' has none; wanted a stream of several"):
            run(config(kind, method), out=tmp_path / "run")
        assert not (tmp_path / "run").exists()
        return
    results = quiet(run, config(kind, method), stream=made(kind))
    assert list(jsonschema.Draft202012Validator(schema()).iter_errors(results)) == []
    joint = METHODS[method].joint_stream
    assert results["evaluated_after"] == ([4] if joint else [0, 1, 2, 3, 4])
    has_af = kind == "imbalanced" and not joint
    assert all((value is not None) == has_af for value in results["af_paper"]["linear"].values())


def test_which_methods_need_task_boundaries():
    assert sorted(NEED_BOUNDARIES) == ["bic", "ccil", "co2l", "il2a", "lucir", "ssil"]


@pytest.mark.parametrize("kind", WITHOUT_BOUNDARIES)
def test_the_learner_notices_no_task_boundary(kind):
    """One task of all classes, and each image once, in the order of the stream."""
    told = Told()
    run(config(kind), listeners=[told])
    assert told.calls == [("begin", 0), ("end", 0)]
    assert [len(rows) for rows in told.rows] == [7] * 11 + [3] and told.batches == 12
    rows = [row for batch in told.rows for row in batch]
    stream = create(config(kind).stream)
    assert rows == stream.order(0).tolist() and sorted(rows) == list(range(80))
    assert set(told.learner.memory.tasks[: told.learner.memory.filled].tolist()) == {0}


def test_a_long_tail_has_its_task_boundaries():
    told = Told()
    run(config("imbalanced"), listeners=[told])
    assert told.calls == [(what, task) for task in range(5) for what in ("begin", "end")]


@pytest.mark.slow
@pytest.mark.parametrize("kind", WITHOUT_BOUNDARIES)
def test_what_is_measured(kind):
    """After each part, the accuracy on the images of all classes seen; at the end, of all."""
    told = Told()
    results = run(config(kind, "mose"), listeners=[told])
    stream, learner = told.stream, told.learner
    points = results["evaluation_points"]
    assert points["images_seen"] == [14, 28, 49, 63, 80]
    order = stream.y_train[torch.from_numpy(stream.order(0))]
    assert points["classes_seen"] == [len(set(order[:n].tolist())) for n in points["images_seen"]]
    assert points["classes_seen"][-1] == 10 == results["classes"]
    assert results["tasks"] == [list(range(10))]
    for classifier, experts in results["accuracy"].items():
        for expert, rows in experts.items():
            seen = torch.tensor([(stream.y_test[:, None] == order[:n]).any(1).sum() for n in points["images_seen"]])
            assert [len(row) for row in rows] == [1] * 5
            # Whole numbers of the images of the classes seen.
            right = torch.tensor([row[0] for row in rows]) * seen
            assert torch.allclose(right, right.round(), atol=1e-3)
            final = (learner.predict(stream.x_test, classifier, expert) == stream.y_test).double().mean()
            assert (
                rows[-1][0] == results["acc"][classifier][expert] == results["sample_acc"][classifier][expert] == final
            )
            average = sum(row[0] for row in rows) / 5
            assert results["average_anytime_accuracy"][classifier][expert] == pytest.approx(average)
            for undefined in ("af_paper", "af_released", "bwt", "new_task_accuracy"):
                assert results[undefined][classifier][expert] is None
    assert sum(map(sum, results["confusion_by_task"])) == len(stream.y_test)
    assert summary(results).splitlines()[1].split()[4:6] == ["-", "-"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "method"), [("imbalanced", "er"), ("blurry", "mose"), ("si_blurry", "er"), ("task_free", "er")]
)
def test_resuming_gives_the_same_bits(kind, method, tmp_path):
    """Interrupted at the end of a part, and in the middle of one."""
    settings = config(kind, method, evaluate_every=2, checkpoint_every=3)
    stream = made(kind)
    whole = quiet(run, settings, stream=stream)
    for stop in (4, 8):
        folder = tmp_path / str(stop)
        try:
            quiet(run, settings, stream=stream, out=folder, listeners=[StopAt(stop)])
        except Interrupted:
            quiet(resume, folder, stream=stream)
        results = json.loads((folder / "results.json").read_text())
        for name in ("accuracy", "buffer_accuracy", "weights_sha256", "anytime", "evaluation_points", "steps"):
            assert results[name] == whole[name], (stop, name)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["blurry"])
def test_accuracy_at_any_time_changes_nothing(kind):
    plain, measured = run(config(kind)), run(config(kind, evaluate_every=2))
    assert plain["weights_sha256"] == measured["weights_sha256"] and plain["accuracy"] == measured["accuracy"]
    curve = measured["anytime"]
    assert curve["batch"] == [2, 4, 6, 7, 8, 9, 10, 12]
    assert curve["ends_task"] == [True, True, False, True, False, True, False, True]
    assert curve["images_seen"] == [14, 28, 42, 49, 56, 63, 70, 80]


@pytest.mark.parametrize("kind", WITHOUT_BOUNDARIES)
def test_training_on_the_final_memory(kind):
    results = run(config(kind, train_on="final_memory", epochs=2))
    assert results["evaluated_after"] == [4] and results["steps"] == 2 * 3
    assert results["evaluation_points"] == {"images_seen": [80], "classes_seen": [10]}
    assert results["average_anytime_accuracy"]["linear"]["1"] is None


def test_options_that_need_task_boundaries_warn():
    with pytest.warns(UserWarning, match="options.first_task of method 'mose' is 'joint'.*kind 'task_free' has none"):
        run(config("task_free", "mose"))


def test_a_stream_made_by_hand_notes_its_kind(tmp_path):
    stream = create(config("blurry").stream)
    made = from_arrays(
        stream.x_test.numpy(),
        stream.y_test,
        stream.x_test.numpy(),
        stream.y_test,
        tasks=5,
        kind="blurry",
        kind_seed=4,
        blur=0.25,
    )
    results = run(stream=made, method="er", out=tmp_path / "run", **SETTINGS)
    noted = results["config"]["stream"]
    assert (noted["kind"], noted["kind_seed"], noted["blur"]) == ("blurry", 4, 0.25)


def test_a_run_is_resumed_on_a_stream_of_its_kind(tmp_path):
    stream = create(config("blurry").stream)
    with pytest.raises(Interrupted):
        run(config("blurry"), stream=stream, out=tmp_path, listeners=[StopAt(4)])
    for other, message in (
        ({"kind_seed": 1}, "stream.kind_seed is 0, but that of the stream that was given is 1"),
        ({"kind": "task_free"}, "stream.kind is 'blurry', but that of the stream that was given is 'task_free'"),
    ):
        with pytest.raises(StreamError, match=message):
            resume(tmp_path, stream=create(dataclasses.replace(config("blurry").stream, **other)))
    assert resume(tmp_path, stream=stream)["accuracy"] == run(config("blurry"))["accuracy"]


def test_events_have_no_new_task(tmp_path):
    """A stream without task boundaries has no newest task, whose accuracy would be shown."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for kind in ("blurry", "tasks"):
        run(config(kind, evaluate_every=2), out=tmp_path / kind)
        events = EventAccumulator(str(tmp_path / kind / "tensorboard"))
        events.Reload()
        names = {name.split("/")[0] for name in events.Tags()["scalars"]}
        assert {"accuracy_ncm", "anytime_accuracy_ncm"} <= names
        assert ("new_task_accuracy_ncm" in names) == (kind == "tasks")
