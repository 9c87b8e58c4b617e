"""The data sets of the registered streams: where their files lie, how to read or download them.

A reader is called with the folder of the data, how image files are decoded, and the parts that are
wanted; files of other parts are not opened. It returns the arrays of these parts, images uint8, and
``labels``, ``source`` and, where there are some, ``class_names``, for
:func:`mose_fast.streams.from_arrays`. It raises StreamError if files are damaged, or absent and
cannot be downloaded.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mose_fast.streams.decoding import Decoding
from mose_fast.streams.draws import StreamError
from mose_fast.streams.npz import arrays_of, read_npz

CIFAR10_NAMES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")

_FINE_LABELS = """
apple aquarium_fish baby bear beaver bed bee beetle bicycle bottle bowl boy bridge bus butterfly camel can
castle caterpillar cattle chair chimpanzee clock cloud cockroach couch crab crocodile cup dinosaur dolphin
elephant flatfish forest fox girl hamster house kangaroo keyboard lamp lawn_mower leopard lion lizard lobster
man maple_tree motorcycle mountain mouse mushroom oak_tree orange orchid otter palm_tree pear pickup_truck
pine_tree plain plate poppy porcupine possum rabbit raccoon ray road rocket rose sea seal shark shrew skunk
skyscraper snail snake spider squirrel streetcar sunflower sweet_pepper table tank telephone television tiger
tractor train trout tulip turtle wardrobe whale willow_tree wolf woman worm
"""
#: The fine labels, in the standard order.
CIFAR100_NAMES = tuple(_FINE_LABELS.split())

# Sizes in bytes of the unpacked MNIST files: header and pixels or labels. torchvision does not
# check these files.
MNIST_SIZES = {
    "train-images-idx3-ubyte": 16 + 60000 * 784,
    "train-labels-idx1-ubyte": 8 + 60000,
    "t10k-images-idx3-ubyte": 16 + 10000 * 784,
    "t10k-labels-idx1-ubyte": 8 + 10000,
}


def digits(data_dir: Path, decoding: Decoding, splits: Sequence[str]) -> dict[str, Any]:
    """scikit-learn's 1,797 handwritten digits as 32x32 RGB; every fifth image of each digit is a
    test image.

    The 8x8 pictures (values 0 to 16) are enlarged bilinearly with pixel centres aligned, in
    integers: exact on every machine.
    """
    from sklearn.datasets import load_digits  # slow to import, and needed by this stream alone

    data = load_digits()
    position = 2 * np.arange(32) - 3  # eight times the source coordinate of each pixel's centre
    weights = np.zeros((32, 8), np.int64)  # eight times the share of each source pixel
    for source in range(8):
        weights[:, source] = np.maximum(0, 8 - np.abs(np.clip(position, 0, 56) - 8 * source))
    labels = data.target.astype(np.int64)
    test = np.zeros(len(labels), bool)
    for digit in range(10):
        test[np.flatnonzero(labels == digit)[4::5]] = True
    found: dict[str, Any] = {"labels": range(10), "source": "digits"}
    for split in splits:
        rows = test if split == "test" else ~test
        enlarged = weights @ data.images[rows].astype(np.int64) @ weights.T  # at most 16 * 64
        grey = ((enlarged * 255 + 512) // 1024).astype(np.uint8)
        found |= {f"x_{split}": np.repeat(grey[..., None], 3, axis=3), f"y_{split}": labels[rows]}
    return found


def locate_cifar(classes: int, data_dir: Path) -> Path | None:
    """The file or folder that :func:`cifar` would read; None if there is none."""
    folder = {10: "cifar-10-batches-py", 100: "cifar-100-python"}[classes]
    candidates = (f"cifar{classes}.npz", folder, f"cifar-{classes}-python.tar.gz")
    return next((data_dir / name for name in candidates if (data_dir / name).exists()), None)


def cifar(classes: int, data_dir: Path, decoding: Decoding, splits: Sequence[str]) -> dict[str, Any]:
    """CIFAR-10 or CIFAR-100 (fine labels): ``cifar10.npz`` or ``cifar100.npz``, else through
    torchvision, which downloads it if it is absent.
    """
    from torchvision import datasets  # slow to import

    dataset = {10: datasets.CIFAR10, 100: datasets.CIFAR100}[classes]
    if "test" not in splits:
        # torchvision computes the checksums of all files on the lists, whichever it reads.
        dataset = type(dataset.__name__, (dataset,), {"test_list": []})
    npz, folder = data_dir / f"cifar{classes}.npz", data_dir / dataset.base_folder
    if npz.exists():
        remedy = f"replace it, or remove it to have {dataset.filename} downloaded"
        arrays = read_npz(npz, arrays_of(splits), remedy=remedy)
    else:
        try:
            arrays = _by_torchvision(dataset, data_dir, splits)
        except Exception as error:  # network, file system, archive and contents all fail in their own ways
            damaged = _damaged_cifar(dataset, data_dir)
            if damaged:
                reason = f"{damaged} is damaged or truncated (its checksum differs) and cannot be replaced"
            else:
                reason = f"CIFAR-{classes} is not in {data_dir} and cannot be downloaded"
            raise StreamError(
                f"{reason} ({_one_line(error)}); place {dataset.filename} from the home page of CIFAR-{classes}, or a"
                f" {npz.name}, in {data_dir}"
            ) from error
    names = CIFAR10_NAMES if classes == 10 else CIFAR100_NAMES
    source = str(npz if npz.exists() else folder)
    return {**arrays, "labels": range(classes), "class_names": names, "source": source}


def locate_mnist(data_dir: Path) -> Path | None:
    """The file or folder that :func:`mnist` would read; None if there is none."""
    npz, folder = data_dir / "mnist.npz", data_dir / "MNIST" / "raw"
    if npz.exists():
        return npz
    return folder if all((folder / name).exists() or (folder / f"{name}.gz").exists() for name in MNIST_SIZES) else None


def mnist(data_dir: Path, decoding: Decoding, splits: Sequence[str]) -> dict[str, Any]:
    """MNIST, padded from 28x28 to 32x32, grey: ``mnist.npz``, else through torchvision, which
    downloads it if it is absent.
    """
    npz, raw = data_dir / "mnist.npz", data_dir / "MNIST" / "raw"
    if npz.exists():
        arrays = read_npz(npz, arrays_of(splits), remedy="replace it, or remove it to have MNIST downloaded")
    else:
        from torchvision.datasets import MNIST  # slow to import

        _refuse_damaged_mnist(raw)
        try:
            arrays = _by_torchvision(MNIST, data_dir, splits)
        except Exception as error:  # for the same reasons as in cifar
            _refuse_damaged_mnist(raw)
            raise StreamError(
                f"MNIST is not in {raw} and cannot be downloaded ({_one_line(error)}); "
                f"place {', '.join(f'{n}.gz' for n in MNIST_SIZES)} there, or a mnist.npz in {data_dir}"
            ) from error
    source = str(npz if npz.exists() else raw)
    for name in (f"x_{split}" for split in splits):
        if arrays[name].shape[1:] != (28, 28):
            raise StreamError(f"{source}: {name} has shape {list(arrays[name].shape)}; wanted [N, 28, 28]")
        arrays[name] = np.pad(arrays[name], ((0, 0), (2, 2), (2, 2)))
    return {**arrays, "labels": range(10), "source": source}


def _by_torchvision(dataset: type, data_dir: Path, splits: Sequence[str]) -> dict[str, np.ndarray]:
    arrays = {}
    for split in splits:
        part = dataset(str(data_dir), train=split == "train", download=True)
        arrays |= {f"x_{split}": np.asarray(part.data), f"y_{split}": np.asarray(part.targets)}
    return arrays


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())


def _damaged_cifar(dataset: type, data_dir: Path) -> Path | None:
    from torchvision.datasets.utils import check_integrity

    listed = [(data_dir / dataset.base_folder / name, md5) for name, md5 in dataset.train_list + dataset.test_list]
    for path, md5 in [(data_dir / dataset.filename, dataset.tgz_md5), *listed]:
        with contextlib.suppress(OSError):
            if path.is_file() and not check_integrity(str(path), md5):
                return path
    return None


def _refuse_damaged_mnist(raw: Path) -> None:
    for name, size in MNIST_SIZES.items():
        path = raw / name
        if path.is_file() and path.stat().st_size != size:
            raise StreamError(
                f"{path} is damaged or truncated: it holds {path.stat().st_size} bytes, MNIST's holds {size}; "
                f"remove it and run again, or place {name}.gz there"
            )
