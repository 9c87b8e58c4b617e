"""ER beside the ER of Avalanche 0.6 and of CapyMOA 0.15, where they are installed: same network,
stream, memory, batches and optimiser. They take one mean over incoming and replayed rows.

``python tests/unit/methods/test_er_beside_others.py DIR`` prints the table of docs/methods.md,
on the CIFAR-100 in DIR.
"""

from __future__ import annotations

import copy
import importlib.util
import math
import sys
from collections.abc import Callable, Iterator
from functools import cache
from statistics import fmean, variance

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from mose_fast import streams
from mose_fast.methods import create_learner
from mose_fast.settings.run import StreamConfig
from mose_fast.streams import Stream, from_arrays

SEEDS = range(5)
MEMORY, BATCH = 100, 10
ADAM = {"lr": 1e-3, "weight_decay": 1e-4}
#: The 97.5th percentile of Student's t with eight degrees of freedom, for two means of five runs.
STUDENT = 2.306


class Logits(nn.Module):
    """The logits of our network, for normalised images of any shape."""

    def __init__(self, learner):
        super().__init__()
        self.network, self.views, self.shape = copy.deepcopy(learner.network), learner.views, learner.image_size

    def forward(self, x: Tensor) -> Tensor:
        x = x.view(-1, 3, *self.shape).contiguous(memory_format=torch.channels_last)
        return self.network.classify(self.network.features(x))[0]

    def images(self, raw: Tensor) -> Tensor:
        return self.views.normalise(raw)


def learner_of(stream: Stream, seed: int, **options):
    own = {"augment": "none", **ADAM, **options}
    return create_learner(method="er", seed=seed, width=4, memory=MEMORY, device="cpu", options=own, **stream.spec)


def batches_of(stream: Stream, seed: int) -> Iterator[tuple[int, Tensor, Tensor]]:
    for task in range(stream.parts):
        for rows in stream.batches(task, seed=seed):
            yield task, stream.x_train[rows], stream.y_train[rows]


def accuracies(stream: Stream, predict: Callable[[Tensor], Tensor]) -> list[float]:
    """The accuracy on each task at the end, among all classes."""
    found = predict(stream.x_test) == stream.y_test
    parts = [torch.isin(stream.y_test, torch.tensor(classes)) for classes in stream.tasks]
    return [found[part].float().mean().item() for part in parts]


def ours(stream: Stream, seed: int, **options) -> list[float]:
    learner = learner_of(stream, seed, **options)
    for task, x, y in batches_of(stream, seed):
        learner.observe(x, y, task)
    return accuracies(stream, lambda x: learner.outputs(x)[1][0].argmax(1))


def evaluated(stream: Stream, model: Logits) -> list[float]:
    model.eval()
    with torch.no_grad():
        return accuracies(stream, lambda x: model(model.images(x)).argmax(1))


def avalanche(stream: Stream, seed: int, replayed: int) -> list[float]:
    """Each batch is an experience of its own, so that the memory takes it in at once."""
    from avalanche.benchmarks import benchmark_from_datasets
    from avalanche.benchmarks.utils import _make_taskaware_tensor_classification_dataset as dataset
    from avalanche.training.plugins import EvaluationPlugin, ReplayPlugin
    from avalanche.training.storage_policy import ReservoirSamplingBuffer
    from avalanche.training.supervised import Naive

    torch.manual_seed(seed)
    model = Logits(learner_of(stream, seed))
    parts = [dataset(model.images(x), y, task_labels=0, targets=y.tolist()) for _, x, y in batches_of(stream, seed)]
    replay = ReplayPlugin(
        mem_size=MEMORY,
        batch_size=BATCH,
        batch_size_mem=replayed,
        storage_policy=ReservoirSamplingBuffer(max_size=MEMORY),
    )
    strategy = Naive(
        model=model,
        optimizer=torch.optim.Adam(model.parameters(), **ADAM),
        criterion=nn.CrossEntropyLoss(),
        train_mb_size=BATCH,
        train_epochs=1,
        plugins=[replay],
        evaluator=EvaluationPlugin(loggers=[]),
    )
    for experience in benchmark_from_datasets(train=parts).train_stream:
        strategy.train(experience)
    return evaluated(stream, model)


def capymoa(stream: Stream, seed: int) -> list[float]:
    """It replays as many rows as come in, of a memory that has taken these in before."""
    from capymoa.classifier import Finetune
    from capymoa.ocl.strategy import ExperienceReplay
    from capymoa.stream import Schema

    model = Logits(learner_of(stream, seed))
    pixels = 3 * math.prod(stream.image_size)
    classes = [str(c) for c in range(len(stream.y_train.unique()))]
    schema = Schema.from_custom([*(f"x{n}" for n in range(pixels)), "y"], "y", {"y": classes})
    adam = torch.optim.Adam(model.parameters(), **ADAM)
    theirs = ExperienceReplay(Finetune(schema, model, adam, random_seed=seed), buffer_size=MEMORY)
    for _, x, y in batches_of(stream, seed):
        theirs.batch_train(model.images(x).flatten(1), y)
    return evaluated(stream, model)


@cache
def patterns() -> Stream:
    """Three tasks of two classes, each a random pattern of 4x4 colours beneath noise."""
    random = np.random.default_rng(0)
    pattern = random.uniform(40, 215, (6, 4, 4, 3)).repeat(2, 1).repeat(2, 2)
    parts = []
    for images in (250, 100):
        y = np.arange(6).repeat(images)
        x = pattern[y] + random.normal(0, 60, (len(y), 8, 8, 3))
        parts += [x.clip(0, 255).astype(np.uint8), y]
    return from_arrays(*parts, tasks=3, mirror_safe=False)


def difference(one: list[list[float]], other: list[list[float]]) -> tuple[float, float]:
    """The difference of the final accuracies, means over tasks and seeds, and half its 95 %
    interval.
    """
    a, b = ([fmean(by_task) for by_task in runs] for runs in (one, other))
    return fmean(a) - fmean(b), STUDENT * math.sqrt((variance(a) + variance(b)) / len(a))


PEERS = {"avalanche": (lambda stream, seed: avalanche(stream, seed, 64), 64), "capymoa": (capymoa, BATCH)}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # theirs
@pytest.mark.parametrize("peer", PEERS)
def test_with_one_mean_it_reaches_what_theirs_reaches(peer, one_thread):
    pytest.importorskip(peer)
    theirs, replayed = PEERS[peer]
    stream = patterns()
    found = [ours(stream, seed, replay_loss="one_mean", buffer_batch=replayed) for seed in SEEDS]
    wanted = [theirs(stream, seed) for seed in SEEDS]
    apart, interval = difference(found, wanted)
    print(peer, found, wanted, apart, interval)
    assert abs(apart) <= interval


def main(folder: str) -> None:
    """Accuracy by task, means and standard deviations over the seeds."""
    torch.set_num_threads(1)
    described = StreamConfig("split-cifar100", data_dir=folder, first_tasks=3, limit_per_task=500)
    stream = streams.create(described)
    runs = {
        f"mose-fast, {kind}, {rows} replayed": lambda s, seed, kind=kind, rows=rows: ours(
            s, seed, replay_loss=kind, buffer_batch=rows
        )
        for rows in (64, BATCH)
        for kind in ("two_means", "one_mean")
    }
    if importlib.util.find_spec("avalanche"):
        runs["Avalanche, 64 replayed"] = PEERS["avalanche"][0]
    if importlib.util.find_spec("capymoa"):
        runs["CapyMOA, 10 replayed"] = capymoa
    for name, act in runs.items():
        by_task = zip(*(act(stream, seed) for seed in SEEDS), strict=True)
        cells = [f"{100 * fmean(a):.1f} ± {100 * math.sqrt(variance(a)):.1f}" for a in by_task]
        print(f"| {name} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
