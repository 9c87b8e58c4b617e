"""Tiny-ImageNet in its official layout, as a folder or as the official zip."""

from __future__ import annotations

import contextlib
import os
import re
import zipfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from mose_fast.streams.cache import arrays_of_parts, decode_resumably, decoded_once, stamp
from mose_fast.streams.decoding import Decoding, read_file
from mose_fast.streams.draws import StreamError
from mose_fast.streams.npz import arrays_of

FOLDER = "tiny-imagenet-200"
ZIP = f"{FOLDER}.zip"
CACHE = f"{FOLDER}.decoded.npz"

SOURCE = f"{ZIP} from the Tiny-ImageNet page of Stanford's course CS231n"


@dataclass(frozen=True)
class _Files:
    """The data set's files by their path in the official layout, in a folder or in the zip."""

    root: Path
    stamps: dict[str, str]  # path -> size and date, to see whether the decoded copy is still of these files
    read: Callable[[str], bytes]

    def text(self, path: str) -> str:
        if path not in self.stamps:
            raise StreamError(f"{self.root / path} is missing; get {SOURCE}")
        try:
            return self.read(path).decode("utf-8")
        except UnicodeDecodeError as error:
            raise StreamError(f"{self.root / path} is damaged, it is no text; get {SOURCE}") from error


def find(data_dir: Path) -> Path | None:
    """Finds the data: ``data_dir`` itself, its folder ``tiny-imagenet-200``, its zip, or None."""
    for folder in (data_dir, data_dir / FOLDER):
        if (folder / "wnids.txt").is_file():
            return folder
    return data_dir / ZIP if (data_dir / ZIP).is_file() else None


def read(data_dir: Path, decoding: Decoding, splits: Sequence[str]) -> dict[str, Any]:
    """Reads the training images and, as test data, the validation images (the official test set has
    no labels); see :mod:`mose_fast.streams.datasets` for arguments and result. Training images come
    by class, validation images in the order of ``val_annotations.txt``.

    Labels number the WordNet ids in sorted order. The order in ``wnids.txt`` has no meaning, and
    readers of class folders sort, too: so label i is the same class for all of them. The data may
    hold a subset of the classes. The decoded arrays are kept beside the data, see
    :func:`mose_fast.streams.cache.decoded_once`.
    """
    root = find(data_dir)
    if root is None:
        raise StreamError(
            f"Tiny-ImageNet is not in {data_dir}: neither {FOLDER}/wnids.txt nor {ZIP} is there; get {SOURCE} and place"
            f" it in {data_dir}"
        )
    with contextlib.ExitStack() as stack:
        try:
            if root.is_dir():
                files, cache = _folder_files(root), root / CACHE
            else:
                files, cache = _zip_files(root, stack.enter_context(zipfile.ZipFile(root))), root.with_name(CACHE)
            names = (*arrays_of(splits), "class_names")
            found = decoded_once(cache, files.stamps, partial(_decode, files, decoding, splits), splits, names)
        except (zipfile.BadZipFile, EOFError) as error:
            raise StreamError(f"{root} is damaged or truncated ({error}); get {SOURCE} again") from error
    return {**found, "labels": range(len(found["class_names"])), "source": str(root)}


def _folder_files(root: Path) -> _Files:
    stamps = {}
    for folder, _, names in os.walk(root):
        for name in names:
            path = Path(folder, name)
            if not re.fullmatch(rf"\.?{FOLDER}\.decoded(\.train)?\.npz.*", name):
                stamps[path.relative_to(root).as_posix()] = stamp(path)
    return _Files(root, stamps, lambda path: read_file(root / path))


def _zip_files(root: Path, archive: zipfile.ZipFile) -> _Files:
    prefix = f"{FOLDER}/"
    infos = {i.filename.removeprefix(prefix): i for i in archive.infolist() if not i.is_dir()}

    def read_member(path: str) -> bytes:
        try:
            return archive.read(infos[path])
        except (zipfile.BadZipFile, zlib.error, EOFError, OSError) as error:
            raise StreamError(f"{root / path} is damaged in the zip ({error}); get {SOURCE} again") from error

    return _Files(root, {path: f"{i.file_size} {i.CRC}" for path, i in infos.items()}, read_member)


def _decode(files: _Files, decoding: Decoding, splits: Sequence[str], unfinished: Path) -> dict[str, Any]:
    wnids = sorted(files.text("wnids.txt").split())
    label_of = {wnid: label for label, wnid in enumerate(wnids)}
    train: dict[str, list[tuple[int, str]]] = {wnid: [] for wnid in wnids}
    for path in files.stamps:
        match = re.fullmatch(r"train/([^/]+)/images/\1_(\d+)\.JPEG", path)
        if match and match[1] in train:
            train[match[1]].append((int(match[2]), path))
    for wnid, found in train.items():
        if not found:
            raise StreamError(
                f"{files.root / 'train' / wnid / 'images'} holds no images, but wnids.txt names {wnid}; get {SOURCE}"
            )
    labelled = {"train": [(path, label_of[wnid]) for wnid in wnids for _, path in sorted(train[wnid])]}
    if "test" in splits:
        labelled["test"] = list(_validation_images(files, label_of))
    paths = [path for found in labelled.values() for path, _ in found]
    sources = [(str(files.root / path), partial(files.read, path)) for path in paths]
    images = decode_resumably(sources, decoding, 64, unfinished)
    return {**arrays_of_parts(labelled, images), "class_names": wnids}


def _validation_images(files: _Files, label_of: dict[str, int]) -> Iterator[tuple[str, int]]:
    annotations = "val/val_annotations.txt"
    for number, line in enumerate(files.text(annotations).splitlines(), 1):
        columns = line.split()
        if len(columns) < 2 or columns[1] not in label_of:
            raise StreamError(
                f"{files.root / annotations}, line {number}: {line!r} names no class of wnids.txt; "
                f"wanted an image's name and its WordNet id; get {SOURCE}"
            )
        path = f"val/images/{columns[0]}"
        if path not in files.stamps:
            raise StreamError(f"{files.root / path} is missing, but val_annotations.txt names it; get {SOURCE}")
        yield path, label_of[columns[1]]
