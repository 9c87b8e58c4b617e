"""What a run leaves in its folder."""

import copy
import csv
import io
import json
import subprocess
import sys
import time

import jsonschema
import numpy as np
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from mose_fast import streams
from mose_fast.methods.mose import MoseOptions
from mose_fast.runs import clock as clock_module
from mose_fast.runs.clock import Clock
from mose_fast.runs.files import RunFolder
from mose_fast.runs.results import schema, summary
from mose_fast.settings.run import RunConfig, StreamConfig
from mose_fast.train import Interrupted, Listener, resume, run
from mose_fast.train import loop as loop_module
from tests.paths import ROOT

SETTINGS = {
    "stream": {"name": "digits", "limit_per_task": 20},
    "options": {"buffer_batch": 12, "new_extra": 4},
    "width": 2,
    "memory": 50,
    "device": "cpu",
}
TASKS = 5


class Losses(Listener):
    """Remembers the losses of all batches."""

    def __init__(self):
        self.losses = {}

    def on_batch(self, batch, losses):
        self.losses[batch] = losses


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A finished run: its folder, what :func:`run` returned, and the losses by batch."""
    out, losses = tmp_path_factory.mktemp("finished") / "run", Losses()
    return out, run(RunConfig.create(**SETTINGS), out=out, listeners=[losses]), losses.losses


@pytest.fixture(scope="module")
def joint():
    return run(RunConfig.create(**SETTINGS | {"train_on": "final_memory", "epochs": 2}))


def errors(results):
    return [
        f"{error.json_path}: {error.message}"
        for error in jsonschema.Draft202012Validator(schema()).iter_errors(results)
    ]


def test_schema_is_a_schema_and_describes_every_entry():
    jsonschema.Draft202012Validator.check_schema(schema())
    for name, entry in schema()["properties"].items():
        assert entry.get("description"), name
        assert "\n" not in entry["description"]
    settings = schema()["$defs"]["config"]["properties"]
    assert settings.keys() == RunConfig.__dataclass_fields__.keys()
    assert settings["stream"]["properties"].keys() == StreamConfig.__dataclass_fields__.keys()


@pytest.mark.slow
def test_results_fit_the_schema(finished, joint):
    out, results, _ = finished
    assert json.loads((out / "results.json").read_text()) == results
    assert errors(results) == []
    assert errors(joint) == []


@pytest.mark.parametrize(
    "settings",
    [
        {"options": {"experts": 1}, "classifiers": "all"},
        {"options": {"experts": 8, "classifier": "lda", "expert": "all"}, "epochs": 2},
        {"preset": "paper", "classifiers": "all"},
    ],
)
def test_results_of_other_settings_fit_the_schema(settings):
    stream = {"name": "digits", "tasks": 1, "limit_per_task": 20, "class_order_seed": 3}
    options = {**SETTINGS["options"], **settings.get("options", {})}
    assert errors(run(RunConfig.create(**SETTINGS | {"stream": stream} | settings | {"options": options}))) == []


def damaged(results):
    """Copies with one fault each, by its name."""

    def copies():
        def damage(path, value):
            changed = copy.deepcopy(results)
            *parents, last = path
            entry = changed
            for name in parents:
                entry = entry[name]
            if value is KeyError:
                del entry[last]
            else:
                entry[last] = value
            return changed

        for name in results:
            yield f"{name} missing", damage([name], KeyError)
            yield f"{name} of no known kind", damage([name], object)
        yield "unknown entry", damage(["accuracies"], {})
        yield "newer version", damage(["schema_version"], 2)
        for matrices in ("accuracy", "buffer_accuracy"):
            yield f"{matrices} in percent", damage([matrices, "ncm", "1", 0, 0], 52.1)
            yield f"{matrices} below 0", damage([matrices, "linear", "mean_logit", 1, 0], -0.1)
            yield f"{matrices} without expert", damage([matrices, "ncm", "1"], KeyError)
            yield f"{matrices} of expert 9", damage([matrices, "linear", "9"], results[matrices]["linear"]["1"])
            yield (
                f"{matrices} of the other mean",
                damage([matrices, "linear", "mean_distance"], results[matrices]["linear"]["1"]),
            )
            yield f"{matrices} of another classifier", damage([matrices, "knn"], results[matrices]["ncm"])
        yield f"{matrices} of lda by distances", damage([matrices, "lda"], results[matrices]["ncm"])
        yield "accuracy unknown", damage(["accuracy", "ncm", "4", 0, 0], None)
        yield "acc above 1", damage(["acc", "ncm", "4"], 1.01)
        yield "forgetting below 0", damage(["af_released", "ncm", "4"], -0.1)
        yield "confusion below 0", damage(["confusion_by_task", 0, 0], -1)
        yield "no one taken for a class", damage(["confusion_by_class", 0, "1"], 0)
        yield "a class by name", damage(["confusion_by_class", 0, "cat"], 1)
        yield "bof below -1", damage(["bof", "ncm", "4", 0], -1.5)
        yield "setting unknown", damage(["config", "momentum"], 0.9)
        yield "setting missing", damage(["config", "memory"], KeyError)
        yield "option nested", damage(["config", "options", "lr"], [0.001])
        yield "phase missing", damage(["seconds", "train"], KeyError)
        yield "time below 0", damage(["seconds", "train"], -1)
        yield "wall time since an unknown moment", damage(["seconds", "wall_since"], "boot")
        yield "hash cut", damage(["weights_sha256"], results["weights_sha256"][:-1])
        yield "two colours", damage(["resolved", "normalisation", "mean"], [0.5, 0.5])

    return dict(copies())


@pytest.mark.slow
def test_damaged_results_do_not_fit_the_schema(finished):
    copies = damaged(finished[1])
    assert len(copies) > 80
    assert [name for name, changed in copies.items() if not errors(changed)] == []


def test_table_agrees_with_the_results(finished):
    out, results, _ = finished
    rows = list(csv.DictReader(io.StringIO((out / "accuracy.csv").read_text())))
    assert len(rows) == 2 * 5 * TASKS * (TASKS + 1) // 2
    for row in rows:
        place = row["classifier"], row["expert"], int(row["after_task"]), int(row["task"])
        for column in ("accuracy", "buffer_accuracy"):
            value = results[column]
            for step in place:
                value = value[step]
            assert row[column] == ("" if value is None else repr(value))
    assert len({(row["classifier"], row["expert"], row["after_task"], row["task"]) for row in rows}) == len(rows)


def test_summaries_follow_from_the_matrices(finished):
    results = finished[1]
    stream = streams.create(StreamConfig(**SETTINGS["stream"]))
    images = np.array([len(stream.test_rows(task)) for task in range(TASKS)])
    assert len(set(images)) > 1
    for classifier, experts in results["accuracy"].items():
        for expert, rows in experts.items():
            a = np.array(rows)
            assert a.shape == (TASKS, TASKS)
            assert not np.triu(a, 1).any()
            best, last = a[:-1].max(0)[:-1], a[-1][:-1]
            got = {
                name: results[name][classifier][expert]
                for name in ("acc", "af_paper", "af_released", "bwt", "new_task_accuracy")
            }
            assert got["acc"] == pytest.approx(a[-1].mean())
            assert results["sample_acc"][classifier][expert] == pytest.approx((a[-1] * images).sum() / sum(images))
            assert got["af_paper"] == pytest.approx((best - last).mean())
            assert got["af_released"] == pytest.approx((a.max(0) - a[-1]).mean())
            assert got["bwt"] == pytest.approx((last - a.diagonal()[:-1]).mean())
            assert got["new_task_accuracy"] == list(a.diagonal())
            for task, (stored, tested) in enumerate(
                zip(results["buffer_accuracy"][classifier][expert][-1], rows[-1], strict=True)
            ):
                bof = None if stored is None or tested == 0 else pytest.approx((stored - tested) / tested)
                assert results["bof"][classifier][expert][task] == bof


def test_confusion_counts_the_test_images(finished, joint):
    stream = streams.create(StreamConfig(**SETTINGS["stream"]))
    images = [len(stream.test_rows(task)) for task in range(TASKS)]
    for results in (finished[1], joint):
        by_class = np.zeros((2 * TASKS, 2 * TASKS))
        for label, row in enumerate(results["confusion_by_class"]):
            for taken_for, count in row.items():
                by_class[label, int(taken_for)] = count
        assert np.trace(by_class) / by_class.sum() == pytest.approx(results["sample_acc"]["ncm"]["4"])
        task_of = np.array(
            [next(t for t, labels in enumerate(results["tasks"]) if label in labels) for label in range(2 * TASKS)]
        )
        confusion = np.array(results["confusion_by_task"])
        for row, column in np.ndindex(TASKS, TASKS):
            assert by_class[np.ix_(task_of == row, task_of == column)].sum() == confusion[row, column]
        assert confusion.shape == (TASKS, TASKS)
        assert confusion.sum(1).tolist() == images
        # Whoever finds the class has found its task.
        right = np.array(results["accuracy"]["ncm"]["4"][-1]) * images
        assert (confusion.diagonal() >= right - 1e-6).all()


def test_events_hold_losses_and_accuracies(finished):
    out, results, losses = finished
    events = EventAccumulator(str(out / "tensorboard")).Reload()
    assert losses[1] is None  # The first batch of the stream trains nothing.
    for name in ("loss", "contrastive", "cross_entropy", "distillation"):
        points = {event.step: event.value for event in events.Scalars(f"loss/{name}")}
        assert points == {batch: pytest.approx(losses[batch][name]) for batch in (10,)}
    for classifier, experts in results["accuracy"].items():
        for expert, rows in experts.items():
            seen = {event.step: event.value for event in events.Scalars(f"accuracy_{classifier}/{expert}")}
            assert seen == {2 * (t + 1): pytest.approx(np.mean(rows[t][: t + 1])) for t in range(TASKS)}
            new = [event.value for event in events.Scalars(f"new_task_accuracy_{classifier}/{expert}")]
            assert new == pytest.approx([rows[t][t] for t in range(TASKS)])


def test_final_memory_mode_has_one_evaluation_and_no_metrics_over_time(joint, finished):
    assert joint["evaluated_after"] == [TASKS - 1]
    for name in ("af_paper", "af_released", "bwt", "average_anytime_accuracy", "new_task_accuracy"):
        assert all(value is None for experts in joint[name].values() for value in experts.values())
    for classifier, experts in joint["accuracy"].items():
        for expert, rows in experts.items():
            assert not np.any(rows[:-1])
            assert all(v is None for row in joint["buffer_accuracy"][classifier][expert][:-1] for v in row)
            assert joint["acc"][classifier][expert] == pytest.approx(np.mean(rows[-1]))
    assert "-" in summary(joint)
    # Two passes over 50 samples in batches of 12, and the same memory as the online run's: so the
    # same untrained accuracy.
    assert joint["steps"] == 2 * 5
    assert joint["untrained"] == finished[1]["untrained"]


def test_what_was_decided_is_recorded(finished):
    results = finished[1]
    stream = streams.create(StreamConfig(**SETTINGS["stream"]))
    assert results["tasks"] == [list(task) for task in stream.tasks]
    assert results["class_order"] == list(range(10))
    assert results["resolved"]["mirror"] is False  # Digits.
    assert results["resolved"]["normalisation"]["name"] == "digits"
    assert (results["resolved"]["classifier"], results["resolved"]["expert"]) == ("ncm", "4")
    assert results["config"]["precision"] == "auto" and results["resolved"]["precision"] == "fp32"
    assert results["resolved"]["reasons"] == {"precision": "auto: on the CPU"}
    assert results["changes_from_preset"] == SETTINGS["options"]
    assert results["config"]["options"].keys() == MoseOptions.__dataclass_fields__.keys()
    assert results["steps"] == TASKS * 2 - 1
    assert results["seconds"]["total"] == pytest.approx(
        sum(results["seconds"][phase] for phase in clock_module.PHASES), abs=0.002
    )
    assert results["gpu"] is None
    assert results["threads"] == 1


def test_summary_is_in_percent_and_marks_the_classifier_of_predict(finished):
    results = finished[1]
    lines = summary(results).splitlines()
    marked = [line for line in lines if "predict()" in line]
    assert len(lines) == 11
    assert len(marked) == 1
    assert marked[0].split()[:3] == ["ncm", "4", f"{100 * results['acc']['ncm']['4']:.1f}"]
    assert max(map(len, lines)) <= 110


def test_summary_has_the_mean_over_images_beside_that_over_tasks(finished):
    results = copy.deepcopy(finished[1])
    results["acc"]["ncm"]["4"], results["sample_acc"]["ncm"]["4"] = 0.25, 0.75
    heading, *lines = summary(results).splitlines()
    assert heading.split()[2:5] == ["ACC", "sample", "ACC"]
    (marked,) = (line for line in lines if "predict()" in line)
    assert marked.split()[:4] == ["ncm", "4", "25.0", "75.0"]


class Slow(Listener):
    """Takes its time where no phase is running."""

    def on_start(self, *ignored):
        time.sleep(0.3)

    def on_task_end(self, task, batch, accuracy):
        time.sleep(0.1)


def test_all_time_from_the_call_to_the_file_is_told(tmp_path, monkeypatch):
    figure = loop_module.accuracy_figure
    monkeypatch.setattr(loop_module, "accuracy_figure", lambda results: time.sleep(0.2) or figure(results))
    written = []
    write = RunFolder.write
    monkeypatch.setattr(RunFolder, "write", lambda *file: written.append(time.perf_counter()) or write(*file))
    start = time.perf_counter()
    run(RunConfig.create(**SETTINGS), out=tmp_path / "run", listeners=[Slow()])
    seconds = json.loads((tmp_path / "run" / "results.json").read_text())["seconds"]
    phases = sum(seconds[phase] for phase in ("train", "evaluate", "checkpoint", "capture"))
    assert seconds["total"] == pytest.approx(phases, abs=0.005)
    assert seconds["wall"] == pytest.approx(seconds["total"] + seconds["other"], abs=0.005)
    # Five listeners' pauses, one before the start, and the figure are in no phase; the last thing
    # that is written are the results.
    assert seconds["other"] >= 0.3 + 0.5 + 0.2
    assert seconds["wall"] == pytest.approx(written[-1] - start, abs=0.05)
    assert seconds["wall_since"] == "call"


def test_a_resumed_run_adds_what_it_took_before(tmp_path):
    def stop(batch, losses):
        if batch == 2:
            raise Interrupted

    first = Slow()
    first.on_batch = stop
    with pytest.raises(Interrupted):
        run(RunConfig.create(**SETTINGS), out=tmp_path / "run", listeners=[first])
    start = time.perf_counter()
    seconds = resume(tmp_path / "run")["seconds"]
    assert seconds["other"] >= 0.3 and seconds["wall"] >= 0.3 + time.perf_counter() - start - 0.05
    assert seconds["wall"] == pytest.approx(seconds["total"] + seconds["other"], abs=0.005)


@pytest.mark.slow
def test_a_process_knows_when_it_started():
    script = (
        "import time; time.sleep(0.5); from mose_fast.runs.clock import Clock, process_start; "
        "print(time.perf_counter() - process_start(), Clock(whole_process=True).wall, Clock().wall)"
    )
    start = time.perf_counter()
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, cwd=ROOT)
    took = time.perf_counter() - start
    process, whole, now = map(float, ended.stdout.split())
    assert 0.5 <= process <= took + 0.02 and 0.5 <= whole <= took + 0.02 and now < 0.1


def test_where_the_system_does_not_say_a_clock_starts_with_the_call(monkeypatch):
    monkeypatch.setattr(clock_module, "process_start", lambda: None)
    clock = Clock(whole_process=True)
    assert clock.since == "call" and clock.wall < 0.1
