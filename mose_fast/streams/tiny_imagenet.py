"""Tiny-ImageNet in its official layout, as a folder or as the official zip."""

from __future__ import annotations

import os
import re
import zipfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from mose_fast.streams.cache import Decoded, decode_resumably, decoded_once
from mose_fast.streams.decoding import Decoding, decode_images
from mose_fast.streams.draws import StreamError
from mose_fast.streams.folder import read_file
from mose_fast.streams.npz import SPLITS

__all__ = ["FOLDER", "ZIP", "find", "read"]

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


def read(data_dir: Path, decoding: Decoding, splits: Sequence[str] = SPLITS) -> Decoded:
    """Reads the training images and, as test data, the validation images (the official test set has
    no labels); of parts other than ``splits``, no image is opened.

    Labels number the WordNet ids in sorted order. The order in ``wnids.txt`` has no meaning, and
    readers of class folders sort, too: so label i is the same class for all of them. The data may
    hold a subset of the classes. The decoded arrays are kept beside the data, see
    :func:`mose_fast.streams.cache.decoded_once`.

    Returns the arrays of these parts (images uint8 [N, 64, 64, 3]; training images by class,
    validation images in the order of ``val_annotations.txt``) and the WordNet ids by label. Raises
    StreamError if files are missing or damaged.
    """
    root = find(data_dir)
    if root is None:
        raise StreamError(
            f"Tiny-ImageNet is not in {data_dir}: neither {FOLDER}/wnids.txt nor {ZIP} is there; get {SOURCE} and place"
            f" it in {data_dir}"
        )
    if root.is_dir():
        files = _folder_files(root)
        return decoded_once(root / CACHE, files.stamps, partial(_decode, files, decoding, splits), splits)
    try:
        with zipfile.ZipFile(root) as archive:
            files = _zip_files(root, archive)
            decode = partial(_decode, files, decoding, splits)
            return decoded_once(root.with_name(CACHE), files.stamps, decode, splits)
    except (zipfile.BadZipFile, EOFError) as error:
        raise StreamError(f"{root} is damaged or truncated ({error}); get {SOURCE} again") from error


def _folder_files(root: Path) -> _Files:
    stamps = {}
    for folder, _, names in os.walk(root):
        for name in names:
            path = Path(folder, name)
            if re.fullmatch(rf"\.?{FOLDER}\.decoded(\.train)?\.npz.*", path.name):
                continue
            status = path.stat()
            stamps[path.relative_to(root).as_posix()] = f"{status.st_size} {status.st_mtime_ns}"
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


def _decode(files: _Files, decoding: Decoding, splits: Sequence[str], unfinished: Path) -> Decoded:
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
    train_paths = [path for wnid in wnids for _, path in sorted(train[wnid])]
    y_train = [label_of[wnid] for wnid in wnids for _ in train[wnid]]

    val_paths, y_test = [], []
    annotations = "val/val_annotations.txt"
    for number, line in enumerate(files.text(annotations).splitlines() if "test" in splits else [], 1):
        columns = line.split()
        if len(columns) < 2 or columns[1] not in label_of:
            raise StreamError(
                f"{files.root / annotations}, line {number}: {line!r} names no class of wnids.txt; "
                f"wanted an image's name and its WordNet id; get {SOURCE}"
            )
        path = f"val/images/{columns[0]}"
        if path not in files.stamps:
            raise StreamError(f"{files.root / path} is missing, but val_annotations.txt names it; get {SOURCE}")
        val_paths.append(path)
        y_test.append(label_of[columns[1]])
    images = _images(files, train_paths + val_paths, decoding, unfinished)
    arrays = {"x_train": images[: len(train_paths)], "y_train": np.array(y_train, np.int64)}
    if "test" in splits:
        arrays |= {"x_test": images[len(train_paths) :], "y_test": np.array(y_test, np.int64)}
    return arrays, wnids


def _images(files: _Files, paths: list[str], decoding: Decoding, unfinished: Path) -> np.ndarray:
    sources = [(str(files.root / path), partial(files.read, path)) for path in paths]

    def decode(start: int) -> Iterator[np.ndarray]:
        for path, image in zip(paths[start:], decode_images(sources, decoding, start), strict=True):
            if image.shape != (64, 64, 3):
                raise StreamError(
                    f"{files.root / path} is {image.shape[0]}x{image.shape[1]}; wanted 64x64 as in the official data"
                )
            yield image

    return decode_resumably(np.empty((len(paths), 64, 64, 3), np.uint8), decode, unfinished)
