"""mose_fast.OnlineClassifier: a learner in scikit-learn's words, by scikit-learn's own checks."""

import pickle
import re

import numpy as np
import pytest
import torch
from scipy.sparse import issparse
from sklearn.base import clone
from sklearn.calibration import CalibratedClassifierCV
from sklearn.exceptions import NotFittedError
from sklearn.frozen import FrozenEstimator
from sklearn.model_selection import GridSearchCV
from sklearn.utils.estimator_checks import parametrize_with_checks

import mose_fast
from mose_fast.train import TrainingDiverged
from tests.paths import ROOT

PAGE = ROOT / "docs" / "scikit_learn.md"

SMALL = {"memory": 64, "width": 1, "device": "cpu", "mirror_safe": False}

# scikit-learn's checks that do not apply to images, and why.
NOT_FOR_IMAGES = {
    "check_n_features_in_after_fitting": "images have a size, no number of features",
    "check_n_features_in": "images have a size, no number of features",
    "check_estimators_empty_data_messages": "images without columns are refused for their size, in our words",
    "check_fit2d_predict1d": "what is no image is refused for its type, in our words",
    "check_complex_data": "pixels are uint8: other types are refused, in our words",
    "check_dtype_object": "pixels are uint8: numbers in an array of objects are refused",
    "check_estimator_sparse_tag": "no image is a sparse matrix: one is refused by its type's name",
    "check_estimator_sparse_array": "no image is a sparse matrix: one is refused by its type's name",
    "check_estimator_sparse_matrix": "no image is a sparse matrix: one is refused by its type's name",
}


class OfRows(mose_fast.OnlineClassifier):
    """Takes the checks' data, rows of numbers, for images: a number is the grey of 8x8 pixels."""

    def __sklearn_tags__(self):
        tags = super().__sklearn_tags__()
        tags.input_tags.two_d_array = True
        return tags

    def fit(self, X, y):
        return super().fit(pictures(X), y)

    def partial_fit(self, X, y, classes=None, task=None):
        return super().partial_fit(pictures(X), y, classes, task)

    def predict(self, X):
        return super().predict(pictures(X))

    def predict_proba(self, X):
        return super().predict_proba(pictures(X))


def pictures(X):
    if issparse(X):
        return X
    X = np.asarray(X)
    if X.ndim != 2 or X.dtype.kind not in "fiu" or not np.isfinite(X).all():
        return X
    grey = np.clip(32 * X.astype(float) + 128, 0, 255).astype(np.uint8)
    return np.kron(grey[:, None], np.ones((1, 8, 8), np.uint8))


# A narrow network and a hundred rows: it learns them if the views are the images themselves.
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@parametrize_with_checks([OfRows("er", **SMALL, settings={"buffer_batch": 16, "augment": "none", "lr": 0.01})])
def test_scikit_learns_checks(estimator, check):
    if check.func.__name__ in NOT_FOR_IMAGES:
        with pytest.raises((AssertionError, ValueError)):
            check(estimator)
    else:
        check(estimator)


@pytest.fixture(autouse=True)
def always_one_thread(one_thread):
    """Of every test here."""


def data(n, labels=("cat", "dog", "eel"), seed=0):
    x = np.random.default_rng(seed).integers(0, 256, (n, 8, 8, 3), dtype=np.uint8)
    return x, np.array(labels)[np.arange(n) % len(labels)]


def small(method="er", **settings):
    given = {name: settings.pop(name) for name in ("batch", "max_classes") if name in settings}
    return mose_fast.OnlineClassifier(method, **SMALL, **given, settings={"buffer_batch": 8, **settings})


def test_it_learns_what_a_loop_of_ones_own_learns():
    x, y = data(25)
    ours = small(batch=7).partial_fit(x[:16], y[:16], classes=["eel", "dog", "cat"])
    ours.partial_fit(torch.from_numpy(x[16:]), y[16:].tolist())
    learner = mose_fast.create_learner(method="er", buffer_batch=8, classes=3, image_size=(8, 8), **SMALL)
    for rows in ([0, 7], [7, 14], [14, 16], [16, 23], [23, 25]):
        learner.observe(x[slice(*rows)], np.arange(25)[slice(*rows)] % 3, 0)
    assert ours.learner_.weights_hash() == learner.weights_hash()
    assert ours.classes_.tolist() == ["cat", "dog", "eel"]
    assert ours.predict(x).tolist() == [["cat", "dog", "eel"][i] for i in learner.predict(x).tolist()]


@pytest.mark.filterwarnings("ignore:options.review:UserWarning")
def test_fit_starts_anew_and_ends_the_task():
    x, y = data(20)
    once, twice = small(review=True, batch=20), small(review=True, batch=20)
    once.fit(x, y)
    assert once.learner_.steps == 1 + 20 // 8  # the review's
    twice.fit(*data(20, ["fox", "gnu"], seed=1)).fit(x, y)
    assert twice.learner_.weights_hash() == once.learner_.weights_hash()
    assert once.partial_fit(x, y).learner_.task == 1


@pytest.mark.filterwarnings("ignore:options.first_task:UserWarning")
@pytest.mark.parametrize(("classifier", "average"), [("ncm", "distance"), ("linear", "logit")])
@pytest.mark.parametrize("expert", ["last", "mean"])
def test_probabilities_by_hand(classifier, average, expert):
    x, y = data(24)
    ours = small("mose", classifier=classifier, expert=expert, experts=2, mean_of_experts=average)
    ours.partial_fit(x[:16], y[:16], classes=["cat", "dog", "eel", "fox"])
    features, logits = (t.double().numpy() for t in ours.learner_.outputs(torch.from_numpy(x)))
    if classifier == "ncm":
        memory = ours.learner_.memory
        stored, labels = memory.images[: memory.filled], memory.labels[: memory.filled].numpy()
        of_memory = ours.learner_.outputs(stored)[0].double().numpy()
        scores = np.full((2, 24, 4), -np.inf)
        for e in range(2):
            for label in range(3):
                directions = of_memory[e, labels == label]
                mean = (directions / np.linalg.norm(directions, axis=1, keepdims=True)).sum(0)
                scores[e, :, label] = features[e] @ mean / np.linalg.norm(features[e], axis=1) / np.linalg.norm(mean)
    else:
        scores = logits
    scores = scores.mean(0) if expert == "mean" else scores[1]
    wanted = np.exp(scores) / np.exp(scores).sum(1, keepdims=True)
    found = ours.predict_proba(x)
    np.testing.assert_allclose(found, wanted, rtol=1e-5)
    assert (ours.predict(x) == ours.classes_[found.argmax(1)]).all()
    if classifier == "ncm":
        assert (found[:, 3] == 0).all() and found[:, :3].max() < np.e * found[:, :3].min(1).min()


def test_classes_may_be_unknown_beforehand():
    x, y = data(16, [5, 3])
    ours = small(max_classes=3).partial_fit(x, y)
    assert ours.classes_.tolist() == [5, 3] and ours.predict_proba(x).shape == (16, 2)
    ours.learner_.network.classifier1.bias.data[2] = 100  # of the class that has not come
    assert set(ours.predict(x)) <= {5, 3}
    ours.partial_fit(x[:2], [3, 9])
    assert ours.classes_.tolist() == [5, 3, 9] and ours.predict(x).tolist() == [9] * 16
    before = ours.learner_.weights_hash()
    with pytest.raises(ValueError, match="y holds 4, which is one class more than the 3 of the network"):
        ours.partial_fit(x[:2], [3, 4])
    assert ours.classes_.tolist() == [5, 3, 9] and ours.learner_.weights_hash() == before


def test_unusable_data_are_refused_and_change_nothing():
    x, y = data(8)
    ours = small()
    with pytest.raises(ValueError, match="classes is None in the first call of partial_fit"):
        ours.partial_fit(x, y)
    with pytest.raises(ValueError, match="y holds 'dog', which is one class more than the 2"):
        ours.partial_fit(x, y, classes=["cat", "eel"])
    with pytest.raises(ValueError, match="X is float64 from 0 to 1; wanted uint8"):
        ours.partial_fit(x / x.max(), y, classes=["cat", "dog", "eel"])
    with pytest.raises(ValueError, match="there is 1 class; wanted at least two"):
        ours.fit(x[:1], y[:1])
    with pytest.raises(ValueError, match="memori is not a setting; did you mean 'memory'"):
        small(memori=3).fit(x, y)
    with pytest.raises(NotFittedError):
        ours.predict(x)
    ours.partial_fit(x, y, classes=["cat", "dog", "eel"])
    before = ours.learner_.weights_hash()
    with pytest.raises(ValueError, match="classes holds 'fox', which is one class more than the 3"):
        ours.partial_fit(x, y, classes=["fox"])
    with pytest.raises(ValueError, match=r"\[8, 8, 16, 3\]; wanted \[N, 8, 8, 3\]"):
        ours.partial_fit(np.zeros((8, 8, 16, 3), np.uint8), y)
    with pytest.raises(ValueError, match="inconsistent numbers of samples"):
        ours.partial_fit(x, y[:7])
    assert ours.learner_.weights_hash() == before


def test_methods_that_need_task_boundaries_are_given_them():
    x, y = data(8, ["cat", "dog", "eel", "fox"])
    ours = small("ssil")
    with pytest.raises(ValueError, match="'ssil' has a softmax for each task, but no task is given"):
        ours.fit(x, y)
    for task, labels in enumerate((["cat", "dog"], ["eel", "fox"])):
        rows = np.isin(y, labels)
        ours.partial_fit(x[rows], y[rows], classes=np.unique(y), task=task)
    learner = mose_fast.create_learner(method="ssil", buffer_batch=8, classes=4, image_size=(8, 8), **SMALL)
    for task in (0, 1):
        rows = np.isin(y, [["cat", "dog"], ["eel", "fox"]][task])
        learner.observe(x[rows], (np.arange(8) % 4)[rows], task)
    assert ours.learner_.weights_hash() == learner.weights_hash()


def test_a_pickle_continues_bit_for_bit_and_a_clone_is_untrained():
    x, y = data(16)
    ours = small(batch=4).partial_fit(x, y, classes=np.unique(y))
    again = pickle.loads(pickle.dumps(ours))
    assert (again.predict_proba(x) == ours.predict_proba(x)).all()
    assert again.partial_fit(x, y).learner_.weights_hash() == ours.partial_fit(x, y).learner_.weights_hash()
    fresh = clone(ours)
    assert not hasattr(fresh, "learner_") and fresh.get_params() == ours.get_params()
    assert fresh.set_params(memory=32).fit(x, y).learner_.memory.capacity == 32


def test_settings_are_searched():
    x, y = data(24)
    search = GridSearchCV(small(batch=6), {"settings": [{"buffer_batch": 8}, {"buffer_batch": 8, "lr": 0.1}]}, cv=2)
    assert search.fit(x, y).best_estimator_.predict(x).shape == (24,)


def test_a_loss_that_is_not_finite_is_told():
    x, y = data(40)
    with pytest.raises(TrainingDiverged, match="wanted a lower lr"):
        small(lr=1e30).fit(x, y)


def test_the_example_of_the_page(capsys):
    (example,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    names = {}
    exec(compile(example, PAGE.name, "exec"), names)
    assert names["classifier"].learner_.steps == 10 and "(3, 10)" in capsys.readouterr().out


def test_a_temperature_changes_no_prediction():
    pytest.importorskip("sklearn", minversion="1.8", reason="scikit-learn is older than method='temperature'")
    x, y = data(24)
    ours = small().fit(x, y)
    calibrated = CalibratedClassifierCV(FrozenEstimator(ours), method="temperature").fit(x, y)
    assert (calibrated.predict(x) == ours.predict(x)).all()
    assert not np.allclose(calibrated.predict_proba(x), ours.predict_proba(x))
