"""Views from a DALI pipeline: rows in, matrices of crops and mirrors, grey and normalisation."""

from __future__ import annotations

import ctypes
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor

from mose_fast.device import CAPTURING, upload
from mose_fast.ops.augment import GREY_WEIGHTS, MIRROR, orient
from mose_fast.ops.augment_parameters import GRAY

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from nvidia.dali import Pipeline
    from nvidia.dali.tensors import TensorListGPU

#: Number of views that a new pipeline takes; it is doubled until a step fits.
_VIEWS = 512

#: Bytes after the pixels of a view in the pipeline's input: a 2x3 matrix and whether the view is
#: grey, as float32.
_PARAMETERS = 28


class DaliLayout(NamedTuple):
    """What each of the V views of a call shows, on the host: ``rows`` int32 [V], the row of its
    image; ``mirrored`` bool [V], whether its fixed orientation is the mirror image, which the
    matrix then contains; ``draws`` int64 [V], the row of its drawn parameters, -1 for none.
    ``turned`` has first view, last view + 1 and orientation of each run of views that have another
    orientation, ``padding`` is the number of zero views to append.
    """

    rows: NDArray[np.int32]
    mirrored: NDArray[np.bool_]
    turned: tuple[tuple[int, int, int], ...]
    draws: NDArray[np.int64]
    padding: int

    @classmethod
    def of(cls, layout: Tensor, padding: int = 0) -> DaliLayout:
        """From a layout int32 [V, 3] on the host, whose last ``padding`` views are zero."""
        rows, orientations, draws = np.ascontiguousarray(layout[: len(layout) - padding].numpy().T)
        ends = [*(np.flatnonzero(np.diff(orientations)) + 1).tolist(), len(orientations)]
        runs = zip([0, *ends[:-1]], ends, strict=True)
        turned = tuple(
            (first, last, int(orientations[first]))
            for first, last in runs
            if last and orientations[first] not in (0, MIRROR)
        )
        return cls(rows, orientations == MIRROR, turned, draws.astype(np.int64), padding)


class DaliViews:
    """Makes views by DALI: the twin of :func:`mose_fast.ops.augment.augment` for recipes without
    colour jitter.

    The host computes the matrices. The pipeline, which is built at the first call, takes one array
    a call: the pixels of every view's row, followed by its matrix. It samples the drawn window
    bilinearly (a mirror is a negative width), normalises and makes grey. Half mirrors and quarter
    turns are done before, by moving pixels. Nothing is prefetched, so nothing is left over at an
    evaluation, a checkpoint or a resumed run. One object handles one image size at a time, and one
    call at a time, from any thread.

    On CUDA everything runs in the order of torch's current stream: DALI copies its input on that
    stream and its result there into a tensor of PyTorch's. (DALI can take input without copying it,
    but then does not wait for the stream.) The calling thread waits for DALI's launches, not for
    the device. A run therefore calls this from a thread of its own,
    :class:`mose_fast.train.ring.Feeder`; DALI lets other Python threads run meanwhile.

    Nothing here disturbs the capture of a graph on another thread. Results do not leave DALI by
    DLPack, whose tensors a thread of DALI's frees after it has waited for the whole GPU. They are
    kept until their copy is done, and everything that builds, runs, frees or ends waits until no
    graph is being captured.
    """

    def __init__(self, mean: Sequence[float], std: Sequence[float]) -> None:
        self.mean, self.std = tuple(mean), tuple(std)
        self._pipeline: Pipeline | None = None
        self._built_for: tuple[torch.device, tuple[int, int]] | None = None
        self._capacity = 0
        #: Results whose copy may not be done, each with an event after it; the oldest first.
        self._copying: deque[tuple[TensorListGPU, torch.cuda.Event]] = deque()

    def __call__(self, images: Tensor, layout: DaliLayout, codes: Tensor) -> Tensor:
        """Makes the views of images, uint8 [R, H, W, 3], on the CPU or on a GPU: float32
        [V + padding, 3, H, W], normalised, contiguous in channels_last order. ``codes`` int32
        [D, 6] are drawn parameters on the host, without jitter. Quarter turns need square images.
        RuntimeError: a CUDA graph is being captured on the current stream.

        Views are within 1e-6 (1 + |value|) of exact arithmetic if H and W are powers of two.
        Otherwise DALI on the CPU is less exact, since it reaches each position by adding steps:
        within 1e-4 for sides up to 40 and 5e-3 up to 224.
        """
        device, count, (height, width) = images.device, len(layout.rows), images.shape[1:3]
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                "DALI was asked for views while a CUDA graph is captured; make the views before and copy them in"
            )
        views = torch.empty(count + layout.padding, height, width, 3, device=device)
        if count:
            packed = _packed(images, layout, codes)
            with CAPTURING:
                pipeline = self._ready(device, (height, width), count)
                try:
                    self._run(pipeline, packed, views[:count])
                except BaseException:  # also Ctrl-C: a later call must not return what this one fed
                    self._drop()
                    raise
        if layout.padding:
            views[count:].zero_()
        return views.permute(0, 3, 1, 2)

    def close(self) -> None:
        """Ends the pipeline's threads and frees its memory; a later call builds a new one."""
        with CAPTURING:
            self._drop()
            self._built_for, self._capacity = None, 0

    def _drop(self) -> None:
        """Frees the pipeline once its results are copied."""
        for _, copied in self._copying:
            copied.synchronize()
        self._copying.clear()
        self._pipeline = None

    def _ready(self, device: torch.device, size: tuple[int, int], count: int) -> Pipeline:
        """The pipeline for images of this size on this device, for at least ``count`` views."""
        if self._pipeline is None or self._built_for != (device, size) or count > self._capacity:
            self._capacity = _VIEWS
            while self._capacity < count:
                self._capacity *= 2
            self._drop()  # frees its memory before the new one takes some
            self._pipeline = _build(device, size, self._capacity, self.mean, self.std)
            self._built_for = (device, size)
        return self._pipeline

    def _run(self, pipeline: Pipeline, packed: Tensor, views: Tensor) -> None:
        """Fills ``views``, float32 [V, H, W, 3]."""
        target = ctypes.c_void_p(views.data_ptr())
        if packed.device.type == "cpu":
            pipeline.feed_input("packed", packed.numpy())
            pipeline.schedule_run()
            (made,) = pipeline.outputs()
            made.copy_to_external(target)
            return
        with torch.cuda.device(packed.device):
            while self._copying and self._copying[0][1].query():
                self._copying.popleft()
            stream = torch.cuda.current_stream()
            if self._copying:
                stream.wait_event(self._copying[-1][1])  # of the previous call, which may have used another stream
            pipeline.feed_input("packed", packed, cuda_stream=stream)
            pipeline.schedule_run()
            (made,) = pipeline.outputs(cuda_stream=stream)
            made.copy_to_external(target, ctypes.c_void_p(stream.cuda_stream), non_blocking=True)
            self._copying.append((made, stream.record_event()))


def _packed(images: Tensor, layout: DaliLayout, codes: Tensor) -> Tensor:
    """uint8 [V, H * W * 3 + 28]: the pixels that each view shows, then its parameters."""
    _, height, width, channels = images.shape
    # One upload: the parameters, then the row as int32.
    host = np.column_stack([_parameters(layout, codes.numpy(), height, width), layout.rows.view(np.float32)])
    numbers = upload(torch.from_numpy(host), images.device).view(torch.uint8)
    shown = numbers[:, _PARAMETERS:].contiguous().view(torch.int32).flatten()
    rows = images.contiguous().view(len(images), -1).index_select(0, shown)
    for first, last, code in layout.turned:
        part = rows[first:last].view(-1, height, width, channels).permute(0, 3, 1, 2)
        rows[first:last] = orient(part, code).permute(0, 2, 3, 1).flatten(1)
    return torch.cat([rows, numbers[:, :_PARAMETERS]], 1)


def _parameters(layout: DaliLayout, codes: NDArray[np.int32], height: int, width: int) -> NDArray[np.float32]:
    """Where the pixels of each view come from, a 2x3 matrix, and if it is grey: float32 [V, 7]."""
    # In a window of w pixels with its centre at x = (W + offset) / 2, pixel x' of the view comes
    # from position w / W x' + (W + offset - w) / 2, where corners count from 0; in a mirrored image
    # it comes from W minus that. Views without drawn parameters show the whole image.
    whole = np.array([[0, width, height, 0, 0, 0]], np.int32)
    drawn = np.concatenate([whole, codes])[layout.draws + 1]
    mirror, flags = drawn[:, 0], drawn[:, 5]
    w, h, x, y = drawn[:, 1:5].T.astype(np.float32)
    across, left = w / np.float32(width), (width + x - w) / 2
    # A drawn mirror of a view that is already mirrored cancels out.
    mirrored = (mirror != 0) != layout.mirrored
    nothing, grey = np.zeros_like(left), (flags & GRAY).astype(np.float32)
    sideways = [np.where(mirrored, -across, across), nothing, np.where(mirrored, width - left, left)]
    return np.column_stack([*sideways, nothing, h / np.float32(height), (height + y - h) / 2, grey])


def _build(
    device: torch.device, size: tuple[int, int], views: int, mean: Sequence[float], std: Sequence[float]
) -> Pipeline:
    # Not at the top: DALI is an extra, and its import takes half a second.
    from nvidia.dali import Pipeline, fn, types

    where = "gpu" if device.type == "cuda" else "cpu"
    # Two sets of buffers, so that a call need not wait until the previous result was copied. Not
    # pipelined, so that DALI starts nothing by itself.
    pipeline = Pipeline(
        batch_size=views,
        num_threads=torch.get_num_threads(),
        device_id=device.index if where == "gpu" else None,
        prefetch_queue_depth=2,
        exec_pipelined=False,
        exec_dynamic=True,
    )
    means, stds = (np.array(numbers, np.float32) for numbers in (mean, std))
    pixels = size[0] * size[1] * 3

    def constant(values: np.ndarray) -> types.Constant:
        return types.Constant(values.reshape(1, 1, 3), device=where)

    with pipeline:
        packed = fn.external_source(name="packed", device=where, dtype=types.UINT8, ndim=1)
        rows = fn.reinterpret(packed[:pixels], shape=[*size, 3], layout="HWC")
        matrices = fn.reinterpret(packed[pixels : pixels + 24], dtype=types.FLOAT, shape=[2, 3])
        grey = fn.reinterpret(packed[pixels + 24 :], dtype=types.FLOAT, shape=[1, 1, 1])
        sampled = fn.warp_affine(
            rows, matrices, size=size, interp_type=types.INTERP_LINEAR, inverse_map=True, dtype=types.FLOAT
        )
        coloured = (sampled * np.float32(1 / 255) - constant(means)) / constant(stds)
        weighted = fn.reductions.sum(coloured * constant(np.array(GREY_WEIGHTS, np.float32)), axes=2, keep_dims=True)
        pipeline.set_outputs(coloured * (np.float32(1) - grey) + weighted * grey)
    pipeline.build()
    return pipeline
