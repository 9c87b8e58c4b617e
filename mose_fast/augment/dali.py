"""Views from a DALI pipeline: rows in, matrices of crops and mirrors, grey and normalisation (craft.md section 5)."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from mose_fast.ops.augment import GREY_WEIGHTS, orient
from mose_fast.ops.augment_parameters import GRAY

if TYPE_CHECKING:
    from nvidia.dali import Pipeline

__all__ = ["DaliViews"]

#: Views that a pipeline takes at first; twice as many, and so on, where a step has more.
_VIEWS = 512

# DALI loads its operators with the first pipeline of a process.
_BUILDING = threading.Lock()


class DaliViews:
    """Makes views by DALI: the twin of :func:`mose_fast.ops.augment.augment` for recipes without colour jitter.

    Rows are gathered and brought into their fixed orientation by index arithmetic in torch, which is exact. The pipeline samples the
    drawn window bilinearly (a matrix for each view; a drawn mirror is its negative width), normalises and makes grey. Every call gives
    the views of its own arguments: nothing is prefetched, so nothing is left over at an evaluation, a checkpoint or a resumed run.

    On CUDA everything stays on the device and in the order of torch's current stream: DALI copies the rows on that stream, its
    result is handed to that stream, and is copied out before anything else is asked of the pipeline. (DALI can take rows without
    copying them, but does not wait for the stream then.) To make views ahead, call this earlier, on another stream; the calling
    thread waits for DALI's launches, not for the device.

    The pipeline is built at the first call. One object serves one size of images at a time, from any thread, one call at a time.

    Args:
        mean: Of images in [0, 1], by channel.
        std: Alike.
    """

    def __init__(self, mean: Sequence[float], std: Sequence[float]) -> None:
        self.mean, self.std = tuple(mean), tuple(std)
        self._lock = threading.Lock()
        self._pipeline: Pipeline | None = None
        self._built_for: tuple[torch.device, tuple[int, int]] | None = None
        self._capacity = 0
        self._copied: torch.cuda.Event | None = None

    def __call__(self, images: Tensor, layout: Tensor, codes: Tensor) -> Tensor:
        """Views of rows.

        Args:
            images: uint8 [R, H, W, 3], on the CPU or on a card.
            layout: int32 [V, 3]; see :func:`mose_fast.ops.augment.augment`. Orientations that turn need square images.
            codes: int32 [D, 6] from :func:`mose_fast.ops.augment_parameters.draw_augment_parameters`; no flag asks for jitter.

        Returns:
            float32 [V, 3, H, W], normalised, contiguous in channels_last order; within 1e-6 (1 + |value|) of exact arithmetic where H and
            W are powers of two. Else DALI on the CPU is less exact, since it adds the step between two places again and again: within
            1e-4 for sides up to 40, 5e-3 up to 224.
        """
        count, (height, width) = len(layout), images.shape[1:3]
        if images.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise RuntimeError("views were asked of DALI while a CUDA graph is captured; wanted them made before, and copied in")
        if count == 0:
            return torch.empty(0, height, width, 3, device=images.device).permute(0, 3, 1, 2)
        rows = _oriented(images, layout)
        matrices, grey = _matrices(layout[:, 2].to(torch.int64), codes, height, width)
        with self._lock:
            pipeline = self._ready(images.device, (height, width), count)
            try:
                views = self._run(pipeline, {"rows": rows, "matrices": matrices, "grey": grey})
            except BaseException:  # Ctrl-C, too: what was fed already must not come out of a later call
                self._pipeline = None
                raise
        return views.permute(0, 3, 1, 2)

    def close(self) -> None:
        """Ends the pipeline's threads and frees its memory; a later call builds another."""
        with self._lock:
            self._pipeline = self._built_for = None
            self._capacity = 0

    def _ready(self, device: torch.device, size: tuple[int, int], count: int) -> Pipeline:
        """The pipeline for images of this size on this device, and for at least so many views."""
        if self._pipeline is None or self._built_for != (device, size) or count > self._capacity:
            self._capacity = _VIEWS
            while self._capacity < count:
                self._capacity *= 2
            self._pipeline = None  # its memory goes first
            with _BUILDING:
                self._pipeline = _build(device, size, self._capacity, self.mean, self.std)
            self._built_for = (device, size)
        return self._pipeline

    def _run(self, pipeline: Pipeline, inputs: dict[str, Tensor]) -> Tensor:
        """Float32 [V, H, W, 3], a copy in torch's memory."""
        device = inputs["rows"].device
        if device.type == "cpu":
            for name, tensor in inputs.items():
                pipeline.feed_input(name, tensor.numpy())
            pipeline.schedule_run()
            (views,) = pipeline.outputs()
            return torch.from_dlpack(views.as_tensor()).clone()
        with torch.cuda.device(device):
            stream = torch.cuda.current_stream()
            if self._copied is not None:
                stream.wait_event(self._copied)  # of the call before, which may have come on another stream
            for name, tensor in inputs.items():
                pipeline.feed_input(name, tensor, cuda_stream=stream)
            pipeline.schedule_run()
            (views,) = pipeline.outputs(cuda_stream=stream)
            copy = torch.from_dlpack(views.as_tensor()).clone()
            self._copied = stream.record_event()
            return copy


@lru_cache(maxsize=16)
def _tables(height: int, width: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """int64 [16 or 4, H * W], which pixel each orientation shows at each place; int32 [1, 6], the codes of the whole image. Never written.

    Made on the host and kept, since every copy to a card waits for what the stream has to do before.
    """
    places = torch.arange(height * width).view(1, 1, height, width)
    known = range(16) if height == width else range(4)
    pixels = torch.cat([orient(places, turned) for turned in known]).view(len(known), -1)
    return pixels.to(device), torch.tensor([[0, width, height, 0, 0, 0]], dtype=torch.int32).to(device)


def _oriented(images: Tensor, layout: Tensor) -> Tensor:
    """uint8 [V, H, W, 3]: the rows that the views show, each in its fixed orientation."""
    row, code = layout[:, 0].to(torch.int64), layout[:, 1].to(torch.int64)
    _, height, width, _ = images.shape
    pixels, _ = _tables(height, width, images.device)
    return images.flatten(1, 2)[row[:, None], pixels[code]].unflatten(1, (height, width))


def _matrices(draws: Tensor, codes: Tensor, height: int, width: int) -> tuple[Tensor, Tensor]:
    """Where the pixels of each view come from, float32 [V, 2, 3], and whether it is grey, float32 [V, 1, 1, 1] of 0 and 1.

    A window of w pixels whose centre lies at x = (W + offset) / 2 gives pixel x' of the view the place w / W x' + (W + offset - w) / 2,
    corners counting from 0; a mirrored image has it at W minus that. Views without a draw show the whole image.
    """
    _, whole = _tables(height, width, codes.device)
    mirror, w, h, x, y, flags = torch.cat([whole, codes])[draws + 1].unbind(1)
    across, down = w / width, h / height
    left, top = (width + x - w) / 2, (height + y - h) / 2
    across, left = torch.where(mirror != 0, -across, across), torch.where(mirror != 0, width - left, left)
    none = torch.zeros_like(across)
    matrices = torch.stack([across, none, left, none, down, top], dim=1).view(-1, 2, 3)
    return matrices, (flags & GRAY).to(torch.float32).view(-1, 1, 1, 1)


def _build(device: torch.device, size: tuple[int, int], views: int, mean: Sequence[float], std: Sequence[float]) -> Pipeline:
    # Not at the top: DALI is an extra, and its import takes half a second.
    from nvidia.dali import Pipeline, fn, types

    where = "gpu" if device.type == "cuda" else "cpu"
    # Two sets of buffers, so that a run need not wait for the result before to be copied out; not pipelined: no run starts by itself.
    pipeline = Pipeline(
        batch_size=views,
        num_threads=torch.get_num_threads(),
        device_id=device.index if where == "gpu" else None,
        prefetch_queue_depth=2,
        exec_pipelined=False,
        exec_dynamic=True,
    )
    means, stds = (np.array(numbers, np.float32) for numbers in (mean, std))

    def constant(values: np.ndarray) -> types.Constant:
        return types.Constant(values.reshape(1, 1, 3), device=where)

    with pipeline:
        rows = fn.external_source(name="rows", device=where, layout="HWC", dtype=types.UINT8, ndim=3)
        matrices = fn.external_source(name="matrices", device=where, dtype=types.FLOAT, ndim=2)
        grey = fn.external_source(name="grey", device=where, dtype=types.FLOAT, ndim=3)
        sampled = fn.warp_affine(rows, matrices, size=size, interp_type=types.INTERP_LINEAR, inverse_map=True, dtype=types.FLOAT)
        coloured = (sampled * np.float32(1 / 255) - constant(means)) / constant(stds)
        weighted = fn.reductions.sum(coloured * constant(np.array(GREY_WEIGHTS, np.float32)), axes=2, keep_dims=True)
        pipeline.set_outputs(coloured * (np.float32(1) - grey) + weighted * grey)
    pipeline.build()
    return pipeline
