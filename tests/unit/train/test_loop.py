"""The loop: order of events, used folders, divergence, training on the final memory, a full
disk.
"""

import errno
import math
import tempfile
import warnings
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from mose_fast.methods import Gdumb, Mose, Scr
from mose_fast.runs.checkpoint import latest, load_checkpoint
from mose_fast.settings.run import RunConfig
from mose_fast.train import Listener, RunError, TensorBoard, TrainingDiverged, resume, run

# Two tasks of four batches.
SETTINGS = {
    "stream": {"name": "digits", "tasks": 2, "limit_per_task": 40},
    "options": {"experts": 2, "buffer_batch": 12, "new_extra": 4},
    "width": 1,
    "memory": 30,
    "device": "cpu",
}


def config(**changes):
    settings = {**SETTINGS, **changes, "options": {**SETTINGS["options"], **changes.get("options", {})}}
    return RunConfig.create(**settings)


class Recorder(Listener):
    """Writes down what it is told."""

    def __init__(self):
        self.told = []

    def on_start(self, config, stream, learner, batch, batches):
        self.told.append(("start", batch, batches))
        self.learner = learner

    def on_task_start(self, task):
        self.told.append(("task", task))

    def on_batch(self, batch, losses):
        self.told.append(("batch", batch, losses is not None))

    def on_task_end(self, task, batch, accuracy):
        self.told.append(("task end", task, batch, accuracy is not None))

    def on_end(self, results):
        self.told.append("end")

    def close(self):
        self.told.append("closed")


@pytest.fixture(scope="module")
def plain():
    """What a run of the plain configuration returns and tells; checkpoints and an output folder
    must not change it.
    """
    recorder = Recorder()
    return run(config(), listeners=[recorder]), recorder


def test_listeners_are_told_in_order(plain):
    recorder = plain[1]
    first, second = ([("batch", b, b > 1) for b in range(s, s + 4)] for s in (1, 5))
    tasks = [("task", 0), *first, ("task end", 0, 4, True), ("task", 1), *second, ("task end", 1, 8, True)]
    assert recorder.told == [("start", 0, 8), *tasks, "end", "closed"]


def test_two_epochs_pass_each_task_twice_and_store_it_once():
    recorder = Recorder()
    results = run(config(epochs=2), listeners=[recorder])
    assert recorder.told[0] == ("start", 0, 16)
    assert [t for t in recorder.told if t[0] == "task end"] == [("task end", 0, 8, True), ("task end", 1, 16, True)]
    assert recorder.learner.memory.seen == 80
    assert results["steps"] == 15


def test_final_memory_is_filled_by_the_stream_and_rehearsed_in_every_epoch(monkeypatch, plain):
    rehearsed, rehearsal = [], Mose.rehearsal
    monkeypatch.setattr(
        Mose, "rehearsal", lambda learner, slots: rehearsed.append(slots.tolist()) or rehearsal(learner, slots)
    )
    recorder, online = Recorder(), plain[1]
    run(config(train_on="final_memory", epochs=3), listeners=[recorder])
    stream = [("task", 0), *[("batch", b, False) for b in range(1, 5)], ("task end", 0, 4, False)]
    stream += [("task", 1), *[("batch", b, False) for b in range(5, 9)], ("task end", 1, 8, False)]
    joint = [("task", 2), *[("batch", b, True) for b in range(9, 18)], ("task end", 2, 17, True)]
    assert recorder.told == [("start", 0, 17), *stream, *joint, "end", "closed"]
    passes = [[slot for slots in rehearsed[e : e + 3] for slot in slots] for e in (0, 3, 6)]
    assert [len(slots) for slots in rehearsed] == [12, 12, 6] * 3
    assert all(sorted(slots) == list(range(30)) for slots in passes)
    assert len({tuple(slots) for slots in passes}) == 3
    assert torch.equal(recorder.learner.memory.indices, online.learner.memory.indices)


def test_settings_beside_a_configuration_are_refused():
    with pytest.raises(TypeError, match="memory: given beside config; wanted them inside it"):
        run(config(), memory=50)


@pytest.mark.parametrize("bad", [math.nan, -math.inf])
def test_divergence_names_the_batch_and_the_part_and_can_be_resumed(tmp_path, monkeypatch, plain, bad):
    out, step = tmp_path / "run", Mose.step

    def broken(learner, inputs, train_on):
        losses = step(learner, inputs, train_on)
        return losses | {"distillation": torch.tensor(bad)} if learner.steps == 5 else losses

    with monkeypatch.context() as patched:
        patched.setattr(Mose, "step", broken)
        with pytest.raises(TrainingDiverged, match=rf"at batch 6 \(task 2\): .*distillation {bad:g}"):
            run(config(checkpoint_every=1), out=out)
    assert load_checkpoint(latest(out / "checkpoints"))[1]["position"]["done"] == 5
    assert resume(out)["weights_sha256"] == plain[0]["weights_sha256"]


@pytest.mark.parametrize(
    ("learner", "options"),
    [(Scr, {"review": True, "buffer_batch": 10}), (Gdumb, {"passes": 2, "passes_before": 2, "buffer_batch": 10})],
)
def test_divergence_at_the_end_of_a_task_is_told_there_and_can_be_resumed(tmp_path, monkeypatch, learner, options):
    """A review, and training for an evaluation: no batch reads their losses."""
    settings = RunConfig.create(**SETTINGS | {"method": learner.__name__.lower(), "options": options})
    unbroken, train_on = run(settings), learner.train_on

    def spoilt(self, inputs):
        ends = "after_step" in vars(self)  # as the loop sets it for this training
        return train_on(self, inputs._replace(views=inputs.views * math.nan) if ends else inputs)

    with monkeypatch.context() as patched:
        patched.setattr(learner, "train_on", spoilt)
        with pytest.raises(TrainingDiverged, match="not finite in the training for the end of task 1"):
            run(settings, out=tmp_path / "run")
    assert resume(tmp_path / "run")["weights_sha256"] == unbroken["weights_sha256"]


def test_missing_classes_are_warned_about_once_in_a_run():
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        results = run(config(stream={"name": "digits", "limit_per_task": 20}, memory=6, options={"buffer_batch": 6}))
    assert ["no sample in the memory" in str(w.message) for w in told].count(True) == 1
    assert any(None in row for row in results["buffer_accuracy"]["ncm"]["1"])


def no_space(*args, **settings):
    raise OSError(errno.ENOSPC, "No space left on device")


def test_events_that_cannot_be_written_only_warn(tmp_path, monkeypatch, plain):
    from tensorboard.summary.writer.record_writer import RecordWriter

    monkeypatch.setattr(RecordWriter, "write", no_space)
    with pytest.warns(
        UserWarning, match=r"cannot write TensorBoard events into .*tensorboard \(No space left on device\)"
    ) as told:
        results = run(config(), out=tmp_path / "run")
    assert ["TensorBoard" in str(w.message) for w in told].count(True) == 1
    assert (tmp_path / "run" / "results.json").exists()
    assert results["weights_sha256"] == plain[0]["weights_sha256"]


class Crash(Listener):
    """Dies like a killed process, without a checkpoint: in a batch, or in the evaluation after."""

    def __init__(self, batch, evaluation):
        self.batch, self.evaluation = batch, evaluation

    def on_batch(self, batch, losses):
        if batch == self.batch and not self.evaluation:
            raise ZeroDivisionError

    def on_evaluation(self, batch, images, accuracy):
        if batch == self.batch and self.evaluation:
            raise ZeroDivisionError


def events_of(folder):
    """The points of every curve that TensorBoard shows."""
    events = EventAccumulator(str(folder)).Reload()
    return {(tag, point.step, point.value) for tag in events.Tags()["scalars"] for point in events.Scalars(tag)}


@pytest.mark.slow
@pytest.mark.parametrize("checkpoint_every", [None, 2])
def test_curves_are_those_of_an_unbroken_run_after_kills(tmp_path, monkeypatch, checkpoint_every):
    monkeypatch.setattr("mose_fast.train.loop.TensorBoard", partial(TensorBoard, every=1))
    chosen = config(evaluate_every=2, checkpoint_every=checkpoint_every)
    run(chosen, out=tmp_path / "whole")
    whole = events_of(tmp_path / "whole" / "tensorboard")
    assert {step for _, step, _ in whole} == set(range(2, 9))
    out = tmp_path / "broken"
    go_on = partial(run, chosen, out=out)
    for crash in (Crash(2, True), Crash(5, False), Crash(6, True), Crash(8, False)):
        with pytest.raises(ZeroDivisionError):
            go_on(listeners=[crash])
        (newest,) = sorted((out / "tensorboard").iterdir(), key=lambda path: path.stat().st_mtime_ns)[-1:]
        with newest.open("ab") as file:
            file.write(b"\x20\0\0\0\0\0\0\0torn")  # the record that it was writing
        go_on = partial(resume, out)
    resume(out)
    assert events_of(out / "tensorboard") == whole


@pytest.mark.slow
@pytest.mark.parametrize("name", ["accuracy.csv", "accuracy.png", "results.json"])
def test_full_disk_while_writing_results_loses_nothing(tmp_path, monkeypatch, plain, name):
    from tensorboard.summary.writer.record_writer import RecordWriter

    out, mkstemp = tmp_path / "run", tempfile.mkstemp
    with monkeypatch.context() as patched:
        patched.setattr(
            tempfile, "mkstemp", lambda **named: no_space() if name in named["prefix"] else mkstemp(**named)
        )
        patched.setattr(RecordWriter, "close", no_space)
        with (
            pytest.warns(UserWarning, match="cannot write TensorBoard events"),
            pytest.raises(RunError, match=rf"cannot write .*{name} .*: No space left on device; .*mose-fast resume"),
        ):
            run(config(checkpoint_every=3), out=out)
    assert not (out / name).exists()
    assert resume(out)["weights_sha256"] == plain[0]["weights_sha256"]
    assert (out / name).exists()


def test_a_checkpoint_never_holds_broken_weights(tmp_path):
    """The last step of a task may break the weights though its loss was finite."""

    class Breaker(Listener):
        def on_start(self, config, stream, learner, batch, batches):
            self.learner = learner

        def on_batch(self, batch, losses):
            if batch == 6:
                with torch.no_grad():
                    next(self.learner.network.parameters()).fill_(float("nan"))

    with pytest.raises(TrainingDiverged, match=r"network/.* holds NaN or infinity after batch 6"):
        run(config(checkpoint_every=2), out=tmp_path / "run", listeners=[Breaker()])
    tensors, _ = load_checkpoint(latest(tmp_path / "run" / "checkpoints"))
    assert all(tensor.isfinite().all() for tensor in tensors.values())


def modes():
    return torch.are_deterministic_algorithms_enabled(), torch.utils.deterministic.fill_uninitialized_memory


def test_deterministic_algorithms_are_asked_for_only_while_it_runs():
    """And new tensors are not filled, since that would be in every graph, between all launches."""
    inside = []

    class Asks(Listener):
        def on_batch(self, batch, losses):
            inside.append(modes())

    before = modes()
    run(config(deterministic=True), listeners=[Asks()])
    assert set(inside) == {(True, False)} and modes() == before == (False, True)


def test_nothing_is_read_that_was_never_written(plain):
    """A program's own deterministic mode fills new tensors with NaN and the largest numbers."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        assert modes() == (True, True) and torch.empty(3).isnan().all()
        results = run(config())
    finally:
        torch.use_deterministic_algorithms(False)
    assert results["weights_sha256"] == plain[0]["weights_sha256"]
    assert results["accuracy"] == plain[0]["accuracy"]


@pytest.mark.slow
def test_a_second_thread_makes_no_run(tmp_path):
    """It would draw from the same random state. The same thread may, as a listener does here."""
    refused = []

    class Runs(Listener):
        def on_task_start(self, task):
            with ThreadPoolExecutor(1) as thread:
                for start in (lambda: run(config(), out=tmp_path / "second"), lambda: resume(tmp_path / "first")):
                    with pytest.raises(
                        RunError, match=r"another thread of this process is in a run.*run_sweep"
                    ) as error:
                        thread.submit(start).result()
                    refused.append(error.value)
            if task == 1:
                run(config())

    run(config(), out=tmp_path / "first", listeners=[Runs()])
    assert len(refused) == 4 and not (tmp_path / "second").exists()
    with ThreadPoolExecutor(1) as thread:
        assert thread.submit(run, config()).result()["steps"] > 0
