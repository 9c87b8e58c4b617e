"""A small run of two tasks of six batches, a stream that is smaller still, and what must not depend
on how a run was computed.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from mose_fast.streams import Stream, from_arrays

TWO_TASKS: dict[str, Any] = {
    "stream": {"name": "digits", "tasks": 2, "limit_per_task": 60},
    "options": {"experts": 2, "buffer_batch": 12, "new_extra": 4},
    "width": 1,
    "memory": 30,
    "device": "cpu",
}


def small_stream(images: int = 80, classes: int = 4, **how: Any) -> Stream:
    """Noise of 8x8 pixels, the same images for training and test."""
    y = np.arange(images) % classes
    x = np.random.default_rng(0).integers(0, 256, (images, 8, 8, 3), dtype=np.uint8)
    return from_arrays(x, y, x, y, **{"tasks": 2, **how})


def outcome(results: dict[str, Any]) -> dict[str, Any]:
    """Results without times, memory and what a resumed run says of itself."""
    left_out = ("seconds", "resumed", "peak_memory_bytes", "commit", "config")
    return {name: value for name, value in results.items() if name not in left_out}
