"""Streams from map-style datasets: those of torchvision and Hugging Face, and of one's own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from PIL import Image
from torch import Tensor
from torch.utils.data import IterableDataset

from mose_fast.settings.knob import ConfigError, shown, whole_number
from mose_fast.streams.arrays import from_arrays
from mose_fast.streams.decoding import pixels_of
from mose_fast.streams.draws import StreamError
from mose_fast.streams.stream import Stream


def from_dataset(
    train: Any, test: Any = None, *, image: str = "image", label: str = "label", **settings: Any
) -> Stream:
    """Makes a stream of datasets that have a length and give an item for each index.

    Every item is read once, in order, when the stream is made, and the images are kept in memory:
    a random transform would draw once and for all. Augmented views are made from them later.

    Args:
        train: The training data. An item is a pair (image, label), or a row, a mapping with a
            column of each. An image is one of Pillow's, or uint8 [H, W, 3] or grey [H, W], numpy or
            torch; all have one size, with sides divisible by 8. A label is an integer.
        test: The test data; None with ``evaluate_on="validation"``.
        image: Name of the rows' column of images.
        label: Name of the rows' column of labels.
        **settings: Those of :func:`from_arrays`. ``name`` is ``dataset`` by default, and
            ``class_names`` are those that the training data know: of the column's feature
            (Hugging Face) or its ``classes`` (torchvision).

    StreamError: an item, which is named by its index, or an argument cannot be used; ConfigError: a
    setting of the kind is out of range.
    """
    x_train, y_train = _read(train, "train", image, label)
    x_test = y_test = None
    if test is not None and settings.get("evaluate_on", "test") == "test":
        x_test, y_test = _read(test, "test", image, label)
    known = settings.get("labels")
    names = _class_names(train, label, np.unique(y_train).tolist() if known is None else list(known))
    return from_arrays(x_train, y_train, x_test, y_test, **{"name": "dataset", "class_names": names} | settings)


def _read(dataset: Any, what: str, image: str, label: str) -> tuple[np.ndarray, np.ndarray]:
    """Images uint8 [N, H, W, 3] and labels int64 [N] of a whole dataset."""
    if isinstance(dataset, Mapping):
        raise StreamError(f"{what} is a {type(dataset).__name__} of {', '.join(map(str, dataset))}; wanted one of them")
    if isinstance(dataset, IterableDataset) or not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")):
        raise StreamError(
            f"{what} is a {type(dataset).__name__}; wanted a dataset with a length and an item for each index"
            " (from_batches takes iterables)"
        )
    if not len(dataset):
        raise StreamError(f"{what} is empty; wanted at least one image")
    labels = np.empty(len(dataset), np.int64)
    for i in range(len(dataset)):
        where = f"{what}[{i}]"
        try:
            item = dataset[i]
        except Exception as error:  # datasets and decoders raise many unrelated types
            raise StreamError(f"{where} cannot be read ({type(error).__name__}: {error})") from error
        picture, number = _image_and_label(item, where, image, label)
        pixels = _pixels(picture, where)
        if i == 0:
            images = np.empty((len(dataset), *pixels.shape), np.uint8)
        elif pixels.shape != images.shape[1:]:
            raise StreamError(
                f"{where} is an image of {_size(pixels)}, and {what}[0] of {_size(images[0])}; wanted one size: resize"
                " them in the dataset's transform"
            )
        images[i] = pixels
        try:
            labels[i] = whole_number(f"the label of {where}", number, low=None)
        except ConfigError as error:
            raise StreamError(str(error)) from error
    return images, labels


def _image_and_label(item: Any, where: str, image: str, label: str) -> tuple[Any, Any]:
    if isinstance(item, Mapping):
        if missing := [column for column in (image, label) if column not in item]:
            raise StreamError(
                f"{where} has the columns {', '.join(map(str, item))}; wanted {' and '.join(map(repr, missing))}, or"
                " other names as image and label"
            )
        return item[image], item[label]
    if not isinstance(item, tuple | list) or len(item) != 2:
        raise StreamError(f"{where} is {shown(item)}; wanted a pair (image, label), or a row with a column of each")
    return item[0], item[1]


def _pixels(picture: Any, where: str) -> np.ndarray:
    """An image as uint8 [H, W, 3]."""
    if isinstance(picture, Image.Image):
        picture = pixels_of(picture, where)
    elif isinstance(picture, Tensor):
        picture = picture.numpy(force=True)
    wanted = "wanted one of Pillow's, or uint8 [H, W, 3] or [H, W]"
    if not isinstance(picture, np.ndarray):
        raise StreamError(f"the image of {where} is a {type(picture).__name__}; {wanted}")
    shape = list(picture.shape)
    if picture.dtype != np.uint8:
        raise StreamError(
            f"the image of {where} is {picture.dtype} {shape}; {wanted}: leave out ToTensor, Normalize and what else"
            " makes numbers of pixels in the dataset's transform"
        )
    if picture.ndim != 2 and shape[2:] != [3]:
        hint = "; it looks channels-first" if picture.ndim == 3 and shape[0] in (1, 3) else ""
        raise StreamError(f"the image of {where} has the shape {shape}; {wanted}{hint}")
    if not picture.size or shape[0] % 8 or shape[1] % 8:
        raise StreamError(
            f"the image of {where} is {_size(picture)}; wanted sides divisible by 8: pad or resize it in the dataset's"
            " transform (torchvision.transforms.Pad, Resize)"
        )
    return np.repeat(picture[..., None], 3, axis=2) if picture.ndim == 2 else picture


def _size(pixels: np.ndarray) -> str:
    return f"{pixels.shape[0]}x{pixels.shape[1]}"


def _class_names(dataset: Any, label: str, known: list[int]) -> list[str] | None:
    """The names of the known labels, as far as a dataset tells them."""
    features = getattr(dataset, "features", None)
    if isinstance(features, Mapping):
        names = getattr(features[label], "names", None)
    else:
        names = getattr(dataset, "classes", None)
    told = isinstance(names, list | tuple) and all(isinstance(name, str) for name in names)
    return [names[number] for number in known] if told and all(0 <= n < len(names) for n in known) else None
