"""Images that stay on the disk: the same pixels, fingerprint and choice of images as in memory."""

from __future__ import annotations

import threading
import time
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from build_tools.image_folder import write_folder
from mose_fast import _dali
from mose_fast.settings.run import ConfigError, StreamConfig
from mose_fast.streams import StreamError, create, decoding, folder
from mose_fast.streams.decoding import decode_image
from mose_fast.streams.image_files import ImageFiles


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    """Four classes of twelve training and four test images, JPEG, of 40x40 pixels."""
    return write_folder(tmp_path_factory.mktemp("data") / "photos", classes=4, train=12, test=4, side=40)


@pytest.fixture
def damaged(tmp_path):
    """The same with eight training images a class, of which one is damaged; and its path."""
    made = write_folder(tmp_path / "damaged", classes=4, train=8, test=2, side=16)
    file = made / "train" / "class0001" / "0003.jpg"
    file.write_bytes(file.read_bytes()[:300])
    return made, file


def load(path, **settings):
    evaluate_on = settings.pop("evaluate_on", "test")
    return create(StreamConfig(name=str(path), **settings), evaluate_on=evaluate_on)


@pytest.mark.parametrize(
    "how",
    [
        {},
        {"resize": 16},
        {"limit_per_task": 7, "class_order_seed": 3, "first_tasks": 1},
        {"validation": 0.25, "evaluate_on": "validation"},
        {"kind": "imbalanced", "imbalance": 4.0},
        {"kind": "blurry"},
    ],
)
def test_a_stream_on_the_disk_is_the_one_in_memory(photos, how):
    there, here = load(photos, load="disk", **how), load(photos, load="memory", **how)
    for name in ("x_train", "x_test"):
        images, wanted = getattr(there, name), getattr(here, name)
        assert isinstance(images, ImageFiles) and isinstance(wanted, Tensor)
        assert images.shape == tuple(wanted.shape)
        order = torch.randperm(len(wanted), generator=torch.Generator().manual_seed(0))
        assert torch.equal(images[order], wanted[order])
    assert torch.equal(there.y_train, here.y_train) and torch.equal(there.y_test, here.y_test)
    assert (there.fingerprint, there.summary) == (here.fingerprint, here.summary)
    for part in range(here.parts):
        assert all(map(torch.equal, there.batches(part, seed=5), here.batches(part, seed=5)))


def test_the_fingerprint_changes_with_every_byte_and_with_the_size(tmp_path):
    made = write_folder(tmp_path / "photos", classes=2, train=2, test=1, side=16)
    file = made / "test" / "class0001" / "0000.jpg"
    found = {load(made, load=where, resize=side).fingerprint for where in ("disk", "memory") for side in (None, 8)}
    assert len(found) == 2
    data = bytearray(file.read_bytes())
    data[-20] ^= 1
    file.write_bytes(data)
    changed = {load(made, load=where, resize=side).fingerprint for where in ("disk", "memory") for side in (None, 8)}
    assert len(changed) == 2 and not changed & found


@pytest.mark.parametrize("how", [{}, {"validation": 0.25, "evaluate_on": "validation"}])
def test_files_are_hashed_once_until_one_changes(tmp_path, monkeypatch, how):
    made = write_folder(tmp_path / "photos", classes=2, train=8, test=1, side=16)
    read = []
    monkeypatch.setattr(folder, "read_file", lambda file: read.append(file) or decoding.read_file(file))
    first = load(made, load="disk", **how).fingerprint
    assert len(read) > 16  # all of them, and one for the size
    read.clear()
    assert load(made, load="disk", **how).fingerprint == first and len(read) == 1
    file = made / "train" / "class0001" / "0003.jpg"
    file.write_bytes(file.read_bytes() + b"0")
    assert load(made, load="disk", **how).fingerprint != first


def test_batches_are_decoded_in_order_and_not_far_ahead(photos, monkeypatch):
    images, wanted = load(photos, load="disk", resize=8).x_train, load(photos, load="memory", resize=8).x_train
    rows = torch.randperm(48, generator=torch.Generator().manual_seed(1)).repeat(10)
    decoded, one = [], decoding.decode_image
    monkeypatch.setattr(decoding, "decode_image", lambda data, what: decoded.append(what) or one(data, what))
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    coming = images.ahead(rows.split(7))
    for number, batch in enumerate(rows.split(7), 1):
        x, kept = next(coming)
        assert torch.equal(x, wanted[batch]) and torch.equal(kept, batch)
        if number in (1, 30):
            time.sleep(0.2)  # in which as much is decoded as there is room for
            # What came, what is left of a group of 32, and two groups that wait.
            assert 7 * number < len(decoded) <= 7 * number + 31 + 2 * 32
    assert next(coming, None) is None and len(decoded) == 480


def test_threads_of_an_iterator_that_is_dropped_end(photos):
    coming = load(photos, load="disk").x_train.ahead(torch.arange(48).split(8))
    next(coming)
    assert any("mose-fast images" in thread.name for thread in threading.enumerate())
    del coming
    assert not any("mose-fast images" in thread.name for thread in threading.enumerate())


@pytest.mark.parametrize(("free", "kind"), [(3 * 64 * 40 * 40 * 3, Tensor), (3 * 64 * 40 * 40 * 3 - 1, ImageFiles)])
def test_auto_looks_at_the_free_memory(photos, monkeypatch, free, kind):
    monkeypatch.setattr(folder, "available_bytes", lambda: free)
    assert isinstance(load(photos).x_train, kind)
    assert isinstance(load(photos, load="memory").x_train, Tensor)
    assert isinstance(load(photos, load="disk").x_train, ImageFiles)
    assert isinstance(load(photos, on_error="skip").x_train, ImageFiles)


def test_a_damaged_file_stops_with_its_name(damaged):
    made, file = damaged
    images = load(made, load="disk").x_train
    wanted = rf"{file} is a damaged or truncated image.*or leave such images out: --on-error skip"
    with pytest.raises(StreamError, match=wanted):
        list(images.ahead(torch.arange(32).split(4)))
    with pytest.raises(StreamError, match=wanted):
        images[torch.tensor([2, 11])]
    assert len(images[torch.tensor([2, 10])]) == 2


@pytest.mark.parametrize("harm", ["damaged", "of another size"])
def test_a_damaged_file_is_left_out_and_named_once(damaged, harm):
    made, file = damaged
    if harm == "of another size":
        Image.new("RGB", (24, 16)).save(file)
    images = load(made, on_error="skip").x_train
    batches = torch.arange(32).split(4)
    with pytest.warns(UserWarning, match=rf"{file} is .*left out") as said:
        first, again = list(images.ahead(batches)), list(images.ahead(batches))
    assert len(said) == 1
    for found in (first, again):
        rows = [batch.tolist() for _, batch in found]
        assert rows[2] == [8, 9, 10] and [len(batch) for batch in rows] == [4, 4, 3, *[4] * 5]
        for x, batch in found:
            assert torch.equal(x, images[batch])
    assert images.skipped == ["train/class0001/0003.jpg"]
    assert images.readable(torch.tensor([10, 11, 12])).tolist() == [10, 12]
    with pytest.raises(StreamError, match=rf"all of the 1 images that are needed are damaged, for example {file}"):
        images.readable(torch.tensor([11]))
    with pytest.raises(StreamError, match=f"{file} is "):
        images[torch.tensor([11])]


def test_the_size_is_that_of_the_first_image_that_can_be_read(damaged):
    made, _ = damaged
    first = made / "train" / "class0000" / "0000.jpg"
    first.write_bytes(b"no image")
    assert load(made, on_error="skip").image_size == (16, 16)
    with pytest.raises(StreamError, match=f"{first} is a damaged"):
        load(made, load="disk")
    with pytest.raises(StreamError, match="is 16x16 and the first image is 24x24; wanted images of one size"):
        Image.new("RGB", (24, 24)).save(first)
        list(load(made, load="disk").x_test.ahead([torch.arange(2)]))
    Image.new("RGB", (20, 20)).save(first)
    with pytest.raises(StreamError, match="wanted sides divisible by 8"):
        load(made, load="disk")


def test_a_file_that_is_gone_is_never_left_out(damaged):
    made, file = damaged
    images = load(made, on_error="skip").x_train
    file.unlink()
    with pytest.raises(StreamError, match=f"cannot read {file}: No such file"):
        list(images.ahead([torch.arange(32)]))


@pytest.mark.skipif(_dali.obstacle() is not None, reason=f"{_dali.obstacle()}; {_dali.INSTALL}")
def test_dali_gives_the_same_pixels_and_leaves_out_the_same_file(damaged, monkeypatch):
    made, file = damaged
    seen, one = [], decoding.decode_image
    monkeypatch.setattr(decoding, "decode_image", lambda data, what: seen.append(Path(what)) or one(data, what))
    found = {}
    for decoder in ("dali", "pil"):
        seen.clear()
        images = load(made, on_error="skip", decoder=decoder).x_test
        found[decoder] = [x for x, _ in images.ahead(torch.arange(8).split(3))]
        assert (len([path for path in seen if "test" in path.parts]) == 1) == (decoder == "dali")
        with pytest.warns(UserWarning, match=f"{file} is .*left out"):
            found[decoder] += [
                x for x, _ in load(made, on_error="skip", decoder=decoder).x_train.ahead([torch.arange(32)])
            ]
    assert all(map(torch.equal, found["dali"], found["pil"])) and len(found["dali"][-1]) == 31


@pytest.mark.parametrize(
    ("settings", "message"),
    [({"load": "disk"}, "stream.load is disk, but 'digits' is no image"), ({"on_error": "skip"}, "stream.on_error is")],
)
def test_only_image_folders_stay_on_the_disk(settings, message):
    with pytest.raises(StreamError, match=message):
        create(StreamConfig(name="digits", **settings))


def test_images_in_memory_cannot_be_left_out():
    with pytest.raises(ConfigError, match=r"stream.on_error is 'skip' with stream.load 'memory'"):
        StreamConfig(load="memory", on_error="skip")


def test_other_threads_do_not_record_warnings(monkeypatch, photos):
    """Two that overlap would leave one's record in place of the user's filters."""
    data = (photos / "train" / "class0000" / "0000.jpg").read_bytes()
    found = []
    wanted = decode_image(data, "mine")
    monkeypatch.setattr(warnings, "catch_warnings", None)
    thread = threading.Thread(target=lambda: found.append(decode_image(data, "mine")))
    thread.start()
    thread.join()
    assert np.array_equal(found[0], wanted)
