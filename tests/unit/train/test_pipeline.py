"""The pipeline that runs and benchmarks share, and the timer of the latter."""

from __future__ import annotations

import pytest
import torch

from bench import bench_run
from bench.common import Case
from mose_fast.app import bench as benchmark_module
from mose_fast.methods import create_learner
from mose_fast.settings.run import RunConfig
from mose_fast.streams import create
from mose_fast.train import Interrupted, run
from mose_fast.train import pipeline as pipeline_module
from mose_fast.train.pipeline import Batch, Pipeline, incoming
from tests.listeners import StopAt
from tests.unit.train.small import TWO_TASKS

SETTINGS = {**TWO_TASKS, "feed": "fused", "kernels": "torch"}
SMALL = RunConfig.create(
    width=1, memory=80, device="cpu", kernels="torch", feed="fused", options={"buffer_batch": 6, "new_extra": 2}
)


def learner_and_stream():
    config = RunConfig.create(**SETTINGS)
    stream = create(config.stream)
    return create_learner(config, classes=stream.classes, image_size=stream.image_size), stream


def batches(stream, task):
    contents = incoming(stream, task, stream.batches(task, seed=0))
    return [Batch({"batch": number}, content) for number, content in enumerate(contents)]


def test_each_step_is_told_once_in_order_and_nothing_is_left():
    learner, stream = learner_and_stream()
    pipeline = Pipeline(learner)
    for task in range(2):
        told = [(taken.position["batch"], losses is None) for taken, losses in pipeline.run(batches(stream, task))]
        assert told == [(number, task == number == 0) for number in range(6)]
        assert len(pipeline.ring) == len(pipeline.reader) == 0
    assert learner.steps == 11 and pipeline.clock.seconds["train"] > 0


def test_a_pipeline_that_is_stopped_is_as_if_nothing_more_had_been_planned():
    (learner, stream), (other, _) = learner_and_stream(), learner_and_stream()
    pipeline = Pipeline(learner)
    for number, _ in enumerate(pipeline.run(batches(stream, 0))):
        if number == 2:
            break
    assert len(pipeline.ring) == 3
    pipeline.stop()
    reference = Pipeline(other)
    for _ in reference.run(batches(stream, 0)[:3]):
        pass
    assert learner.steps == other.steps == 2 and learner.data.sequence == 2
    for name, tensor in learner.state()[0].items():
        assert torch.equal(tensor, other.state()[0][name]), name
    # And goes on from there.
    assert [taken.position["batch"] for taken, _ in pipeline.run(batches(stream, 0)[3:])] == [3, 4, 5]


def test_the_numbers_of_all_images_go_to_the_gpu_in_one_transfer(monkeypatch):
    """One a batch would wait for the GPU each time, since it comes from memory that the GPU
    cannot read by itself.
    """
    uploaded = []
    monkeypatch.setattr(
        pipeline_module, "upload", lambda tensor, device: uploaded.append(len(tensor)) or tensor.to(device)
    )
    _, stream = learner_and_stream()
    contents = incoming(stream, 1, stream.batches(1, seed=0), train=False)
    assert uploaded == [60] and len(contents) == 6
    arguments = contents[2]()
    rows = stream.batches(1, seed=0)[2]
    assert torch.equal(arguments["index"], rows) and torch.equal(arguments["x"], stream.x_train[rows])
    assert arguments["task"] == 1 and arguments["train"] is False and arguments["store"] is True


class Measure:
    """In place of the fixture of bench/conftest.py."""

    def given(self, case: Case, take) -> None:
        self.seconds = take()


@pytest.mark.parametrize("who", ["run", "mose-fast bench", "bench_run"])
def test_what_is_measured_is_what_runs(monkeypatch, who):
    steps, take = [], Pipeline._take
    monkeypatch.setattr(Pipeline, "_take", lambda pipeline, *step: steps.append(step) or take(pipeline, *step))
    if who == "run":
        with pytest.raises(Interrupted):
            run(RunConfig.create(**SETTINGS), listeners=[StopAt(4)])
        assert len(steps) == 4
        return
    if who == "bench_run":
        measure = Measure()
        monkeypatch.setattr(bench_run, "config_for", lambda case, feed: SMALL)
        monkeypatch.setattr(
            bench_run, "random_stream", lambda config, classes, images: benchmark_module.random_stream(config, 4, 300)
        )
        bench_run.bench_loop(measure, "reference", "cpu", torch.float32, "fused")
        seconds = measure.seconds
    else:
        _, seconds = benchmark_module.in_the_loop(SMALL, benchmark_module.random_stream(SMALL, 4, 300), 0.05)
    # The first task and the ramp only fill the memory, a few steps warm up; each of the others is
    # timed.
    assert len(steps) >= 20 + 12 + 3 + 9 and len(seconds) >= 8 and min(seconds) > 0


def test_a_measurement_that_fails_leaves_no_thread_behind(monkeypatch):
    closed = []
    monkeypatch.setattr(Pipeline, "close", lambda pipeline: closed.append(len(pipeline.ring)))
    monkeypatch.setattr(Pipeline, "drain", lambda pipeline, **how: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        benchmark_module.in_the_loop(SMALL, benchmark_module.random_stream(SMALL, 4, 300), 0.05)
    assert len(closed) == 1


class Event:
    """Stands in for a GPU's events."""

    def __init__(self, log: list, number: int):
        self.log, self.number = log, number

    def record(self):
        self.log.append("record")

    def synchronize(self):
        self.log.append(f"wait for {self.number}")

    def elapsed_time(self, later):
        return 1e3 * (later.number - self.number)


def test_calls_on_a_gpu_are_timed_without_a_gap(monkeypatch):
    """A call that finds the GPU idle is timed with its launch; the host waits once, when all have
    been launched.
    """
    log: list = []
    events: list = []
    monkeypatch.setattr(torch.cuda, "Event", lambda enable_timing: events.append(Event(log, len(events))) or events[-1])
    seconds = benchmark_module.back_to_back(torch.device("cuda"), lambda: log.append("call"), calls=4)
    assert seconds == [1.0] * 4
    one_by_one = ["record", *["call", "record"] * 1, "wait for 1", "record", *["call", "record"] * 4, "wait for 6"]
    assert log == one_by_one
    log.clear()
    # Three warm ones tell how many fit: of one second each, in 9 seconds nine.
    assert len(benchmark_module.back_to_back(torch.device("cuda"), lambda: log.append("call"), seconds=9)) == 9
    assert log.count("call") == 12 and sum(entry.startswith("wait") for entry in log) == 2
