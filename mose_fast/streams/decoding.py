"""Image files to pixels: by Pillow, or many at a time by DALI, with the same pixels."""

from __future__ import annotations

import io
import math
import re
import struct
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from PIL import Image, UnidentifiedImageError

from mose_fast import _dali
from mose_fast.streams.draws import StreamError

#: An image file: its name for messages, and what reads its bytes.
Source = tuple[str, Callable[[], bytes]]

#: Called with the number of images decoded so far, and of all.
Watch = Callable[[int, int], None]

# From so many files on, DALI saves more than the second that its import takes.
_MANY = 2000
# Files that are decoded together; fewer where they are resized, since those may be large photos.
_BATCH = 256
_RESIZED_BATCH = 32

# The kinds of files whose bits a channel Pillow tells; it shortens deeper pixels without a word.
_FORMATS = ("BMP", "GIF", "JPEG", "PNG", "TIFF", "WEBP")


def read_file(file: str | Path) -> bytes:
    """The file's bytes. Raises StreamError if it cannot be read."""
    try:
        return Path(file).read_bytes()
    except OSError as error:
        raise StreamError(f"cannot read {file}: {error.strerror}") from error


class UnusableImage(StreamError):
    """An image file is damaged, or not as images of the stream are."""


class _Differs(Exception):
    """DALI and Pillow decode a file differently."""


@dataclass(frozen=True)
class Decoding:
    """How image files become pixels.

    Attributes:
        decoder: ``pil``, ``dali``, or ``auto``: DALI if it is installed and there are many files.
        resize: Side in pixels to which images are resized, see :func:`centre_square`; None: they
            stay.
        load, on_error: The settings of a stream with these names, which image folders have.
    """

    decoder: str = "auto"
    watch: Watch | None = None
    resize: int | None = None
    load: str = "auto"
    on_error: str = "stop"


def centre_square(pixels: np.ndarray, side: int) -> np.ndarray:
    """Resizes an image of any size so that its shorter side is ``side``, and cuts out the centre:
    uint8 [H, W, 3] to [side, side, 3], in one step of Pillow's bilinear filter with antialiasing.
    An image of the wanted size is unchanged.
    """
    height, width = pixels.shape[:2]
    short = min(height, width)
    left, top = (width - short) / 2, (height - short) / 2
    box = (left, top, left + short, top + short)
    return np.array(Image.fromarray(pixels).resize((side, side), Image.Resampling.BILINEAR, box))


def decode_image(data: bytes, what: str) -> np.ndarray:
    """Decodes an image file to uint8 [H, W, 3]; grey and palette images become RGB, without alpha.
    Of an animation, or of several pages, the first image is read. Warnings of Pillow are passed on,
    on the main thread with the file's name. Raises UnusableImage if the file is damaged, no image
    of a kind that is read, too large, or holds more than 8 bits a channel.
    """
    if threading.current_thread() is not threading.main_thread():
        # Python records warnings for all threads at once, so that no other thread may begin to.
        return _pixels(data, what)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        pixels = _pixels(data, what)
    for warning in caught:
        warnings.warn(f"{what}: {warning.message}", warning.category, stacklevel=2)
    return pixels


def _pixels(data: bytes, what: str) -> np.ndarray:
    try:
        return pixels_of(Image.open(io.BytesIO(data), formats=_FORMATS), what)
    except UnusableImage:
        raise
    except Image.DecompressionBombError as error:
        count, most = re.findall(r"\d+", str(error))[:2]
        raise UnusableImage(
            f"{what} has {int(count):,} pixels; wanted at most {int(most):,}: make it smaller first"
        ) from error
    except UnidentifiedImageError as error:  # whose message names the bytes that it was given
        raise UnusableImage(
            f"{what} is a damaged or truncated image, or none of the kinds that are read ({', '.join(_FORMATS)}"
            " with 8 bits a channel); convert, replace or remove it"
        ) from error
    except Exception as error:  # Pillow's decoders raise many unrelated types on damaged input
        raise UnusableImage(f"{what} is a damaged or truncated image ({error}); replace or remove it") from error


def pixels_of(image: Image.Image, what: str) -> np.ndarray:
    """The pixels of one of Pillow's images as uint8 [H, W, 3]; grey and palette images become RGB,
    without alpha. Raises UnusableImage if it holds more than 8 bits a channel.
    """
    bits = _bits(image)
    if bits > 8 or image.mode.startswith(("I", "F")):
        raise UnusableImage(
            f"{what} holds pixels of mode {image.mode} with {bits} bits a channel; wanted 8 bits a channel: convert it"
            " first"
        )
    if image.mode == "P" and "transparency" in image.info:
        # Pillow warns of the direct conversion to RGB, which gives the same colours.
        image = image.convert("RGBA")
    return np.array(image.convert("RGB"))


def _bits(image: Image.Image) -> int:
    """Bits a channel of an image file of which the header has been read."""
    if image.format == "TIFF":
        return max(image.tag_v2.get(258, (1,)))  # BitsPerSample
    return 16 if image.format == "PNG" and any(";16" in tile[3] for tile in image.tile) else 8


def decode_images(files: Sequence[Source], decoding: Decoding, start: int = 0) -> Iterator[np.ndarray]:
    """Decodes files in order, from number ``start`` on: uint8 [H, W, 3] each.

    Raises StreamError as :class:`Decoder` does.
    """
    decoder = Decoder(decoding, len(files))
    batch = _BATCH if decoding.resize is None else _RESIZED_BATCH
    for first in range(start, len(files), batch):
        names, data = [], []
        for name, read in files[first : first + batch]:
            names.append(name)
            data.append(read())
        yield from decoder.decode(names, data)
        if decoding.watch is not None:
            decoding.watch(first + len(names), len(files))


class Decoder:
    """Decodes image files, several at a time; ``count``: how many there are in all.

    DALI decodes JPEG files only, on the host, where it uses the same algorithm as Pillow: one image
    of every batch is decoded by both, and must be the same in every pixel. Resizing is Pillow's in
    both cases. So the decoder changes how long it takes and nothing else.

    Raises StreamError if DALI is required and cannot be used.
    """

    def __init__(self, decoding: Decoding, count: int) -> None:
        decoder = decoding.decoder
        if decoder == "dali":
            obstacle = _dali.obstacle()
            if obstacle:
                raise StreamError(f"stream.decoder is 'dali', but {obstacle}; wanted: {_dali.INSTALL}, or decoder pil")
        elif decoder == "auto":
            decoder = "dali" if count >= _MANY and _dali.obstacle() is None else "pil"
        self._decoding, self._decode = decoding, _by_dali() if decoder == "dali" else _by_pillow
        #: How many threads may decode at the same time. DALI has threads of its own.
        self.threads = 1 if decoder == "dali" else torch.get_num_threads()

    def decode(self, names: Sequence[str], data: Sequence[bytes]) -> Iterator[np.ndarray]:
        """The pixels of files, uint8 [H, W, 3] each, of at most 256 in a call. Raises UnusableImage
        if one is, and StreamError if DALI is required and decodes a file differently.
        """
        try:
            images = self._decode(names, data)
        except _Differs as difference:
            if self._decoding.decoder == "dali":
                raise StreamError(f"{difference}; wanted decoder pil") from None
            self._decode = _by_pillow
            images = self._decode(names, data)
        side = self._decoding.resize
        yield from images if side is None else (centre_square(image, side) for image in images)


def _by_pillow(names: Sequence[str], data: Sequence[bytes]) -> Iterable[np.ndarray]:
    # One at a time: a list of large photos may not fit into the memory.
    return (decode_image(one, name) for name, one in zip(names, data, strict=True))


def _by_dali() -> Callable[[Sequence[str], Sequence[bytes]], Iterable[np.ndarray]]:
    # Not at the top: DALI is an extra, and its import takes half a second.
    from nvidia.dali import Pipeline, fn, types

    pipeline = Pipeline(batch_size=_BATCH, num_threads=torch.get_num_threads(), device_id=None, prefetch_queue_depth=1)
    with pipeline:
        encoded = fn.external_source(name="encoded", device="cpu", dtype=types.UINT8, ndim=1)
        # Pillow does not rotate by EXIF's orientation either.
        pipeline.set_outputs(fn.decoders.image(encoded, device="cpu", output_type=types.RGB, adjust_orientation=False))
    pipeline.build()
    lock = threading.Lock()

    def decode(names: Sequence[str], data: Sequence[bytes]) -> Iterable[np.ndarray]:
        jpeg = [i for i, one in enumerate(data) if _usual_jpeg(one)]
        images: list[np.ndarray | None] = [None] * len(data)
        if jpeg:
            try:
                with lock:
                    (decoded,) = pipeline.run(encoded=[np.frombuffer(data[i], np.uint8) for i in jpeg])
                    for position, i in enumerate(jpeg):
                        images[i] = np.array(decoded[position])
            except RuntimeError:
                # DALI does not say which file it is; Pillow does, or decodes what DALI cannot.
                return _by_pillow(names, data)
            first = jpeg[0]
            known = decode_image(data[first], names[first])
            if images[first].shape != known.shape or not np.array_equal(images[first], known):
                raise _Differs(f"{names[first]} has other pixels when DALI {_dali.version()} decodes it than by Pillow")
        return [decode_image(data[i], names[i]) if image is None else image for i, image in enumerate(images)]

    return decode


def _usual_jpeg(data: bytes) -> bool:
    """Whether a JPEG has a whole header, 8 bits, a size that Pillow takes, and an end; 20 times as
    fast as Pillow. DALI 2.4 crashes with the process at some that are cut off.
    """
    place, usual = 2 if data[:2] == b"\xff\xd8" else len(data), False
    while place + 9 <= len(data) and data[place] == 0xFF:
        marker, length, bits, height, width = struct.unpack_from(">xBHBHH", data, place)
        if marker == 0xDA:  # the header's end
            return usual and data.rfind(b"\xff\xd9", place) > 0
        # JPEG's markers of a frame, which begins with the bits and the size.
        if 0xC0 <= marker <= 0xCF and marker not in (0xC4, 0xC8, 0xCC):
            usual = bits == 8 and height * width <= (Image.MAX_IMAGE_PIXELS or math.inf)
        place += 2 + length
    return False
