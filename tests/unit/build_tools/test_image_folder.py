"""The made-up image folder: its size, the same pictures each time, and classes that differ."""

import io

import numpy as np
from PIL import Image

from build_tools.image_folder import write_folder


def test_the_folder_is_as_asked_and_its_classes_can_be_told_apart(tmp_path):
    first, second = (write_folder(tmp_path / name, classes=3, train=6, test=2, side=40) for name in "ab")
    files = sorted(path.relative_to(first) for path in first.rglob("*.jpg"))
    assert len(files) == 3 * (6 + 2)
    contents = [(first / file).read_bytes() for file in files]
    assert contents == [(second / file).read_bytes() for file in files]
    pixels = [np.asarray(Image.open(io.BytesIO(data))).astype(float) for data in contents]
    assert all(image.shape == (40, 40, 3) for image in pixels)
    means = {
        label: np.mean([p for p, f in zip(pixels, files, strict=True) if f.parts[:2] == ("train", label)], axis=0)
        for label in ("class0000", "class0001", "class0002")
    }
    for image, file in zip(pixels, files, strict=True):
        if file.parts[0] == "test":
            assert min(means, key=lambda label: ((means[label] - image) ** 2).sum()) == file.parts[1]
