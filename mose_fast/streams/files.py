"""Reading image files, image folders and ``.npz`` archives, with errors that name the file."""

from __future__ import annotations

import io
import zipfile
import zlib
from pathlib import Path

import numpy as np
from PIL import Image

from mose_fast.streams.stream import StreamError

__all__ = ["ARRAYS", "decode_image", "read_folder", "read_npz"]

#: The arrays that an ``.npz`` of a stream holds.
ARRAYS = ("x_train", "y_train", "x_test", "y_test")

SUFFIXES = (".jpg", ".jpeg", ".png", ".bmp")


def read_npz(path: Path, names: tuple[str, ...] = ARRAYS, *, remedy: str = "write it again with numpy.savez") -> dict[str, np.ndarray]:
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
            raise StreamError(f"{path} holds a single array; wanted an .npz with {', '.join(names)}: numpy.savez writes it")
        with archive:
            missing = [n for n in names if n not in archive.files]
            if missing:
                held = ", ".join(archive.files) or "nothing"
                raise StreamError(f"{path} lacks {', '.join(missing)} and holds {held}; wanted {', '.join(names)}")
            return {n: archive[n] for n in names}
    except StreamError:
        raise
    except (OSError, ValueError, EOFError, KeyError, NotImplementedError, zipfile.BadZipFile, zlib.error) as error:
        raise StreamError(f"{path} is damaged, truncated or no .npz archive ({error}); {remedy}") from error


def decode_image(data: bytes, what: str) -> np.ndarray:
    """Decodes a JPEG, PNG or BMP file to uint8 [H, W, 3]; grey and palette images become RGB, alpha is dropped.

    Raises:
        StreamError: The file is damaged, or holds more than 8 bits a channel.
    """
    try:
        with Image.open(io.BytesIO(data)) as image:
            if image.mode.startswith(("I", "F")):
                raise StreamError(f"{what} holds pixels of mode {image.mode}; wanted 8 bits a channel: convert it first")
            return np.array(image.convert("RGB"))
    except StreamError:
        raise
    except Exception as error:  # Pillow's decoders raise many unrelated types on damaged input
        raise StreamError(f"{what} is a damaged or truncated image ({error}); replace or remove it") from error


def read_folder(root: Path) -> tuple[dict[str, np.ndarray], list[str]]:
    """Reads ``root/train/<class>/<file>`` and ``root/test/<class>/<file>``; files of other types are passed over.

    Returns:
        The four arrays of :data:`ARRAYS`, labels numbering the class folders of ``train`` in sorted order, and their names.

    Raises:
        StreamError: A folder is missing or empty, a file is damaged, or sizes differ or cannot be used.
    """
    for part in ("train", "test"):
        if not (root / part).is_dir():
            raise StreamError(f"{root / part} is missing; wanted {root} to hold train/<class>/<image> and test/<class>/<image>")
    names = _class_folders(root / "train")
    if not names:
        raise StreamError(f"{root / 'train'} holds no class folders; wanted train/<class>/<image>")
    for name in _class_folders(root / "test"):
        if name not in names:
            raise StreamError(f"{root / 'test' / name} is a class without training images; wanted {root / 'train' / name} as well")
    arrays: dict[str, np.ndarray] = {}
    first: tuple[Path, tuple[int, ...]] | None = None
    for part in ("train", "test"):
        images, labels = [], []
        for label, name in enumerate(names):
            files = _image_files(root / part / name)
            if not files and part == "train":
                raise StreamError(f"{root / part / name} holds no images ({', '.join(SUFFIXES)}); wanted at least one, or no such folder")
            for file in files:
                image = decode_image(_read(file), str(file))
                height, width = image.shape[:2]
                first = first or (file, image.shape)
                if image.shape != first[1]:
                    raise StreamError(
                        f"{first[0]} is {first[1][0]}x{first[1][1]} and {file} is {height}x{width}; wanted images of one size: "
                        "resize them first, for example with Pillow's Image.resize"
                    )
                if height % 8 or width % 8:
                    raise StreamError(f"{file} is {height}x{width}; wanted sides divisible by 8: pad or resize the images first")
                images.append(image)
                labels.append(label)
        if not images:
            raise StreamError(f"{root / part} holds no images; wanted {part}/<class>/<image> with {', '.join(SUFFIXES)}")
        arrays[f"x_{part}"], arrays[f"y_{part}"] = np.stack(images), np.array(labels, np.int64)
    return arrays, names


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
