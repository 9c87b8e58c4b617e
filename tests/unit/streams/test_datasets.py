"""The registered streams: digits always, the others on small stand-ins, and on the real data where
it is at hand.
"""

import fcntl
import gzip
import hashlib
import io
import os
import pickle
import struct
import tarfile
import zipfile

import numpy as np
import pytest
import torch
import torchvision
from PIL import Image

from build_tools import tiny_imagenet as tiny_stand_in
from mose_fast.settings.run import StreamConfig
from mose_fast.streams import (
    NORMALISATIONS,
    StreamError,
    cache,
    create,
    datasets,
    decoding,
    locate,
    names,
    summary,
    tiny_imagenet,
)

RNG = np.random.default_rng(0)
NO_HOST = "http://127.0.0.1:9/"  # the discard port: refuses at once


def load(name, data_dir, **settings):
    return create(StreamConfig(name=name, data_dir=str(data_dir), **settings))


def check_validation(name, data_dir, arrays, **settings):
    """Held-out and other images are together the training images."""
    stream = create(StreamConfig(name, str(data_dir), validation=0.4, **settings), evaluate_on="validation")
    held = stream.held_out.rows.numpy()
    assert np.array_equal(stream.x_test.numpy(), arrays["x_train"][held])
    assert np.array_equal(stream.x_train.numpy(), np.delete(arrays["x_train"], held, axis=0))


def statistics(x):
    """Mean and standard deviation of a channel, of images in [0, 1]."""
    values = torch.arange(256, dtype=torch.float64) / 255
    shares = [torch.bincount(x[..., c].flatten(), minlength=256).double() / x[..., c].numel() for c in range(3)]
    means = torch.stack([s @ values for s in shares])
    return torch.cat([means, torch.stack([(s @ values**2 - m**2).sqrt() for s, m in zip(shares, means, strict=True)])])


def constants(name):
    return torch.tensor([*NORMALISATIONS[name].mean, *NORMALISATIONS[name].std], dtype=torch.float64)


# digits


def test_digits_are_the_default_and_need_no_files(tmp_path):
    stream = create(StreamConfig(data_dir=str(tmp_path / "absent")))
    assert (stream.name, len(stream.tasks), stream.classes, stream.image_size) == ("digits", 5, 10, (32, 32))
    assert not stream.mirror_safe and stream.class_order == tuple(range(10))
    assert len(stream.x_train) + len(stream.x_test) == 1797
    assert not (tmp_path / "absent").exists()
    assert torch.allclose(statistics(stream.x_train), constants("digits"), atol=1e-4)


def test_digits_are_bilinear_enlargements_split_every_fifth():
    from sklearn.datasets import load_digits

    data = load_digits()
    test = np.zeros(1797, bool)
    seen = [0] * 10
    for row, digit in enumerate(data.target):
        seen[digit] += 1
        test[row] = seen[digit] % 5 == 0
    small = torch.from_numpy(data.images)[:, None] * (255 / 16)
    large = torch.nn.functional.interpolate(small, scale_factor=4, mode="bilinear", align_corners=False)[:, 0]
    stream = create(StreamConfig())
    for x, y, rows in ((stream.x_train, stream.y_train, ~test), (stream.x_test, stream.y_test, test)):
        assert y.tolist() == data.target[rows].tolist()
        assert (x[..., 0].double() - large[torch.from_numpy(rows)]).abs().max() <= 0.5 + 1e-9
        assert torch.equal(x[..., 0], x[..., 1]) and torch.equal(x[..., 0], x[..., 2])


def test_settings_reach_the_stream():
    stream = create(StreamConfig(tasks=2, batch=7, limit_per_task=50, class_order_seed=1, normalisation="half"))
    assert len(stream.tasks) == 2 and stream.batch == 7 and stream.normalisation.name == "half"
    assert [len(stream.train_rows(t)) for t in range(2)] == [50, 50]
    assert torch.bincount(stream.y_train).tolist() == [10] * 10 and len(stream.x_test) == 355
    assert stream.class_order != tuple(range(10))
    with pytest.raises(
        StreamError, match="tasks is 3, and the 10 classes of digits cannot be split into 3 equal tasks"
    ):
        create(StreamConfig(tasks=3))


# Registry


def test_every_stream_is_listed_and_located(tmp_path):
    assert names() == ["digits", "split-mnist", "split-cifar10", "split-cifar100", "split-tiny-imagenet"]
    assert "10 tasks x 10 classes" in summary("split-cifar100")
    assert locate("digits", None) == (True, "comes with scikit-learn")
    for name, file in (
        ("split-mnist", "mnist.npz"),
        ("split-cifar10", "cifar10.npz"),
        ("split-cifar100", "cifar100.npz"),
    ):
        found, advice = locate(name, tmp_path)
        assert not found and str(tmp_path) in advice and file in advice
        (tmp_path / file).touch()
        assert locate(name, tmp_path) == (True, str(tmp_path / file))
    found, advice = locate("split-tiny-imagenet", str(tmp_path))
    assert not found and "tiny-imagenet-200.zip" in advice
    (tmp_path / "tiny-imagenet-200.zip").touch()
    assert locate("split-tiny-imagenet", tmp_path) == (True, str(tmp_path / "tiny-imagenet-200.zip"))
    for ask in (summary, lambda name: locate(name, None)):
        with pytest.raises(StreamError, match="'split-mnis' is unknown; did you mean 'split-mnist'"):
            ask("split-mnis")


def test_data_dir_defaults_to_the_cache_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    (tmp_path / "mose_fast").mkdir()
    (tmp_path / "mose_fast" / "cifar10.npz").touch()
    assert locate("split-cifar10", None) == (True, str(tmp_path / "mose_fast" / "cifar10.npz"))
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert locate("split-cifar10", None)[1].startswith(f"not in {tmp_path / 'home' / '.cache' / 'mose_fast'}")


# CIFAR


def cifar_arrays(classes):
    y = np.arange(2 * classes) % classes
    x = RNG.integers(0, 256, (len(y), 32, 32, 3), dtype=np.uint8)
    return {"x_train": x, "y_train": y.astype(np.uint8), "x_test": x[:classes], "y_test": y[:classes].astype(np.uint8)}


@pytest.mark.parametrize(
    ("classes", "tasks", "first", "last"), [(10, 5, "airplane", "truck"), (100, 10, "apple", "worm")]
)
def test_cifar_npz_comes_first(tmp_path, classes, tasks, first, last):
    arrays = cifar_arrays(classes)
    np.savez(tmp_path / f"cifar{classes}.npz", **arrays)
    stream = load(f"split-cifar{classes}", tmp_path)
    assert np.array_equal(stream.x_train.numpy(), arrays["x_train"])
    assert stream.y_train.tolist() == arrays["y_train"].tolist()
    assert [len(t) for t in stream.tasks] == [classes // tasks] * tasks
    assert stream.mirror_safe and stream.normalisation.name == "cifar10"
    assert (stream.class_names[0], stream.class_names[-1]) == (first, last)


def test_cifar_names_are_sorted_and_complete():
    assert len(set(datasets.CIFAR100_NAMES)) == 100 and list(datasets.CIFAR100_NAMES) == sorted(datasets.CIFAR100_NAMES)
    assert len(set(datasets.CIFAR10_NAMES)) == 10


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"y_train": np.arange(20) % 10 + 1},
            r"cifar10\.npz: y_train holds label 10 \(row 9\), which is outside the classes of the data set",
        ),
        ({"y_train": np.arange(20) % 9}, r"cifar10\.npz: y_train has no image of class 9"),
        ({"y_test": np.arange(10) - 1}, r"cifar10\.npz: y_test holds label -1 \(row 0\)"),
    ],
)
def test_bad_cifar_labels_are_refused(tmp_path, changes, message):
    np.savez(tmp_path / "cifar10.npz", **{**cifar_arrays(10), **changes})
    with pytest.raises(StreamError, match=message):
        load("split-cifar10", tmp_path)


def test_damaged_cifar_npz_is_named(tmp_path):
    (tmp_path / "cifar100.npz").write_bytes(b"PK\x03\x04 and no more")
    with pytest.raises(
        StreamError, match=r"cifar100\.npz is damaged.*remove it to have cifar-100-python\.tar\.gz downloaded"
    ):
        load("split-cifar100", tmp_path)


@pytest.fixture
def cifar_tar(tmp_path, monkeypatch):
    """A small CIFAR-10 in torchvision's tar format, with the checksums that torchvision is to look
    for, and no network.
    """
    arrays = cifar_arrays(10)
    parts = {
        f"data_batch_{i}": (arrays["x_train"][4 * i - 4 : 4 * i], arrays["y_train"][4 * i - 4 : 4 * i])
        for i in range(1, 6)
    }
    parts["test_batch"] = (arrays["x_test"], arrays["y_test"])
    files = {
        n: pickle.dumps({"data": x.transpose(0, 3, 1, 2).reshape(len(x), -1), "labels": y.tolist()})
        for n, (x, y) in parts.items()
    }
    files["batches.meta"] = pickle.dumps({"label_names": list(datasets.CIFAR10_NAMES)})
    tar_path = tmp_path / "cifar-10-python.tar.gz"
    with tarfile.open(tar_path, "w:gz") as tar:
        for name, data in files.items():
            info = tarfile.TarInfo(f"cifar-10-batches-py/{name}")
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    sums = {n: hashlib.md5(d).hexdigest() for n, d in files.items()}
    dataset = torchvision.datasets.CIFAR10
    monkeypatch.setattr(dataset, "url", NO_HOST)
    monkeypatch.setattr(dataset, "tgz_md5", hashlib.md5(tar_path.read_bytes()).hexdigest())
    monkeypatch.setattr(dataset, "train_list", [[n, sums[n]] for n in files if n.startswith("data")])
    monkeypatch.setattr(dataset, "test_list", [["test_batch", sums["test_batch"]]])
    monkeypatch.setattr(
        dataset, "meta", {"filename": "batches.meta", "key": "label_names", "md5": sums["batches.meta"]}
    )
    return tar_path, arrays


def test_cifar_is_read_through_torchvision(cifar_tar):
    tar_path, arrays = cifar_tar
    stream = load("split-cifar10", tar_path.parent)
    assert np.array_equal(stream.x_train.numpy(), arrays["x_train"])
    assert np.array_equal(stream.x_test.numpy(), arrays["x_test"])
    assert stream.y_train.tolist() == arrays["y_train"].tolist()
    assert locate("split-cifar10", tar_path.parent) == (True, str(tar_path.parent / "cifar-10-batches-py"))


def test_damaged_cifar_files_are_named(cifar_tar):
    tar_path, _ = cifar_tar
    load("split-cifar10", tar_path.parent)
    good = tar_path.read_bytes()
    batch = tar_path.parent / "cifar-10-batches-py" / "data_batch_2"
    batch.write_bytes(batch.read_bytes()[:-5])
    assert len(load("split-cifar10", tar_path.parent).x_train) == 20  # unpacked again from the tar
    batch.write_bytes(batch.read_bytes()[:-5])
    tar_path.write_bytes(good[:-100])
    with pytest.raises(
        StreamError, match=r"cifar-10-python\.tar\.gz is damaged or truncated .*place cifar-10-python\.tar\.gz from"
    ):
        load("split-cifar10", tar_path.parent)
    tar_path.unlink()
    with pytest.raises(StreamError, match=r"data_batch_2 is damaged or truncated"):
        load("split-cifar10", tar_path.parent)


def test_absent_cifar_without_network_says_what_to_place_where(tmp_path, monkeypatch):
    monkeypatch.setattr(torchvision.datasets.CIFAR100, "url", NO_HOST)
    told = r"CIFAR-100 is not in .*place cifar-100-python\.tar\.gz from .*, or a cifar100\.npz, in "
    with pytest.raises(StreamError, match=f"{told}{tmp_path}$"):
        load("split-cifar100", tmp_path)


def test_cifar_without_its_test_file_is_read_for_validation(cifar_tar):
    """Not even its checksum is computed, which would have the archive unpacked again."""
    tar_path, arrays = cifar_tar
    load("split-cifar10", tar_path.parent)
    tar_path.unlink()
    (tar_path.parent / "cifar-10-batches-py" / "test_batch").unlink()
    check_validation("split-cifar10", tar_path.parent, arrays)
    with pytest.raises(StreamError, match=r"CIFAR-10 is not in .* and cannot be downloaded"):
        load("split-cifar10", tar_path.parent)


# MNIST


def mnist_arrays():
    y = (np.arange(20) % 10).astype(np.uint8)
    x = RNG.integers(0, 256, (20, 28, 28), dtype=np.uint8)
    return {"x_train": x, "y_train": y, "x_test": x[:10], "y_test": y[:10]}


def test_mnist_is_padded_with_black_and_repeated_to_rgb(tmp_path):
    arrays = mnist_arrays()
    np.savez(tmp_path / "mnist.npz", **arrays)
    stream = load("split-mnist", tmp_path)
    assert stream.image_size == (32, 32) and not stream.mirror_safe and stream.normalisation.name == "mnist"
    for channel in range(3):
        assert np.array_equal(stream.x_train[:, 2:30, 2:30, channel].numpy(), arrays["x_train"])
    assert int(stream.x_train.sum()) == 3 * int(arrays["x_train"].sum())
    np.savez(tmp_path / "mnist.npz", **{**arrays, "x_test": np.zeros((10, 32, 32), np.uint8)})
    with pytest.raises(StreamError, match=r"mnist\.npz: x_test has shape \[10, 32, 32\]; wanted \[N, 28, 28\]"):
        load("split-mnist", tmp_path)


def idx(array):
    return struct.pack(f">I{array.ndim}I", 0x800 + array.ndim, *array.shape) + array.tobytes()


def test_mnist_is_read_through_torchvision_and_damage_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(torchvision.datasets.MNIST, "mirrors", [NO_HOST])
    with pytest.raises(StreamError, match=r"MNIST is not in .*train-images-idx3-ubyte\.gz, .*, or a mnist\.npz in"):
        load("split-mnist", tmp_path)
    arrays = mnist_arrays()
    raw = tmp_path / "MNIST" / "raw"
    raw.mkdir(parents=True, exist_ok=True)
    contents = {n: idx(a) for n, a in zip(datasets.MNIST_SIZES, arrays.values(), strict=True)}
    for name, data in contents.items():
        (raw / name).write_bytes(data)
    with pytest.raises(
        StreamError,
        match=r"train-images-idx3-ubyte is damaged or truncated: it holds 15696 bytes, MNIST's holds 47040016",
    ):
        load("split-mnist", tmp_path)
    monkeypatch.setattr(datasets, "MNIST_SIZES", {n: len(d) for n, d in contents.items()})
    stream = load("split-mnist", tmp_path)
    assert np.array_equal(stream.x_train[:, 2:30, 2:30, 0].numpy(), arrays["x_train"])
    assert stream.y_train.tolist() == arrays["y_train"].tolist()
    assert locate("split-mnist", tmp_path) == (True, str(raw))
    (raw / "t10k-images-idx3-ubyte").write_bytes(bytes(len(contents["t10k-images-idx3-ubyte"])))
    padded = np.pad(arrays["x_train"], ((0, 0), (2, 2), (2, 2)))[..., None].repeat(3, axis=3)
    check_validation("split-mnist", tmp_path, {"x_train": padded})
    with pytest.raises(StreamError):
        load("split-mnist", tmp_path)
    (raw / "t10k-labels-idx1-ubyte").write_bytes(contents["t10k-labels-idx1-ubyte"][:-1])
    with pytest.raises(StreamError, match="t10k-labels-idx1-ubyte is damaged or truncated"):
        load("split-mnist", tmp_path)


def test_a_damaged_mnist_archive_is_not_taken(tmp_path, monkeypatch):
    monkeypatch.setattr(torchvision.datasets.MNIST, "mirrors", [NO_HOST])
    raw = tmp_path / "MNIST" / "raw"
    raw.mkdir(parents=True)
    for name in datasets.MNIST_SIZES:
        (raw / f"{name}.gz").write_bytes(gzip.compress(b"not MNIST"))
    with pytest.raises(StreamError, match="cannot be downloaded"):
        load("split-mnist", tmp_path)


# Tiny-ImageNet


WNIDS = ("n03", "n01", "n02", "n04")  # unsorted, as in the official file


def tiny_files():
    """Path and content of every file of a Tiny-ImageNet with four classes, and the decoded images
    by path.
    """
    files, images = {"wnids.txt": "\n".join(WNIDS).encode()}, {}
    paths = [f"train/{w}/images/{w}_{i}.JPEG" for w in WNIDS for i in (0, 10, 2)]
    paths += [f"val/images/val_{i}.JPEG" for i in range(8)]
    for k, path in enumerate(paths):
        buffer = io.BytesIO()
        pixels = RNG.integers(0, 256, (64, 64) if k == 4 else (64, 64, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(buffer, "JPEG")
        files[path] = buffer.getvalue()
        images[path] = np.array(Image.open(buffer).convert("RGB"))
    lines = [f"val_{i}.JPEG\t{WNIDS[i % 4]}\t0\t0\t63\t63\n" for i in (3, 1, 0, 2, 7, 6, 5, 4)]
    files["val/val_annotations.txt"] = "".join(lines).encode()
    files["train/n01/n01_boxes.txt"] = b"n01_0.JPEG\t0\t0\t1\t1\n"
    return files, images


def write_folder(folder, files):
    for path, data in files.items():
        (folder / "tiny-imagenet-200" / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / "tiny-imagenet-200" / path).write_bytes(data)


@pytest.fixture
def tiny(tmp_path):
    """The folder that holds the small Tiny-ImageNet, its files and its images."""
    files, images = tiny_files()
    write_folder(tmp_path, files)
    return tmp_path, files, images


def write_zip(folder, files):
    with zipfile.ZipFile(folder / "tiny-imagenet-200.zip", "w") as archive:
        archive.writestr("tiny-imagenet-200/", "")
        for path, data in files.items():
            archive.writestr(f"tiny-imagenet-200/{path}", data)


def check_tiny(stream, images):
    assert stream.class_names == ("n01", "n02", "n03", "n04") and stream.image_size == (64, 64)
    expected = [images[f"train/{w}/images/{w}_{i}.JPEG"] for w in sorted(WNIDS) for i in (0, 2, 10)]
    assert np.array_equal(stream.x_train.numpy(), np.stack(expected))
    assert stream.y_train.tolist() == [0, 0, 0, 1, 1, 1, 2, 2, 2, 3, 3, 3]
    order = (3, 1, 0, 2, 7, 6, 5, 4)
    assert np.array_equal(stream.x_test.numpy(), np.stack([images[f"val/images/val_{i}.JPEG"] for i in order]))
    assert [stream.class_names[h] for h in stream.y_test] == [WNIDS[i % 4] for i in order]
    assert stream.normalisation.name == "tiny-imagenet" and stream.mirror_safe


def test_tiny_is_read_from_the_folder_or_above_it(tiny):
    folder, _, images = tiny
    check_tiny(load("split-tiny-imagenet", folder, tasks=2), images)
    check_tiny(load("split-tiny-imagenet", folder / "tiny-imagenet-200", tasks=4), images)


def test_tiny_is_read_from_its_zip(tmp_path):
    files, images = tiny_files()
    write_zip(tmp_path, files)
    for _ in range(2):
        check_tiny(load("split-tiny-imagenet", tmp_path, tasks=2), images)
        assert {p.name for p in tmp_path.iterdir()} == {"tiny-imagenet-200.zip", "tiny-imagenet-200.decoded.npz"}


@pytest.mark.parametrize("zipped", [False, True])
def test_tiny_without_its_test_images_is_read_for_validation(tmp_path, zipped):
    files, images = tiny_files()
    files = {path: data for path, data in files.items() if not path.startswith("val/")}
    (write_zip if zipped else write_folder)(tmp_path, files)
    expected = np.stack([images[f"train/{w}/images/{w}_{i}.JPEG"] for w in sorted(WNIDS) for i in (0, 2, 10)])
    for _ in range(2):
        check_validation("split-tiny-imagenet", tmp_path, {"x_train": expected}, tasks=2)
    found = {p.name for p in (tmp_path if zipped else tmp_path / "tiny-imagenet-200").iterdir()}
    assert "tiny-imagenet-200.decoded.train.npz" in found and "tiny-imagenet-200.decoded.npz" not in found
    with pytest.raises(StreamError, match=r"val_annotations.txt is missing"):
        load("split-tiny-imagenet", tmp_path, tasks=2)


def test_tiny_decodes_once_and_again_when_files_change(tiny, monkeypatch):
    folder, files, images = tiny
    decoded = []

    def counted(data, what):
        decoded.append(what)
        return decode(data, what)

    decode = decoding.decode_image
    monkeypatch.setattr(decoding, "decode_image", counted)
    copy = folder / "tiny-imagenet-200" / tiny_imagenet.CACHE
    for state, count in (("fresh", 20), ("cached", 0), ("damaged", 20), ("cached", 0), ("changed", 20)):
        if state == "damaged":
            copy.write_bytes(copy.read_bytes()[: copy.stat().st_size // 2])
        if state == "changed":
            path = "train/n02/images/n02_2.JPEG"
            (folder / "tiny-imagenet-200" / path).write_bytes(files["val/images/val_0.JPEG"])
            images = {**images, path: images["val/images/val_0.JPEG"]}
        decoded.clear()
        check_tiny(load("split-tiny-imagenet", folder, tasks=2), images)
        assert (state, len(decoded)) == (state, count)
    assert [p.name for p in copy.parent.iterdir() if p.name.startswith(".")] == []


def test_tiny_tidies_what_a_killed_preparation_left(tiny, monkeypatch):
    folder, _, images = tiny
    copy = folder / "tiny-imagenet-200" / tiny_imagenet.CACHE
    left, growing = (copy.with_name(f".{copy.name}.{number}") for number in (1, 2))
    left.write_bytes(bytes(1000))
    with growing.open("wb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # as the process does that writes it
        check_tiny(load("split-tiny-imagenet", folder, tasks=2), images)
        assert (left.exists(), growing.exists()) == (False, True)
    left.write_bytes(bytes(1000))
    check_tiny(load("split-tiny-imagenet", folder, tasks=2), images)  # from the cache this time
    assert (left.exists(), growing.exists()) == (False, False)

    def unsupported(file, operation):
        raise OSError(37, "No locks available")

    monkeypatch.setattr(fcntl, "flock", unsupported)
    for path in (left, growing):
        path.write_bytes(bytes(1000))
    os.utime(left, (0, 0))
    copy.unlink()
    check_tiny(load("split-tiny-imagenet", folder, tasks=2), images)
    assert (left.exists(), growing.exists(), copy.exists()) == (False, True, True)


@pytest.mark.parametrize(
    ("damage", "again"),
    [
        (lambda file: file, 8),
        (lambda file: file[:-1], 14),  # a block that is not whole
        (lambda file: file[:10] + b"other" + file[15:], 20),
    ],
)
def test_a_killed_preparation_is_continued(tiny, monkeypatch, damage, again):
    folder, _, images = tiny
    decode, decoded, told = decoding.decode_image, [], []

    def killed(data, what):
        if len(decoded) == 14:
            raise KeyboardInterrupt
        return counted(data, what)

    def counted(data, what):
        decoded.append(what)
        return decode(data, what)

    monkeypatch.setattr(cache, "_BLOCK", 6)
    monkeypatch.setattr(decoding, "decode_image", killed)
    with pytest.raises(KeyboardInterrupt):
        load("split-tiny-imagenet", folder, tasks=2)
    (unfinished,) = (folder / "tiny-imagenet-200").glob(".*")
    assert unfinished.stat().st_size == 2 * (6 * 64 * 64 * 3 + 4)
    unfinished.write_bytes(damage(unfinished.read_bytes()))
    decoded.clear()
    monkeypatch.setattr(decoding, "decode_image", counted)
    settings = StreamConfig("split-tiny-imagenet", str(folder), tasks=2)
    check_tiny(create(settings, lambda *progress: told.append(progress)), images)
    assert (len(decoded), told) == (again, [(20, 20)])
    assert list((folder / "tiny-imagenet-200").glob(".*")) == []
    check_tiny(create(settings), images)  # from the copy
    assert len(decoded) == again


def test_a_killed_preparation_is_not_continued_with_other_files(tiny, monkeypatch):
    folder, files, images = tiny
    data = folder / "tiny-imagenet-200"

    def killed(*_, **__):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(cache, "_BLOCK", 6)
        patch.setattr(np, "savez", killed)
        with pytest.raises(KeyboardInterrupt):
            load("split-tiny-imagenet", folder, tasks=2)
    assert len(list(data.glob(".*"))) == 1
    path = "train/n02/images/n02_2.JPEG"
    (data / path).write_bytes(files["val/images/val_0.JPEG"])
    check_tiny(load("split-tiny-imagenet", folder, tasks=2), {**images, path: images["val/images/val_0.JPEG"]})
    assert list(data.glob(".*")) == []


def test_tiny_works_where_its_folder_cannot_be_written(tiny, monkeypatch):
    folder, _, images = tiny

    def full_disk(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(np, "savez", full_disk)
    check_tiny(load("split-tiny-imagenet", folder, tasks=2), images)
    assert {p.name for p in (folder / "tiny-imagenet-200").iterdir()} == {"wnids.txt", "train", "val"}


def test_tiny_default_needs_all_classes(tiny):
    with pytest.raises(
        StreamError, match=r"tasks is 100, and the 4 classes of .*tiny-imagenet-200 cannot .* one of 1, 2, 4"
    ):
        load("split-tiny-imagenet", tiny[0])


def test_absent_tiny_says_what_to_place_where(tmp_path):
    with pytest.raises(
        StreamError, match=r"Tiny-ImageNet is not in .*get tiny-imagenet-200\.zip .*CS231n and place it in "
    ):
        load("split-tiny-imagenet", tmp_path)


PIXELS = io.BytesIO()
Image.new("RGB", (32, 64)).save(PIXELS, "JPEG")


@pytest.mark.parametrize("form", ["folder", "zip"])
@pytest.mark.parametrize(
    ("path", "content", "message"),
    [
        ("val/val_annotations.txt", None, r"val/val_annotations\.txt is missing; get tiny-imagenet-200\.zip"),
        ("val/val_annotations.txt", b"\xff\xfe\xff", r"val/val_annotations\.txt is damaged, it is no text"),
        (
            "val/val_annotations.txt",
            b"val_0.JPEG\tn01\nval_1.JPEG\tn09\n",
            r"val_annotations\.txt, line 2: .*n09.* names no class of wnids\.txt",
        ),
        ("val/images/val_5.JPEG", None, r"val/images/val_5\.JPEG is missing, but val_annotations\.txt names it"),
        ("wnids.txt", b"n01 n02 n03 n04 n05", r"train/n05/images holds no images, but wnids\.txt names n05"),
        ("val/images/val_5.JPEG", b"\xff\xd8 no picture", r"val/images/val_5\.JPEG is a damaged or truncated image"),
        ("val/images/val_5.JPEG", PIXELS.getvalue(), r"val/images/val_5\.JPEG is 64x32; wanted 64x64"),
    ],
)
def test_damaged_tiny_files_are_named(tmp_path, form, path, content, message):
    files, _ = tiny_files()
    files = {p: d for p, d in {**files, path: content}.items() if d is not None}
    (write_zip if form == "zip" else write_folder)(tmp_path, files)
    with pytest.raises(StreamError, match=message):
        load("split-tiny-imagenet", tmp_path, tasks=2)
    assert not list(tmp_path.rglob("*.npz"))


def test_a_damaged_tiny_zip_is_named(tmp_path):
    write_zip(tmp_path, tiny_files()[0])
    archive = tmp_path / "tiny-imagenet-200.zip"
    good = bytearray(archive.read_bytes())
    archive.write_bytes(good[: len(good) // 2])
    with pytest.raises(StreamError, match=r"tiny-imagenet-200\.zip is damaged or truncated .* again"):
        load("split-tiny-imagenet", tmp_path, tasks=2)
    good[len(good) // 2] ^= 255
    archive.write_bytes(good)
    with pytest.raises(StreamError, match=r"JPEG is damaged in the zip"):
        load("split-tiny-imagenet", tmp_path, tasks=2)


# Real data


@pytest.mark.slow
def test_real_cifar100(real_data):
    folder = real_data("cifar100")
    stream = load("split-cifar100", folder)
    assert (
        torch.bincount(stream.y_train).tolist() == [500] * 100 and torch.bincount(stream.y_test).tolist() == [100] * 100
    )
    assert stream.tasks[3] == tuple(range(30, 40)) and stream.class_order == tuple(range(100))
    assert [len(stream.batches(t, seed=0)) for t in range(10)] == [500] * 10
    assert torch.allclose(statistics(stream.x_train), constants("cifar100"), atol=1e-4)
    assert stream.normalisation.mean == tuple(v / 255 for v in (125.3, 123.0, 113.9))
    limited = load("split-cifar100", folder, limit_per_task=100, class_order_seed=5)
    assert torch.bincount(limited.y_train).tolist() == [10] * 100 and len(limited.x_test) == 10000


def test_real_mnist(real_data):
    stream = load("split-mnist", real_data("mnist"))
    assert torch.bincount(stream.y_train).tolist() == [5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949]
    assert len(stream.x_test) == 10000 and stream.image_size == (32, 32)
    assert torch.allclose(statistics(stream.x_train[:, 2:30, 2:30]), constants("mnist"), atol=1e-4)


def test_real_tiny_imagenet_labels_equal_the_annotations(real_data):
    root = real_data("tiny") / "tiny-imagenet-200"
    stream = load("split-tiny-imagenet", root.parent, tasks=10)
    assert stream.x_train.shape == (2000, 64, 64, 3) and [len(t) for t in stream.tasks] == [2] * 10
    rows = [line.split()[:2] for line in (root / "val" / "val_annotations.txt").read_text().splitlines()]
    assert [stream.class_names[h] for h in stream.y_test] == [wnid for _, wnid in rows]
    for i in range(0, len(rows), 50):
        image = Image.open(root / "val" / "images" / rows[i][0]).convert("RGB")
        assert np.array_equal(stream.x_test[i].numpy(), np.array(image))
    for i in (0, 101, 1999):
        wnid = stream.class_names[stream.y_train[i]]
        image = Image.open(root / "train" / wnid / "images" / f"{wnid}_{i % 100}.JPEG").convert("RGB")
        assert np.array_equal(stream.x_train[i].numpy(), np.array(image))


def test_the_stand_in_for_tiny_has_its_layout(tmp_path):
    tiny_stand_in.write_zip(tmp_path, classes=4, train=3, val=2)
    stream = load("split-tiny-imagenet", tmp_path, tasks=2)
    assert stream.image_size == (64, 64)
    assert torch.bincount(stream.y_train).tolist() == [3] * 4 and torch.bincount(stream.y_test).tolist() == [2] * 4
