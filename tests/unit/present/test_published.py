"""The paper's numbers, against its tables as read off again for this test."""

import copy

import pytest

from mose_fast.present import published

CONFIG = {
    "method": "mose",
    "epochs": 1,
    "train_on": "stream",
    "width": 64,
    "memory": 1000,
    "stream": {"name": "split-cifar100", "batch": 10, "limit_per_task": None, "class_order_seed": None},
}


@pytest.mark.parametrize(
    ("expert", "data", "memory", "acc", "af"),
    [
        ("last", "split-cifar100", 1000, (35.1, 0.4), (36.9, 0.3)),
        ("last", "split-cifar100", 2000, (45.1, 0.3), (25.4, 0.4)),
        ("last", "split-tiny-imagenet", 10000, (38.7, 0.4), (15.5, 0.3)),
        ("mean", "split-cifar100", 5000, (55.6, 0.4), (12.7, 0.4)),
        ("mean", "split-tiny-imagenet", 2000, (21.4, 0.4), (40.6, 0.6)),
        ("mean", "split-tiny-imagenet", 4000, (29.8, 0.5), (26.3, 0.5)),
        ("last", "split-cifar100", 200, (20.2, 0.5), None),
    ],
)
def test_numbers_of_mose(expert, data, memory, acc, af):
    assert published.lookup("mose", "ncm", expert, data, memory) == (acc, af)


def test_numbers_of_other_methods():
    assert published.lookup("er", "linear", "last", "split-cifar100", 5000) == ((28.8, 0.8), (60.0, 1.6))
    assert published.lookup("scr", "ncm", "last", "split-tiny-imagenet", 4000) == ((18.2, 0.1), (15.4, 0.3))
    assert published.numbers("tab:acc_af", "split-tiny-imagenet")["OnPro"]["ACC-10000"].mean == 29.8
    for absent in (("mose", "ncm", 300), ("mose", "linear", 1000), ("finetune", "linear", 1000)):
        method, classifier, memory = absent
        assert published.lookup(method, classifier, "last", "split-cifar100", memory) == (None, None)


def test_small_tables():
    ncm = {"1": 47.1, "2": 51.0, "3": 53.5, "4": 54.6, "mean_distance": 55.6}
    found = published.experts("split-cifar100", 5000)
    assert {expert: value for (classifier, expert), value in found.items() if classifier == "ncm"} == ncm
    assert published.experts("split-cifar100", 2000) == {("linear", "4"): 41.0, ("linear", "mean_logit"): 42.1}
    assert published.experts("split-tiny-imagenet", 2000) == {}


def test_protocol_of_the_paper_and_departures_from_it():
    assert published.deviations(CONFIG, 10) == []
    other = copy.deepcopy(CONFIG) | {"width": 16, "epochs": 2}
    other["stream"]["limit_per_task"] = 500
    assert published.deviations(other, 20) == [
        "width 16 instead of 64",
        "epochs 2 instead of 1",
        "stream.limit_per_task 500 instead of None",
        "tasks 20 instead of 10",
    ]
    assert published.dataset(CONFIG) == "split-cifar100"
    assert published.dataset({"stream": {"name": "digits"}}) is None
    assert published.dataset(CONFIG | {"evaluate_on": "validation"}) is None
