"""Reading image folders, with errors that name the file."""

from __future__ import annotations

import os
import warnings
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from mose_fast.output import readable
from mose_fast.streams.cache import arrays_of_parts, decode_resumably, decoded_once, stamp
from mose_fast.streams.decoding import Decoding, Source, decode_images
from mose_fast.streams.draws import StreamError

#: The file types that are read.
SUFFIXES = (".jpg", ".jpeg", ".png", ".bmp", ".webp", ".tif", ".tiff")

# How many of the files that are not read a warning names.
_NAMED = 5


def read_folder(root: Path, decoding: Decoding, splits: Sequence[str]) -> dict[str, Any]:
    """Reads ``root/train/<class>/<file>`` and ``root/test/<class>/<file>``, only the parts
    ``splits``; the folders of others are not opened.

    Files of other types and in other places are not read, and a warning says so. Names that begin
    with a point are ignored. Resized images are kept in the folder, see
    :func:`mose_fast.streams.cache.decoded_once`, since photos take long to decode.

    Returns the arrays of these parts, labels numbering the class folders of ``train`` in sorted
    order, and ``class_names``, the names of these folders as :func:`mose_fast.output.readable`
    text. Raises StreamError if a folder is missing or empty, a file is damaged, or sizes differ or
    cannot be used.
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

    def decode(unfinished: Path) -> dict[str, Any]:
        images = decode_resumably(sources, decoding, decoding.resize, unfinished)
        return {**arrays_of_parts(labelled, images), "class_names": class_names}

    if decoding.resize is None:
        return {**arrays_of_parts(labelled, _images(sources, decoding)), "class_names": class_names}
    # Copies of versions that read more than 8 bits a channel are made again.
    stamps = {"": "8 bits a channel"} | {file.relative_to(root).as_posix(): stamp(file) for file in files}
    return decoded_once(root / f"resized-{decoding.resize}.npz", stamps, decode, splits)


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
        if height % 8 or width % 8:
            raise StreamError(
                f"{file} is {height}x{width}; wanted sides divisible by 8: pad or resize the images, for example with"
                " --resize N (stream.resize)"
            )
        images.append(image)
    return np.stack(images)


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


def read_file(file: Path) -> bytes:
    """The file's bytes. Raises StreamError if it cannot be read."""
    try:
        return file.read_bytes()
    except OSError as error:
        raise StreamError(f"cannot read {file}: {error.strerror}") from error
