"""Writes a stand-in for ``tiny-imagenet-200.zip``: the official layout and number of images, with
made-up pictures.

    python -m build_tools.tiny_imagenet FOLDER

It serves to try the stream ``split-tiny-imagenet`` at full length without the real data.
"""

from __future__ import annotations

import argparse
import zipfile
from pathlib import Path

import numpy as np

from build_tools.image_folder import draw_jpeg

_ROOT = "tiny-imagenet-200"


def write_zip(folder: Path, *, classes: int = 200, train: int = 500, val: int = 50) -> Path:
    """Writes and returns ``folder/tiny-imagenet-200.zip`` with so many classes, and training and
    validation images a class; the same arguments give the same pictures.
    """
    random = np.random.default_rng(0)
    wnids = [f"n{1_000_000 + 17 * number:08d}" for number in range(classes)]
    colours = random.integers(40, 216, (classes, 8, 8, 3))
    path = folder / f"{_ROOT}.zip"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:

        def picture(name: str, label: int) -> None:
            archive.writestr(f"{_ROOT}/{name}", draw_jpeg(random, colours[label], 64))

        # The official file does not sort the WordNet ids.
        archive.writestr(f"{_ROOT}/wnids.txt", "".join(f"{wnids[i]}\n" for i in random.permutation(classes)))
        archive.writestr(f"{_ROOT}/words.txt", "".join(f"{wnid}\tclass {i}\n" for i, wnid in enumerate(wnids)))
        for label, wnid in enumerate(wnids):
            boxes = "".join(f"{wnid}_{number}.JPEG\t0\t0\t63\t63\n" for number in range(train))
            archive.writestr(f"{_ROOT}/train/{wnid}/{wnid}_boxes.txt", boxes)
            for number in range(train):
                picture(f"train/{wnid}/images/{wnid}_{number}.JPEG", label)
        labels = random.permutation(np.repeat(np.arange(classes), val))
        lines = (f"val_{number}.JPEG\t{wnids[label]}\t0\t0\t63\t63\n" for number, label in enumerate(labels))
        archive.writestr(f"{_ROOT}/val/val_annotations.txt", "".join(lines))
        for number, label in enumerate(labels):
            picture(f"val/images/val_{number}.JPEG", label)
    return path


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m build_tools.tiny_imagenet", description=__doc__)
    parser.add_argument("folder", type=Path)
    print(write_zip(parser.parse_args().folder))
