"""Streams by name: makes the stream that a :class:`StreamConfig` describes."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from mose_fast.settings.run import StreamConfig, near_matches
from mose_fast.streams import datasets, tiny_imagenet
from mose_fast.streams.arrays import from_arrays
from mose_fast.streams.catalogue import names, summary
from mose_fast.streams.decoding import Decoding, Watch
from mose_fast.streams.draws import StreamError
from mose_fast.streams.folder import read_folder
from mose_fast.streams.kinds import Kind
from mose_fast.streams.npz import SPLITS, arrays_of, read_npz
from mose_fast.streams.stream import Stream

__all__ = ["check_fingerprint", "create", "locate"]


@dataclass(frozen=True)
class _Entry:
    """A registered stream: its default split, how its data is read, and where it is found."""

    tasks: int
    normalisation: str
    mirror_safe: bool
    # The arrays of some parts of the data and, as far as known, source, labels and class_names.
    read: Callable[[Path, Decoding, Sequence[str]], dict[str, Any]]
    find: Callable[[Path], Path | None] | None  # None: part of an installed package
    obtain: str


def _read_digits(data_dir: Path, decoding: Decoding, splits: Sequence[str]) -> dict[str, Any]:
    return {**datasets.digits(splits), "labels": range(10), "source": "digits"}


def _read_mnist(data_dir: Path, decoding: Decoding, splits: Sequence[str]) -> dict[str, Any]:
    arrays, source = datasets.mnist(data_dir, splits)
    return {**arrays, "labels": range(10), "source": str(source)}


def _read_tiny_imagenet(data_dir: Path, decoding: Decoding, splits: Sequence[str]) -> dict[str, Any]:
    arrays, wnids = tiny_imagenet.read(data_dir, decoding, splits)
    return {**arrays, "labels": range(len(wnids)), "class_names": wnids, "source": str(tiny_imagenet.find(data_dir))}


_DOWNLOAD = "it is downloaded on first use; without a network, place there "


def _cifar(classes: int, tasks: int, names: Sequence[str]) -> _Entry:
    def read(data_dir: Path, decoding: Decoding, splits: Sequence[str]) -> dict[str, Any]:
        arrays, source = datasets.cifar(classes, data_dir, splits)
        return {**arrays, "labels": range(classes), "class_names": names, "source": str(source)}

    obtain = f"{_DOWNLOAD}cifar-{classes}-python.tar.gz or cifar{classes}.npz"
    return _Entry(tasks, "cifar10", True, read, partial(datasets.locate_cifar, classes), obtain)


_STREAMS: dict[str, _Entry] = {
    "digits": _Entry(5, "digits", mirror_safe=False, read=_read_digits, find=None, obtain="comes with scikit-learn"),
    "split-mnist": _Entry(
        tasks=5,
        normalisation="mnist",
        mirror_safe=False,
        read=_read_mnist,
        find=datasets.locate_mnist,
        obtain=f"{_DOWNLOAD}mnist.npz, or MNIST's four .gz files in the folder MNIST/raw",
    ),
    "split-cifar10": _cifar(10, 5, datasets.CIFAR10_NAMES),
    "split-cifar100": _cifar(100, 10, datasets.CIFAR100_NAMES),
    "split-tiny-imagenet": _Entry(
        tasks=100,
        normalisation="tiny-imagenet",
        mirror_safe=True,
        read=_read_tiny_imagenet,
        find=tiny_imagenet.find,
        obtain=f"place there {tiny_imagenet.SOURCE}",
    ),
}


def locate(name: str, data_dir: str | Path | None) -> tuple[bool, str]:
    """Whether the data of a registered stream is found, and where, or what to do about it. Nothing
    is read or downloaded. ``data_dir`` None is ``~/.cache/mose_fast``. Raises StreamError if there
    is no such stream, or no such folder.
    """
    summary(name)  # refuses an unknown name
    entry = _STREAMS[name]
    if entry.find is None:
        return True, entry.obtain
    folder = _data_dir(data_dir)
    if data_dir is not None and not folder.is_dir():
        raise StreamError(
            f"data_dir is {str(data_dir)!r}, which is not a folder; wanted the folder with the data sets' files"
        )
    found = entry.find(folder)
    return (True, str(found)) if found else (False, f"not in {folder}: {entry.obtain}")


def create(config: StreamConfig, watch: Watch | None = None, *, evaluate_on: str = "test") -> Stream:
    """Makes the stream that a configuration describes: a registered one, an image folder, or an
    ``.npz`` file.

    docs/own_data.md describes folders and ``.npz`` files. By default they have the normalisation
    ``half`` and are safe to mirror; ``tasks`` None splits them like :func:`from_arrays`.

    Args:
        watch: Called with the number of image files decoded so far, and of all.
        evaluate_on: ``test``, or ``validation``: then no test image is read.

    Raises:
        StreamError: The name is unknown, the data is missing or damaged, has another fingerprint
            than the configuration, or cannot be split as asked.
    """
    stream = _make(config, evaluate_on, watch)
    check_fingerprint(config, stream)
    return stream


def check_fingerprint(config: StreamConfig, stream: Stream) -> None:
    """Raises StreamError if the data are others than those that a configuration was written for."""
    if config.fingerprint not in (None, stream.fingerprint):
        raise StreamError(
            f"the data of stream {config.name!r} have changed: their fingerprint is {stream.fingerprint}, and was"
            f" {config.fingerprint} when the run began. Put the earlier data back, or begin a new run in another"
            " folder, where stream.fingerprint null takes the data that are there now",
            instead=("stream.fingerprint", None),
        )


def _make(config: StreamConfig, evaluate_on: str, watch: Watch | None) -> Stream:
    splits = ("train",) if evaluate_on == "validation" else SPLITS
    decoding = Decoding(config.decoder, watch, config.resize)
    path = Path(config.name).expanduser()
    if config.resize is not None and (config.name in _STREAMS or path.is_file()):
        raise StreamError(
            f"stream.resize is {config.resize}, but {config.name!r} is no image folder; wanted one, or no stream.resize"
        )
    settings = {
        "batch": config.batch,
        "class_order_seed": config.class_order_seed,
        "limit_per_task": config.limit_per_task,
        "first_tasks": config.first_tasks,
        "validation": config.validation,
        "validation_seed": config.validation_seed,
        "evaluate_on": evaluate_on,
        **dataclasses.asdict(Kind.of(config)),
    }
    if config.name in _STREAMS:
        entry = _STREAMS[config.name]
        return from_arrays(
            **entry.read(_data_dir(config.data_dir), decoding, splits),
            **settings,
            name=config.name,
            mirror_safe=entry.mirror_safe,
            tasks=entry.tasks if config.tasks is None else config.tasks,
            normalisation=config.normalisation or entry.normalisation,
        )
    if path.suffix.lower() == ".npz":
        contents: dict[str, Any] = dict(read_npz(path, arrays_of(splits)))
    elif path.is_dir():
        contents, class_names = read_folder(path, decoding, splits)
        contents = {**contents, "class_names": class_names}
    elif os.sep in config.name or path.exists():
        raise StreamError(
            f"stream {config.name!r} is neither a folder nor an .npz file; wanted a folder with train and"
            " test, or an .npz file"
        )
    else:
        raise StreamError(
            f"stream {config.name!r} is unknown{near_matches(config.name, names())}; own data: a folder, or an .npz"
            " file"
        )
    return from_arrays(
        **contents,
        **settings,
        source=str(path),
        name=path.stem if path.is_file() else path.resolve().name,
        tasks=config.tasks,
        normalisation=config.normalisation,
    )


def _data_dir(data_dir: str | Path | None) -> Path:
    return datasets.default_data_dir() if data_dir is None else Path(data_dir).expanduser()
