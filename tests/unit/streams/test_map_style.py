"""from_dataset: torchvision's and Hugging Face's datasets, and of one's own, give the stream that
their arrays give.
"""

import tracemalloc

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import Dataset, IterableDataset, Subset
from torchvision import transforms
from torchvision.datasets import FakeData, ImageFolder

from mose_fast.streams import StreamError, from_arrays, from_dataset

LABELS = np.arange(24) % 4
IMAGES = np.random.default_rng(0).integers(0, 256, (24, 16, 8, 3), dtype=np.uint8)


class Items(Dataset):
    """A dataset of given images and labels."""

    def __init__(self, images, labels):
        self.images, self.labels, self.read = images, labels, []

    def __len__(self):
        return len(self.images)

    def __getitem__(self, i):
        self.read.append(i)
        return self.images[i], self.labels[i]


def assert_same(found, wanted):
    for name in ("x_train", "y_train", "x_test", "y_test"):
        assert torch.equal(getattr(found, name), getattr(wanted, name)), name
    assert (found.fingerprint, found.class_names, found.tasks) == (wanted.fingerprint, wanted.class_names, wanted.tasks)


@pytest.mark.parametrize("form", [Image.fromarray, np.array, torch.tensor])
@pytest.mark.parametrize("number", [int, np.int32, torch.tensor])
def test_pairs_of_any_form(form, number):
    items = Items([form(i) for i in IMAGES], [number(y + 5) for y in LABELS])
    settings = {"tasks": 2, "class_order_seed": 3, "batch": 4, "mirror_safe": False}
    found = from_dataset(items, Subset(items, range(8)), **settings)
    assert_same(found, from_arrays(IMAGES, LABELS + 5, IMAGES[:8], LABELS[:8] + 5, **settings))
    assert found.name == "dataset" and items.read == [*range(24), *range(8)]


def test_names_that_do_not_reach_all_labels_are_none():
    items = Items(IMAGES, LABELS - 1)
    items.classes = ["ant", "bee", "cow", "dog"]
    assert from_dataset(items, items).class_names == ("-1", "0", "1", "2")


def test_grey_and_palette_images_become_rgb():
    grey = IMAGES[..., 0]
    wanted = from_arrays(grey, LABELS, grey, LABELS)
    for form in (Image.fromarray, np.array, lambda i: Image.fromarray(i).convert("P")):
        items = Items([form(i) for i in grey], LABELS)
        assert_same(from_dataset(items, items), wanted)


def test_no_test_image_is_read_for_validation():
    items, never = Items(IMAGES, LABELS), Items(IMAGES, LABELS)
    settings = {"validation": 0.5, "evaluate_on": "validation"}
    assert_same(from_dataset(items, never, **settings), from_arrays(IMAGES, LABELS, **settings))
    assert never.read == []


def test_torchvision(tmp_path):
    fake = FakeData(12, (3, 16, 8), num_classes=3)
    x, y = np.stack([np.array(image) for image, _ in fake]), [int(label) for _, label in fake]
    assert_same(from_dataset(fake, fake), from_arrays(x, y, x, y))
    for i, name in enumerate(["cat", "dog"] * 2):
        (tmp_path / name).mkdir(exist_ok=True)
        Image.fromarray(IMAGES[i]).save(tmp_path / name / f"{i}.png")
    folder = ImageFolder(tmp_path)
    assert from_dataset(folder, folder).class_names == ("cat", "dog")
    assert from_dataset(folder, folder, class_names=["a", "b"]).class_names == ("a", "b")
    with pytest.raises(StreamError, match=r"the image of train\[0\] is float32 \[3, 16, 8\]; .* leave out ToTensor"):
        from_dataset(ImageFolder(tmp_path, transforms.ToTensor()), folder)


@pytest.mark.slow
def test_hugging_face():
    datasets = pytest.importorskip("datasets", reason="the package datasets is not installed")
    features = datasets.Features(img=datasets.Image(), kind=datasets.ClassLabel(names=["cat", "dog", "eel", "fox"]))
    rows = {"img": [Image.fromarray(i) for i in IMAGES], "kind": LABELS.tolist()}
    data = datasets.Dataset.from_dict(rows, features=features)
    found = from_dataset(data, data.select(range(8)), image="img", label="kind")
    assert_same(found, from_arrays(IMAGES, LABELS, IMAGES[:8], LABELS[:8], class_names=["cat", "dog", "eel", "fox"]))
    # Labels that do not occur have names, too.
    some = data.filter(lambda row: row["kind"] != 1)
    assert from_dataset(some, some, image="img", label="kind").class_names == ("cat", "eel", "fox")
    with pytest.raises(StreamError, match=r"train\[0\] has the columns img, kind; wanted 'image' and 'label'"):
        from_dataset(data, data)
    with pytest.raises(StreamError, match="train is a DatasetDict of train, test; wanted one of them"):
        from_dataset(datasets.DatasetDict(train=data, test=data))
    with pytest.raises(StreamError, match=r"the image of train\[0\] has the shape .* it looks channels-first"):
        from_dataset(data.with_format("torch"), data, image="img", label="kind")
    with pytest.raises(StreamError, match=r"train is a IterableDataset; .*from_batches takes iterables"):
        from_dataset(data.to_iterable_dataset(), data)


class Broken(Items):
    def __getitem__(self, i):
        if i == 7:
            raise OSError("truncated file")
        return super().__getitem__(i)


class Flow(IterableDataset):
    def __iter__(self):
        return iter(())

    def __len__(self):
        return 0


def replaced(i, image=None, label=None):
    images, labels = [*IMAGES], [*LABELS]
    images[i] = images[i] if image is None else image
    labels[i] = labels[i] if label is None else label
    return Items(images, labels)


@pytest.mark.parametrize(
    ("train", "told"),
    [
        (Broken(IMAGES, LABELS), r"train\[7\] cannot be read \(OSError: truncated file\)"),
        (replaced(5, np.zeros((8, 8, 3), np.uint8)), r"train\[5\] is an image of 8x8, and train\[0\] of 16x8"),
        (replaced(3, np.zeros((12, 8, 3), np.uint8)), r"the image of train\[3\] is 12x8; wanted sides divisible by 8"),
        (replaced(3, np.zeros((3, 16, 8), np.uint8)), r"train\[3\] has the shape \[3, 16, 8\]; .*channels-first"),
        (replaced(2, np.zeros((16, 8, 3))), r"the image of train\[2\] is float64 \[16, 8, 3\]; .* leave out ToTensor"),
        (replaced(2, Image.new("I;16", (8, 16))), r"train\[2\] holds pixels of mode I;16"),
        (replaced(2, "cat.png"), r"the image of train\[2\] is a str; wanted one of Pillow's"),
        (replaced(9, label="cat"), r"the label of train\[9\] is 'cat'; wanted an integer"),
        (replaced(9, label=1.0), r"the label of train\[9\] is 1.0; wanted an integer"),
        (IMAGES, r"train\[0\] is array.* wanted a pair \(image, label\)"),
        ([], "train is empty"),
        (iter([]), "train is a list_iterator; wanted a dataset with a length"),
        (Flow(), "train is a Flow; wanted a dataset with a length"),
    ],
)
def test_what_cannot_be_used_is_named(train, told):
    with pytest.raises(StreamError, match=told):
        from_dataset(train, Items(IMAGES, LABELS))


def test_images_are_held_once():
    class Large(Items):
        def __getitem__(self, i):
            return np.full((64, 64, 3), i % 256, np.uint8), i % 2

    tracemalloc.start()
    try:
        stream = from_dataset(Large(range(1000), None), Large(range(10), None))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert stream.x_train.nbytes < peak < 1.1 * stream.x_train.nbytes
