"""Streams by name: makes the stream that a :class:`StreamConfig` describes."""

from __future__ import annotations

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
from mose_fast.streams.npz import SPLITS, arrays_of, read_npz
from mose_fast.streams.stream import Stream


@dataclass(frozen=True)
class _Entry:
    """A registered stream: its default split, how its data is read (:mod:`.datasets`), and where it
    is found.
    """

    tasks: int
    normalisation: str
    mirror_safe: bool
    read: Callable[[Path, Decoding, Sequence[str]], dict[str, Any]]
    find: Callable[[Path], Path | None] | None  # None: part of an installed package
    obtain: str


_DOWNLOAD = "it is downloaded on first use; without a network, place there "


def _cifar(classes: int, tasks: int) -> _Entry:
    obtain = f"{_DOWNLOAD}cifar-{classes}-python.tar.gz or cifar{classes}.npz"
    read, find = partial(datasets.cifar, classes), partial(datasets.locate_cifar, classes)
    return _Entry(tasks, "cifar10", True, read, find, obtain)


_STREAMS: dict[str, _Entry] = {
    "digits": _Entry(5, "digits", False, datasets.digits, None, "comes with scikit-learn"),
    "split-mnist": _Entry(
        tasks=5,
        normalisation="mnist",
        mirror_safe=False,
        read=datasets.mnist,
        find=datasets.locate_mnist,
        obtain=f"{_DOWNLOAD}mnist.npz, or MNIST's four .gz files in the folder MNIST/raw",
    ),
    "split-cifar10": _cifar(10, 5),
    "split-cifar100": _cifar(100, 10),
    "split-tiny-imagenet": _Entry(
        tasks=100,
        normalisation="tiny-imagenet",
        mirror_safe=True,
        read=tiny_imagenet.read,
        find=tiny_imagenet.find,
        obtain=f"place there {tiny_imagenet.SOURCE}",
    ),
}

# Settings that are handed to :func:`from_arrays` as they are.
_AS_THEY_ARE = ("batch", "class_order_seed", "limit_per_task", "first_tasks", "validation", "validation_seed")
_AS_THEY_ARE += ("kind", "kind_seed", "disjoint", "blur", "imbalance", "drift")


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
    splits = ("train",) if evaluate_on == "validation" else SPLITS
    decoding = Decoding(config.decoder, watch, config.resize, config.load, config.on_error)
    entry, path = _STREAMS.get(config.name), Path(config.name).expanduser()
    of_folders = {"resize": config.resize is None, "load": config.load != "disk", "on_error": config.on_error == "stop"}
    for name, usual in of_folders.items():
        if not usual and (entry or path.is_file()):
            raise StreamError(
                f"stream.{name} is {getattr(config, name)}, but {config.name!r} is no image folder; wanted one, or no"
                f" stream.{name}"
            )
    if entry:
        contents = entry.read(_data_dir(config.data_dir), decoding, splits)
        contents |= {"name": config.name, "mirror_safe": entry.mirror_safe}
    else:
        contents = _own_data(config.name, path, decoding, splits)
    stream = from_arrays(
        **contents,
        **{name: getattr(config, name) for name in _AS_THEY_ARE},
        tasks=config.tasks or (entry and entry.tasks),
        normalisation=config.normalisation or (entry and entry.normalisation),
        evaluate_on=evaluate_on,
    )
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


def _own_data(given: str, path: Path, decoding: Decoding, splits: Sequence[str]) -> dict[str, Any]:
    if path.suffix.lower() == ".npz":
        contents: dict[str, Any] = dict(read_npz(path, arrays_of(splits)))
    elif path.is_dir():
        contents = read_folder(path, decoding, splits)
    elif os.sep in given or path.exists():
        raise StreamError(
            f"stream {given!r} is neither a folder nor an .npz file; wanted a folder with train and test, or an .npz"
            " file"
        )
    else:
        raise StreamError(
            f"stream {given!r} is unknown{near_matches(given, names())}; own data: a folder, or an .npz file"
        )
    return {**contents, "source": str(path), "name": path.stem if path.is_file() else path.resolve().name}


def _data_dir(data_dir: str | Path | None) -> Path:
    """The folder that is named, else ``mose_fast`` in the user's cache folder."""
    if data_dir is not None:
        return Path(data_dir).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "mose_fast"
