"""Classifiers of stored features and logits, against scikit-learn and values worked by hand."""

import math

import numpy as np
import pytest
import torch
from sklearn.covariance import LedoitWolf
from sklearn.discriminant_analysis import LinearDiscriminantAnalysis
from sklearn.linear_model import RidgeClassifier
from torch.nn import functional as F

from mose_fast.nn import Classifiers, classify, names_of_experts
from mose_fast.nn.classifiers import JOINING, OF_FEATURES
from mose_fast.settings.run import CLASSIFIERS

EXPERTS, CLASSES, SIZE = 3, 6, 10
PENALTY = 0.3
ABSENT = 4


def made(counts, seed=0):
    """Features [E, N, D], logits [E, N, K] and labels of ``counts`` images a class."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.repeat_interleave(torch.arange(CLASSES), torch.tensor(counts))
    centres = torch.rand(EXPERTS, CLASSES, SIZE, generator=torch.Generator().manual_seed(9))
    noise = torch.randn(EXPERTS, len(labels), SIZE, generator=generator) * torch.linspace(0.1, 0.6, SIZE)
    features = (centres[:, labels] + noise).clamp_min(0)
    return features, torch.randn(EXPERTS, len(labels), CLASSES, generator=generator), labels


STORED = made([7, 12, 3, 20, 0, 5])
FEATURES, LOGITS, _ = made([10] * CLASSES, seed=1)
KNOWN = [c for c in range(CLASSES) if c != ABSENT]


def fitted(stored=STORED):
    return Classifiers(*stored, ridge_penalty=PENALTY)


def scores(classifier, stored=STORED, **joined):
    return fitted(stored).scores(classifier, FEATURES, LOGITS, **joined)


def inputs(stored=STORED):
    """For every row of the scores of single features: memory's and images' features, float64, its
    labels.
    """
    normal = [F.normalize(f, dim=-1) for f in (stored[0], FEATURES)]
    rows = [[f[e].double().numpy() for f in normal] for e in range(EXPERTS)]
    beside = [torch.cat(list(f), 1) / math.sqrt(EXPERTS) for f in normal]
    return [*rows, [f.double().numpy() for f in beside]], stored[2].numpy()


def agree(classifier, theirs):
    """``theirs`` computes the scores of the known classes from features, labels and images."""
    rows, labels = inputs()
    wanted = [theirs(x, labels, queries) for x, queries in rows]
    found = scores(classifier)
    assert found.dtype == torch.float64 and found.shape == (EXPERTS + 1, len(FEATURES[0]), CLASSES)
    assert (found[..., ABSENT] == -torch.inf).all()
    wanted.insert(EXPERTS, np.mean(wanted[:EXPERTS], 0))
    found = torch.cat([found, scores(classifier, joined=True)])[..., KNOWN].numpy()
    np.testing.assert_allclose(found, wanted, rtol=1e-6, atol=1e-5)
    assert len({tuple(row.argmax(-1)) for row in found}) > EXPERTS, "rows that differ"


class Shared:
    """The covariance within classes for scikit-learn, which else shrinks that of each class."""

    def __init__(self, x, labels):
        means = np.stack([x[labels == label].mean(0) for label in labels])
        self.covariance_ = LedoitWolf(assume_centered=True).fit(x - means).covariance_

    def fit(self, x):
        return self


def test_lda_equals_that_of_scikit_learn():
    def theirs(x, labels, queries):
        priors = np.full(len(KNOWN), 1 / len(KNOWN))
        lda = LinearDiscriminantAnalysis("lsqr", priors=priors, covariance_estimator=Shared(x, labels))
        return lda.fit(x, labels).decision_function(queries) - np.log(priors)

    agree("lda", theirs)


def test_ridge_equals_that_of_scikit_learn():
    def theirs(x, labels, queries):
        weights = (1 / np.bincount(labels, minlength=CLASSES).clip(1))[labels]
        eigenvalue = np.trace(np.cov(x.T, aweights=weights, ddof=0)) / x.shape[1]
        penalty = PENALTY * eigenvalue * len(x)
        model = RidgeClassifier(penalty, class_weight="balanced", solver="cholesky").fit(x, labels)
        return (model.decision_function(queries) + 1) / 2

    agree("ridge", theirs)


def test_class_means_of_all_features_are_their_cosines():
    def theirs(x, labels, queries):
        means = np.stack([x[labels == label].mean(0) for label in KNOWN])
        return 2 * queries @ (means / np.linalg.norm(means, axis=1, keepdims=True)).T - 2

    agree("ncm", theirs)


def test_residual_neighbours_by_a_loop():
    def unit(x):
        return x / np.linalg.norm(x)

    def theirs(x, labels, queries):
        means = {label: unit(x[labels == label].mean(0)) for label in KNOWN}
        found = []
        for query in queries:
            distances = np.linalg.norm(x - query, axis=1)
            nearest = np.argsort(distances)[:25]
            weights = np.exp(-distances[nearest] / 0.9)
            moves = [means[labels[i]] - x[i] for i in nearest]
            moved = unit(query + np.average(moves, axis=0, weights=weights))
            found.append([-np.sum((moved - mean) ** 2) for mean in means.values()])
        return np.array(found)

    agree("residual", theirs)


def test_adjusted_by_hand():
    """The head gives class 0 the probability 3/4 on its image and 1/4 on each of class 1's two."""
    probabilities = torch.tensor([[0.75, 0.2, 0.05], [0.25, 0.7, 0.05], [0.25, 0.7, 0.05]])
    stored = torch.rand(1, 3, 4), probabilities.log()[None], torch.tensor([0, 1, 1])
    found = Classifiers(*stored, ridge_penalty=1.0)
    torch.testing.assert_close(found.log_prior().exp(), torch.tensor([[0.5, 0.45, 0.05]]).double())
    logits = torch.tensor([[[1.0, 0.9, 3.0]]])
    row = found.scores("adjusted", torch.rand(1, 1, 4), logits)[0, 0]
    torch.testing.assert_close(row, torch.tensor([1 - math.log(0.5), 0.9 - math.log(0.45), -math.inf]).double())
    assert row.argmax() == 1, "the class that the head knows less"


def test_the_prior_of_confident_heads_is_finite():
    logits = torch.full((1, 2, 2), -1e4)
    logits[0, :, 0] = 0
    found = Classifiers(torch.rand(1, 2, 4), logits, torch.tensor([0, 1]), ridge_penalty=1.0)
    torch.testing.assert_close(found.log_prior(), torch.tensor([[0.0, -1e4]]).double())


@pytest.mark.parametrize("joined", [False, True])
@pytest.mark.parametrize(("name", "parts"), [("ncm_linear", ("ncm", "linear")), ("lda_adjusted", ("lda", "adjusted"))])
def test_averages_are_of_standardised_scores(name, parts, joined):
    def standard(part):
        among = scores(part, joined=joined)[..., KNOWN].double().numpy()
        return (among - among.mean(-1, keepdims=True)) / among.std(-1, keepdims=True)

    found = scores(name, joined=joined)
    assert (found[..., ABSENT] == -torch.inf).all()
    np.testing.assert_allclose(found[..., KNOWN].numpy(), sum(map(standard, parts)) / 2, rtol=1e-9, atol=1e-9)


def _constant():
    features, logits, labels = made([7, 12, 3, 20, 0, 5])
    features[..., 0] = 0.5
    features[..., 1] = 0
    return features, logits, labels


def _same():
    features, logits, labels = made([2, 2, 2, 2, 0, 2])
    return torch.ones_like(features), torch.zeros_like(logits), labels


def _twice():
    features, logits, labels = made([1, 1, 1, 1, 0, 1])
    return features.repeat(1, 3, 1), logits.repeat(1, 3, 1), labels.repeat(3)


@pytest.mark.parametrize("joined", [False, True])
@pytest.mark.parametrize("classifier", CLASSIFIERS)
@pytest.mark.parametrize(
    "stored",
    {
        "one image a class": made([1, 1, 1, 1, 0, 1]),
        "one image": made([1, 0, 0, 0, 0, 0]),
        "two of one class": made([2, 0, 0, 0, 0, 0]),
        "duplicates": _twice(),
        "constant features": _constant(),
        "all the same": _same(),
    }.items(),
    ids=lambda item: item[0],
)
def test_scores_are_numbers_whatever_is_stored(stored, classifier, joined):
    stored = stored[1]
    found = scores(classifier, stored, joined=joined)
    present = torch.zeros(CLASSES, dtype=torch.bool)
    present[stored[2]] = True
    assert found[..., present].isfinite().all()
    if classifier != "linear":
        assert (found[..., ~present] == -torch.inf).all()


@pytest.mark.parametrize("stored", [made([1, 1, 1, 1, 0, 1]), _twice()], ids=["one image a class", "duplicates"])
def test_lda_without_variance_within_classes_takes_the_nearest_mean(stored):
    found = scores("lda", stored)[:EXPERTS].argmax(-1)
    assert torch.equal(found, scores("ncm", stored)[:EXPERTS].argmax(-1))


def test_an_empty_memory_leaves_the_linear_classifier_alone():
    empty = fitted((torch.empty(EXPERTS, 0, SIZE), torch.empty(EXPERTS, 0, CLASSES), torch.empty(0, dtype=torch.int64)))
    for classifier in CLASSIFIERS:
        if classifier == "linear":
            assert empty.scores(classifier, FEATURES, LOGITS).isfinite().all()
        else:
            with pytest.raises(ValueError, match="memory is empty"):
                empty.scores(classifier, FEATURES, LOGITS)


@pytest.mark.parametrize("none", [True, False])
def test_labels_are_those_of_the_highest_scores(none):
    names = {name: names_of_experts(name, EXPERTS, joined=True) for name in CLASSIFIERS}
    found = classify(FEATURES, LOGITS, None if none else fitted(), names)
    assert {name: [*rows] for name, rows in found.items()} == names
    for name, rows in found.items():
        labels = torch.stack([*rows.values()])
        if none and name != "linear":
            assert (labels == -1).all()
        else:
            wanted = [scores(name), *([scores(name, joined=True)] if name in JOINING else [])]
            assert torch.equal(labels, torch.cat(wanted).argmax(-1))


def test_names_of_rows():
    assert names_of_experts("ncm", 2, joined=True) == ["1", "2", "mean_distance", "all"]
    assert names_of_experts("lda", 2, joined=False) == ["1", "2", "mean_score"]
    assert names_of_experts("lda", 1, joined=True) == ["1", "mean_score"]
    assert names_of_experts("linear", 2, joined=True) == ["1", "2", "mean_logit"]
    assert {*OF_FEATURES, "linear", "adjusted", "ncm_linear", "lda_adjusted"} == CLASSIFIERS.keys()
