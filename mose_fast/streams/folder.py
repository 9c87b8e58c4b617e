"""Reading image folders, with errors that name the file."""

from __future__ import annotations

import hashlib
import os
import warnings
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from mose_fast.device import available_bytes
from mose_fast.output import readable
from mose_fast.streams.cache import arrays_of_parts, decode_resumably, decoded_once, stamp
from mose_fast.streams.decoding import Decoding, Source, UnusableImage, decode_image, decode_images, read_file
from mose_fast.streams.draws import StreamError
from mose_fast.streams.image_files import ImageFiles
from mose_fast.streams.npz import arrays_of

#: The file types that are read.
SUFFIXES = (".jpg", ".jpeg", ".png", ".bmp", ".webp", ".tif", ".tiff")

# How many of the files that are not read a warning names.
_NAMED = 5

# Making a stream of images in memory copies them.
_COPIES = 3


def read_folder(root: Path, decoding: Decoding, splits: Sequence[str]) -> dict[str, Any]:
    """Reads ``root/train/<class>/<file>`` and ``root/test/<class>/<file>``, only the parts
    ``splits``; the folders of others are not opened.

    Files of other types and in other places are not read, and a warning says so. Names that begin
    with a point are ignored. What takes long is kept in the folder, see
    :func:`mose_fast.streams.cache.decoded_once`: resized images that are loaded into memory, and
    the hash of files that stay on the disk.

    Returns the arrays of these parts, labels numbering the class folders of ``train`` in sorted
    order; ``class_names``, the names of these folders as :func:`mose_fast.output.readable` text;
    and ``content``, a hash of the files with the size to which they are resized, which is the same
    wherever the images are. Images that stay on the disk are :class:`ImageFiles`. Raises
    StreamError if a folder is missing or empty, a file is damaged, or sizes differ or cannot be
    used; of images on the disk, only if a file cannot be read or the first image cannot be used.
    """
    for part in splits:
        if not (root / part).is_dir():
            held = " and ".join(f"{split}/<class>/<image>" for split in splits)
            raise StreamError(f"{root / part} is missing; wanted {root} to hold {held}")
    names = _class_folders(root / "train")
    class_names = [readable(name) for name in names]
    if not names:
        raise StreamError(f"{root / 'train'} holds no class folders; wanted train/<class>/<image>")
    for name in _class_folders(root / "test") if "test" in splits else []:
        if name not in names:
            raise StreamError(
                f"{root / 'test' / name} is a class without training images; wanted {root / 'train' / name} as well"
            )
    labelled: dict[str, list[tuple[Path, int]]] = {split: [] for split in splits}
    for part, found in labelled.items():
        for label, name in enumerate(names):
            files = _image_files(root / part / name)
            if not files and part == "train":
                raise StreamError(
                    f"{root / part / name} holds no images ({', '.join(SUFFIXES)}); wanted at least one, or no such"
                    " folder"
                )
            found += [(file, label) for file in files]
        if not found:
            raise StreamError(
                f"{root / part} holds no images; wanted {part}/<class>/<image> with {', '.join(SUFFIXES)}"
            )
    files = [file for found in labelled.values() for file, _ in found]
    _warn_of_others(root, files, splits)
    sources: list[Source] = [(str(file), partial(read_file, file)) for file in files]

    def described() -> dict[str, Any]:
        return {"class_names": class_names, "hash": _hash(files)}

    def decode(unfinished: Path) -> dict[str, Any]:
        images = decode_resumably(sources, decoding, decoding.resize, unfinished)
        return arrays_of_parts(labelled, images) | described()

    # Copies of versions that read more than 8 bits a channel are made again.
    stamps = {"": "8 bits a channel"} | {file.relative_to(root).as_posix(): stamp(file) for file in files}
    texts = ("class_names", "hash")
    if (size := _size_on_disk(sources, decoding)) is not None:
        images = ImageFiles(root, [str(file.relative_to(root)) for file in files], size, decoding)
        kept = decoded_once(root / "hash.npz", stamps, lambda unfinished: described(), splits, texts)
        found = arrays_of_parts(labelled, images) | kept
    elif decoding.resize is None:
        found = arrays_of_parts(labelled, _images(sources, decoding)) | described()
    else:
        names = (*arrays_of(splits), *texts)
        found = decoded_once(root / f"resized-{decoding.resize}.npz", stamps, decode, splits, names)
    return found | {"content": found.pop("hash") + f"{decoding.resize or 0:08x}"}


def _size_on_disk(sources: Sequence[Source], decoding: Decoding) -> tuple[int, int] | None:
    """Height and width of images that stay on the disk; None if they are loaded into memory."""
    if decoding.load == "memory":
        return None
    height, width = _first_size(sources, decoding)
    # What is left out is known once it is decoded: the stream must not depend on it.
    needed = decoding.load == "disk" or decoding.on_error == "skip"
    fits = _COPIES * len(sources) * height * width * 3 <= available_bytes()
    return None if fits and not needed else (height, width)


def _hash(files: Sequence[Path]) -> str:
    """The hash of the files' bytes, in order, in hex digits."""
    digest = hashlib.sha256()
    for file in files:
        data = read_file(file)
        digest.update(f" {len(data)} ".encode())
        digest.update(data)
    return digest.hexdigest()


def _first_size(sources: Sequence[Source], decoding: Decoding) -> tuple[int, int]:
    """Height and width of the images: those of the first one, where they are not resized."""
    if decoding.resize is not None:
        return decoding.resize, decoding.resize
    for number, (file, read) in enumerate(sources, 1):
        try:
            height, width = decode_image(read(), file).shape[:2]
        except UnusableImage:
            if decoding.on_error == "stop" or number == len(sources):
                raise
        else:
            _check_sides(file, height, width)
            break
    return height, width


def _images(files: Sequence[Source], decoding: Decoding) -> np.ndarray:
    """Decodes files of one size, which nobody has said."""
    images: list[np.ndarray] = []
    for (file, _), image in zip(files, decode_images(files, decoding), strict=True):
        height, width = image.shape[:2]
        if images and image.shape != images[0].shape:
            first = "x".join(map(str, images[0].shape[:2]))
            raise StreamError(
                f"{files[0][0]} is {first} and {file} is {height}x{width}; wanted images of one size: resize them with"
                " --resize N (stream.resize)"
            )
        _check_sides(file, height, width)
        images.append(image)
    return np.stack(images)


def _check_sides(file: str, height: int, width: int) -> None:
    if height % 8 or width % 8:
        raise StreamError(
            f"{file} is {height}x{width}; wanted sides divisible by 8: pad or resize the images, for example with"
            " --resize N (stream.resize)"
        )


def _warn_of_others(root: Path, read: list[Path], splits: Sequence[str]) -> None:
    known = set(read)
    others = [
        path.relative_to(root)
        for part in splits
        for path in sorted((root / part).rglob("*"))
        if path.is_file()
        and path not in known
        and not any(name.startswith(".") for name in path.relative_to(root).parts)
    ]
    if others:
        more = f" and {len(others) - _NAMED} more" if len(others) > _NAMED else ""
        warnings.warn(
            f"{root} holds files that are not read ({len(others)}): {', '.join(map(str, others[:_NAMED]))}{more}; only"
            f" {', '.join(SUFFIXES)} directly in a class folder are read: train/<class>/<image>",
            stacklevel=2,
        )


def _class_folders(folder: Path) -> list[str]:
    found = (p.name for p in folder.iterdir() if p.is_dir() and not p.name.startswith("."))
    return sorted(found, key=os.fsencode)  # the same order in every locale


def _image_files(folder: Path) -> list[Path]:
    if not folder.is_dir():
        return []
    found = (p for p in folder.iterdir() if p.suffix.lower() in SUFFIXES and not p.name.startswith("."))
    return sorted(found, key=os.fsencode)
