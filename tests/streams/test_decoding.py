"""Image files become the same pixels by Pillow and by DALI; progress is told; what is wrong names
the file.
"""

from __future__ import annotations

import io
import sys

import numpy as np
import pytest
from PIL import Image
from torchvision.transforms import InterpolationMode
from torchvision.transforms.functional import center_crop, resize

from mose_fast import _dali
from mose_fast.config import ConfigError, StreamConfig
from mose_fast.streams import StreamError, create, decoding
from mose_fast.streams.decoding import Decoding, centre_square, decode_image, decode_images

NO_DALI = _dali.obstacle()
needs_dali = pytest.mark.skipif(NO_DALI is not None, reason=f"{NO_DALI}; {_dali.INSTALL}")


def picture(
    seed: int = 0, height: int = 48, width: int = 64, *, form: str = "JPEG", mode: str = "RGB", **options
) -> bytes:
    """Colours that change over a few pixels, so that chroma subsampling shows."""
    rng = np.random.default_rng(seed)
    small = Image.fromarray(rng.integers(0, 256, (height // 4, width // 4, 3), dtype=np.uint8))
    file = io.BytesIO()
    small.resize((width, height), Image.Resampling.BICUBIC).convert(mode).save(file, form, **options)
    return file.getvalue()


def turned() -> bytes:
    exif = Image.Exif()
    exif[0x112] = 6  # shown turned by a quarter
    return picture(exif=exif)


KINDS = {
    "4:2:0": picture(subsampling=2),
    "4:2:2": picture(subsampling=1),
    "4:4:4": picture(subsampling=0),
    "low quality": picture(quality=20),
    "high quality": picture(quality=98),
    "progressive": picture(progressive=True),
    "restarts": picture(restart_marker_blocks=4),
    "odd size": picture(height=44, width=60),
    "grey": picture(mode="L"),
    "cmyk": picture(mode="CMYK"),
    "turned": turned(),
    "png": picture(form="PNG"),
    "palette png": picture(form="PNG", mode="P"),
    "png with alpha": picture(form="PNG", mode="RGBA"),
    "bmp": picture(form="BMP"),
}


def decoded(files: dict[str, bytes], decoder: str, watch=None, resize=None) -> list[np.ndarray]:
    sources = [(name, lambda data=data: data) for name, data in files.items()]
    return list(decode_images(sources, Decoding(decoder, watch, resize)))


@needs_dali
@pytest.mark.parametrize("kind", KINDS)
def test_dali_and_pillow_give_the_same_pixels(kind):
    # The first of a batch is compared in production, too; here it is not the one of interest.
    files = {"first": picture(1), kind: KINDS[kind]}
    for ours, wanted in zip(decoded(files, "dali"), decoded(files, "pil"), strict=True):
        assert ours.dtype == np.uint8
        assert np.array_equal(ours, wanted)


@needs_dali
def test_dali_really_decodes(monkeypatch):
    """Of 600 JPEG files Pillow sees three: one a batch, to compare."""
    seen = []

    def counted(data, what):
        seen.append(what)
        return one(data, what)

    one = decoding.decode_image
    monkeypatch.setattr(decoding, "decode_image", counted)
    told = []
    images = decoded({str(i): picture(i % 7) for i in range(600)}, "dali", lambda done, all: told.append((done, all)))
    assert seen == ["0", "256", "512"]
    assert len(images) == 600
    assert told == [(256, 600), (512, 600), (600, 600)]


@needs_dali
def test_real_tiny_imagenet_files(real_data):
    root = real_data("tiny") / "tiny-imagenet-200"
    files = {str(path): path.read_bytes() for path in sorted(root.glob("train/*/images/*.JPEG"))[::9]}
    assert len(files) > 100
    assert all(np.array_equal(a, b) for a, b in zip(decoded(files, "dali"), decoded(files, "pil"), strict=True))


@needs_dali
@pytest.mark.parametrize(
    "damage", [lambda d: d[: len(d) // 2], lambda d: d[:-2], lambda d: d[:2] + b"x" * 100, lambda d: b""]
)
def test_a_damaged_file_among_good_ones_is_named(damage):
    good = {f"good {i}": picture(i) for i in range(3)}
    for decoder in ("pil", "dali"):
        with pytest.raises(StreamError, match="the bad one is a damaged or truncated image"):
            decoded({**good, "the bad one": damage(picture(9)), "after it": picture(10)}, decoder)
    assert len(decoded(good, "dali")) == 3


@pytest.fixture
def other_pixels(monkeypatch):
    """A DALI that is found to decode the first file differently."""

    def differing():
        def decode(names, data):
            raise decoding._Differs(f"{names[0]} has other pixels")

        return decode

    monkeypatch.setattr(_dali, "obstacle", lambda: None)
    monkeypatch.setattr(decoding, "_by_dali", differing)


def test_a_dali_of_other_pixels_is_refused_or_left(other_pixels, monkeypatch):
    files = {str(i): picture(i) for i in range(4)}
    with pytest.raises(StreamError, match=r"0 has other pixels.*; wanted decoder pil"):
        decoded(files, "dali")
    monkeypatch.setattr(decoding, "_MANY", 3)
    assert all(np.array_equal(a, b) for a, b in zip(decoded(files, "auto"), decoded(files, "pil"), strict=True))


@needs_dali
def test_other_pixels_are_noticed(monkeypatch):
    one = decoding.decode_image
    monkeypatch.setattr(decoding, "decode_image", lambda data, what: one(data, what) ^ np.uint8(1))
    with pytest.raises(
        StreamError, match=r"a has other pixels when DALI \d.* decodes it than by Pillow; wanted decoder pil"
    ):
        decoded({"a": picture()}, "dali")


@pytest.mark.parametrize("size", [(48, 96), (96, 48), (64, 64), (8, 24), (16, 16)])
def test_resizing_is_torchvisions_resize_and_centre_crop(size):
    """To one level of the last bit, where the sizes leave nothing to round."""
    height, width = size
    image = np.array(Image.open(io.BytesIO(picture(2, height, width, form="PNG"))))
    wanted = np.array(center_crop(resize(Image.fromarray(image), 16, InterpolationMode.BILINEAR), 16))
    assert np.abs(centre_square(image, 16).astype(int) - wanted).max() <= (0 if size == (16, 16) else 1)


def test_a_resized_image_shows_the_centre_undistorted():
    """A disc in the middle of an odd-sized image remains a disc, and the edges beyond are gone."""
    y, x = np.mgrid[:301, :451]
    disc = ((y - 150) ** 2 + (x - 225) ** 2 < 100**2) * 255
    disc[:, :60] = disc[:, -60:] = 255  # outside the centre
    small = centre_square(np.repeat(disc[..., None], 3, 2).astype(np.uint8), 32)
    assert small.shape == (32, 32, 3) and np.array_equal(small, small[::-1]) and np.array_equal(small, small[:, ::-1])
    assert small[0].max() == small[:, 0].max() == 0
    assert (
        (small[..., 0] > 127).any(0).sum() == (small[..., 0] > 127).any(1).sum() == pytest.approx(200 / 301 * 32, abs=1)
    )


@needs_dali
def test_resized_images_are_the_same_by_both_decoders():
    files = {f"{n}": picture(n, 40 + 4 * n, 120 - 8 * n) for n in range(10)}
    ours, wanted = decoded(files, "dali", resize=24), decoded(files, "pil", resize=24)
    assert np.array_equal(np.stack(ours), np.stack(wanted)) and ours[0].shape == (24, 24, 3)


def test_automatic_choice(monkeypatch):
    """Few files are not worth DALI's import; where it is not installed, many are decoded by
    Pillow.
    """
    monkeypatch.setitem(sys.modules, "nvidia.dali", None)
    monkeypatch.setattr(decoding, "_MANY", 3)
    assert len(decoded({str(i): picture(i) for i in range(4)}, "auto")) == 4
    with pytest.raises(
        StreamError,
        match=r"stream.decoder is 'dali', but DALI is not installed; wanted: pip install 'mose-fast\[dali\]'",
    ):
        decoded({"a": picture()}, "dali")
    monkeypatch.setattr(_dali, "obstacle", lambda: pytest.fail("DALI was imported"))
    assert len(decoded({"a": picture()}, "auto")) == 1
    with pytest.raises(ConfigError, match=r"stream\.decoder is 'gpu'; wanted one of 'auto', 'pil', 'dali'"):
        StreamConfig(decoder="gpu")


@pytest.mark.parametrize("decoder", ["pil", pytest.param("dali", marks=needs_dali)])
def test_a_folder_is_the_same_stream_by_both_and_tells_its_progress(tmp_path, decoder):
    for part, count in (("train", 200), ("test", 60)):
        for name in ("cat", "dog"):
            folder = tmp_path / "pets" / part / name
            folder.mkdir(parents=True)
            for i in range(count):
                (folder / f"{i}.{'jpg' if i % 3 else 'png'}").write_bytes(
                    picture(i, 16, 16, form="JPEG" if i % 3 else "PNG")
                )
    told = []
    settings = {"name": str(tmp_path / "pets"), "tasks": 1}
    stream = create(StreamConfig(**settings, decoder=decoder), lambda done, all: told.append((done, all)))
    assert told == [(256, 520), (512, 520), (520, 520)]
    known = create(StreamConfig(**settings, decoder="pil"))
    assert all(
        np.array_equal(getattr(stream, x), getattr(known, x)) for x in ("x_train", "y_train", "x_test", "y_test")
    )
    assert (len(stream.x_train), len(stream.x_test)) == (400, 120)


def test_a_palette_with_transparency_has_its_colours_and_no_warning(recwarn):
    colours = np.random.default_rng(0).integers(0, 256, (8, 8, 3), np.uint8)
    palette = Image.fromarray(colours).convert("P", palette=Image.Palette.ADAPTIVE)
    file = io.BytesIO()
    palette.save(file, "PNG", transparency=bytes(range(64)))
    assert np.array_equal(decode_image(file.getvalue(), "mine"), np.array(palette.convert("RGB")))
    assert not recwarn.list


def test_what_pillow_warns_of_is_told_with_the_file(monkeypatch):
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 40)
    file = io.BytesIO()
    Image.new("RGB", (8, 8)).save(file, "PNG")
    with pytest.warns(Image.DecompressionBombWarning, match="^cat/1.png: Image size"):
        decode_image(file.getvalue(), "cat/1.png")
