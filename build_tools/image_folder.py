"""Writes an image folder of the size of ImageNet-100, with made-up pictures.

    python -m build_tools.image_folder FOLDER

It serves to try a stream that is larger than the memory without real data.
"""

from __future__ import annotations

import argparse
import io
from pathlib import Path

import numpy as np
from PIL import Image


def draw_jpeg(random: np.random.Generator, colours: np.ndarray, side: int) -> bytes:
    """A picture of a class with these colours, [8, 8, 3] in 0 to 255, on a coarse grid. Each
    picture adds other ones, and noise: so that classes can be learned, and files are as large as
    photos'.
    """
    mixed = colours + random.normal(0, 40, (8, 8, 3))
    image = Image.fromarray(mixed.clip(0, 255).astype(np.uint8)).resize((side, side), Image.Resampling.BICUBIC)
    noisy = np.asarray(image, np.int16) + random.integers(-12, 13, (side, side, 1), np.int16)
    file = io.BytesIO()
    Image.fromarray(noisy.clip(0, 255).astype(np.uint8)).save(file, "JPEG", quality=75)
    return file.getvalue()


def write_folder(folder: Path, *, classes: int = 100, train: int = 500, test: int = 50, side: int = 300) -> Path:
    """Writes and returns ``folder`` as docs/own_data.md wants it: so many classes, training and
    test images a class, and pixels a side. The same arguments give the same pictures.
    """
    random = np.random.default_rng(0)
    colours = random.integers(40, 216, (classes, 8, 8, 3))
    for part, images in (("train", train), ("test", test)):
        for label in range(classes):
            of_class = folder / part / f"class{label:04d}"
            of_class.mkdir(parents=True)
            for number in range(images):
                (of_class / f"{number:04d}.jpg").write_bytes(draw_jpeg(random, colours[label], side))
    return folder


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m build_tools.image_folder", description=__doc__)
    parser.add_argument("folder", type=Path)
    for name, default in (("classes", 100), ("train", 500), ("test", 50), ("side", 300)):
        parser.add_argument(f"--{name}", type=int, default=default, help="default: %(default)s")
    print(write_folder(**vars(parser.parse_args())))
