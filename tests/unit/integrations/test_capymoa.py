"""Methods in CapyMOA's loop learn what they learn in our own."""

from __future__ import annotations

import pytest
from torch.utils.data import DataLoader

from mose_fast.methods import METHODS, create_learner
from mose_fast.settings.run import ConfigError
from tests.unit.integrations.twins import SMALL, TINY, own_loop

pytest.importorskip("capymoa", reason="CapyMOA is not installed")

from capymoa.evaluation import prequential_evaluation
from capymoa.ocl.evaluation import events, ocl_train_eval_loop
from capymoa.ocl.events import Dispatcher
from capymoa.stream.torch import TorchStream

from mose_fast.integrations.capymoa import learner


def stream_of(twin, shape=None):
    return TorchStream.from_classification(twin.train[0], num_classes=twin.stream.classes, shape=shape)


def learner_for(twin, method="er", **settings):
    return learner(stream_of(twin, twin.shape).get_schema(), method, **twin.described, **settings)


def evaluated(twin, learns, **loop):
    """What the loop measured."""
    train = [DataLoader(task, batch_size=twin.stream.batch) for task in twin.train]
    test = [DataLoader(task, batch_size=256) for task in twin.test]
    return ocl_train_eval_loop(learns, train, test, **loop)


def rows_of(metrics):
    """The accuracies on the tasks so far after each."""
    return [row[: number + 1] for number, row in enumerate(metrics.accuracy_matrix.tolist())]


@pytest.mark.slow
@pytest.mark.parametrize("method", ["mose", "er"])
def test_split_mnist_gives_the_accuracies_of_our_own_loop(mnist, method, one_thread):
    learns = learner_for(mnist, method, **SMALL)
    rows = rows_of(evaluated(mnist, learns))
    own_weights, own_rows = own_loop(method, mnist.stream, **SMALL)
    assert learns.learner.weights_hash() == own_weights
    assert [pytest.approx(row, abs=1e-6) for row in own_rows] == rows


@pytest.mark.slow
@pytest.mark.parametrize("method", [name for name in METHODS if name != "joint"])
def test_every_method_learns_what_it_learns_in_our_own_loop(tiny, method, one_thread):
    # CO2L alone wants to know how many batches there are.
    task_batches = [4, 4] if method == "co2l" else None
    learns = learner_for(tiny, method, tasks=tiny.stream.tasks, task_batches=task_batches, **TINY)
    rows = rows_of(evaluated(tiny, learns))
    own_weights, own_rows = own_loop(method, tiny.stream, **TINY)
    assert learns.learner.weights_hash() == own_weights
    assert [pytest.approx(row, abs=1e-6) for row in own_rows] == rows


def test_more_evaluations_in_a_task_want_its_number_of_batches(tiny, one_thread):
    settings = {**TINY, "options": {"review": True, "buffer_batch": 10}}
    with pytest.raises(ValueError, match=r"after the end of task 0, after 2 batches; task_batches is None"):
        evaluated(tiny, learner_for(tiny, **settings), continual_evaluations=2)
    learns = learner_for(tiny, task_batches=[4, 4], **settings)
    # Their last one is before the fourth batch.
    evaluated(tiny, learns, continual_evaluations=3)
    assert learns.learner.weights_hash() == own_loop("er", tiny.stream, **settings)[0]


def test_a_task_has_ended_when_its_last_batch_is_evaluated(tiny):
    learns = learner_for(tiny, tasks=[{1, 0}, {3, 2}], task_batches=[4, 4], **TINY)
    dispatcher, ended = Dispatcher(), []
    dispatcher.subscribe(events.TestBegin, lambda event: ended.append(learns.learner.data.ended))
    evaluated(tiny, learns, dispatcher=dispatcher, continual_evaluations=2)
    assert ended == [False, True] * 2 and learns.learner.data.task_classes == [2, 3]


def test_later_passes_do_not_fill_the_memory(tiny):
    learns = learner_for(tiny, epochs=3, task_batches=[12, 12], **TINY)
    evaluated(tiny, learns, epochs=3)
    assert learns.learner.memory.seen == 64 and learns.learner.steps == 24
    assert learns.learner.task == 1 and learns.learner.data.ended


def test_without_boundaries_all_is_one_task(tiny, one_thread):
    learns = learner_for(tiny, boundaries=False, **TINY)
    evaluated(tiny, learns)
    own = create_learner(method="er", **tiny.stream.spec, **TINY)
    for part in range(2):
        for rows in tiny.stream.batches(part, seed=0):
            own.observe(tiny.stream.x_train[rows], tiny.stream.y_train[rows], 0)
    assert learns.learner.task == 0 and learns.learner.data.ended
    assert learns.learner.weights_hash() == own.weights_hash()
    with pytest.raises(ConfigError, match="softmax for each task"):
        evaluated(tiny, learner_for(tiny, "ssil", boundaries=False, **TINY))


@pytest.mark.parametrize("exact", [False, True])
def test_batches_are_predicted_before_they_are_trained_on(tiny, exact, one_thread):
    """By the method's own classifier, unless that need not be exact; test images, and all images
    after the loop, always are.
    """
    heard = []
    dispatcher = Dispatcher()
    for event in (events.TrainBatchPredict, events.EvalBatchPredict):
        dispatcher.subscribe(event, heard.append)
    learns = learner_for(tiny, "scr", exact_training_accuracy=exact, task_batches=[4, 4], **TINY)
    evaluated(tiny, learns, dispatcher=dispatcher, continual_evaluations=2)
    own = create_learner(method="scr", **tiny.stream.spec, **TINY)
    trained, tested = (
        [e for e in heard if type(e) is kind] for kind in (events.TrainBatchPredict, events.EvalBatchPredict)
    )
    coming = iter(trained)
    for task, classes in enumerate(tiny.stream.tasks):
        own.begin_task(task, classes)
        for rows in tiny.stream.batches(task, seed=0):
            x, event = tiny.stream.x_train[rows], next(coming)
            if own.seen:
                wanted = own.predict(x, *(() if exact else ("linear", "last")))
                assert event.y_hat.tolist() == wanted.tolist()
            own.observe(x, tiny.stream.y_train[rows], task)
        own.end_task()
    assert learns.learner.weights_hash() == own.weights_hash()
    assert own.resolve_expert()[0] == "ncm"
    assert tested[-2].y_hat.tolist() == own.predict(tiny.stream.x_test[tiny.stream.test_rows(0)]).tolist()
    images = tiny.test[1].tensors[0]
    wanted = learns.learner.predict(tiny.stream.x_test[tiny.stream.test_rows(1)])
    assert learns.batch_predict(images.flatten(1)).tolist() == wanted.tolist()


def test_instances_one_by_one_and_in_batches(tiny):
    learns = learner_for(tiny, **TINY)
    prequential_evaluation(stream_of(tiny, tiny.shape), learns, batch_size=16)
    assert learns.learner.memory.seen == 32 and learns.learner.task == 0
    instance = stream_of(tiny, tiny.shape).next_instance()
    first = tiny.stream.batches(0, seed=0)[0][:1]
    assert learns.predict(instance) == learns.learner.predict(tiny.stream.x_train[first]).item()
    learns.train(instance)
    assert learns.learner.memory.seen == 33


def test_a_schema_without_a_shape_of_images_is_refused(tiny):
    flat = stream_of(tiny).get_schema()
    with pytest.raises(ConfigError, match=r"shape is \(192,\); wanted \(C, H, W\)"):
        learner(flat, "er", **TINY)
    assert learner(flat, "er", shape=tiny.shape, **TINY).learner.image_size == (8, 8)
