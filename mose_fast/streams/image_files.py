"""Images that stay in their files and are decoded when they are asked for."""

from __future__ import annotations

import dataclasses
import os
import warnings
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cached_property
from itertools import islice
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from mose_fast.streams.decoding import Decoder, Decoding, UnusableImage, read_file
from mose_fast.streams.draws import StreamError

# Files that a thread decodes at a time.
_TOGETHER = 32


class ImageFiles:
    """Images of one size in files: like a tensor uint8 [N, H, W, 3] on the CPU that cannot be
    written. Rows, int64 [n], give the pixels of images, a slice gives images in files again.

    Attributes:
        shape: (N, H, W, 3).
        skipped: The files that were left out so far, sorted.
    """

    device = torch.device("cpu")

    def __init__(self, root: Path, files: Sequence[str], size: tuple[int, int], decoding: Decoding) -> None:
        """``files`` are paths below ``root``; ``size`` is (H, W)."""
        self._root, self._files, self._decoding = root, files, decoding
        self.shape = (len(files), *size, 3)
        self._unreadable: set[int] = set()

    def __len__(self) -> int:
        return len(self._files)

    def __getitem__(self, rows: Tensor | slice) -> Tensor | ImageFiles:
        """Decodes images: uint8 [n, H, W, 3]. Raises StreamError for a file that cannot be read, or
        whose image is damaged or of another size, also where :meth:`ahead` leaves it out.
        """
        if isinstance(rows, slice):
            return self.subset(np.arange(len(self))[rows])
        numbers, images = rows.tolist(), []
        for first in range(0, len(numbers), _TOGETHER):
            for image in self._decode(numbers[first : first + _TOGETHER]):
                if isinstance(image, UnusableImage):
                    raise image
                images.append(image)
        return self._stacked(images)

    @property
    def skipped(self) -> list[str]:
        return sorted(self._files[row] for row in self._unreadable)

    def subset(self, rows: np.ndarray) -> ImageFiles:
        """Some of the images, in the order of their rows, int64 [n]."""
        return ImageFiles(self._root, [self._files[row] for row in rows.tolist()], self.shape[1:3], self._decoding)

    def ahead(self, batches: Sequence[Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
        """Decodes batches, int64 rows each, in order and ahead of their use, on threads; holds the
        images of about two batches, at least 64. Yields the images of each batch, uint8
        [b, H, W, 3], and their rows, int64 [b].

        A batch lacks its images that are damaged or of another size where ``on_error`` is ``skip``,
        with a warning that names the file; otherwise StreamError names it.
        """
        images = self._decoded_ahead([row for rows in batches for row in rows.tolist()], max(map(len, batches)))
        for rows in batches:
            found = list(islice(images, len(rows)))
            for row, image in zip(rows.tolist(), found, strict=True):
                if isinstance(image, UnusableImage) and row not in self._unreadable:
                    self._unreadable.add(row)
                    warnings.warn(f"{image}; it is left out, as stream.on_error says", stacklevel=2)
            kept = [n for n, image in enumerate(found) if not isinstance(image, UnusableImage)]
            yield self._stacked([found[n] for n in kept]), rows[kept]

    def readable(self, rows: Tensor) -> Tensor:
        """Rows, int64 [n], without those that :meth:`ahead` left out so far. Raises StreamError if
        none is left.
        """
        left = rows[~torch.isin(rows, torch.tensor(sorted(self._unreadable), dtype=torch.int64))]
        if not len(left):
            raise StreamError(
                f"all of the {len(rows)} images that are needed are damaged, for example"
                f" {self._name(int(rows[0]))}; wanted at least one that can be decoded"
            )
        return left

    @cached_property
    def _decoder(self) -> Decoder:
        return Decoder(self._decoding, len(self))

    def _name(self, row: int) -> str:
        return os.path.join(self._root, self._files[row])

    def _stacked(self, images: list[np.ndarray]) -> Tensor:
        return torch.from_numpy(np.stack(images)) if images else torch.empty(0, *self.shape[1:], dtype=torch.uint8)

    def _decoded_ahead(self, rows: list[int], largest: int) -> Iterator[np.ndarray | UnusableImage]:
        """What :meth:`_decode` makes of rows, with room for a batch that is the ``largest``."""
        most = self._decoder.threads + -(-largest // _TOGETHER)
        pool = ThreadPoolExecutor(self._decoder.threads, "mose-fast images")
        waiting: deque[Future[list[np.ndarray | UnusableImage]]] = deque()
        try:
            for first in range(0, len(rows), _TOGETHER):
                waiting.append(pool.submit(self._decode, rows[first : first + _TOGETHER]))
                if len(waiting) > most:
                    yield from waiting.popleft().result()
            while waiting:
                yield from waiting.popleft().result()
        finally:
            pool.shutdown(cancel_futures=True)

    def _decode(self, rows: list[int]) -> list[np.ndarray | UnusableImage]:
        """Decodes at most 32 images. Where ``on_error`` is ``skip``, an error stands for an image
        that is damaged or of another size; otherwise it is raised.
        """
        names = [self._name(row) for row in rows]
        # A file that cannot be read now may be there when the run is resumed: it is never left out.
        data = [read_file(name) for name in names]
        try:
            images = self._decoder.decode(names, data)
            return [self._checked(name, image) for name, image in zip(names, images, strict=True)]
        except UnusableImage as error:
            if self._decoding.on_error == "stop":
                raise UnusableImage(f"{error}, or leave such images out: --on-error skip (stream.on_error)") from error
        return [self._alone(name, one) for name, one in zip(names, data, strict=True)]

    def _alone(self, name: str, data: bytes) -> np.ndarray | UnusableImage:
        try:
            (image,) = Decoder(dataclasses.replace(self._decoding, decoder="pil"), 1).decode([name], [data])
            return self._checked(name, image)
        except UnusableImage as error:
            return error

    def _checked(self, name: str, image: np.ndarray) -> np.ndarray:
        if image.shape != self.shape[1:]:
            height, width = image.shape[:2]
            raise UnusableImage(
                f"{name} is {height}x{width} and the first image is {self.shape[1]}x{self.shape[2]}; wanted images of"
                " one size: resize them with --resize N (stream.resize)"
            )
        return image
