"""Own data: image folders and .npz files."""

import numpy as np
import pytest
from PIL import Image

from mose_fast.settings.run import StreamConfig
from mose_fast.streams import StreamError, create, decoding
from mose_fast.streams.decoding import centre_square

RNG = np.random.default_rng(0)


def save(path, array):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(array).save(path)
    return array


@pytest.fixture
def folder(tmp_path):
    """Two classes, three training images and one test image each, in the formats that keep
    pixels.
    """
    for label, name in enumerate(("cat", "dog")):
        for i, suffix in enumerate(("png", "PNG", "bmp")):
            save(tmp_path / "pets" / "train" / name / f"{i}.{suffix}", np.full((16, 8, 3), 100 * label + i, np.uint8))
        save(tmp_path / "pets" / "test" / name / "0.png", np.full((16, 8, 3), 100 * label + 50, np.uint8))
    (tmp_path / "pets" / "train" / "cat" / "notes.txt").write_text("no image")
    (tmp_path / "pets" / "train" / ".hidden").mkdir()
    return tmp_path / "pets"


def load(path, **settings):
    return create(StreamConfig(name=str(path), **settings))


def test_folder_is_read(folder):
    stream = load(folder, tasks=2, batch=4)
    assert stream.x_train[:, 3, 2, 1].tolist() == [0, 1, 2, 100, 101, 102]
    assert stream.y_train.tolist() == [0, 0, 0, 1, 1, 1]
    assert stream.x_test[:, 15, 7, 0].tolist() == [50, 150] and stream.y_test.tolist() == [0, 1]
    assert (stream.name, stream.class_names, stream.image_size, stream.batch) == ("pets", ("cat", "dog"), (16, 8), 4)
    assert stream.normalisation.name == "half" and stream.mirror_safe
    assert load(folder, normalisation="cifar10").normalisation.name == "cifar10"


def test_folder_turns_every_colour_mode_into_rgb(folder):
    grey = save(folder / "train" / "cat" / "3.png", RNG.integers(0, 256, (16, 8), dtype=np.uint8))
    alpha = save(folder / "train" / "cat" / "4.png", RNG.integers(0, 256, (16, 8, 4), dtype=np.uint8))
    save(folder / "train" / "cat" / "5.jpeg", np.full((16, 8), 77, np.uint8))
    x = load(folder).x_train.numpy()
    assert np.array_equal(x[3], np.repeat(grey[..., None], 3, axis=2))
    assert np.array_equal(x[4], alpha[..., :3])
    assert (x[5] == 77).all()


def test_webp_and_tiff_are_read(folder):
    pixels = RNG.integers(0, 256, (16, 8, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(folder / "train" / "cat" / "3.webp", lossless=True)
    save(folder / "train" / "cat" / "4.tif", pixels)
    save(folder / "train" / "cat" / "5.TIFF", pixels)
    x = load(folder).x_train.numpy()
    assert len(x) == 9
    for row in (3, 4, 5):
        assert np.array_equal(x[row], pixels)


def test_files_that_are_not_read_are_named(folder):
    save(folder / "train" / "cat" / "deeper" / "9.png", np.zeros((16, 8, 3), np.uint8))
    save(folder / "test" / "stray.png", np.zeros((16, 8, 3), np.uint8))
    (folder / "train" / "dog" / ".thumbnail.gif").touch()
    (folder / "train" / ".hidden" / "x.gif").touch()
    with pytest.warns(UserWarning) as caught:
        stream = load(folder)
    assert len(stream.x_train) == 6
    (warning,) = [str(w.message) for w in caught]
    named = "train/cat/deeper/9.png, train/cat/notes.txt, test/stray.png"
    assert warning.startswith(f"{folder} holds files that are not read (3): {named}; only .jpg, ")
    for i in range(10):
        (folder / "train" / "cat" / f"{i}.heic").touch()
    with pytest.warns(UserWarning, match=r"holds files that are not read \(13\): .* and 8 more; only "):
        load(folder)


def test_a_folder_of_images_alone_has_no_warning(folder, recwarn):
    (folder / "train" / "cat" / "notes.txt").unlink()
    load(folder)
    assert not recwarn.list


@pytest.fixture
def photos(tmp_path):
    """Two classes of images of four sizes, and what they are at 16x16."""
    images = {}
    for name in ("cat", "dog"):
        for part, sizes in (("train", ((40, 32), (17, 90))), ("test", ((16, 16),))):
            for number, size in enumerate(sizes):
                path = tmp_path / "photos" / part / name / f"{number}.png"
                images[path] = centre_square(save(path, RNG.integers(0, 256, (*size, 3), np.uint8)), 16)
    return tmp_path / "photos", images


def test_images_of_any_size_are_resized(photos):
    folder, images = photos
    stream = load(folder, resize=16)
    assert stream.image_size == (16, 16)
    train = [image for path, image in images.items() if "train" in path.parts]
    assert np.array_equal(stream.x_train.numpy(), np.stack(train))
    with pytest.raises(StreamError, match="wanted images of one size: resize them"):
        load(folder)


def test_resized_images_are_decoded_once_and_again_when_files_change(photos, monkeypatch):
    folder, _ = photos
    seen = []
    decode = decoding.decode_image
    monkeypatch.setattr(decoding, "decode_image", lambda data, what: seen.append(what) or decode(data, what))
    before = load(folder, resize=16).fingerprint
    assert len(seen) == 6
    assert load(folder, resize=16).fingerprint == before and len(seen) == 6
    assert load(folder, resize=8).image_size == (8, 8) and len(seen) == 12  # not the copy of another size
    save(folder / "train" / "dog" / "0.png", np.zeros((50, 20, 3), np.uint8))
    changed = load(folder, resize=16)
    assert len(seen) == 18 and changed.fingerprint != before and not changed.x_train[2].any()
    (folder / "train" / "dog" / "1.png").unlink()
    assert len(load(folder, resize=16).x_train) == 3


def test_only_image_folders_are_resized(tmp_path):
    np.savez(tmp_path / "mine.npz", **ARRAYS)
    for stream in ("digits", tmp_path / "mine.npz"):
        with pytest.raises(StreamError, match=r"stream\.resize is 16, but .* is no image folder"):
            load(stream, resize=16)


def empty(folder):
    """As if there were no files."""
    for file in [path for path in folder.rglob("*") if path.is_file()]:
        file.unlink()


def save_all(folder, array):
    for file in [*folder.rglob("*.png"), *folder.rglob("*.PNG"), *folder.rglob("*.bmp")]:
        save(file, array)


BLACK = np.zeros((16, 8, 3), np.uint8)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (
            lambda f: (f / "test").rename(f / "tests"),
            "pets/test is missing; wanted .* to hold train/<class>/<image> and test/<class>/<image>",
        ),
        (lambda f: [(f / "train").rename(f / "other"), (f / "train").mkdir()], "pets/train holds no class folders"),
        (
            lambda f: (f / "train" / "eel").mkdir(),
            r"pets/train/eel holds no images \(.jpg, .jpeg, .png, .bmp, .webp, .tif, .tiff\)",
        ),
        (lambda f: save(f / "test" / "eel" / "0.png", BLACK), "pets/test/eel is a class without training images"),
        (lambda f: empty(f / "test"), "pets/test holds no images"),
        (
            lambda f: (f / "train" / "dog" / "0.png").write_bytes(b"these are no pixels"),
            "train/dog/0.png is a damaged or truncated image",
        ),
        (
            lambda f: save(f / "train" / "dog" / "0.png", np.zeros((16, 16, 3), np.uint8)),
            "train/cat/0.png is 16x8 and .*train/dog/0.png is 16x16; wanted images of one size: resize",
        ),
        (
            lambda f: save_all(f, np.zeros((28, 28, 3), np.uint8)),
            "train/cat/0.png is 28x28; wanted sides divisible by 8: pad or resize",
        ),
        (
            lambda f: save(f / "train" / "dog" / "0.png", np.zeros((16, 8), np.uint16)),
            "train/dog/0.png holds pixels of mode I.*wanted 8 bits",
        ),
    ],
)
def test_bad_folders_are_refused(folder, damage, message):
    damage(folder)
    with pytest.raises(StreamError, match=message):
        load(folder)


ARRAYS = {
    "x_train": RNG.integers(0, 256, (6, 8, 8, 3), dtype=np.uint8),
    "y_train": np.array([40, 10, 30, 20, 10, 40]),
    "x_test": RNG.integers(0, 256, (4, 8, 8, 3), dtype=np.uint8),
    "y_test": np.array([10, 20, 30, 40]),
}


@pytest.mark.parametrize("save_npz", [np.savez, np.savez_compressed])
def test_npz_is_read(tmp_path, save_npz):
    save_npz(tmp_path / "mine.npz", **ARRAYS)
    stream = load(tmp_path / "mine.npz", class_order_seed=3)
    assert np.array_equal(stream.x_train.numpy(), ARRAYS["x_train"]) and np.array_equal(
        stream.x_test.numpy(), ARRAYS["x_test"]
    )
    assert stream.original_label(stream.y_train).tolist() == ARRAYS["y_train"].tolist()
    assert (stream.name, len(stream.tasks), sorted(stream.class_order)) == ("mine", 2, [10, 20, 30, 40])


class Trap:
    """Runs code when it is unpickled."""

    def __reduce__(self):
        return exec, ("raise SystemExit('unpickled')",)


@pytest.mark.parametrize(
    ("write", "message"),
    [
        (lambda p: None, "mine.npz is no file; wanted an .npz with x_train, y_train, x_test, y_test"),
        (lambda p: p.write_bytes(b""), "mine.npz is damaged, truncated or no .npz archive"),
        (lambda p: p.write_bytes(b"no archive at all"), "mine.npz is damaged, truncated or no .npz archive"),
        (lambda p: np.savez(p, x_train=1, y_train=2), "mine.npz lacks x_test, y_test and holds x_train, y_train"),
        (
            lambda p: np.savez(p, **{**ARRAYS, "y_test": np.array([10, 20, 30, 50])}),
            r"mine.npz: y_test holds label 50 \(row 3\)",
        ),
        (lambda p: np.savez(p, **{**ARRAYS, "x_train": ARRAYS["x_train"] / 255}), "mine.npz: x_train is float64"),
        (
            lambda p: np.savez(p, **{**ARRAYS, "y_train": np.array([Trap()] * 6)}),
            "mine.npz is damaged.*Object arrays cannot be loaded",
        ),
    ],
)
def test_bad_npz_files_are_refused(tmp_path, write, message):
    write(tmp_path / "mine.npz")
    with pytest.raises(StreamError, match=message):
        load(tmp_path / "mine.npz")


def test_a_single_array_is_no_stream(tmp_path):
    np.save(tmp_path / "mine.npy", ARRAYS["x_train"])
    (tmp_path / "mine.npy").rename(tmp_path / "mine.npz")
    with pytest.raises(StreamError, match=r"mine\.npz holds a single array; wanted an .npz"):
        load(tmp_path / "mine.npz")


@pytest.mark.parametrize("save_npz", [np.savez, np.savez_compressed])
def test_damage_anywhere_in_an_npz_is_noticed(tmp_path, save_npz):
    path = tmp_path / "mine.npz"
    save_npz(path, **ARRAYS)
    good = path.read_bytes()
    for end in range(10, len(good) - 30, 97):
        path.write_bytes(good[:end])
        with pytest.raises(StreamError, match=r"mine\.npz is damaged, truncated"):
            load(path)
    flipped = bytearray(good)
    flipped[700] ^= 255  # inside the pixels of x_train
    path.write_bytes(flipped)
    with pytest.raises(StreamError, match=r"mine\.npz is damaged, truncated"):
        load(path)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("split-cifar", "stream 'split-cifar' is unknown; did you mean 'split-cifar1"),
        ("zzz", "stream 'zzz' is unknown; known: digits, .*; own data: a folder, or an .npz file"),
        ("no/such/folder", "stream 'no/such/folder' is neither a folder nor an .npz file"),
    ],
)
def test_unknown_streams_are_refused(name, message):
    with pytest.raises(StreamError, match=message):
        create(StreamConfig(name=name))
