"""Image files become the same pixels by Pillow and by DALI; progress is told; what is wrong names
the file.
"""

from __future__ import annotations

import io
import struct
import sys
import zlib

import numpy as np
import pytest
from PIL import Image
from torchvision.transforms import InterpolationMode
from torchvision.transforms.functional import center_crop, resize

from mose_fast import _dali
from mose_fast.settings.run import ConfigError, StreamConfig
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
    return saved(small.resize((width, height), Image.Resampling.BICUBIC).convert(mode), form, **options)


def saved(image: Image.Image, form: str, **options) -> bytes:
    file = io.BytesIO()
    image.save(file, form, **options)
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
@pytest.mark.parametrize(
    "damage", [lambda d: d[: len(d) // 2], lambda d: d[:-2], lambda d: d[:2] + b"x" * 100, lambda d: b""]
)
def test_a_damaged_file_among_good_ones_is_named(damage):
    good = {f"good {i}": picture(i) for i in range(3)}
    for decoder in ("pil", "dali"):
        with pytest.raises(StreamError, match="the bad one is a damaged or truncated image"):
            decoded({**good, "the bad one": damage(picture(9)), "after it": picture(10)}, decoder)
    assert len(decoded(good, "dali")) == 3


def test_a_jpeg_that_is_cut_off_is_left_to_pillow():
    """DALI 2.4 takes the process with it at some that end within their header."""
    for kind in ("4:2:0", "progressive", "restarts", "grey", "turned"):
        data = KINDS[kind]
        assert decoding._usual_jpeg(data) and decoding._usual_jpeg(data + b"more")
        assert not any(decoding._usual_jpeg(data[:end]) for end in range(len(data) - 1))
    assert not decoding._usual_jpeg(KINDS["png"])


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


def png_16(pixels: np.ndarray) -> bytes:
    """A PNG of 16 bits a channel, written from its definition, since Pillow writes grey ones alone:
    [H, W, channels].
    """
    height, width, channels = pixels.shape
    colour = {1: 0, 2: 4, 3: 2, 4: 6}[channels]
    rows = b"".join(b"\0" + row.astype(">u2").tobytes() for row in pixels)
    chunks = [(b"IHDR", struct.pack(">IIBBBBB", width, height, 16, colour, 0, 0, 0)), (b"IDAT", zlib.compress(rows))]
    parts = [struct.pack(">I", len(data)) + kind + data for kind, data in [*chunks, (b"IEND", b"")]]
    return b"\x89PNG\r\n\x1a\n" + b"".join(part + struct.pack(">I", zlib.crc32(part[4:])) for part in parts)


def tiff_16(mode: str) -> bytes:
    """A TIFF of 16 bits a channel: the bytes of one that is twice as wide and has 8."""
    data = picture(form="TIFF", mode=mode, width=32, height=16)
    bits = struct.pack("<H", 8) * len(mode)
    assert data.count(bits) == 1
    width = [struct.pack("<HHIHH", 256, 3, 1, side, 0) for side in (32, 16)]
    width += [struct.pack("<HHII", 256, 4, 1, side) for side in (32, 16)]
    return data.replace(bits, struct.pack("<H", 16) * len(mode)).replace(width[0], width[1]).replace(width[2], width[3])


def jpeg_12() -> bytes:
    """A grey JPEG of 8x8 pixels and 12 bits, all coefficients 0."""
    segments = [
        (0xDB, b"\0" + b"\1" * 64),
        (0xC1, struct.pack(">BHHB", 12, 8, 8, 1) + b"\1\x11\0"),
        (0xC4, b"\x00\1" + bytes(15) + b"\0"),
        (0xC4, b"\x10\1" + bytes(15) + b"\0"),
        (0xDA, b"\1\1\0\0\x3f\0"),
    ]
    coded = b"".join(struct.pack(">BBH", 255, kind, len(data) + 2) + data for kind, data in segments)
    return b"\xff\xd8" + coded + b"\x3f\xff\xd9"


COLOURS = np.random.default_rng(0).integers(0, 1021, (16, 16, 4))
DEEP = {
    "grey png": png_16(COLOURS[..., :1]),
    "grey png with alpha": png_16(COLOURS[..., :2]),
    "colour png": png_16(COLOURS[..., :3]),
    "colour png with alpha": png_16(COLOURS),
    "colour tiff": tiff_16("RGB"),
    "cmyk tiff": tiff_16("CMYK"),
    "float tiff": saved(Image.fromarray(COLOURS[..., 0].astype(np.float32)), "TIFF"),
    "grey tiff": saved(Image.fromarray(COLOURS[..., 0].astype(np.uint16)), "TIFF"),
    "jpeg of 12 bits": jpeg_12(),
}
DECODERS = ["pil", pytest.param("dali", marks=needs_dali)]


@pytest.mark.parametrize("decoder", DECODERS)
@pytest.mark.parametrize("kind", DEEP)
def test_more_than_8_bits_a_channel_are_refused_by_the_files_name(kind, decoder):
    with pytest.raises(StreamError, match=f"^{kind} .*8 bits a channel.*convert") as refusal:
        decoded({"first": picture(1), kind: DEEP[kind]}, decoder)
    assert "_io." not in str(refusal.value)


def animation(form: str) -> bytes:
    frames = [Image.fromarray(np.full((8, 8, 3), level, np.uint8)) for level in (200, 100)]
    return saved(frames[0], form, save_all=True, append_images=frames[1:])


@pytest.mark.parametrize("form", ["GIF", "PNG", "TIFF", "WEBP"])
def test_of_an_animation_the_first_image_is_read(form):
    assert (np.abs(decode_image(animation(form), "a").astype(int) - 200) <= 1).all()


def test_shallow_images_of_uncommon_kinds_are_read():
    pixels = np.random.default_rng(1).integers(0, 256, (8, 8, 3), np.uint8)
    for form, options in (("TIFF", {"compression": "tiff_lzw"}), ("BMP", {}), ("PNG", {"bits": 8})):
        assert np.array_equal(decode_image(saved(Image.fromarray(pixels), form, **options), "a"), pixels)
    # 5, 6 and 5 bits a pixel.
    header = struct.pack("<IHHI", 66 + 128, 0, 0, 66)
    header += struct.pack("<IiiHHIIiiII", 40, 8, 8, 1, 16, 3, 128, 0, 0, 0, 0) + struct.pack(
        "<III", 0xF800, 0x7E0, 0x1F
    )
    white = b"BM" + header + b"\xff" * 128
    assert (decode_image(white, "a") == 255).all()


@pytest.mark.parametrize("decoder", DECODERS)
@pytest.mark.parametrize("form", ["JPEG", "PNG"])
def test_an_image_of_too_many_pixels_is_no_damaged_one(form, decoder, monkeypatch):
    """Pillow's limits, which hold for both decoders; here few pixels are many."""
    files = {"first": picture(1, 8, 8), "large": picture(form=form)}
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 48 * 64 // 2 - 1)
    with pytest.raises(StreamError, match=r"^large has 3,072 pixels; wanted at most 3,070: make it smaller first$"):
        decoded(files, decoder)
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 48 * 64 - 1)
    with pytest.warns(Image.DecompressionBombWarning, match="^large: Image size"):
        decoded(files, decoder)


@pytest.mark.parametrize("decoder", DECODERS)
@pytest.mark.parametrize(
    "data", [b"", b"\xff\xd8", b"\xff\xd8\xff\xe0\0\0", b"no image", b"\x89PNG", b"P6 1 1 255 abc"]
)
def test_what_is_no_image_is_named_and_not_its_bytes(data, decoder):
    with pytest.raises(StreamError, match=r"^the file is a damaged or truncated image") as refusal:
        decoded({"first": picture(1), "the file": data}, decoder)
    assert "_io." not in str(refusal.value) and "0x" not in str(refusal.value)
