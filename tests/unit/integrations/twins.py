"""Streams as the benchmarks of other libraries have them, in the order of our own loop."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import TensorDataset

import mose_fast
from mose_fast.streams import Stream

# Settings of the learners on Split MNIST, and on a stream of noise.
SMALL = {"width": 4, "memory": 100, "seed": 3, "device": "cpu"}
TINY = {"width": 1, "memory": 20, "device": "cpu", "options": {"buffer_batch": 10}}


class Twin(NamedTuple):
    """A stream; its tasks as data sets, the training images in the order in which the stream's
    batches arrive; the adapters' keywords for the images; and the (C, H, W) of each.
    """

    stream: Stream
    train: list[TensorDataset]
    test: list[TensorDataset]
    described: dict[str, Any]
    shape: tuple[int, int, int]


def twin_of(stream: Stream, seed: int, *, crop: int = 0, channels: int = 3) -> Twin:
    """Normalised floats, without ``crop`` pixels at each side, and the first channels alone."""
    constants = stream.normalisation.mean[:channels], stream.normalisation.std[:channels]
    mean, std = (torch.tensor(values).view(-1, 1, 1) for values in constants)
    side = stream.image_size[0] - 2 * crop

    def dataset(x: Tensor, y: Tensor) -> TensorDataset:
        x = x[:, crop : crop + side, crop : crop + side, :channels].permute(0, 3, 1, 2)
        made = TensorDataset(((x / 255 - mean) / std).contiguous(), y)
        made.targets = y.tolist()
        return made

    tasks = range(len(stream.tasks))
    arrived = [torch.cat(stream.batches(task, seed=seed)) for task in tasks]
    return Twin(
        stream,
        [dataset(stream.x_train[rows], stream.y_train[rows]) for rows in arrived],
        [dataset(stream.x_test[rows], stream.y_test[rows]) for rows in map(stream.test_rows, tasks)],
        {"mean": constants[0], "std": constants[1], "mirror_safe": stream.mirror_safe},
        (channels, side, side),
    )


def own_loop(method: str, stream: Stream, **settings: Any) -> tuple[str, list[list[float]]]:
    """The hash of the weights after a run of ours, and the accuracies of the method's classifier on
    the tasks so far after each.
    """
    results = mose_fast.run(method=method, stream=stream, **settings)
    resolved = results["resolved"]
    rows = results["accuracy"][resolved["classifier"]][resolved["expert"]]
    return results["weights_sha256"], [row[: n + 1] for n, row in enumerate(rows)]
