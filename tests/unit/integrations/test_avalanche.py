"""Methods in Avalanche's loops learn what they learn in our own."""

from __future__ import annotations

import pytest
from torch.utils.data import ConcatDataset

from mose_fast.methods import METHODS, create_learner
from mose_fast.settings.run import ConfigError
from mose_fast.train.loop import TrainingDiverged
from tests.unit.integrations.twins import SMALL, TINY, own_loop

pytest.importorskip("avalanche", reason="avalanche-lib is not installed")

from avalanche.benchmarks import OnlineCLScenario, benchmark_from_datasets, class_incremental_benchmark
from avalanche.benchmarks.utils import as_classification_dataset
from avalanche.core import SupervisedPlugin
from avalanche.evaluation.metrics import accuracy_metrics, loss_metrics
from avalanche.training.plugins import EvaluationPlugin

from mose_fast.integrations.avalanche import strategy

pytestmark = pytest.mark.filterwarnings("ignore:No loggers specified", "ignore:Deprecated")


class Outputs(SupervisedPlugin):
    """Keeps what the training batches were predicted as, and their losses."""

    def __init__(self):
        super().__init__()
        self.outputs, self.losses = [], []

    def after_training_iteration(self, strategy, **kwargs):
        self.outputs.append(strategy.mb_output)
        self.losses.append(float(strategy.loss))


def benchmark_of(twin):
    train, test = ([as_classification_dataset(task) for task in tasks] for tasks in (twin.train, twin.test))
    return benchmark_from_datasets(train=train, test=test)


def joined(tasks):
    whole = ConcatDataset(tasks)
    whole.targets = [label for task in tasks for label in task.targets]
    return whole


def strategy_for(twin, method="er", **settings):
    spec = {"classes": twin.stream.classes, "image_size": twin.shape[1:], **twin.described}
    metrics = accuracy_metrics(experience=True, epoch=True), loss_metrics(experience=True)
    return strategy(method, **spec, evaluator=EvaluationPlugin(*metrics, loggers=[]), **settings)


def measured(told, name):
    """A metric of each experience of the test stream."""
    return [value for key, value in sorted(told.items()) if key.startswith(f"{name}/eval_phase/test")]


def trained(twin, method, **settings):
    """The hash of the weights, and the accuracies on the tasks so far after each."""
    benchmark, learns = benchmark_of(twin), strategy_for(twin, method, **settings)
    rows = []
    for number, experience in enumerate(benchmark.train_stream):
        learns.train(experience, shuffle=False)
        rows.append(measured(learns.eval(benchmark.test_stream), "Top1_Acc_Exp")[: number + 1])
    return learns.learner.weights_hash(), rows


@pytest.mark.slow
@pytest.mark.parametrize("method", ["mose", "er"])
def test_split_mnist_gives_the_accuracies_of_our_own_loop(mnist, method, one_thread):
    weights, rows = trained(mnist, method, **SMALL)
    own_weights, own_rows = own_loop(method, mnist.stream, **SMALL)
    assert weights == own_weights
    assert [pytest.approx(row, abs=1e-6) for row in own_rows] == rows


@pytest.mark.slow
@pytest.mark.parametrize("method", [name for name in METHODS if name != "joint"])
def test_every_method_learns_what_it_learns_in_our_own_loop(tiny, method, one_thread):
    weights, rows = trained(tiny, method, **TINY)
    own_weights, own_rows = own_loop(method, tiny.stream, **TINY)
    assert weights == own_weights
    assert [pytest.approx(row, abs=1e-6) for row in own_rows] == rows


# Avalanche's own mark of a task's last part is wrong where all parts are equally large, as 32 / 8.
@pytest.mark.parametrize("size", [8, 10])
def test_an_online_stream_with_boundaries_is_the_same_tasks(tiny, size, one_thread):
    settings = {**TINY, "train_mb_size": size, "options": {"review": True, "buffer_batch": 10}}
    whole, online = (strategy_for(tiny, "er", **settings) for _ in range(2))
    benchmark = benchmark_of(tiny)
    whole.train(benchmark.train_stream, shuffle=False)
    scenario = OnlineCLScenario(
        benchmark.streams.values(), experience_size=size, access_task_boundaries=True, shuffle=False
    )
    online.train(scenario.train_online_stream, shuffle=False)
    assert online.learner.task == 1 and online.learner.data.ended
    assert online.learner.data.task_batches == -(-32 // size)
    assert online.learner.weights_hash() == whole.learner.weights_hash()


def test_an_online_stream_without_boundaries_is_one_task(tiny, one_thread):
    online, benchmark = strategy_for(tiny, "er", **TINY), benchmark_of(tiny)
    scenario = OnlineCLScenario(benchmark.streams.values(), experience_size=10, shuffle=False)
    online.train(scenario.train_online_stream, shuffle=False)
    own = create_learner(method="er", **tiny.stream.spec, **TINY)
    for part in range(2):
        for rows in tiny.stream.batches(part, seed=0):
            own.observe(tiny.stream.x_train[rows], tiny.stream.y_train[rows], 0)
    assert online.learner.task == 0 and not online.learner.data.ended
    assert online.learner.weights_hash() == own.weights_hash()
    with pytest.raises(ConfigError, match="softmax for each task"):
        strategy_for(tiny, "ssil", **TINY).train(
            OnlineCLScenario(benchmark.streams.values(), experience_size=10, shuffle=False).train_online_stream
        )


def test_later_passes_do_not_fill_the_memory(tiny):
    learns = strategy_for(tiny, "er", train_epochs=3, **TINY)
    learns.train(benchmark_of(tiny).train_stream[0])
    assert learns.learner.memory.seen == 32 and learns.learner.steps == 3 * 4
    assert learns.learner.config.epochs == 3 and learns.learner.data.task_batches == 12


def test_labels_and_the_order_of_classes_are_the_benchmarks(tiny):
    train, test = (as_classification_dataset(joined(tasks)) for tasks in (tiny.train, tiny.test))
    benchmark = class_incremental_benchmark({"train": train, "test": test}, class_order=[3, 0, 2, 1], num_experiences=2)
    learns = strategy_for(tiny, "er", **TINY)
    learns.train(benchmark.train_stream[0])
    assert sorted(learns.learner.seen) == learns.learner.data.task_classes == [0, 3]
    predicted = learns.model.eval()(tiny.test[0].tensors[0]).argmax(1)
    assert predicted.tolist() == learns.learner.predict(tiny.stream.x_test[tiny.stream.test_rows(0)]).tolist()


def test_metrics_see_what_a_batch_was_predicted_as_before_it_was_trained_on(tiny, one_thread):
    seen = Outputs()
    learns = strategy_for(tiny, "er", plugins=[seen], **TINY)
    told = learns.train(benchmark_of(tiny).train_stream[0], shuffle=False)
    own = create_learner(method="er", **tiny.stream.spec, **TINY)
    own.begin_task(0, tiny.stream.tasks[0])
    right = []
    for number, rows in enumerate(tiny.stream.batches(0, seed=0)):
        x, y = tiny.stream.x_train[rows], tiny.stream.y_train[rows]
        if number:  # nothing was seen before the first
            assert seen.outputs[number].argmax(1).tolist() == own.predict(x).tolist()
        right += (seen.outputs[number].argmax(1) == y).tolist()
        assert seen.losses[number] == float(own.observe(x, y, 0)["loss"])
    assert seen.outputs[0].tolist() == [[0] * 4] * 10
    assert told["Top1_Acc_Epoch/train_phase/train_stream"] == pytest.approx(sum(right) / 32)


def test_class_means_of_an_empty_memory_predict_nothing(tiny):
    """LUCIR chooses its exemplars when a task ends."""
    seen = Outputs()
    options = {"buffer_batch": 10, "classifier": "ncm"}
    learns = strategy_for(tiny, "lucir", plugins=[seen], **{**TINY, "options": options})
    learns.train(benchmark_of(tiny).train_stream)
    assert [bool(output.any()) for output in seen.outputs] == [False] * 4 + [True] * 4


def test_the_loss_of_an_evaluation_is_the_share_of_errors(tiny):
    learns, benchmark = strategy_for(tiny, "er", eval_every=0, **TINY), benchmark_of(tiny)
    # With eval_every, Avalanche evaluates before anything was learned, too.
    learns.train(benchmark.train_stream[0], eval_streams=[benchmark.test_stream])
    told = learns.eval(benchmark.test_stream)
    errors = [1 - accuracy for accuracy in measured(told, "Top1_Acc_Exp")]
    assert measured(told, "Loss_Exp") == pytest.approx(errors) and min(errors) > 0


def test_what_a_loop_of_tasks_cannot_present_is_refused(tiny):
    with pytest.raises(ConfigError, match=r"method 'joint' .* learns the stream as a whole"):
        strategy_for(tiny, "joint", **TINY)


def test_training_that_diverges_stops(tiny):
    with pytest.raises(TrainingDiverged, match="after step"):
        strategy_for(tiny, "er", **{**TINY, "options": {"lr": 1e30, "buffer_batch": 10}}).train(
            benchmark_of(tiny).train_stream
        )
