"""Every method learns the new and keeps some of the old: what a step by hand cannot show, since it
takes Adam, many steps, or classes that come later.

Tasks of two classes each, patterns beneath noise, on a network of width 4. Each method has its own
optimiser and defaults, but images of 8 pixels are not augmented. Floors follow from chance and from
fine-tuning and joint training in the same setting.
"""

from __future__ import annotations

from functools import cache
from statistics import fmean
from typing import NamedTuple

import numpy as np
import pytest

from mose_fast.methods import METHODS
from mose_fast.settings.run import RunConfig
from mose_fast.streams import Stream, from_arrays
from mose_fast.train import run

#: GDumb trains for fewer passes, which is enough here; patterns that are rotated are others.
OPTIONS = {"gdumb": {"passes": 16, "passes_before": 8}, "ocm": {"rotations": 1}, "onpro": {"rotations": 1}}
#: Fine-tuning keeps nothing, and A-GEM hardly more: it never trains on its memory (in the paper's
#: table it forgets 78 %).
REPLAYS_NOTHING = ("finetune", "agem")


TASKS, IMAGES = 3, 250  # of each class
#: Steps on each batch: with one, OCM and OnPro have 6 % on the newest task.
ITERATIONS = 2


@cache
def patterns() -> Stream:
    random, classes = np.random.default_rng(0), 2 * TASKS
    pattern = random.uniform(40, 215, (classes, 4, 4, 3)).repeat(2, 1).repeat(2, 2)
    parts = []
    for count in (IMAGES, 50):
        y = np.arange(classes).repeat(count)
        x = pattern[y] + random.normal(0, 60, (len(y), 8, 8, 3))
        parts += [x.clip(0, 255).astype(np.uint8), y]
    return from_arrays(*parts, tasks=TASKS, mirror_safe=False)


class Learned(NamedTuple):
    """Accuracies of predict(): on each later task just after it, on average; on the first at the
    end.
    """

    new: float
    old: float


@cache
def learn(method: str) -> Learned:
    options = {
        "augment": "none",
        **({} if method == "gdumb" else {"iterations": ITERATIONS}),
        **OPTIONS.get(method, {}),
    }
    config = RunConfig.create(method=method, options=options, width=4, memory=100, device="cpu")
    results = run(config, stream=patterns())
    table = results["accuracy"][results["resolved"]["classifier"]][results["resolved"]["expert"]]
    return Learned(0.0 if method == "joint" else fmean(table[t][t] for t in range(1, TASKS)), table[-1][0])


def floors() -> Learned:
    """A third of the way from chance to fine-tuning, and from chance to joint training."""
    chance = Learned(fmean(1 / (2 * task + 2) for task in range(1, TASKS)), 1 / (2 * TASKS))
    best_new, best_old = learn("finetune").new, learn("joint").old
    return Learned(chance.new + (best_new - chance.new) / 3, chance.old + (best_old - chance.old) / 3)


@pytest.fixture(autouse=True)
def with_one_thread(one_thread):
    """Of every test here."""


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_it_learns_the_new_and_keeps_some_of_the_old(method):
    found, wanted = learn(method), floors()
    assert method == "joint" or found.new >= wanted.new
    assert method in REPLAYS_NOTHING or found.old >= wanted.old


@pytest.mark.slow
def test_the_floors_tell_learning_from_chance_and_from_forgetting():
    forgetful, wanted = learn("finetune"), floors()
    assert forgetful.new > 0.9 and wanted.new > 0.4 and wanted.old > 0.4 > forgetful.old
