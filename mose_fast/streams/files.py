"""Reading image folders and ``.npz`` archives, with errors that name the file."""

from __future__ import annotations

import warnings
from functools import partial
from pathlib import Path

import numpy as np

from mose_fast.streams.decoding import Decoding, decode_images
from mose_fast.streams.stream import StreamError

__all__ = ["ARRAYS", "read_folder", "read_npz"]

#: The arrays that an ``.npz`` of a stream holds.
ARRAYS = ("x_train", "y_train", "x_test", "y_test")

SUFFIXES = (".jpg", ".jpeg", ".png", ".bmp", ".webp", ".tif", ".tiff")

# Files that are not read, which a warning names.
_NAMED = 5


def read_npz(
    path: Path, names: tuple[str, ...] = ARRAYS, *, remedy: str = "write it again with numpy.savez"
) -> dict[str, np.ndarray]:
    """Reads the named arrays. Pickled contents are refused, never executed.

    Args:
        path: The archive.
        names: Arrays it must hold.
        remedy: What to do about a damaged file, for the message.

    Raises:
        StreamError: The file is missing, damaged or lacks an array.
    """
    if not path.is_file():
        raise StreamError(f"{path} is no file; wanted an .npz with {', '.join(names)}")
    try:
        archive = np.load(path, allow_pickle=False)
        if not isinstance(archive, np.lib.npyio.NpzFile):
            raise StreamError(
                f"{path} holds a single array; wanted an .npz with {', '.join(names)}: numpy.savez writes it"
            )
        with archive:
            missing = [n for n in names if n not in archive.files]
            if missing:
                held = ", ".join(archive.files) or "nothing"
                raise StreamError(f"{path} lacks {', '.join(missing)} and holds {held}; wanted {', '.join(names)}")
            return {n: archive[n] for n in names}
    except StreamError:
        raise
    except MemoryError as error:
        raise StreamError(f"{path} is damaged, or its arrays do not fit into the memory ({error}); {remedy}") from error
    except Exception as error:  # zipfile, zlib and numpy raise many unrelated types on damaged input
        raise StreamError(f"{path} is damaged, truncated or no .npz archive ({error}); {remedy}") from error


def read_folder(root: Path, decoding: Decoding) -> tuple[dict[str, np.ndarray], list[str]]:
    """Reads ``root/train/<class>/<file>`` and ``root/test/<class>/<file>``.

    Files of other types and in other places are not read, and a warning says so. Names that begin
    with a point are passed over.

    Args:
        root: The folder.
        decoding: What decodes the images.

    Returns:
        The four arrays of :data:`ARRAYS`, labels numbering the class folders of ``train`` in sorted
        order, and their names.

    Raises:
        StreamError: A folder is missing or empty, a file is damaged, or sizes differ or cannot be
            used.
    """
    for part in ("train", "test"):
        if not (root / part).is_dir():
            raise StreamError(
                f"{root / part} is missing; wanted {root} to hold train/<class>/<image> and test/<class>/<image>"
            )
    names = _class_folders(root / "train")
    if not names:
        raise StreamError(f"{root / 'train'} holds no class folders; wanted train/<class>/<image>")
    for name in _class_folders(root / "test"):
        if name not in names:
            raise StreamError(
                f"{root / 'test' / name} is a class without training images; wanted {root / 'train' / name} as well"
            )
    labelled: dict[str, list[tuple[Path, int]]] = {"train": [], "test": []}
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
    _warn_of_others(root, files)
    images: list[np.ndarray] = []
    for file, image in zip(
        files, decode_images([(str(file), partial(_read, file)) for file in files], decoding), strict=True
    ):
        height, width = image.shape[:2]
        if images and image.shape != images[0].shape:
            raise StreamError(
                f"{files[0]} is {images[0].shape[0]}x{images[0].shape[1]} and {file} is {height}x{width}; wanted images"
                " of one size: resize them first, for example with Pillow's Image.resize"
            )
        if height % 8 or width % 8:
            raise StreamError(
                f"{file} is {height}x{width}; wanted sides divisible by 8: pad or resize the images first"
            )
        images.append(image)
    arrays: dict[str, np.ndarray] = {}
    for part, found in labelled.items():
        arrays[f"x_{part}"], images = np.stack(images[: len(found)]), images[len(found) :]
        arrays[f"y_{part}"] = np.array([label for _, label in found], np.int64)
    return arrays, names


def _warn_of_others(root: Path, read: list[Path]) -> None:
    known = set(read)
    others = [
        path.relative_to(root)
        for part in ("train", "test")
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
    return sorted(p.name for p in folder.iterdir() if p.is_dir() and not p.name.startswith("."))


def _image_files(folder: Path) -> list[Path]:
    if not folder.is_dir():
        return []
    return sorted(p for p in folder.iterdir() if p.suffix.lower() in SUFFIXES and not p.name.startswith("."))


def _read(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError as error:
        raise StreamError(f"cannot read {file}: {error.strerror}") from error
