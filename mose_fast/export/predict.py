"""Classifying image files with an export."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from mose_fast.errors import MoseFastError
from mose_fast.export.card import ExportError
from mose_fast.export.classifier import BATCH, Classifier
from mose_fast.streams.decoding import centre_square, decode_image
from mose_fast.streams.folder import SUFFIXES


def classify_files(
    classifier: Classifier, paths: Iterable[str | Path], unusable: Callable[[MoseFastError], None] | None = None
) -> Iterator[dict[str, Any]]:
    """Classifies image files, and those in folders (file types as in an image folder of a stream,
    at any depth) in the order of their names.

    Yields for each file ``path``, ``name`` of the class, ``label`` in the data set, ``head_index``,
    ``score`` (squared distance or logit) and ``margin`` to the second best class, None where only
    one class is known. ``unusable`` takes the ExportError or StreamError of a file or folder that
    cannot be used, and the others are classified; without it the first such error is raised.
    """
    files: list[Path] = []
    for path in paths:
        with _reported(unusable):
            files += _image_files(Path(path))
    for first in range(0, len(files), BATCH):
        read: list[tuple[Path, np.ndarray]] = []
        for file in files[first : first + BATCH]:
            with _reported(unusable):
                read.append((file, _read_image(file, classifier)))
        if not read:
            continue
        found = classifier.predict(np.stack([image for _, image in read]))
        for row, (file, _) in enumerate(read):
            head_index, margin = int(found.head_index[row]), float(found.margin[row])
            yield {
                "path": str(file),
                "name": classifier.class_names[head_index],
                "label": int(found.label[row]),
                "head_index": head_index,
                "score": float(found.scores[row, head_index]),
                "margin": margin if math.isfinite(margin) else None,
            }


@contextmanager
def _reported(unusable: Callable[[MoseFastError], None] | None) -> Iterator[None]:
    """Passes an error to ``unusable`` instead of raising it, unless that is None."""
    try:
        yield
    except MoseFastError as error:
        if unusable is None:
            raise
        unusable(error)


def _image_files(path: Path) -> list[Path]:
    if not path.is_dir():
        return [path]
    files = sorted(
        p for p in path.rglob("*") if p.suffix.lower() in SUFFIXES and not p.name.startswith(".") and p.is_file()
    )
    if not files:
        raise ExportError(f"the folder {path} holds no images ({', '.join(SUFFIXES)}); wanted at least one")
    return files


def _read_image(file: Path, classifier: Classifier) -> np.ndarray:
    try:
        image = decode_image(file.read_bytes(), str(file))
    except OSError as error:
        raise ExportError(f"cannot read {file}: {error.strerror}") from error
    if classifier.resize is not None:
        return centre_square(image, classifier.resize)
    if image.shape[:2] != classifier.image_size:
        sizes = ["x".join(map(str, size)) for size in (image.shape[:2], classifier.image_size)]
        raise ExportError(f"{file} is {sizes[0]} (height x width); wanted {sizes[1]}, as in training: resize it first")
    return image
